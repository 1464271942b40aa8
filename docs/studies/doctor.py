"""Is what the doctor expects what then happens? docs/research/netlab.md, in eleven minutes.

    python -m docs.studies.doctor [--optimizer adamw] [--log-dir FOLDER]

Ten real links (runs/netlab): in each the doctor looks at the script `doctor_script.py`, which then
trains dense, and with the default policy held at the CF that the doctor found best.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from docs.studies.common import columns, write

SCRIPT = Path(__file__).with_name("doctor_script.py")

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

HEAD = ["rate", "workers", "best", "dense s, expected", "then", "best s, expected", "then"]
HEAD += ["speed-up, expected", "then", "larger error"]


def _run(rate: str, workers: int, words: list[str]) -> None:
    """In a lab of its own; if it fails the end of what it said ends this process."""
    lab = ["-m", "runs", "netlab", "--network", rate, "--workers", str(workers), "--"]
    done = subprocess.run(
        [sys.executable, *lab, *words], capture_output=True, text=True, timeout=LIMIT
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr.strip()[-500:]}")


def _cell(rate: str, workers: int, common: list[str]) -> tuple[list[str], list[float], bool]:
    """A row of the table; the relative errors of the step times, dense and at the best CF; and
    whether the speed-up was within its interval."""
    with TemporaryDirectory(prefix="doctor-") as folder:
        report = Path(folder, "verdict.json")
        _run(rate, workers, ["doctor", "--json", str(report), "--", str(SCRIPT), *common])
        found = json.loads(report.read_text())

        def happens(*more: str) -> float:
            out = Path(folder, "seconds.json")
            _run(rate, workers, [str(SCRIPT), *common, "--out", str(out), *more])
            return float(json.loads(out.read_text()))

        dense = happens("--steps", str(DENSE_STEPS))
        best = happens("--steps", str(STEPS), "--cf", str(found["best"]))
    expected = dict(found["expected"])
    own_dense, own_best = expected[1.0], expected[found["best"]]
    errors = [abs(own_dense / dense - 1), abs(own_best / best - 1)]
    low, high = found["low"], found["high"]
    times = [f"{value:.3g}" for value in (own_dense, dense, own_best, best)]
    speedup = f"{own_dense / own_best:.2f} [{low:.2f}, {high:.2f}]"
    row = [rate, f"{workers}", found["best_name"], *times, speedup, f"{dense / best:.2f}"]
    return [*row, f"{max(errors):.0%}"], errors, low <= dense / best <= high


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adamw"))
    parser.add_argument("--log-dir", type=Path, default=Path("logs/study-doctor"))
    given = parser.parse_args(words)
    rows, errors, within = [HEAD], [], 0
    for rate, width in CELLS:
        for workers in WORKERS:
            common = ["--width", str(width), "--optimizer", given.optimizer]
            row, found, inside = _cell(rate, workers, common)
            print(" | ".join(row), file=sys.stderr, flush=True)
            rows.append(row)
            errors += found
            within += inside
    told = (
        f"median relative error of a step time {median(errors):.1%}, largest {max(errors):.0%}; "
        f"{within} of {len(rows) - 1} speed-ups within their intervals"
    )
    write(f"{columns(rows)}\n{told}", given.log_dir)


if __name__ == "__main__":
    main()
