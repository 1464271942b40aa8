"""A study's result, to be read."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from runs.study.phases import KINDS

STUDY_FILE, TABLE_FILE = "study.json", "table.txt"
"""In the log folder of every experiment."""


def make_table(result: dict[str, Any]) -> str:
    """All the tables, as text. result: as in study.json."""
    lines = [_gain_heading(result["cfs"])]
    for row in result["gains"]:
        cells = [_gains(row[kind]) for kind in KINDS]
        errors = row["errors"]
        signal = [
            f"{cells[0]} ({_number(errors['peers'])})",
            f"{cells[1]} ({_number(errors['next'])})",
        ]
        lines.append(_line(row["sent"], row["phase"], *signal, *cells[2:]))
    better = "higher" if result["higher_is_better"] else "lower"
    lines += ["", f"held-out {result['quality_name']} ({better} is better), seed by seed"]
    for part in ("fixed", "moved", "chosen"):
        runs = [run for run in result["runs"] if run["part"] == part]
        for label in dict.fromkeys(run["label"] for run in runs):
            lines.append(_ended(part, label, [run for run in runs if run["label"] == label]))
    lines += [f"note: {note}" for note in result["notes"]]
    return "\n".join(lines)


def _gain_heading(cfs: list[float]) -> str:
    listed = "/".join(f"{cf:g}" for cf in cfs)
    top = f"gains at CF {listed}; in brackets, standard errors of the denominator above 0"
    return f"{top}\n" + _line("sent", "phase", *KINDS)


def _line(sent: str, phase: str, *cells: str) -> str:
    peers, after, *rest = cells
    return f"{sent:<14}{phase:<17}{peers:<24}{after:<24}" + "".join(f"{cell:<17}" for cell in rest)


def _ended(part: str, label: str, runs: list[dict[str, Any]]) -> str:
    qualities = " ".join(_number(run["quality"], 4) for run in runs)
    sent = fmean(run["bytes"] for run in runs) / 1e6
    text = f"{part:<8}{label:<16}{qualities:<24}{sent:9.3g} MB"
    fixed = [run["bytes_of_fixed"] for run in runs]
    if part != "fixed":
        known = [other / run["bytes"] for other, run in zip(fixed, runs, strict=True) if other]
        ratios = " ".join(f"{ratio:.2f}" for ratio in known) or "outside of what fixed CFs reach"
        text += f"  bytes of fixed CFs for this quality / its own: {ratios}"
    if part == "chosen":
        text += f"  steps at {_steps(runs[0]['steps_at_cf'])}"
    return text


def _steps(shares: dict[str, int]) -> str:
    return ", ".join(f"{cf}: {steps}" for cf, steps in shares.items())


def _gains(by_cf: dict[str, float | None]) -> str:
    return "/".join(_number(value) for value in by_cf.values())


def _number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "?"
    return f"{value:.{digits}g}" if digits > 2 or abs(value) >= 10 else f"{value:.2f}"
