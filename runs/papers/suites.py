"""The tables of five papers as comparisons: who takes part, on what, and what the paper reports.

A suite is data. Steps in brackets, as in `window=[500]`, are the paper's, and shrink with --scale,
`[2<660]` to no fewer than 2; {clip} differs from part to part. A paper's figures are
those of its table, a tuple for each part, in the order of the suite's columns; a text is what the
paper says in words, None what it does not report.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

from runs.compare.contender import Contender, parse_contender

Figure = float | str | None

FIXED_CLOCK, LINK = 0.2, "100mbit"
"""Of the modelled step times: seconds of computing, and the network."""


@dataclass(frozen=True)
class Column:
    """A column is one number of each contender, beside the paper's.

    name: its head, where {quality} is the task's. measure: quality, test, top5, seconds (modelled,
    of the whole run), epoch (the same, of so many steps as the part has in an epoch), bytes or
    floats sent. over: None, or a contender: the number is then how many times less than that
    contender's this one's is. worse: instead, by how many percent it is larger. only: for
    contenders in whose names this is."""

    name: str
    measure: str
    over: str | None = None
    worse: bool = False
    only: str = ""


@dataclass(frozen=True)
class Part:
    """A part of a suite is one model and its data.

    task, model: the paper's, or what is nearest to it here. small: the model below scale 1. steps:
    the paper's. model_mb: the paper's gradients, for modelled times. drops: steps after which the
    learning rate is a tenth. weight_decay, workers, batch_size: options of train. top5: whether the
    paper's quality is top-5 accuracy. epoch: steps of one. clip: stands for {clip} in contenders.
    """

    task: str
    model: str
    small: str
    steps: int
    model_mb: float
    drops: tuple[int, ...] = ()
    weight_decay: float | None = None
    workers: int | None = None
    batch_size: int | None = None
    top5: bool = False
    epoch: int = 0
    clip: float = 0.0


class Entry(NamedTuple):
    """An entry is one contender of a suite. spec: as compare's --contender. figures: the paper's,
    by part."""

    name: str
    spec: str
    figures: tuple[tuple[Figure, ...], ...] = ()


def entry(name: str, spec: str, *figures: tuple[Figure, ...]) -> Entry:
    return Entry(name, spec, figures)


@dataclass(frozen=True)
class Suite:
    """A suite is a paper's table. differs: what is another way here, in sentences."""

    name: str
    paper: str
    columns: tuple[Column, ...]
    parts: tuple[Part, ...]
    entries: tuple[Entry, ...]
    scale: float
    differs: tuple[str, ...]

    def part(self, task: str) -> Part | None:
        """The part of that task, if there is one."""
        return next((part for part in self.parts if part.task == task), None)


@dataclass(frozen=True)
class Plan:
    """A plan is a part of a suite at a scale, a fraction of the paper's steps. Below 1 the model
    is the small one. only: texts, of which one must be in an entry's name; empty: all entries."""

    suite: Suite
    part: Part
    scale: float
    only: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        return self._scaled(self.part.steps)

    @property
    def options(self) -> dict[str, Any]:
        """What all contenders have in common, as options of train."""
        part = self.part
        given: dict[str, Any] = {
            "task": part.task,
            "model": part.model if self.scale >= 1 else part.small,
            "steps": self.steps,
            "fixed_clock": FIXED_CLOCK,
            "link": LINK,
            "model_mb": part.model_mb,
            "lr_drop": [self._scaled(step) for step in part.drops] or None,
            "weight_decay": part.weight_decay,
            "workers": part.workers,
            "batch_size": part.batch_size,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def contenders(self) -> list[Contender]:
        """Of the entries, by their names."""
        return [
            replace(parse_contender(self.spec(one)), label=one.name)
            for one in self.suite.entries
            if not self.only or any(text in one.name for text in self.only)
        ]

    def figures(self, name: str) -> tuple[Figure, ...]:
        """The paper's of the contender of that name, as far as it has some."""
        part = self.suite.parts.index(self.part)
        found = [one.figures for one in self.suite.entries if one.name == name]
        return found[0][part] if found and part < len(found[0]) else ()

    def spec(self, entry: Entry) -> str:
        """Of an entry, with the steps that it has at this scale."""

        def scaled(found: re.Match[str]) -> str:
            return str(max(int(found[1] or 1), self._scaled(int(found[2]))))

        return re.sub(r"\[(?:(\d+)<)?(\d+)\]", scaled, entry.spec).replace(
            "{clip}", f"{self.part.clip:g}"
        )

    def _scaled(self, steps: int) -> int:
        return max(1, ceil(steps * self.scale - 1e-9))


RESIDUAL = "granularity=layer,memory=residual"
"""Tensor by tensor, with plain error feedback."""

GRAVAC_7 = "gravac-paper:epsilon=0.7,omega=0.01,window=[500]"

GRAVAC = Suite(
    "gravac",
    "GraVAC (Tyagi, Swany, 2023), its table of quality and speed-up over static top-k 10; 32 V100s",
    (
        Column("{quality}", "quality"),
        Column("speed-up over top-k 10", "seconds", over="top-k 10"),
        Column("bytes, times fewer than dense", "bytes", over="dense"),
        Column("floats, times fewer than dense", "floats", over="dense"),
    ),
    (
        Part("cifar10", "resnet101", "resnet8", 20_000, 170, (9_000, 14_000), 1e-4),
        Part("cifar100", "vgg16", "vgg11", 20_000, 528, (9_000, 14_000), 5e-4, top5=True),
        Part("words", "lstm-2x1500", "lstm-small", 20_000, 252, (9_000, 14_000), 1e-5),
    ),
    (
        entry("dense", "dense"),
        *(
            entry(name, f"{spec}:{RESIDUAL}", *figures)
            for name, spec, *figures in (
                ("top-k 10", "topk+fp32@10", (80.14, 1), (91.2, 1), (22.0, 1)),
                ("top-k 1000", "topk+fp32@1000", (76.4, 3.02), (90.68, 3.22), (26.78, 3.36)),
                ("DGC 10", "dgc+fp32@10", (80.4, 1.23), (90.8, 0.935), (21.67, 1.23)),
                ("DGC 1000", "dgc+fp32@1000", (78.6, 5.19), (90.4, 3.35), (25.14, 6.25)),
                ("RedSync 10", "redsync+fp32@10", (79.4, 1.2), (90.45, 0.99), (21.65, 1.17)),
                ("RedSync 1000", "redsync+fp32@1000", (77.4, 6.94), (90.3, 3.6), (24.24, 6.9)),
                ("random-k 10", "randomk@10", ("fails", None), (87.8, 0.7), (24.15, 1.3)),
            )
        ),
        entry(
            *("GraVAC, epsilon 0.7", GRAVAC_7),
            *((80.2, 4.32, None, 163), (90.48, 1.95, None, 80), (21.25, 6.67, None, 289)),
        ),
        entry(
            *("GraVAC, epsilon 0.9", "gravac-paper:epsilon=0.9,omega=0.01,window=[500]"),
            *((None, None, None, 19), (None, None, None, 13.5), (None, None, None, 279)),
        ),
        entry("GraVAC, 0.7, raw gain", f"{GRAVAC_7},gain=raw"),
        entry(
            "our GraVAC, 0.7",
            "gravac:base=topk+fp32,granularity=layer,epsilon=0.7,omega=0.01,window=[500],"
            "gain=error_fed",
        ),
        entry(
            "Accordion 10/1000",
            "accordion-paper:low=10,high=1000,cf_range=10/1000,interval=[2<660],epoch=[66]",
        ),
        entry(
            "our Accordion 10/1000",
            "accordion:base=topk+fp32,granularity=layer,interval=[2<660]",
        ),
        entry("the default", "goodput"),
    ),
    0.02,
    (
        "the paper's 32 workers are --workers here; its bandwidth is not reported",
        "VGG-16 without its two hidden linear layers; --model-mb counts them in the modelled times",
    ),
)

ACCORDION = Suite(
    "accordion",
    "Accordion (Agarwal and others, 2021), CIFAR-10 with ResNet-18: PowerSGD, top-k",
    (
        Column("{quality}", "quality"),
        Column("data saved over low, PowerSGD", "floats", over="PowerSGD low", only="PowerSGD"),
        Column("data saved over low, top-k", "floats", over="top-k low", only="top-k"),
        Column("speed-up over dense", "seconds", over="dense"),
    ),
    (Part("cifar10", "resnet18", "resnet8", 58_500, 44.7, (29_250, 48_750), 5e-4),),
    (
        entry("dense", "dense"),
        entry("PowerSGD low", "powersgd@10:memory=residual", (94.5, 1)),
        entry("PowerSGD high", "powersgd@1000:memory=residual", (94.1,)),
        entry(
            "PowerSGD Accordion",
            "accordion-paper:base=powersgd,low=10,high=1000,cf_range=10/1000,interval=[2<1950],"
            "epoch=[195]",
            (94.5, 1.5),
        ),
        entry("top-k low", f"topk+fp32@1.01:{RESIDUAL}", (94.2, None, 1)),
        entry("top-k high", f"topk+fp32@10:{RESIDUAL}", (93.1,)),
        entry(
            "top-k Accordion",
            "accordion-paper:cf_range=1.01/10,interval=[2<1950],epoch=[195]",
            (93.9, None, 2.8),
        ),
        entry(
            "our Accordion, top-k",
            "accordion:base=topk+fp32,granularity=layer,cf_range=1.01/10,interval=[2<1950]",
        ),
        entry("the default", "goodput"),
    ),
    0.01,
    (
        "a setting of PowerSGD is a CF here: CF 10 has ranks from 1 to 5 in the small model's "
        "layers, CF 1000 has rank 1 (the paper: 2 and 1 everywhere)",
        "the paper's batch-size variant is a recipe (docs/recipes.md)",
    ),
)

HARRIS = Suite(
    "harris",
    "Harris (2020), LSTM of 4.4 M parameters on PTB, one worker, each setting at its own best "
    "learning rate of 60 random ones",
    (
        Column("test perplexity", "test"),
        Column("% worse than none", "test", over="none", worse=True),
        Column("bytes, times fewer than none", "bytes", over="none"),
        Column("s an epoch", "epoch"),
    ),
    (Part("words", "lstm-medium", "lstm-small", 13_270, 17.8, epoch=1_327),),
    (
        entry("none", "dense", (92.2, 0, 1, 9.16)),
        *(
            entry(
                f"{name} {times}x",
                f"{base}+fp32@{2 * times}:{RESIDUAL}",
                (perplexity, 100 * (perplexity / 92.2 - 1), times, seconds),
            )
            for name, base, times, perplexity, seconds in (
                ("top-k", "topk", 50, 89.6, 11.6),
                ("top-k", "topk", 500, 93.1, 11.4),
                ("top-k", "topk", 5000, 107.5, 10.7),
                ("DGC", "dgc", 50, 88.5, 10.2),
                ("DGC", "dgc", 500, 91.4, 10.4),
                ("DGC", "dgc", 5000, 124.2, 10.4),
            )
        ),
        *(
            entry(
                f"QSGD {bits} bits",
                f"qsgd@{32 / bits:.6g}:granularity=layer",
                (perplexity, 100 * (perplexity / 92.2 - 1), 32 / bits, 10.0),
            )
            for bits, perplexity in ((7, 93.1), (5, 91.6), (3, 94.4))
        ),
        entry("random-k 10x, fed back", f"randomk@10:{RESIDUAL}", (None, "about 76", 10, None)),
        entry(
            "random-k 10x, not fed back",
            "randomk@10:granularity=layer,memory=none",
            (None, "about 271", 10, None),
        ),
    ),
    0.03,
    (
        "one learning rate for all, and with that less of what its tuning finds: "
        "`tune --sampler random` is its procedure",
        "the paper's seconds are those of compression on one worker, ours those of a network and "
        "none of compression",
    ),
)

DGC_WARMUP = "Warmup.paper(steps=[5000]):warmup=[20000]"

DGC = Suite(
    "dgc",
    "Deep Gradient Compression (Lin and others, 2018): ResNet-50 on ImageNet, LSTM on PTB",
    (
        Column("{quality}", "quality"),
        Column("bytes, times fewer than dense", "bytes", over="dense"),
        Column("speed-up over dense", "seconds", over="dense"),
    ),
    (
        Part(
            "cifar10",
            "resnet101",
            "resnet8",
            450_000,
            97.5,
            (150_000, 300_000, 400_000),
            1e-4,
            clip=2,
        ),
        Part("words", "lstm-2x1500", "lstm-small", 450_000, 252, clip=0.25),
    ),
    (
        entry("dense", "dense", (75.96, 1), (72.30, 1)),
        entry(
            *("DGC 0.999", f"{DGC_WARMUP},clip_local={{clip}}"),
            *((76.15, 277), (72.24, 462)),
        ),
        entry(
            "... without momentum correction", f"{DGC_WARMUP},memory=residual,clip_local={{clip}}"
        ),
        entry(
            "... without masking",
            f"{DGC_WARMUP},masking=off,clip_local={{clip}}",
        ),
        entry("... without clipping", DGC_WARMUP),
        entry(
            "... without any warm-up",
            "dgc+fp32@1000:granularity=layer,memory=momentum,clip_local={clip}",
        ),
        entry("the default", "goodput"),
    ),
    0.001,
    (
        "the sparsity of each warm-up stage is the paper's, 75, 93.75, 98.4375, 99.6 and 99.9%",
        "the paper's bytes are of other codes of values and indices",
    ),
)

LIU = Suite(
    "liu",
    "Communication-efficient SGD (Liu, Zhang): vectors exchanged with a server, of dense's 2 N; "
    "N (1 + 1/CF) with single compression, 2 N / CF with double",
    (
        Column("{quality}", "quality"),
        Column("vectors, times fewer than dense", "bytes", over="dense"),
        Column("speed-up over dense", "seconds", over="dense"),
    ),
    (Part("text", "lstm", "lstm", 10_000, 252, workers=4, batch_size=4),),
    (
        entry("dense", "dense", (None, 1)),
        entry(
            "single, CF 100",
            f"topk+fp32@100:{RESIDUAL},exchange=sharded,down_cf=1",
            (None, 2 / (1 + 1 / 100)),
        ),
        entry(
            "double, CF 100 (DoubleSqueeze)",
            f"topk+fp32@100:{RESIDUAL},exchange=sharded",
            (None, 100),
        ),
        entry(
            "double, CF 100, nothing fed back",
            "topk+fp32@100:granularity=layer,memory=none,exchange=sharded",
            (None, 100),
        ),
        entry(
            "double, up 100, down 10",
            f"topk+fp32@100:{RESIDUAL},exchange=sharded,down_cf=10",
            (None, 2 / (1 / 100 + 1 / 10)),
        ),
        entry("all-gather, CF 100", f"topk+fp32@100:{RESIDUAL},exchange=all_gather"),
        entry("the default", "goodput"),
    ),
    0.03,
    (
        "every worker is the server of its share of the parameters; what that server does not send "
        "waits in this worker's residual, not in a memory of the server's own",
        "the formulas count values, the bytes here indices, too",
    ),
)

SUITES = {suite.name: suite for suite in (GRAVAC, ACCORDION, HARRIS, DGC, LIU)}
