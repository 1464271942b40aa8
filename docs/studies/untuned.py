"""Recipes that the default's rule has never seen: does it keep dense's quality on them?

    python -m docs.studies.untuned --images CIFAR --text WIKITEXT [--workers 2 4] [--seeds 3]

A GPT with experts, of which a gate picks one for each byte (Switch Transformer: Fedus and others
2022); a small U-Net that classifies each pixel, by Adam and by SGD; and an MLP-Mixer that learns
from a trained net's scores (distillation: Hinton and others 2015). 300 steps each, dense and by
default. Half an hour for two workers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi
from pathlib import Path

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from docs.studies.dense_and_default import compare_with_dense
from docs.studies.fine_tuning import trained
from runs.bench.recipes import ConvNet, Mixer, Recipe, cosine, warm_cosine
from runs.models.gpt import Block, ByteGPT
from runs.tasks import make_task

BALANCE = 0.01
"""The factor of the loss by which the gate's picks become even."""


class Experts(nn.Module):
    """A block's MLP, of which there are several: each byte goes through the one with the largest
    score, times that score. picked: the loss of uneven picks in the last forward."""

    def __init__(self, width: int, several: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, several)
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(several)
        )
        self.picked = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.gate(flat).softmax(-1)
        score, which = scores.max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.each):
            at = (which == i).nonzero().flatten()
            out = out.index_add(0, at, expert(flat[at]) * score[at, None])
        share = F.one_hot(which, len(self.each)).float().mean(0)
        self.picked = len(self.each) * (share * scores.mean(0)).sum()
        return out.view_as(x)


class ExpertBlock(Block):
    """A block of `ByteGPT` with experts in place of its MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.experts = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.norm_attention(x)))
        mixed: Tensor = self.experts(self.norm_mlp(x))
        return x + mixed


class ExpertGPT(ByteGPT):
    """A byte model whose two blocks have four experts each."""

    def __init__(self) -> None:
        super().__init__(width=96, layers=2, heads=4)
        self.blocks = nn.ModuleList(ExpertBlock(96, 4) for _ in range(2))


def of_experts(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy; in training the loss of uneven picks is added."""
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    if not model.training:
        return loss
    blocks = [each for each in model.modules() if isinstance(each, Experts)]
    return loss + BALANCE * torch.stack([each.picked for each in blocks]).sum()


class UNet(nn.Module):
    """Scores of eight classes for each pixel: down twice, and up with connections past it."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.second = _layer(3, width), _layer(width, 2 * width, 2)
        self.third = _layer(2 * width, 4 * width, 2)
        self.up, self.last = _layer(6 * width, 2 * width), _layer(3 * width, width)
        self.head = nn.Conv2d(width, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first)
        third = F.interpolate(self.third(second), scale_factor=2)
        up = F.interpolate(self.up(torch.cat([third, second], 1)), scale_factor=2)
        scores: Tensor = self.head(self.last(torch.cat([up, first], 1)))
        return scores


def _layer(before: int, after: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(before, after, 3, stride, padding=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())


def of_pixels(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the pixels of a noisy image. A pixel's class: which of its three
    colours are above their mean in the 7 x 7 pixels around."""
    above = inputs > F.avg_pool2d(inputs, 7, 1, 3)
    classes = (above * torch.tensor([1, 2, 4]).view(1, 3, 1, 1)).sum(1)
    drawn = torch.Generator().manual_seed(int(targets.sum()))
    noisy = inputs + 0.5 * torch.randn(inputs.shape, generator=drawn)
    return F.cross_entropy(model(noisy), classes)


def distillation(images: Path) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """The loss of a student: the divergence from the scores of a net that was trained on images
    whose colours are in the other order."""
    torch.manual_seed(0)
    teacher, task = ConvNet(nn.BatchNorm2d), make_task("cifar10", data=images, batch_size=32)
    batches = ((x.flip(1), y) for x, y in (task.batch(step, 0, 1) for step in range(300)))
    optimizer = optim.AdamW(teacher.parameters(), lr=3e-3)
    trained(teacher, optimizer, batches, warm_cosine, 300)
    teacher.eval().requires_grad_(False)

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        taught = (teacher(inputs.flip(1)) / 2).softmax(-1)
        return 4 * F.kl_div((model(inputs) / 2).log_softmax(-1), taught, reduction="batchmean")

    return loss


def to_a_tenth(share: float) -> float:
    """From 0 to 1 in 5% of the steps, then to 0.1 by a cosine."""
    return min(1.0, share / 0.05) * (0.1 + 0.45 * (1 + cos(pi * share)))


def recipes(images: Path) -> tuple[Recipe, ...]:
    return (
        Recipe(
            name="experts, AdamW",
            half="later",
            model=ExpertGPT,
            optimizer=lambda model: optim.AdamW(
                model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95)
            ),
            schedule=to_a_tenth,
            task="text",
            loss=of_experts,
            measure="perplexity",
            clip=1.0,
        ),
        Recipe(
            name="pixels, Adam",
            half="later",
            model=UNet,
            optimizer=lambda model: optim.Adam(model.parameters(), lr=2e-3),
            schedule=cosine,
            task="cifar10",
            loss=of_pixels,
            measure="loss",
        ),
        Recipe(
            name="pixels, Nesterov",
            half="later",
            model=UNet,
            optimizer=lambda model: optim.SGD(model.parameters(), 0.1, 0.9, nesterov=True),
            schedule=to_a_tenth,
            task="cifar10",
            loss=of_pixels,
            measure="loss",
        ),
        Recipe(
            name="distilled mixer, AdamW",
            half="later",
            model=Mixer,
            optimizer=lambda model: optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05),
            schedule=warm_cosine,
            task="cifar10",
            loss=distillation(images),
            measure="loss",
            clip=1.0,
        ),
    )


if __name__ == "__main__":
    compare_with_dense(recipes)
