"""`python -m runs study gossip`: time to quality on many networks, with a mean of all and without.

Each contender is trained once with each number of simulated workers; how many steps it takes to a
quality, and how many bytes a step sends, do not depend on the network. What a step takes there is
then reckoned, by two models of cost. alpha is the latency, B the bytes of a rank's message, beta
the seconds of a byte, N the workers:

- as the lecture has it (Liu and Zhang 2020, chapter 5): with a server in the middle, whose link all
  messages share, N alpha + N B beta; with neighbours alpha + B beta.
- as collectives are made: rings, in which as many messages follow one another as it takes
  (2 (N - 1) for an all-reduce), and a rank waits for all bytes that it sends itself; with
  neighbours one latency, and the bytes for all of them.

Nothing hides behind compute in either.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from adaptive import LinkSpec
from adaptive.config import make_base
from adaptive.exchange.choice import GOSSIP, ExchangeChoice
from adaptive.exchange.topology import named
from runs.build import check
from runs.claim import claim
from runs.compare.contender import Contender, parse_contender
from runs.compare.slice import is_finished, steps_done
from runs.config import TrainConfig, write_text
from runs.interrupt import UNSAVED
from runs.job import claimed, make_job
from runs.options import make_config
from runs.parser import UsageError, check_writable, typed
from runs.records import TIMELINE_FILE
from runs.report.run import Run
from runs.report.source import Place, read_run
from runs.simulate.command import simulate
from runs.simulate.options import STEP_SECONDS
from runs.study.table import STUDY_FILE, TABLE_FILE

PLOT_FILE = "gossip.png"

SIZES = (8, 16)
CONTENDERS = (
    "dense",
    "topk@100:exchange=voted_indices",
    "none:exchange=gossip",
    "none:exchange=gossip,topology=exponential",
    "topk@10:exchange=gossip",
    "topk@100:exchange=gossip,topology=exponential",
    "qsgd@4:exchange=gossip",
    "qsgd@8:exchange=gossip,gossip=deepsqueeze",
    "qsgd@8:exchange=gossip,gossip=naive",
)
LINKS = ("1gbit,0.1ms", "1gbit,10ms", "100mbit,1ms", "10mbit,1ms", "10mbit,50ms")

HOPS = {"all_reduce": 2, "all_gather": 1, "sharded": 2, "voted_indices": 3, "shared_indices": 3}
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


def study(given: dict[str, Any]) -> int:
    """Train what is not there yet, then report; the exit code."""
    given = dict(given)
    sizes = tuple(dict.fromkeys(given.pop("sizes", SIZES)))
    labels = tuple(dict.fromkeys(given.pop("contenders", CONTENDERS)))
    links = [_link(text) for text in given.pop("links", LINKS)]
    target, model_mb = given.pop("target", None), given.pop("model_mb", None)
    as_json = given.pop("json", False)
    folder = Path(
        given.pop("log_dir", None) or Path("logs", f"study-gossip-{given.get('task', 'text')}")
    )
    steps = given.get("steps", TrainConfig.steps)
    common = {"fixed_clock": STEP_SECONDS, "eval_every": max(1, steps // 8), **given}
    if min(sizes) < 2:
        raise UsageError(f"--sizes {min(sizes)}: must be 2 or more workers")
    if "workers" in given:
        raise UsageError(f"--workers {given['workers']}: study gossip takes --sizes")
    runs = [
        (one, {**common, **one.given, "workers": n, "log_dir": str(_folder(folder, one, n))})
        for n in sizes
        for one in map(parse_contender, labels)
    ]
    configs = [_config(options) for _, options in runs]
    check_writable(folder)
    out = sys.stderr if as_json else sys.stdout
    with claim(folder, f"--log-dir {folder}", typed()):
        for number, ((one, options), config) in enumerate(zip(runs, configs, strict=True), 1):
            if is_finished(config):
                continue
            where = f"run {number} of {len(runs)}"
            print(f"{where}: {one.label}, {config.workers} workers", file=out, flush=True)
            code = _train(options, config)
            if code and not is_finished(config):  # one that has diverged has its result
                return code
        found = [
            (one, config, _read(config)) for (one, _), config in zip(runs, configs, strict=True)
        ]
        goal = _target(found) if target is None else target
        trained = [_trained(*each, goal, model_mb) for each in found]
        quality_name = found[0][2].quality_name
        result = _result(trained, links, common["fixed_clock"], goal, quality_name)
        text = make_table(result)
        try:
            write_text(folder / STUDY_FILE, json.dumps(result, indent=2, allow_nan=False) + "\n")
            write_text(folder / TABLE_FILE, text + "\n")
            note = draw(trained, common["fixed_clock"], folder / PLOT_FILE)
        except OSError as error:
            print(f"error: the report could not be written: {error}", file=sys.stderr)
            return UNSAVED
    print(f"\n{text}{note}\nfiles in {folder}", file=out, flush=True)
    if as_json:
        print(json.dumps(result, allow_nan=False), flush=True)
    return 0


def _config(options: dict[str, Any]) -> TrainConfig:
    """The configuration of a run, checked against what is in its folder. UsageError if it cannot
    be, or if that holds another run."""
    config = make_config({**options, "simulated": True})
    check(config)
    steps_done(config)
    return config


def _folder(folder: Path, one: Contender, workers: int) -> Path:
    return folder / "runs" / f"{one.folder}-of-{workers}"


def _link(text: str) -> LinkSpec:
    try:
        return LinkSpec.parse(text)
    except ValueError as error:
        raise UsageError(f"--links {text}: {error}") from error


def _train(options: dict[str, Any], config: TrainConfig) -> int:
    """A run, or what is left of it; the exit code."""
    begun = (config.folder / "checkpoint" / "meta.json").exists()
    if not begun and config.folder.exists():  # killed before its first checkpoint
        shutil.rmtree(config.folder)
    job = make_job({"resume": str(config.folder)} if begun else options, None, simulated=True)
    with claimed(job) as ours, redirect_stdout(sys.stderr):
        return simulate(ours)


def _read(config: TrainConfig) -> Run:
    folder = config.folder
    return read_run(Place(str(folder), folder.name, folder, folder / TIMELINE_FILE))


def _target(found: Sequence[tuple[Contender, TrainConfig, Run]]) -> float:
    """The worst that is reached in the end without compression."""
    exact = [run for _, config, run in found if config.base == "none" and isfinite(run.quality)]
    exact = exact or [run for *_, run in found if isfinite(run.quality)]
    if not exact:
        raise UsageError("--target: no run has reached any quality; accepted: fewer --lr, or more")
    pick = min if exact[0].higher_is_better else max
    return pick(run.quality for run in exact)


def _trained(
    one: Contender, config: TrainConfig, run: Run, target: float, model_mb: float | None
) -> Trained:
    reports = [record.report for record in run.recorded.steps]
    n = config.workers
    sent = sum(each.wire_bytes - each.statistics_bytes for each in reports) / len(reports)
    scale = 1.0
    if model_mb is not None:
        dense = reports[0].dense_wire_bytes * n / (2 * (n - 1))
        scale = model_mb * 1e6 / dense
    gap, hops, copies = None, 1, 1.0
    if config.exchange == GOSSIP:
        topology = named(config.topology or "ring", n)
        gap, copies = topology.spectral_gap, topology.messages
    else:
        strategy = _strategy(config)
        hops = HOPS[strategy] * (n - 1)
        copies = n - 1 if strategy == "all_gather" else 2 * (n - 1) / n
    better = run.higher_is_better
    reached = (
        done
        for done, quality in run.evaluations
        if (quality >= target if better else quality <= target)
    )
    return Trained(
        one.label,
        n,
        run.quality,
        scale * sent / copies,
        scale * sent,
        hops,
        next(reached, None),
        gap,
    )


def _strategy(config: TrainConfig) -> str:
    """The exchange that the run has taken, as far as latency is concerned."""
    if config.base == "none" or config.cf == 1:
        return "all_reduce"
    exchange = config.exchange or "auto"
    base = make_base(config.base or "none", config.memory or "auto", exchange)
    picked = ExchangeChoice(base, exchange, config.workers).pick(1e6, base).name
    return picked.removesuffix("_by_energy")


def _result(
    trained: Sequence[Trained],
    links: Sequence[LinkSpec],
    compute: float,
    target: float,
    quality_name: str,
) -> dict[str, Any]:
    def known(value: float) -> float | None:
        return value if isfinite(value) else None

    rows = []
    for one in trained:
        seconds = {
            str(link): [known(one.seconds(link, compute, lecture)) for lecture in (True, False)]
            for link in links
        }
        rows.append({**asdict(one), "quality": known(one.quality), "seconds": seconds})
    return {
        "quality_name": quality_name,
        "target": target,
        "compute_seconds": compute,
        "links": [str(link) for link in links],
        "rows": rows,
    }


def make_table(result: dict[str, Any]) -> str:
    """A table for each number of workers. result: as in study.json."""
    lines = [
        f"seconds to {result['quality_name']} {result['target']:.4g}, a step computing for "
        f"{result['compute_seconds']:g} s: with a server or neighbours as in the lecture / with "
        f"rings"
    ]
    for n in dict.fromkeys(row["workers"] for row in result["rows"]):
        head = ("contender", "gap", "kB a step", "quality", "steps", *result["links"])
        table = [head]
        for row in result["rows"]:
            if row["workers"] == n:
                table.append(_row(row))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["", f"{n} workers"]
        lines += ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    def shown(value: float | None, form: str = ".4g", without: str = "-") -> str:
        return without if value is None else format(value, form)

    return (
        row["label"],
        shown(row["gap"], ".3g"),
        f"{row['sent'] / 1e3:.4g}",
        shown(row["quality"], without="diverged"),
        shown(row["to_target"], "d"),
        *(" / ".join(shown(each, ".3g") for each in pair) for pair in row["seconds"].values()),
    )


def draw(trained: Sequence[Trained], compute: float, path: Path) -> str:
    """Write the PNG: seconds to the target along bandwidth and along latency. What there is to be
    told of that."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return f"\nno {PLOT_FILE}: matplotlib is not installed"
    sizes = list(dict.fromkeys(one.workers for one in trained))
    figure = Figure(figsize=(9, 3.2 * len(sizes)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(sizes), 2, squeeze=False)
    along = (
        ("bandwidth, Mbit/s", [(rate / 1e6, LinkSpec(rate, AT.latency)) for rate in RATES]),
        ("latency, ms", [(s * 1e3, LinkSpec(AT.bits_per_second, s)) for s in LATENCIES]),
    )
    for n, row in zip(sizes, panels, strict=True):
        for (name, points), axes in zip(along, row, strict=True):
            for i, one in enumerate(each for each in trained if each.workers == n):
                if one.to_target is None:
                    continue
                for lecture, style in ((False, "-"), (True, ":")):
                    y = [one.seconds(link, compute, lecture) for _, link in points]
                    label = None if lecture else one.label
                    x = [at for at, _ in points]
                    axes.loglog(x, y, style, color=f"C{i}", linewidth=1.3, label=label)
            axes.set_title(f"{n} workers", fontsize=9, loc="left")
            axes.set_xlabel(name, fontsize=9)
            axes.tick_params(labelsize=8)
            axes.grid(color="#dddddd", linewidth=0.6)
        row[0].set_ylabel("seconds to the quality", fontsize=9)
        row[1].legend(fontsize=6, frameon=False)
    figure.savefig(path)
    return ""
