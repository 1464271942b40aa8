"""The tables of five papers as comparisons: who takes part, on what, and what the paper reports.

A suite is data. Steps in brackets, as in `window=[500]`, are the paper's, and shrink with --scale,
`[40<500]` to no fewer than 40. {clip} differs from part to part. {lr} is each of the suite's
learning rates, of which the best counts; {lr/10} is a tenth of it. {NAME@CF} is what compressing
and decoding take, as in `CODING`. A paper's figures are those of its table, a tuple for each part,
in the order of the suite's columns. A text is what the paper says in words, None what it does not
report.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

from runs.compare.contender import Contender, parse_contender
from runs.parser import UsageError

Figure = float | str | None

FIXED_CLOCK, LINK = 0.2, "100mbit"
"""Of the modelled step times: seconds of computing, and the network."""

CODING = {
    "textbook@10": 21.0,
    "textbook@1000": 12.7,
    "topk@10": 3.1,
    "topk@100": 1.2,
    "topk@1000": 0.7,
    "dgc@10": 3.4,
    "dgc@100": 1.4,
    "dgc@1000": 0.8,
    "redsync@10": 3.2,
    "redsync@1000": 0.8,
    "randomk@10": 4.9,
    "randomk@1000": 0.4,
    "powersgd@100": 4.1,
    "qsgd@4": 3.6,
}
"""Nanoseconds an element of compressing and decoding on one thread (docs/studies/coding.py).
"textbook" is top-k by `torch.topk`, as papers time it. Where the CF changes, it is that of
CF 100."""


@dataclass(frozen=True)
class Column:
    """A column is one number of each contender, beside the paper's.

    name: its head, where {quality} is the task's. measure: quality, test, top5, seconds (modelled,
    of the whole run), epoch (the same, of so many steps as the part has in an epoch), stopped
    (epochs until early stopping, as long), bytes or floats sent. over: None, or a contender: the
    number is then how many times less than that contender's this one's is. worse: instead, by how
    many percent it is larger. only: for contenders in whose names this is."""

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
    momentum: an option of train.
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
    momentum: float | None = None


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
    """A suite is a paper's table. differs: what is another way here, in sentences. lrs: learning
    rates that each entry is tried with. seeds: unless others are given."""

    name: str
    paper: str
    columns: tuple[Column, ...]
    parts: tuple[Part, ...]
    entries: tuple[Entry, ...]
    scale: float
    differs: tuple[str, ...]
    lrs: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0,)

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
            "network": LINK,
            "model_mb": part.model_mb,
            "lr_drop": [self._scaled(step) for step in part.drops] or None,
            "weight_decay": part.weight_decay,
            "workers": part.workers,
            "batch_size": part.batch_size,
            "momentum": part.momentum,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def contenders(self) -> list[Contender]:
        """Of the entries, by their names; with each of several learning rates."""
        return [
            replace(parse_contender(self.spec(one, lr)), label=label(one.name, lr))
            for one in self._wanted
            for lr in self.suite.lrs or (None,)
        ]

    @property
    def names(self) -> list[str]:
        """Of the entries that take part."""
        return [one.name for one in self._wanted]

    @property
    def _wanted(self) -> list[Entry]:
        only = self.only
        return [one for one in self.suite.entries if not only or any(t in one.name for t in only)]

    def figures(self, name: str) -> tuple[Figure, ...]:
        """The paper's of the contender of that name, as far as it has some."""
        part = self.suite.parts.index(self.part)
        found = [one.figures for one in self.suite.entries if one.name == name]
        return found[0][part] if found and part < len(found[0]) else ()

    def spec(self, entry: Entry, lr: float | None = None) -> str:
        """Of an entry, with the steps that it has at this scale, and a learning rate."""

        def scaled(found: re.Match[str]) -> str:
            return str(max(int(found[1] or 1), self._scaled(int(found[2]))))

        spec = re.sub(r"\[(?:(\d+)<)?(\d+)\]", scaled, entry.spec)
        numbers = {**CODING, "clip": self.part.clip, "lr": lr or 0.0, "lr/10": (lr or 0.0) / 10}
        return re.sub(r"\{(.+?)\}", lambda found: f"{numbers[found[1]]:g}", spec)

    def _scaled(self, steps: int) -> int:
        return max(1, ceil(steps * self.scale - 1e-9))


def label(name: str, lr: float | None) -> str:
    """Of an entry with one of several learning rates."""
    return name if lr is None else f"{name}, lr {lr:g}"


RESIDUAL = "granularity=layer,memory=residual"
"""Tensor by tensor, with plain error feedback."""

GRAVAC_7 = "gravac-paper:epsilon=0.7,omega=0.01,window=[40<500],coding={topk@100}"
ACCORDION_EPOCHS = "interval=[120<660],epoch=[30<66]"
OVER_RANDOMK = "base=randomk,cf_range=1.5/1000,coding={randomk@10}"
OVER_ACCORDION = "Accordion, random-k"

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
            entry(f"{name} {cf}", f"{base}@{cf}:{RESIDUAL},coding={{{timed}@{cf}}}", *figures)
            for name, base, timed, cf, *figures in (
                *(
                    ("top-k", "topk+fp32", "textbook", cf, *figures)
                    for cf, *figures in (
                        (10, (80.14, 1), (91.2, 1), (22.0, 1)),
                        (1000, (76.4, 3.02), (90.68, 3.22), (26.78, 3.36)),
                    )
                ),
                ("DGC", "dgc+fp32", "dgc", 10, (80.4, 1.23), (90.8, 0.935), (21.67, 1.23)),
                ("DGC", "dgc+fp32", "dgc", 1000, (78.6, 5.19), (90.4, 3.35), (25.14, 6.25)),
                (
                    "RedSync",
                    "redsync+fp32",
                    "redsync",
                    10,
                    (79.4, 1.2),
                    (90.45, 0.99),
                    (21.65, 1.17),
                ),
                (
                    "RedSync",
                    "redsync+fp32",
                    "redsync",
                    1000,
                    (77.4, 6.94),
                    (90.3, 3.6),
                    (24.24, 6.9),
                ),
                ("random-k", "randomk", "randomk", 10, ("fails", None), (87.8, 0.7), (24.15, 1.3)),
            )
        ),
        entry(
            *("GraVAC, epsilon 0.7", GRAVAC_7),
            *((80.2, 4.32, None, 163), (90.48, 1.95, None, 80), (21.25, 6.67, None, 289)),
        ),
        entry(
            *("GraVAC, epsilon 0.9", GRAVAC_7.replace("0.7", "0.9")),
            *((None, None, None, 19), (None, None, None, 13.5), (None, None, None, 279)),
        ),
        entry("GraVAC, 0.7, raw gain", f"{GRAVAC_7},gain=raw"),
        entry(
            "our GraVAC, 0.7",
            "gravac:base=topk+fp32,granularity=layer,epsilon=0.7,omega=0.01,"
            "window=[40<500],gain=error_fed,coding={topk@100}",
        ),
        entry(
            "Accordion 10/1000",
            f"accordion-paper:low=10,high=1000,{ACCORDION_EPOCHS},coding={{topk@100}}",
        ),
        entry(
            "our Accordion 10/1000",
            "accordion:base=topk+fp32,granularity=layer,interval=[120<660],coding={topk@100}",
        ),
        entry("the default", "goodput:coding={topk@100}"),
    ),
    0.04,
    (
        "windows have at least 40 steps, Accordion's epochs 30",
        "compression counts as measured on one thread, top-k as `torch.topk` does it",
        "the paper's 32 workers are --workers here; its bandwidth is not reported",
        "VGG-16 without its two hidden linear layers; --model-mb counts them in the modelled times",
    ),
    seeds=(0, 1, 2),
)

RANDOMK = Suite(
    "gravac-randomk",
    "GraVAC (Tyagi, Swany, 2023) against Accordion, both over random-k, CF 1.5 to 1000",
    (
        Column("{quality}", "quality"),
        Column("floats, times fewer than Accordion", "floats", over=OVER_ACCORDION),
        Column("speed-up over Accordion", "seconds", over=OVER_ACCORDION),
        Column("floats, times fewer than dense", "floats", over="dense"),
        Column("speed-up over dense", "seconds", over="dense"),
    ),
    GRAVAC.parts,
    (
        entry("dense", "dense"),
        entry(
            "GraVAC, random-k",
            f"gravac-paper:{OVER_RANDOMK},gain=raw,epsilon=0.7,omega=0.01,window=[40<2000]",
            *((None, 44.5, 1.94), (None, 22.4, 5.63), (None, 104.2, 2.06)),
        ),
        entry(
            "GraVAC, random-k, gain of the paper",
            f"gravac-paper:{OVER_RANDOMK},epsilon=0.7,omega=0.01,window=[40<2000]",
        ),
        entry(
            OVER_ACCORDION,
            f"accordion-paper:low=1.5,high=1000,{OVER_RANDOMK},{ACCORDION_EPOCHS}",
        ),
        entry(
            "Accordion of GraVAC's code, random-k",
            "runs.papers.norm_change.NormChange(window=[10<100]):coding={randomk@1000}",
        ),
        entry("the default", "goodput:coding={topk@100}"),
    ),
    GRAVAC.scale,
    (
        *GRAVAC.differs[:3],
        "the paper does not say by which settings its Accordion ran; its released script has a "
        "rule of its own, at CF 100 and 1000 (runs/papers/norm_change.py)",
    ),
    seeds=GRAVAC.seeds,
)


def by_ranks(low: int, high: int) -> str:
    """Accordion between two ranks of PowerSGD, or always at one."""
    epochs = "interval=[40<1950], epoch=[30<195]"
    return f"Accordion.paper({low}, {high}, as_ranks=True, {epochs}):coding={{powersgd@100}}"


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
        entry("PowerSGD low", by_ranks(2, 2), (94.5, 1)),
        entry("PowerSGD high", by_ranks(1, 1), (94.1,)),
        entry("PowerSGD Accordion", by_ranks(2, 1), (94.5, 1.5)),
        entry("top-k low", f"topk+fp32@1.01:{RESIDUAL},coding={{topk@10}}", (94.2, None, 1)),
        entry("top-k high", f"topk+fp32@10:{RESIDUAL},coding={{topk@10}}", (93.1,)),
        entry(
            "top-k Accordion",
            "accordion-paper:interval=[40<1950],epoch=[30<195],coding={topk@10}",
            (93.9, None, 2.8),
        ),
        entry(
            "our Accordion, top-k",
            "accordion:base=topk+fp32,granularity=layer,cf_range=1.01/10,interval=[40<1950],"
            "coding={topk@10}",
        ),
        entry("the default", "goodput:coding={topk@100}"),
    ),
    0.01,
    (
        "epochs have at least 30 steps; compression counts as measured on one thread",
        "the paper's batch-size variant is a recipe (docs/recipes.md)",
    ),
)

TOPK = "topk+fp32@{cf}:memory=residual,lr={{lr}}"
QSGD_WHOLE = "QSGD(norm='l2', bucket=None)"
DGC_MOMENTUM = "dgc+fp32@{cf}:memory=momentum,momentum=0.9,lr={{lr/10}}"

HARRIS = Suite(
    "harris",
    "Harris (2020), LSTM of 4.4 M parameters on PTB, one worker, each setting at its own best "
    "learning rate of 60 random ones",
    (
        Column("test perplexity", "test"),
        Column("% worse than none", "test", over="none", worse=True),
        Column("bytes, times fewer than none", "bytes", over="none"),
        Column("s an epoch", "epoch"),
        Column("epochs until early stopping", "stopped"),
    ),
    (Part("words", "lstm-medium", "lstm-small", 13_270, 17.8, epoch=1_327, momentum=0),),
    (
        entry("none", "dense:lr={lr}", (92.2, 0, 1, 9.16)),
        *(
            entry(
                f"{name} {times}x",
                f"{how.format(cf=2 * times)},granularity=layer,coding={{{timed}}}",
                (perplexity, 100 * (perplexity / 92.2 - 1), times, seconds),
            )
            for name, how, times, timed, perplexity, seconds in (
                ("top-k", TOPK, 50, "topk@100", 89.6, 11.6),
                ("top-k", TOPK, 500, "topk@1000", 93.1, 11.4),
                ("top-k", TOPK, 5000, "topk@1000", 107.5, 10.7),
                ("DGC", DGC_MOMENTUM, 50, "dgc@100", 88.5, 10.2),
                ("DGC", DGC_MOMENTUM, 500, "dgc@1000", 91.4, 10.4),
                ("DGC", DGC_MOMENTUM, 5000, "dgc@1000", 124.2, 10.4),
            )
        ),
        *(
            entry(
                f"QSGD {bits} bits",
                f"fixed@{32 / bits:.6g}:base={QSGD_WHOLE},granularity=layer,lr={{lr}},"
                f"coding={{qsgd@4}}",
                (perplexity, 100 * (perplexity / 92.2 - 1), 32 / bits, 10.0),
            )
            for bits, perplexity in ((7, 93.1), (5, 91.6), (3, 94.4))
        ),
        entry(
            "random-k 10x, fed back",
            f"randomk@10:{RESIDUAL},lr={{lr/10}},coding={{randomk@10}}",
            (None, "about 76", 10, None),
        ),
        entry(
            "random-k 10x, not fed back",
            "randomk@10:granularity=layer,memory=none,lr={lr},coding={randomk@10}",
            (None, "about 271", 10, None),
        ),
    ),
    0.03,
    (
        "each setting has the best of three learning rates by validation, where the paper tries 60 "
        "at random (`tune --sampler random` does that); DGC, with momentum 0.9, and random-k fed "
        "back have a tenth of these",
        "epochs until early stopping need --patience; an epoch has the paper's 1,327 steps",
        "QSGD has the paper's 64, 16 and 4 levels, sign and level in 7, 5 and 3 bits",
        "the paper's seconds are those of compression on one worker, ours those of computing, of "
        "compression on one thread, and of a network",
    ),
    lrs=(0.5, 2, 8),
)

DGC_WARMUP = "Warmup.paper(steps=[5000]):warmup=[20000],coding={dgc@1000}"

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
            f"{DGC_WARMUP},memory=Momentum(masking=False),clip_local={{clip}}",
        ),
        entry("... without clipping", DGC_WARMUP),
        entry(
            "... without any warm-up",
            "dgc+fp32@1000:granularity=layer,memory=momentum,clip_local={clip},coding={dgc@1000}",
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
            f"topk+fp32@100:{RESIDUAL},exchange=ParameterServer(down_cf=1)",
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
            f"topk+fp32@100:{RESIDUAL},exchange=ParameterServer(down_cf=10)",
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

SUITES = {suite.name: suite for suite in (GRAVAC, RANDOMK, ACCORDION, HARRIS, DGC, LIU)}


def plan_from(given: dict[str, Any]) -> Plan | None:
    """The paper's table that --suite names; takes what is about it out of the options."""
    name, steps = given.pop("suite", None), given.pop("steps", None)
    scale, only = given.pop("scale", None), tuple(given.pop("only", ()))
    if name is None:
        for option, value in (("scale", scale), ("only", " ".join(only) or None)):
            if value is not None:
                raise UsageError(
                    f"--{option} {value}: needs --suite; accepted: {', '.join(SUITES)}"
                )
        if steps is not None:
            given["steps"] = steps
        return None
    if name not in SUITES:
        raise UsageError(f"--suite {name!r}: is unknown; accepted: {', '.join(SUITES)}")
    suite = SUITES[name]
    task = given.pop("task", suite.parts[0].task)
    part = suite.part(task)
    if part is None:
        tasks = ", ".join(part.task for part in suite.parts)
        raise UsageError(f"--suite {name} --task {task}: has no such part; accepted: {tasks}")
    if steps is not None and scale is not None:
        raise UsageError(f"--scale {scale:g} --steps {steps}: accepted: one of the two")
    if steps is not None:
        scale = steps / part.steps
    plan = Plan(suite, part, suite.scale if scale is None else scale, only)
    if not plan.contenders:
        names = "; ".join(entry.name for entry in suite.entries)
        raise UsageError(f"--only {' '.join(only)}: is in no name; accepted: parts of {names}")
    return plan
