"""The densities of a gradient before and after compression, as the papers draw them.

    python -m docs.studies.densities --data DIR [--model resnet18] [--steps 60] [--cf 10 100]

One worker trains a model of CIFAR-10 images by SGD. Each gradient is compressed at each CF with
error feedback, as if it were to be sent. Of the last step are drawn, a panel for each CF: the
gradient g, the error-fed gradient a = g + r, and c, which is what is kept of a.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compressors import make_compressor
from compressors.base import Spec
from runs.papers.images import Cifar10Task
from runs.style import GREY, RUNS, picture

BINS = 60


def density(values: Tensor, edges: np.ndarray) -> np.ndarray:
    """Share of the values a unit of width, between the edges; values of 0 are left out."""
    own = values[values != 0].numpy()
    counts, _ = np.histogram(own, edges)
    shares: np.ndarray = counts / max(1, len(own)) / np.diff(edges)
    return shares


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True)
    add("--model", default="resnet8")
    add("--steps", type=int, default=60)
    add("--cf", type=float, nargs="+", default=[10.0, 100.0, 1000.0])
    add("--batch-size", type=int, default=32)
    add("--out", type=Path, default=Path("densities.png"))
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    task = Cifar10Task(model=given.model, data=given.data, batch_size=given.batch_size)
    model, topk = task.build_model(), make_compressor("topk+fp32")
    optimizer = task.optimizer(model)
    residuals: dict[float, Tensor] = {}
    drawn: dict[float, tuple[Tensor, Tensor]] = {}
    for step in range(given.steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(step, 0, 1)).backward()
        g = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        for cf in given.cf:
            a = g + residuals.get(cf, torch.zeros_like(g))
            c = torch.zeros_like(a)
            topk.add_to(c, topk.compress(a.clone(), Spec((len(a),), cf)))
            residuals[cf], drawn[cf] = a - c, (a, c)
        optimizer.step()
    with picture(
        given.out,
        f"{given.model}, after {given.steps} steps",
        size=(10, 3.4),
        columns=len(given.cf),
        across="value",
    ) as panels:
        for axes, (cf, (a, c)) in zip(panels, drawn.items(), strict=True):
            edge = float(a.abs().quantile(0.9995))
            edges = np.linspace(-edge, edge, BINS + 1)
            named = (("gradient g", g, GREY), ("error-fed a", a, RUNS[0]), ("kept c", c, RUNS[1]))
            for name, values, colour in named:
                axes.stairs(density(values, edges), edges, color=colour, label=name)
            axes.set_yscale("log")
            axes.set_title(f"CF {cf:g}")
        panels[0].set_ylabel("density (without zeros)")
        panels[0].legend()
    print(f"picture in {given.out}")


if __name__ == "__main__":
    main()
