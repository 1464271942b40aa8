"""The tables of five papers as comparisons: who takes part, on what, and what the paper reports.

A suite is data. Steps in brackets, as in `window=[500]`, are the paper's, and shrink with --scale,
`[2<660]` to no fewer than 2; what stands in braces differs from part to part. A paper's figures are
those of its table, in the order of the suite's columns; a text is what the paper says in words,
None what it does not report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

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
    learning rate is a tenth. quality: the column of the paper's quality, if it has another than the
    task's. options: further ones of train, {..} in contenders from `fill`."""

    task: str
    model: str
    small: str
    steps: int
    model_mb: float
    drops: tuple[int, ...] = ()
    top5: bool = False
    epoch: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    fill: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """An entry is one contender of a suite. spec: as compare's --contender. figures: the paper's,
    by task, in the order of the columns."""

    name: str
    spec: str
    figures: Mapping[str, tuple[Figure, ...]] = field(default_factory=dict)


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
            **part.options,
        }
        if part.drops:
            given["lr_drop"] = [self._scaled(step) for step in part.drops]
        return given

    @property
    def contenders(self) -> list[Contender]:
        """Of the entries, by their names."""
        wanted = [
            entry
            for entry in self.suite.entries
            if not self.only or any(text in entry.name for text in self.only)
        ]
        return [replace(parse_contender(self.spec(one)), label=one.name) for one in wanted]

    def spec(self, entry: Entry) -> str:
        """Of an entry, with the steps that it has at this scale."""

        def scaled(found: re.Match[str]) -> str:
            return str(max(int(found[1] or 1), self._scaled(int(found[2]))))

        return re.sub(r"\[(?:(\d+)<)?(\d+)\]", scaled, entry.spec).format_map(self.part.fill)

    def _scaled(self, steps: int) -> int:
        return max(1, ceil(steps * self.scale - 1e-9))


RESIDUAL = "granularity=layer,memory=residual"
"""Tensor by tensor, with plain error feedback."""


def _of(*figures: Figure, task: str = "cifar10") -> dict[str, tuple[Figure, ...]]:
    return {task: figures}


def _of_three(images: Any, hundred: Any, words: Any) -> dict[str, tuple[Figure, ...]]:
    return {"cifar10": images, "cifar100": hundred, "words": words}


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
        Part(
            *("cifar10", "resnet101", "resnet8", 20_000, 170, (9_000, 14_000)),
            options={"weight_decay": 1e-4},
        ),
        Part(
            *("cifar100", "vgg16", "vgg11", 20_000, 528, (9_000, 14_000)),
            top5=True,
            options={"weight_decay": 5e-4},
        ),
        Part(
            *("words", "lstm-2x1500", "lstm-small", 20_000, 252, (9_000, 14_000)),
            options={"weight_decay": 1e-5},
        ),
    ),
    (
        Entry("dense", "dense"),
        Entry("top-k 10", f"topk+fp32@10:{RESIDUAL}", _of_three((80.14, 1), (91.2, 1), (22.0, 1))),
        Entry(
            "top-k 1000",
            f"topk+fp32@1000:{RESIDUAL}",
            _of_three((76.4, 3.02), (90.68, 3.22), (26.78, 3.36)),
        ),
        Entry(
            "DGC 10",
            f"dgc+fp32@10:{RESIDUAL}",
            _of_three((80.4, 1.23), (90.8, 0.935), (21.67, 1.23)),
        ),
        Entry(
            "DGC 1000",
            f"dgc+fp32@1000:{RESIDUAL}",
            _of_three((78.6, 5.19), (90.4, 3.35), (25.14, 6.25)),
        ),
        Entry(
            "RedSync 10",
            f"redsync+fp32@10:{RESIDUAL}",
            _of_three((79.4, 1.2), (90.45, 0.99), (21.65, 1.17)),
        ),
        Entry(
            "RedSync 1000",
            f"redsync+fp32@1000:{RESIDUAL}",
            _of_three((77.4, 6.94), (90.3, 3.6), (24.24, 6.9)),
        ),
        Entry(
            "random-k 10",
            f"randomk@10:{RESIDUAL}",
            _of_three(("fails", None), (87.8, 0.7), (24.15, 1.3)),
        ),
        Entry(
            "GraVAC, epsilon 0.7",
            "gravac-paper:epsilon=0.7,omega=0.01,window=[500]",
            _of_three((80.2, 4.32, None, 163), (90.48, 1.95, None, 80), (21.25, 6.67, None, 289)),
        ),
        Entry(
            "GraVAC, epsilon 0.9",
            "gravac-paper:epsilon=0.9,omega=0.01,window=[500]",
            _of_three((None, None, None, 19), (None, None, None, 13.5), (None, None, None, 279)),
        ),
        Entry(
            "GraVAC, 0.7, raw gain",
            "gravac-paper:epsilon=0.7,omega=0.01,window=[500],gain=raw",
        ),
        Entry(
            "our GraVAC, 0.7",
            "gravac:base=topk+fp32,granularity=layer,epsilon=0.7,omega=0.01,window=[500],"
            "gain=error_fed",
        ),
        Entry("Accordion 10/1000", "accordion-paper:cf_range=10/1000,interval=[2<660],epoch=[66]"),
        Entry(
            "our Accordion 10/1000",
            "accordion:base=topk+fp32,granularity=layer,interval=[2<660]",
        ),
        Entry("the default", "goodput"),
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
    (
        Part(
            *("cifar10", "resnet18", "resnet8", 58_500, 44.7, (29_250, 48_750)),
            options={"weight_decay": 5e-4},
        ),
    ),
    (
        Entry("dense", "dense"),
        Entry("PowerSGD low", "powersgd@10:memory=residual", _of(94.5, 1)),
        Entry("PowerSGD high", "powersgd@1000:memory=residual", _of(94.1)),
        Entry(
            "PowerSGD Accordion",
            "accordion-paper:base=powersgd,cf_range=10/1000,interval=[2<1950],epoch=[195]",
            _of(94.5, 1.5),
        ),
        Entry("top-k low", f"topk+fp32@1.01:{RESIDUAL}", _of(94.2, None, 1)),
        Entry("top-k high", f"topk+fp32@10:{RESIDUAL}", _of(93.1)),
        Entry(
            "top-k Accordion",
            "accordion-paper:cf_range=1.01/10,interval=[2<1950],epoch=[195]",
            _of(93.9, None, 2.8),
        ),
        Entry(
            "our Accordion, top-k",
            "accordion:base=topk+fp32,granularity=layer,cf_range=1.01/10,interval=[2<1950]",
        ),
        Entry("the default", "goodput"),
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
        Entry("none", "dense", _of(92.2, 0, 1, 9.16, task="words")),
        *(
            Entry(
                f"{name} {times}x",
                f"{base}+fp32@{2 * times}:{RESIDUAL}",
                _of(perplexity, 100 * (perplexity / 92.2 - 1), times, seconds, task="words"),
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
            Entry(
                f"QSGD {bits} bits",
                f"qsgd@{32 / bits:.6g}:granularity=layer",
                _of(perplexity, 100 * (perplexity / 92.2 - 1), 32 / bits, 10.0, task="words"),
            )
            for bits, perplexity in ((7, 93.1), (5, 91.6), (3, 94.4))
        ),
        Entry(
            "random-k 10x, fed back",
            f"randomk@10:{RESIDUAL}",
            _of(None, "about 76", 10, None, task="words"),
        ),
        Entry(
            "random-k 10x, not fed back",
            "randomk@10:granularity=layer,memory=none",
            _of(None, "about 271", 10, None, task="words"),
        ),
    ),
    0.03,
    (
        "one learning rate for all, and with that less of what its tuning finds: "
        "`tune --plan random` is its procedure",
        "the paper's seconds are those of compression on one worker, ours those of a network and "
        "none of compression",
    ),
)

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
            *("cifar10", "resnet101", "resnet8", 450_000, 97.5, (150_000, 300_000, 400_000)),
            options={"weight_decay": 1e-4},
            fill={"clip": "2"},
        ),
        Part("words", "lstm-2x1500", "lstm-small", 450_000, 252, fill={"clip": "0.25"}),
    ),
    (
        Entry("dense", "dense", {"cifar10": (75.96, 1), "words": (72.30, 1)}),
        Entry(
            "DGC 0.999",
            "warmup:base=dgc+fp32,cf_range=4/1000,granularity=layer,memory=momentum,masking=on,"
            "warmup_steps=[5000],warmup=[20000],clip_local={clip}",
            {"cifar10": (76.15, 277), "words": (72.24, 462)},
        ),
        *(
            Entry(
                f"... without {what}",
                f"warmup:base=dgc+fp32,cf_range=4/1000,granularity=layer,{settings}",
            )
            for what, settings in (
                (
                    "momentum correction",
                    "memory=residual,warmup_steps=[5000],warmup=[20000],clip_local={clip}",
                ),
                (
                    "masking",
                    "memory=momentum,masking=off,warmup_steps=[5000],warmup=[20000],"
                    "clip_local={clip}",
                ),
                ("clipping", "memory=momentum,masking=on,warmup_steps=[5000],warmup=[20000]"),
            )
        ),
        Entry(
            "... without any warm-up",
            "dgc+fp32@1000:granularity=layer,memory=momentum,masking=on,clip_local={clip}",
        ),
        Entry("the default", "goodput"),
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
    (Part("text", "lstm", "lstm", 10_000, 252, options={"workers": 4, "batch_size": 4}),),
    (
        Entry("dense", "dense", _of(None, 1, task="text")),
        Entry(
            "single, CF 100",
            f"topk+fp32@100:{RESIDUAL},exchange=sharded,down_cf=1",
            _of(None, 2 / (1 + 1 / 100), task="text"),
        ),
        Entry(
            "double, CF 100 (DoubleSqueeze)",
            f"topk+fp32@100:{RESIDUAL},exchange=sharded",
            _of(None, 100, task="text"),
        ),
        Entry(
            "double, CF 100, nothing fed back",
            "topk+fp32@100:granularity=layer,memory=none,exchange=sharded",
            _of(None, 100, task="text"),
        ),
        Entry(
            "double, up 100, down 10",
            f"topk+fp32@100:{RESIDUAL},exchange=sharded,down_cf=10",
            _of(None, 2 / (1 / 100 + 1 / 10), task="text"),
        ),
        Entry("all-gather, CF 100", f"topk+fp32@100:{RESIDUAL},exchange=all_gather"),
        Entry("the default", "goodput"),
    ),
    0.03,
    (
        "every worker is the server of its share of the parameters; what that server does not send "
        "waits in this worker's residual, not in a memory of the server's own",
        "the formulas count values, the bytes here indices, too",
    ),
)

SUITES = {suite.name: suite for suite in (GRAVAC, ACCORDION, HARRIS, DGC, LIU)}
