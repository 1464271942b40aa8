"""Event files of long runs, written by the sink from records that nobody measured."""

from __future__ import annotations

import shutil
from math import exp, sin
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from adaptive import Event, StepRecord, StepReport, TensorBoardTimeline
from policies import Measurement

STEPS = 100_000


def many_runs(folder: Path, runs: int, switches: int) -> None:
    """`runs` folders of 100,000 steps, each with so many switches: two are made, the others are
    copies of them."""
    for kind in range(min(runs, 2)):
        _long_run(folder / f"run{kind:02d}", STEPS // (switches + 1), phase=kind)
    for index in range(2, runs):
        shutil.copytree(folder / f"run{index % 2:02d}", folder / f"run{index:02d}")


def _long_run(folder: Path, stretch: int, phase: int) -> None:
    cfs = (10.0, 20.0, 40.0, 160.0, 1000.0)
    writer = SummaryWriter(str(folder))
    timeline = TensorBoardTimeline(writer, interval=100)
    cf = cfs[phase]
    for step in range(STEPS):
        if step and step % stretch == 0:
            before, cf = cf, cfs[(step // stretch + phase) % len(cfs)]
            timeline.event(Event(step, before, cf, f"made up {before:g} -> {cf:g} at {step}"))
        timeline.step(record(step, cf))
        if step % 1000 == 0:
            writer.add_scalar("train/loss", 2 * exp(-step / 4e4) + 0.05 * sin(step / 300), step)
    timeline.close()
    writer.close()


def record(step: int, cf: float) -> StepRecord:
    """A step that says what a real one says."""
    gain = cf**-0.3
    measurement = Measurement(gain, 1 - gain, 1.0, 1.0, 1 - gain, 1.0)
    report = StepReport(
        step,
        cf,
        {cf: measurement},
        seconds=0.1,
        compress_seconds=0.01,
        exchange_seconds=0.02,
        wire_bytes=4e6 / cf,
        dense_wire_bytes=4e6,
    )
    return StepRecord(report, step / 10, 10.0, 10 * gain, {"candidate": cf, "epsilon": 0.3})
