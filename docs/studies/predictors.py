"""What tells beforehand how much quality a CF loses in equal steps? An hour and a half.

    python -m docs.studies.predictors --images CIFAR --text WIKITEXT [--log FILE]

Every development recipe of `runs bench quality` is trained dense, and at one CF all along. A run
tells what a policy could have known: gains, norms of gradients, learning rates. The table has rank
correlations (Spearman's) with the quality lost, in units of what is allowed, over recipes and CFs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np

from docs.studies import predictors
from docs.studies.common import columns
from policies import DENSE, Goodput, Plan, StepReport, checks
from policies.base import setting
from runs.bench.quality import train
from runs.bench.recipes import RECIPES, Recipe
from runs.expression import Typed
from runs.report.verdict import allowed

CFS = (20.0, 100.0)


@dataclass(eq=False, kw_only=True)
class Held(Goodput):
    """Sends `cf` all along, and measures what it keeps. seen: what it saw in each step."""

    cf: float = setting(20.0, checks.real, least=1)
    seen: ClassVar[list[dict[str, float]]] = []

    def plan(self) -> Plan:
        return Plan(self.cf)

    def _consider(self) -> None:
        """It does not move."""

    def observe(self, report: StepReport) -> None:
        super().observe(report)
        if report.step == len(self.seen):  # not of the other ranks, which see the same
            step = {
                "1 - error-fed gain": 1 - report.gain(self.cf, "error_fed"),
                "CF / steps at about this rate": min(1.0, self.cf / max(1, self._lateness.alike)),
            }
            self.seen.append({**step, "norm": report.grad_norm, "lr": report.lr})


def run(recipe: Recipe, data: dict[str, Path], cf: float, seed: int) -> dict[str, Any]:
    """Its quality, and the predictors of what that loses, each larger for a larger loss."""
    seen = predictors.Held.seen  # of the module that the policy's name stands for
    seen.clear()
    policy = Typed(f"docs.studies.predictors.Held(cf={cf})" if cf != DENSE else "Fixed(1)")
    quality = train(recipe, data, policy, 2, "", seed).quality
    if cf == DENSE:
        return {"quality": quality}
    norms, lrs = ([step.pop(name) for step in seen] for name in ("norm", "lr"))
    tenth = recipe.steps // 10
    parts = [fmean(norms[i : i + tenth]) for i in range(0, recipe.steps, tenth)]
    return {
        "quality": quality,
        "the CF itself": cf,
        **{name: fmean(step[name] for step in seen) for name in seen[0]},
        "change of the gradient's norm": fmean(abs(b - a) / a for a, b in pairwise(parts)),
        "fall of the learning rate": 1 - lrs[-1] / max(lrs),
    }


def ranked(values: Sequence[float]) -> list[float]:
    """Ranks; equal values share the mean of theirs."""
    return [sum(y < x for y in values) + sum(y == x for y in values) / 2 for x in values]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    for name in ("--images", "--text", "--log"):
        parser.add_argument(name, type=Path, default=Path("predictors.jsonl"))
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args(words)
    data = {"cifar10": given.images, "text": given.text}
    lines = given.log.read_text().splitlines() if given.log.exists() else []
    found = {tuple(key): told for key, told in map(json.loads, lines)}
    recipes = [each for each in RECIPES if each.half == "development"]
    for seed, recipe, cf in product(range(given.seeds), recipes, (DENSE, *CFS)):
        if (key := (recipe.name, cf, seed)) not in found:
            found[key] = run(recipe, data, cf, seed)
            with given.log.open("a") as out:
                print(json.dumps([key, found[key]]), file=out)
    losses, told = [], []
    for recipe, cf in product(recipes, CFS):
        dense, runs = (
            [found[recipe.name, each, seed] for seed in range(given.seeds)] for each in (DENSE, cf)
        )
        mean = {name: fmean(each[name] for each in runs) for name in runs[0]}
        whole, points = [each["quality"] for each in dense], recipe.measure.endswith("%")
        worse = (fmean(whole) - mean.pop("quality")) * (1 if points else -1)
        losses.append(worse / allowed(whole, points))
        told.append(mean)
        print(f"{recipe.name}, CF {cf:g}: lost {losses[-1]:.2f} of what is allowed", mean)
    rows = [["predictor", *(f"CF {cf:g}" for cf in CFS), "both"]]
    for name in told[0]:
        parts = *((i, len(CFS)) for i in range(len(CFS))), (0, 1)
        alike = [
            np.corrcoef(ranked([each[name] for each in told[i::n]]), ranked(losses[i::n]))[0, 1]
            for i, n in parts
        ]
        rows.append([name, *(f"{each:.2f}" if np.isfinite(each) else "-" for each in alike)])
    print(columns(rows))


if __name__ == "__main__":
    main()
