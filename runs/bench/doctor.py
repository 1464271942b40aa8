"""Is what the doctor expects what then happens? On real links of several rates (runs/netlab)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from runs.bench.timing import Row
from runs.netlab.lab import missing
from runs.parser import UsageError

SCRIPT = Path(__file__).with_name("scripts") / "mlp.py"

CELLS = (
    ("10mbit", 320),
    ("30mbit", 640),
    ("100mbit", 1152),
    ("300mbit", 1792),
    ("1gbit", 2944),
)
"""Rates, and widths of models of 0.3 to 10 million parameters: dense takes about a second a step
with two workers, and at most three with four."""

WORKERS = (2, 4)

DENSE_STEPS, STEPS = 12, 40
LIMIT = 600.0
"""Seconds that one run may take."""


@dataclass(frozen=True)
class Cell:
    """What was expected in one place of the grid, and what happened. cf: the doctor's best."""

    rate: str
    workers: int
    optimizer: str
    cf: float
    name: str
    verdict: str
    expected: tuple[float, float]
    happened: tuple[float, float]
    interval: tuple[float, float]

    @property
    def errors(self) -> tuple[float, float]:
        """Relative, of the step times of dense and of the best CF."""
        dense, best = zip(self.expected, self.happened, strict=True)
        return abs(dense[0] / dense[1] - 1), abs(best[0] / best[1] - 1)

    @property
    def speedup(self) -> float:
        return self.happened[0] / self.happened[1]

    @property
    def inside(self) -> bool:
        """Whether the speed-up was within the interval."""
        low, high = self.interval
        return low <= self.speedup <= high

    def __str__(self) -> str:
        low, high = self.interval
        (dense, best), (dense_then, best_then) = self.expected, self.happened
        expected = self.expected[0] / self.expected[1]
        return (
            f"| {self.rate} | {self.workers} | {self.optimizer} | {self.name} | {dense:.3g} | "
            f"{dense_then:.3g} | {best:.3g} | {best_then:.3g} | {expected:.2f} [{low:.2f}, "
            f"{high:.2f}] | {self.speedup:.2f} | {max(self.errors):.0%} |"
        )


HEAD = """\
| rate | workers | optimizer | best | dense s, expected | then | best s, expected | then \
| speed-up, expected | then | larger error |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def bench_doctor(optimizer: str = "sgd") -> list[Row]:
    """The grid, a line for each cell on stderr, and how far off the expected step times are."""
    lack = missing()
    if lack:
        raise UsageError(f"doctor: {lack}")
    print(HEAD, file=sys.stderr, flush=True)
    cells = []
    for rate, width in CELLS:
        for workers in WORKERS:
            cells.append(_cell(rate, workers, width, optimizer))
            print(cells[-1], file=sys.stderr, flush=True)
    errors = [error for cell in cells for error in cell.errors]
    within = sum(cell.inside for cell in cells)
    detail = (
        f"{len(cells)} cells, {WORKERS} workers, {CELLS[0][0]} to {CELLS[-1][0]}; largest "
        f"{max(errors):.0%}; {within} of {len(cells)} speed-ups within their intervals"
    )
    return [Row("doctor: median relative error of a step time", median(errors), "<= 0.10", detail)]


def _cell(rate: str, workers: int, width: int, optimizer: str) -> Cell:
    common = ["--width", str(width), "--optimizer", optimizer]
    with TemporaryDirectory(prefix="doctor-") as folder:
        report = Path(folder, "verdict.json")
        words = ["doctor", "--json", str(report), "--", str(SCRIPT), *common]
        _run(rate, workers, words)
        found: dict[str, Any] = json.loads(report.read_text())
        expected = dict(found["expected"])
        cf = found["best"]

        def happens(*more: str) -> float:
            out = Path(folder, "seconds.json")
            _run(rate, workers, [str(SCRIPT), *common, "--out", str(out), *more])
            return float(json.loads(out.read_text()))

        dense = happens("--steps", str(DENSE_STEPS))
        best = happens("--steps", str(STEPS), "--cf", str(cf))
    return Cell(
        rate,
        workers,
        optimizer,
        cf,
        found["best_name"],
        found["name"],
        (expected[1.0], expected[cf]),
        (dense, best),
        (found["low"], found["high"]),
    )


def _run(rate: str, workers: int, words: list[str]) -> None:
    """UsageError with the end of what it said if it fails."""
    lab = ["-m", "runs", "netlab", "--rate", rate, "--workers", str(workers), "--"]
    done = subprocess.run(
        [sys.executable, *lab, *words], capture_output=True, text=True, timeout=LIMIT
    )
    if done.returncode:
        raise UsageError(f"doctor: {' '.join(words)}: {done.stderr.strip()[-500:]}")
