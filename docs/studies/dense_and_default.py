"""Recipes by dense and by default, in equal steps: what a study of recipes does."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import torch

from docs.studies.common import columns
from runs.bench.quality import CONTENDERS, DENSE, SLOW, train
from runs.bench.recipes import Recipe


def compare_with_dense(
    recipes: Callable[[Path], Sequence[Recipe]], words: Sequence[str] | None = None
) -> None:
    """Train each recipe of `recipes(images)` for each number of workers and each seed, by `train`
    of `runs bench quality`: its modelled link and measure. words: as on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    data = {"cifar10": given.images, "text": given.text}
    rows = [["recipe", "workers", "dense", "default", "times fewer bytes"]]
    for recipe, workers in product(recipes(given.images), given.workers):
        ends = {
            name: [
                train(recipe, data, CONTENDERS[name], workers, SLOW, seed)
                for seed in range(given.seeds)
            ]
            for name in (DENSE, "default")
        }
        qualities = [", ".join(f"{run.quality:.4g}" for run in runs) for runs in ends.values()]
        fewer = fmean(run.fewer for run in ends["default"])
        rows.append([f"{recipe.name} ({recipe.measure})", str(workers), *qualities, f"{fewer:.0f}"])
        print(*rows[-1], sep=" | ", flush=True)
    print(columns(rows))
