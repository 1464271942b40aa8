"""Which part of the true gradient gets through at each CF: the docs/research/signal-gain.md.

    python -m docs.studies.signal_gain --steps 120 --network 20mbit
    python -m docs.studies.signal_gain --task cifar10 --model resnet8 --data DIR --steps 240

What is not named in --help goes on to `python -m runs train`. Trained are

- fixed: dense and at each of --cfs all along, with plain error feedback and with momentum
  correction (AdamW and those like it: with updates), recording every gain of every CF;
- moved: with the latter, the two largest CFs in one run, each first, changing where the learning
  rate drops to a tenth (after 60% of the steps);
- chosen: GraVAC with each of the gains, over an emulated link, so that compression pays.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, isfinite, log, nan, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, get_args

from adaptive import StepReport
from docs.studies.common import columns, train, write
from policies.base import GainKind
from policies.signal_gain import SignalGain
from runs.files import read_json
from runs.progress import cf_name
from runs.records import TIMELINE_FILE, read_records
from runs.result import RESULT_FILE
from runs.style import GREY, RUNS, picture

DROP = 0.6
"""Share of the steps after which the learning rate is a tenth."""

COMMON = ("--base", "topk+fp32", "--granularity", "layer")
"""Nothing is rounded: what is lost is what was not kept."""

KINDS = ("peers", "next", "gradient", "error_fed", "raw")
"""Signal gain by the ranks' products and by the next step's; the others as measured while this
run's CF was sent, of error_fed those in steady state."""


@dataclass(frozen=True)
class Run:
    """A training run. part: "fixed", "moved" or "chosen". words: its own options of `train`."""

    part: str
    label: str
    words: tuple[str, ...]

    def result(self, folder: Path) -> dict[str, Any]:
        return dict(read_json(self.folder(folder) / RESULT_FILE))

    def reports(self, folder: Path) -> list[StepReport]:
        records = read_records(self.folder(folder) / TIMELINE_FILE).steps
        return [record.report for record in records]

    def folder(self, study: Path) -> Path:
        return study / "runs" / f"{self.part} {self.label}".replace(" ", "-")


def all_runs(
    cfs: Sequence[float], drop: int, corrected: str, gravac: str, how: Sequence[str]
) -> Iterator[Run]:
    """cfs: ascending. corrected: the memory that is no plain feedback. gravac: its settings. how:
    options of its runs."""
    listed = [f"{cf:g}" for cf in cfs]
    ends = ("--cf-range", listed[0], listed[-1])
    recording = ("--policy", f"Fixed(gain='signal', probe=({', '.join(listed)},))")
    yield Run("fixed", "dense", (*recording, "--cf", "1", "--memory", corrected))
    for memory in ("residual", corrected):
        for cf in listed:
            words = (*recording, "--cf", cf, "--memory", memory)
            yield Run("fixed", f"{memory} {cf}", words)
    for first, then in (listed[-2:], listed[:-3:-1]):
        schedule = f"Schedule({{0: {first}, {drop}: {then}}}, gain='signal')"
        how_sent = ("--policy", schedule, "--memory", corrected, *ends)
        yield Run("moved", f"{first} then {then}", how_sent)
    for gain in get_args(GainKind):
        policy = f"GraVAC(gain='{gain}', {gravac})"
        yield Run("chosen", gain, ("--policy", policy, *ends, *how))


# -- gains, phase by phase ---------------------------------------------------------------------


def phases(drop: int, steps: int) -> dict[str, range]:
    """Steps of each phase; one that has none is left out."""
    early = max(1, drop // 3)
    parts = {"early": (0, early), "before the drop": (early, drop), "after the drop": (drop, steps)}
    return {name: range(*ends) for name, ends in parts.items() if range(*ends)}


def gains(reports: Sequence[StepReport], cfs: Sequence[float]) -> dict[str, dict[float, float]]:
    """Ratios of means over these steps, by kind and CF."""
    found = {
        "peers": _ratios([(r.peers, r.peers_total) for r in reports], cfs),
        "next": _ratios([(r.signal, r.signal_total) for r in reports], cfs),
        "error_fed": {cf: _mean([r.steady_gain.get(cf, nan) for r in reports]) for cf in cfs},
    }
    for kind in ("gradient", "raw"):
        found[kind] = {}
        for cf in cfs:
            terms = [r.measurements[cf].terms(kind) for r in reports if cf in r.measurements]
            tops, bottoms = zip(*terms, strict=True) if terms else ((), ())
            found[kind][cf] = _divided(sum(tops), sum(bottoms))
    return found


def errors(totals: Sequence[float]) -> float:
    """By how many standard errors the mean of a signal gain's denominators exceeds 0."""
    known = [total for total in totals if _known(total)]
    if len(known) < 2 or not (spread := stdev(known)):
        return nan
    return fmean(known) / spread * sqrt(len(known))


def _ratios(
    steps: Sequence[tuple[Mapping[float, float], float]], cfs: Sequence[float]
) -> dict[float, float]:
    known = [(products, total) for products, total in steps if _known(total)]
    bottom = sum(total for _, total in known)
    return {cf: _divided(sum(p.get(cf, nan) for p, _ in known), bottom) for cf in cfs}


def _known(total: float) -> bool:
    """0: there was no step before."""
    return isfinite(total) and total != 0


def _divided(top: float, bottom: float) -> float:
    return top / bottom if bottom else nan


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if isfinite(value)]
    return fmean(known) if known else nan


# -- bytes at equal quality --------------------------------------------------------------------


def bytes_at(
    points: Sequence[tuple[float, float]], quality: float, higher_is_better: bool
) -> float:
    """Bytes that fixed CFs would have needed for this quality, by interpolation of log bytes
    between the (bytes, quality) of those that no other beats; nan outside of them."""
    sign = 1 if higher_is_better else -1
    best: list[tuple[float, float]] = []
    for sent, reached in sorted((sent, sign * reached) for sent, reached in points):
        if not best or reached > best[-1][1]:
            best.append((sent, reached))
    wanted = sign * quality
    for (less, low), (more, high) in pairwise(best):
        if low <= wanted <= high:
            part = (wanted - low) / (high - low)
            return exp(log(less) + part * (log(more) - log(less)))
    return nan


# -- the report --------------------------------------------------------------------------------


def table_of_gains(
    runs: Sequence[Run], folder: Path, cfs: Sequence[float], parts: Mapping[str, range]
) -> str:
    """Of each fixed CF and phase."""
    rows: list[Sequence[str]] = [("sent", "phase", *KINDS)]
    for run in runs:
        reports = run.reports(folder)
        for phase, steps in parts.items():
            inside = [report for report in reports if report.step in steps]
            found = gains(inside, cfs)
            cells = ["/".join(f"{found[kind][cf]:.2f}" for cf in cfs) for kind in KINDS]
            cells[0] += f" ({errors([r.peers_total for r in inside]):.2g})"
            cells[1] += f" ({errors([r.signal_total for r in inside]):.2g})"
            rows.append((run.label, phase, *cells))
    listed = "/".join(f"{cf:g}" for cf in cfs)
    top = f"gains at CF {listed}; in brackets, standard errors of the denominator above 0"
    return f"{top}\n{columns(rows)}"


def table_of_ends(runs: Sequence[Run], folder: Path) -> str:
    """Quality and bytes of each run; bytes of the fixed CFs for the same quality over its own."""
    ends = {run: run.result(folder) for run in runs}
    higher = next(iter(ends.values()))["higher_is_better"]
    fixed = [
        (end["summary"]["bytes_sent"], end["quality"])
        for run, end in ends.items()
        if run.part == "fixed" and "residual" not in run.label and end["quality"] is not None
    ]
    name = next(iter(ends.values()))["quality_name"]
    rows = [("part", "run", f"held-out {name}", "MB", "at equal quality", "steps at each CF")]
    for run, end in ends.items():
        sent, quality = end["summary"]["bytes_sent"], end["quality"]
        ratio = ""
        if run.part != "fixed" and quality is not None:
            at_equal = bytes_at(fixed, quality, higher)
            ratio = f"{at_equal / sent:.2f}" if isfinite(at_equal) else "out of reach"
        shares = end["summary"]["steps_at_cf"] if run.part == "chosen" else ()
        steps = ", ".join(f"{cf_name(cf)}: {count}" for cf, count in shares)
        shown = "diverged" if quality is None else f"{quality:.4g}"
        rows.append((run.part, run.label, shown, f"{sent / 1e6:.3g}", ratio, steps))
    better = "higher" if higher else "lower"
    note = "at equal quality: bytes of fixed CFs for this quality / its own"
    return f"{columns(rows)}\n{better} is better; {note}"


def draw(reports: Sequence[StepReport], cfs: Sequence[float], drop: int, path: Path) -> None:
    """Write the PNG: signal gain of each CF over training as a policy sees it, by the ranks'
    products (left) and the next step's (right)."""
    with picture(path, "", size=(8, 3), columns=2) as panels:
        for axes, name in zip(panels, ("peers", "next step"), strict=True):
            gain = SignalGain()
            ratio = gain.peers if name == "peers" else gain.next
            lines: dict[float, list[float]] = {cf: [] for cf in cfs}
            for report in reports:
                gain.observe(report)
                for cf in cfs:
                    value = ratio.value(cf)
                    lines[cf].append(value if ratio.clear and isfinite(value) else nan)
            for (cf, values), colour in zip(lines.items(), RUNS * len(lines), strict=False):
                axes.plot(values, color=colour, label=f"CF {cf:g}")
            axes.axvline(drop, color=GREY, linewidth=0.8, linestyle=":")
            axes.set_title(f"against {name}, where clear", loc="left")
            axes.set_ylim(-0.05, 1.05)
        panels[0].set_ylabel("signal gain")
        panels[0].legend()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--cfs", type=float, nargs="+", default=[10.0, 100.0, 1000.0], help="two or more")
    add("--epsilon", type=float, default=0.3, help="of GraVAC")
    add("--window", type=int, help="of GraVAC (a twentieth of the steps)")
    add("--network", default="2mbit", help="of the runs with GraVAC")
    add("--optimizer", default="sgd")
    add("--log-dir", type=Path, default=Path("logs/study-signal-gain"))
    given, rest = parser.parse_known_args(words)
    cfs, folder, drop = sorted(given.cfs), given.log_dir, max(1, round(DROP * given.steps))
    common = ["--steps", f"{given.steps}", "--optimizer", given.optimizer, "--lr-drop", f"{drop}"]
    common += [*COMMON, *rest]
    window = given.window or max(5, given.steps // 20)
    gravac, how = f"epsilon={given.epsilon:g}, window={window}", ("--network", given.network)
    corrected = "momentum" if given.optimizer == "sgd" else "updates"
    runs = list(all_runs(cfs, drop, corrected, gravac, how))
    for run in runs:
        train("train", [*common, *run.words], run.folder(folder))
    fixed = [run for run in runs if run.part == "fixed"]
    gain_rows = table_of_gains(fixed, folder, cfs, phases(drop, given.steps))
    draw(fixed[0].reports(folder), cfs, drop, folder / "signal.png")
    write(f"{gain_rows}\n\n{table_of_ends(runs, folder)}", folder)


if __name__ == "__main__":
    main()
