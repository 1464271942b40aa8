"""The pictures of a report: one module for each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adaptive import LinkSpec
from runs.report.figures import (
    densities,
    distribution,
    gains,
    layers,
    quality,
    throughput,
    timelines,
)
from runs.report.figures.style import Picture, paint
from runs.report.table import Row
from runs.report.target import Target

__all__ = ["Picture", "make_pictures", "paint"]


def make_pictures(
    rows: Sequence[Row], targets: Mapping[str, Target], networks: Sequence[LinkSpec]
) -> tuple[list[Picture], list[str]]:
    """All that the runs have the data for, and notes on those that they have not."""
    runs = [row.run for row in rows]
    pictures, notes = [], []
    for made, missing in (
        (quality.make(rows, targets, networks), "no run was evaluated: no quality to draw"),
        (timelines.make(runs), "no run has a timeline: no CFs to draw"),
        (distribution.make(runs), ""),
        (gains.make(runs), "no gain was measured: no gains to draw"),
        (throughput.make(runs), "no step was timed: no throughput to draw"),
        (layers.make(runs), ""),
        (densities.make(runs), ""),
    ):
        pictures += made
        if not made and missing:
            notes.append(missing)
    return pictures, notes
