"""Time to quality on many networks, by all-reduce and by gossip: docs/research/gossip.md.

    python -m docs.studies.gossip --sizes 8 --target 28 --contenders dense 'none:sync=Gossip()' \
        --task cifar10 --model resnet8 --data DIR --batch-size 8 --steps 120 --eval-every 15

What is not named in --help goes on to `python -m runs simulate`. Each contender (as of `compare`)
is trained once with each number of simulated workers; how many steps it takes to a quality, and how
many bytes a step sends, do not depend on the network. What a step takes there is then reckoned, by
two models of cost. alpha is the latency, B the bytes of a rank's message, beta the seconds of a
byte, N the workers:

- as the lecture has it (Liu and Zhang 2020, chapter 5): with a server in the middle, whose link all
  messages share, N alpha + N B beta; with neighbours alpha + B beta.
- as collectives are made: rings, in which as many messages follow one another as it takes
  (2 (N - 1) for an all-reduce), and a rank waits for all bytes that it sends itself; with
  neighbours one latency, and the bytes for all of them.

Nothing hides behind compute in either.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

from adaptive import Gossip, LinkSpec
from adaptive.exchange.choice import ExchangeChoice
from adaptive.step.config import make_base
from docs.studies.common import columns, train, write
from runs.build import sends_dense, synchronisation
from runs.compare.contender import Contender, parse_contender
from runs.config import TrainConfig
from runs.parser import UsageError
from runs.report.run import Run
from runs.report.source import read_folder
from runs.simulate.command import STEP_SECONDS
from runs.style import RUNS, log_axis, picture

PLOT_FILE = "gossip.png"

SIZES = (8, 16)
CONTENDERS = (
    "dense",
    "topk@100:exchange=voted_indices",
    "none:sync=Gossip()",
    "none:sync=Gossip('exponential')",
    "topk@10:sync=Gossip()",
    "topk@100:sync=Gossip('exponential')",
    "qsgd@4:sync=Gossip()",
    "qsgd@8:sync=Gossip(algorithm='deepsqueeze')",
    "qsgd@8:sync=Gossip(algorithm='naive')",
)
LINKS = ("1gbit,0.1ms", "1gbit,10ms", "100mbit,1ms", "10mbit,1ms", "10mbit,50ms")

HOPS = {"all_reduce": 2, "all_gather": 1, "sharded": 2, "voted_indices": 3}
"""Messages that follow one another in an exchange, for each of the other ranks."""

LATENCIES = (1e-4, 1e-3, 1e-2, 1e-1)
RATES = (1e6, 1e7, 1e8, 1e9, 1e10)
AT = LinkSpec(1e8, 1e-3)
"""Of the picture: along the axes, and for the other of the two."""


@dataclass(frozen=True)
class Trained:
    """A contender with so many workers. message: bytes of what a rank hands out in a step, once.
    sent: bytes that it sends in a step. hops: messages that follow one another, by rings.
    to_target: steps to the target, None if it was not reached. gap: of the topology, if there is
    one."""

    label: str
    workers: int
    quality: float
    message: float
    sent: float
    hops: int
    to_target: int | None
    gap: float | None

    def seconds(self, link: LinkSpec, compute: float, lecture: bool) -> float:
        """To the target; inf if it is not reached."""
        if self.to_target is None:
            return inf
        alpha, beta = link.latency, 8 / link.bits_per_second
        if lecture:
            n = self.workers if self.gap is None else 1
            return self.to_target * (compute + n * alpha + n * self.message * beta)
        return self.to_target * (compute + self.hops * alpha + self.sent * beta)


def contender(text: str) -> Contender:
    """An argument type."""
    try:
        return parse_contender(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def read(folder: Path) -> tuple[Run, TrainConfig]:
    """A run that has been trained there."""
    run = read_folder(folder, "--log-dir")
    assert run.config is not None, "it is our own"
    return run, run.config


def exact_quality(runs: Iterable[tuple[Run, TrainConfig]]) -> float:
    """The worst that is reached in the end without compression."""
    exact = [run for run, config in runs if config.base == "none" and isfinite(run.quality)]
    if not exact:
        raise SystemExit("--target: no contender without compression has reached any quality")
    pick = min if exact[0].higher_is_better else max
    return pick(run.quality for run in exact)


def trained(label: str, run: Run, config: TrainConfig, target: float) -> Trained:
    reports = [record.report for record in run.recorded.steps]
    n = config.workers
    sent = sum(each.wire_bytes - each.statistics_bytes for each in reports) / len(reports)
    gap, hops, copies = None, 1, 1.0
    if isinstance(sync := synchronisation(config), Gossip):
        topology = sync.topology_of(n)
        gap, copies = topology.spectral_gap, topology.messages
    else:
        strategy = _strategy(config)
        hops = HOPS[strategy] * (n - 1)
        copies = n - 1 if strategy == "all_gather" else 2 * (n - 1) / n
    reached = run.steps_to(target)
    return Trained(
        label,
        n,
        run.quality,
        sent / copies,
        sent,
        hops,
        int(reached) if isfinite(reached) else None,
        gap,
    )


def _strategy(config: TrainConfig) -> str:
    """The exchange that the run has taken, as far as latency is concerned."""
    if sends_dense(config):
        return "all_reduce"
    exchange = config.exchange or "auto"
    base = make_base(config.base or "none", config.memory or "auto")
    return ExchangeChoice(base, exchange, config.workers).pick(lambda _: 1e6, 100).name


def make_table(
    trained: Sequence[Trained], links: Sequence[LinkSpec], compute: float, goal: str
) -> str:
    """A table for each number of workers. goal: what quality the steps are to."""
    text = (
        f"seconds to {goal}, a step computing for {compute:g} s: with a server or neighbours as in "
        f"the lecture / with rings"
    )
    for n in dict.fromkeys(one.workers for one in trained):
        rows = [("contender", "gap", "kB a step", "quality", "steps", *map(str, links))]
        rows += [_row(one, links, compute) for one in trained if one.workers == n]
        text += f"\n\n{n} workers\n{columns(rows)}"
    return text


def _row(one: Trained, links: Sequence[LinkSpec], compute: float) -> tuple[str, ...]:
    def seconds(link: LinkSpec) -> str:
        if one.to_target is None:
            return "-"
        return " / ".join(f"{one.seconds(link, compute, way):.3g}" for way in (True, False))

    return (
        one.label,
        "-" if one.gap is None else f"{one.gap:.3g}",
        f"{one.sent / 1e3:.4g}",
        f"{one.quality:.4g}" if isfinite(one.quality) else "diverged",
        "-" if one.to_target is None else str(one.to_target),
        *map(seconds, links),
    )


def draw(trained: Sequence[Trained], compute: float, path: Path) -> None:
    """Write the PNG: seconds to the target along bandwidth and along latency."""
    sizes = list(dict.fromkeys(one.workers for one in trained))
    along = (
        ("bandwidth, Mbit/s", [(rate / 1e6, LinkSpec(rate, AT.latency)) for rate in RATES]),
        ("latency, ms", [(s * 1e3, LinkSpec(AT.bits_per_second, s)) for s in LATENCIES]),
    )
    places = [(n, *how) for n in sizes for how in along]
    size = (9, 3.2 * len(sizes))
    with picture(path, "", [1] * len(sizes), size, across="", columns=2) as panels:
        for (n, name, points), axes in zip(places, panels, strict=True):
            heights = []
            for i, one in enumerate(each for each in trained if each.workers == n):
                if one.to_target is None:
                    continue
                for lecture, style in ((False, "-"), (True, ":")):
                    y = [one.seconds(link, compute, lecture) for _, link in points]
                    heights += y
                    label = None if lecture else one.label
                    colour = RUNS[i % len(RUNS)]
                    axes.plot([at for at, _ in points], y, style, color=colour, label=label)
            log_axis(axes.xaxis, [at for at, _ in points])
            log_axis(axes.yaxis, heights)
            axes.set_title(f"{n} workers", loc="left")
            axes.set_xlabel(name)
        for axes in panels[::2]:
            axes.set_ylabel("seconds to the quality")
        panels[1].legend()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=SIZES, help="numbers of workers")
    add("--contenders", type=contender, nargs="+", default=[*map(parse_contender, CONTENDERS)])
    add("--links", type=LinkSpec.parse, nargs="+", default=[*map(LinkSpec.parse, LINKS)])
    add("--target", type=float, help="the quality (the worst without compression, in the end)")
    add("--step-seconds", type=float, default=STEP_SECONDS, help="that a step computes for")
    add("--eval-every", type=int, default=15)
    add("--log-dir", type=Path, default=Path("logs/study-gossip"))
    given, rest = parser.parse_known_args(words)
    common = [
        *rest,
        "--step-seconds",
        f"{given.step_seconds}",
        "--eval-every",
        f"{given.eval_every}",
    ]
    runs: list[tuple[Contender, Path]] = []
    for n in given.sizes:
        for one in given.contenders:
            folder = given.log_dir / "runs" / f"{one.folder}-of-{n}"
            own = shlex.split(one.config({"log_dir": str(folder)}).command)[4:]
            train("simulate", [*common, *own, "--workers", f"{n}"], folder)
            runs.append((one, folder))
    found = [(one.label, *read(folder)) for one, folder in runs]
    target = given.target
    if target is None:
        target = exact_quality((run, config) for _, run, config in found)
    all_trained = [trained(label, run, config, target) for label, run, config in found]
    goal = f"{found[0][1].quality_name} {target:.4g}"
    draw(all_trained, given.step_seconds, given.log_dir / PLOT_FILE)
    write(make_table(all_trained, given.links, given.step_seconds, goal), given.log_dir)


if __name__ == "__main__":
    main()
