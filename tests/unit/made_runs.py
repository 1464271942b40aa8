"""Runs made by hand, as reports and comparisons read them from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptive import StepRecord, StepReport
from adaptive.network.pace import Pace
from runs.config import TrainConfig
from runs.records import Recorded
from runs.report.run import Ending, Run

DENSE = {"policy": "fixed", "base": "none"}


def record(step: int, cf: float = 10.0, seconds: float = 0.5, **changes: Any) -> StepRecord:
    """1000 bytes a step, 5000 if dense."""
    report = StepReport(
        step,
        cf,
        timed_cf=cf,
        seconds=seconds,
        median_seconds=seconds,
        compress_seconds=0.0,
        exchange_seconds=0.0,
        wire_bytes=1000.0,
        dense_wire_bytes=5000.0,
    )
    pace = Pace()
    pace.add(seconds * step, step)  # of the steps before
    return StepRecord(report, 0.0, **{"t_sys": 2.0, "t_comp": 1.0, "pace": pace, **changes})


def made(
    name: str = "run",
    records: Sequence[StepRecord] | None = None,
    evaluations: tuple[tuple[int, float], ...] = (),
    ending: Ending | None = None,
    **settings: Any,
) -> Run:
    """Ten steps, unless records say otherwise."""
    config = TrainConfig(log_dir=name, **{"steps": 10, **settings})
    steps = [record(i) for i in range(10)] if records is None else list(records)
    trained = len(steps) or 10
    return Run(
        name, Path(name), config, Recorded(steps, []), trained, evaluations, (), ending or Ending()
    )
