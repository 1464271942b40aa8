"""The picture of what was sent at which CF: the share of steps, and the compression throughput, of
each CF (the two figures of GraVAC's paper that compare CFs)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import median

from runs.progress import cf_name
from runs.report.rows import Row
from runs.report.run import Run
from runs.style import GREY, RUNS, picture

CFS_FILE = "cfs.png"

MOST = 12
"""CFs that are drawn: those with most of the steps. With CFs of layers there may be thousands."""


def throughputs(run: Run) -> dict[float, float]:
    """T_comp at each CF that was sent, ascending: the median over its steps, see `unit_of`."""
    found: dict[float, list[float]] = {}
    for record in run.records:
        if isfinite(record.t_comp):
            found.setdefault(record.report.cf, []).append(record.t_comp)
    return {cf: median(values) for cf, values in sorted(found.items())}


def unit_of(rows: Sequence[Row]) -> str:
    """Of the throughputs of these runs. `train` tells its compressor the samples of a step; whether
    a script does is not on record."""
    ours = all(row.run.config is not None and not row.run.config.script for row in rows)
    return "samples/s" if ours else "samples/s where a step's are known, else steps/s"


def draw_cfs(rows: Sequence[Row], folder: Path, title: str) -> None:
    """Write the PNG: bars for the first run of each of the first rows, on the left its share of
    steps at each CF, on the right T_comp at each. ImportError without matplotlib."""
    rows = rows[:MOST]
    numbers = {row.label: (row.run.shares, throughputs(row.run)) for row in rows}
    most: Counter[float] = Counter()
    for shares, _ in numbers.values():
        most.update(shares)
    cfs = sorted(cf for cf, _ in most.most_common(MOST))
    if not cfs:
        return
    wide, high = 1 / (len(rows) + 1), max(3.0, 0.3 * len(cfs) * (len(rows) + 1))
    heads = "share of the steps", f"T_comp, {unit_of(rows)}"
    with picture(folder / CFS_FILE, title, size=(9, high), across="", columns=2) as panels:
        for panel, (axes, head) in enumerate(zip(panels, heads, strict=True)):
            for i, (label, both) in enumerate(numbers.items()):
                bars = {cf: value for cf, value in both[panel].items() if cf in cfs}
                places = [cfs.index(cf) + (i - (len(rows) - 1) / 2) * wide for cf in bars]
                colour = GREY if rows[i].run.is_dense else RUNS[i % len(RUNS)]
                axes.barh(places, list(bars.values()), height=wide, color=colour, label=label)
            axes.set_xlabel(head)
            axes.set_yticks(range(len(cfs)), [*map(cf_name, cfs)])
        panels[0].set_ylabel("CF")
        panels[0].legend()
