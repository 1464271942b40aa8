"""The gains of GraVAC's ladder by model size: the experiment of docs/research/papers.md.

    python -m docs.studies.gains --data DIR [--model resnet101] [--steps 100] [--device cuda]

One worker trains each model by SGD with momentum on what top-k keeps at CF 10, tensor by tensor,
with plain error feedback. The gains of the whole ladder are measured besides. Each gain is a ratio
of sums over the last half of the steps; of the first step the residual is empty, so that its gain
is that of the gradient alone. DIR holds cifar-10-batches-py and wikitext-2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from docs.studies.common import columns, write
from runs.papers.images import Cifar10Task
from runs.papers.words import WordsTask
from runs.tasks import Task

LADDER = (10.0, 20.0, 40.0, 160.0, 1000.0)
"""GraVAC's exponential scaling, of which the first is sent."""

MODELS = ("resnet8", "resnet18", "vgg11", "vgg16", "resnet50", "resnet101", "lstm-2x1500")

LR = {"lstm-2x1500": 0.1}
"""Learning rates, where they are not --lr."""


class Energies:
    """Sums over tensors of one step: total, ||a||^2, and kept, ||c||^2 at each CF of the ladder;
    the norms ||g|| and ||c||, for the gain of GraVAC's released code."""

    def __init__(self) -> None:
        self.total, self.norms = 0.0, 0.0
        self.kept, self.kept_norms = [0.0] * len(LADDER), [0.0] * len(LADDER)

    def add(self, a: Tensor, g: Tensor) -> Tensor:
        """Count a tensor; returns the places of what is kept at the first CF. a, g: (elements,)."""
        numel = a.numel()
        largest = a.abs().topk(max(1, int(numel / LADDER[0])))  # descending
        energies = largest.values.double().square().cumsum(0)
        self.total += float(a.double().square().sum())
        self.norms += float(g.norm())
        for i, cf in enumerate(LADDER):
            kept = float(energies[max(1, int(numel / cf)) - 1])
            self.kept[i] += kept
            self.kept_norms[i] += kept**0.5
        return largest.indices


def trained(task: Task, steps: int, device: str) -> list[Energies]:
    """Of each step."""
    model = task.build_model().train().to(device)
    optimizer = task.optimizer(model)
    residuals = [torch.zeros(p.numel(), device=device) for p in model.parameters()]
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(step, 0, 1)).backward()
        energies = Energies()
        for p, residual in zip(model.parameters(), residuals, strict=True):
            if p.grad is None:
                continue
            g = p.grad.flatten()
            residual += g  # the error-fed gradient a
            kept = energies.add(residual, g)
            sent = torch.zeros_like(residual).index_copy_(0, kept, residual[kept])
            residual -= sent
            p.grad.copy_(sent.view_as(p.grad))
        optimizer.step()
        found.append(energies)
    return found


def gains(steps: Sequence[Energies]) -> tuple[list[float], list[float]]:
    """By CF of the ladder: the paper's gain, ||c||^2 / ||a||^2, and its released code's, ||c|| over
    ||g||, each summed over tensors."""
    total, norms = sum(e.total for e in steps), sum(e.norms for e in steps)
    paper = [sum(e.kept[i] for e in steps) / total for i in range(len(LADDER))]
    code = [sum(e.kept_norms[i] for e in steps) / norms for i in range(len(LADDER))]
    return paper, code


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True)
    add("--model", nargs="+", default=MODELS, choices=MODELS, metavar="MODEL")
    add("--steps", type=int, default=100)
    add("--batch-size", type=int, default=32)
    add("--lr", type=float, default=0.01, help="of image models")
    add("--device", default="cpu")
    add("--log-dir", type=Path, default=Path("logs/study-gains"))
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    rows: list[Sequence[str]] = [("model", "M", "gain", "steps", *(f"CF {cf:g}" for cf in LADDER))]
    for name in given.model:
        kind, data = (Cifar10Task, given.data)
        if name in WordsTask.models:
            kind, data = WordsTask, given.data / "wikitext-2"  # type: ignore[assignment]
        lr = LR.get(name, given.lr)
        task = kind(model=name, data=data, batch_size=given.batch_size, lr=lr)
        size = sum(p.numel() for p in task.build_model().parameters()) / 1e6
        began = time.process_time()
        steps = trained(task, given.steps, given.device)
        late = steps[len(steps) // 2 :]
        numbers = f"{given.steps - len(late)} to {given.steps - 1}"
        paper, code = gains(late)
        parts = (("paper", "0", gains(steps[:1])[0]), ("paper", numbers, paper))
        for told, which, values in (*parts, ("code", numbers, code)):
            cells = [f"{value:.3f}" for value in values]
            rows.append((name, f"{size:.3g}", told, which, *cells))
            print(*rows[-1], flush=True)
        print(f"{name}: {time.process_time() - began:.0f} s of processor time", flush=True)
    write(columns(rows), given.log_dir)


if __name__ == "__main__":
    main()
