"""Pictures of many small panels, one for each run, with the same axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from runs.report.figures.style import Picture, short, tidy, titled
from runs.report.run import Run

MOST = 6
"""Panels in one picture; more runs make more pictures."""


def in_pictures(
    file: str,
    runs: Sequence[Run],
    make: Callable[[str, Sequence[Run], str], Picture],
) -> list[Picture]:
    """Split the runs: `make(file, some of the runs, remark for the heading)` for each picture."""
    parts = [runs[i : i + MOST] for i in range(0, len(runs), MOST)]
    if len(parts) == 1:
        return [make(f"{file}.png", runs, "")]
    return [
        make(f"{file}_{i}.png", part, f", {i} of {len(parts)}") for i, part in enumerate(parts, 1)
    ]


def grid(figure: Any, runs: Sequence[Run], columns: int, **share: Any) -> list[Any]:
    """Axes for each run, with its name; the last row may have empty places."""
    columns = min(columns, len(runs))
    rows = -(-len(runs) // columns)
    every = figure.subplots(rows, columns, squeeze=False, **share).flat
    axes = list(every)
    for empty in axes[len(runs) :]:
        empty.set_visible(False)
    for one, run in zip(axes, runs, strict=False):
        tidy(one)
        titled(one, short(run.name))
    return axes[: len(runs)]
