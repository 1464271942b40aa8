"""Fine-tuning: does the default keep dense's quality where a model was trained before?

    python -m docs.studies.fine_tuning --images CIFAR --text WIKITEXT [--workers 2 4] [--seeds 3]

A GPT learns Python's own sources for 1,200 steps, and is then fine-tuned on WikiText-2: all of it,
or matrices of rank 8 beside its linear layers (LoRA: Hu and others 2021). A convolutional net
learns five pairs of CIFAR-10's classes, gets a new head, and is fine-tuned on the ten. 300 steps
each, dense and by default, by `train` of `runs bench quality`: its modelled link and measure.
Twenty minutes for two workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from docs.studies.dense_and_default import compare_with_dense
from runs.bench.recipes import (
    ConvNet,
    Recipe,
    cosine,
    cross_entropy,
    warm_cosine,
)
from runs.models.gpt import ByteGPT
from runs.tasks import make_task
from runs.tasks.base import Batch

RANK = 8
"""Of LoRA's matrices."""


class LowRank(nn.Module):
    """A linear layer that stays as it is, plus a trained product of two thin matrices."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + 2 * F.linear(F.linear(x, self.down), self.up)


def trained(
    model: nn.Module,
    optimizer: optim.Optimizer,
    batches: Iterator[Batch],
    schedule: Callable[[float], float],
    steps: int,
) -> None:
    """Train a model by one process."""
    usual = optimizer.param_groups[0]["lr"]
    for step, batch in zip(range(steps), batches, strict=False):
        optimizer.param_groups[0]["lr"] = usual * schedule(step / steps)
        cross_entropy(model, *batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@cache
def of_sources() -> dict[str, Tensor]:
    """A GPT that has learnt Python's own sources."""
    torch.manual_seed(0)
    model, task = ByteGPT(), make_task("text", data=None, batch_size=16, seed=123)
    batches = (task.batch(step, 0, 1) for step in range(1200))
    trained(model, optim.AdamW(model.parameters(), lr=3e-3), batches, warm_cosine, 1200)
    return model.state_dict()


@cache
def of_pairs(images: Path) -> dict[str, Tensor]:
    """A convolutional net that has learnt five pairs of classes."""
    torch.manual_seed(0)
    model = ConvNet(nn.BatchNorm2d)
    task = make_task("cifar10", data=images, batch_size=32, seed=123)
    batches = (task.batch(step, 0, 1) for step in range(1000))
    pairs = ((inputs, targets // 2) for inputs, targets in batches)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    trained(model, optimizer, pairs, cosine, 1000)
    return {name: kept for name, kept in model.state_dict().items() if "head" not in name}


def gpt() -> nn.Module:
    """The trained GPT."""
    model = ByteGPT()
    model.load_state_dict(of_sources())
    return model


def gpt_with_low_ranks() -> nn.Module:
    """The trained GPT, of which only matrices of low rank beside its linear layers are trained."""
    model = gpt().requires_grad_(False)
    for module in [*model.modules()]:
        for name, inside in [*module.named_children()]:
            if isinstance(inside, nn.Linear):
                setattr(module, name, LowRank(inside))
    return model


def warm_line(share: float) -> float:
    """From 0 to 1 in 6% of the steps, then to 0 in a line."""
    return share / 0.06 + 0.01 if share < 0.06 else (1 - share) / 0.94


def adamw(model: nn.Module, lr: float) -> optim.Optimizer:
    """AdamW of the parameters that are trained."""
    return optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def recipes(images: Path) -> tuple[Recipe, ...]:
    """What is fine-tuned, and how."""

    def convolutions() -> nn.Module:
        model = ConvNet(nn.BatchNorm2d)
        model.load_state_dict(of_pairs(images), strict=False)
        return model

    text = Recipe(
        name="GPT, AdamW",
        half="held-out",
        model=gpt,
        optimizer=lambda model: adamw(model, 5e-4),
        schedule=warm_line,
        task="text",
        loss=cross_entropy,
        measure="perplexity",
        batch=8,
        clip=1.0,
    )
    pictures = Recipe(
        name="convolutions, SGD",
        half="held-out",
        model=convolutions,
        optimizer=lambda model: optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4),
        schedule=cosine,
        task="cifar10",
        loss=cross_entropy,
        measure="accuracy %",
    )
    low_ranks = replace(
        text,
        name="GPT, LoRA, AdamW",
        model=gpt_with_low_ranks,
        optimizer=lambda model: adamw(model, 2e-3),
    )
    by_adamw = replace(
        pictures,
        name="convolutions, AdamW",
        optimizer=lambda model: adamw(model, 5e-4),
        schedule=warm_line,
    )
    return text, low_ranks, pictures, by_adamw


if __name__ == "__main__":
    compare_with_dense(recipes)
