"""The sink that writes TensorBoard's event files."""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from adaptive.tensorboard.hparams import end_session, header_settings, start_session
from adaptive.tensorboard.layout import layout_summary
from adaptive.tensorboard.scalars import LayerScalars, scalars
from adaptive.tensorboard.summaries import scalar_summary, switch_summary
from adaptive.tensorboard.used import UsedCFs
from adaptive.timeline import Event, Header, StepRecord, Timeline

SHORTEST = 0.1
"""Seconds between two records by default: one takes 0.1 to 0.3 ms to make and write, so that steps
of any length get well less than 1% longer (`python -m runs bench timeline`)."""

FLUSH_SECONDS = 10


class TensorBoardTimeline(Timeline):
    """Writes event files that `tensorboard --logdir` shows.

    log_dir: folder for the event files, or an existing `torch.utils.tensorboard.SummaryWriter`,
        which stays open.
    interval: write every this many steps; None: every step, but no more than 10 a second. A step
        with another CF than the one before is always written, and so is the one before it.
    hparams: settings of the run by name, for the HParams page, beside those of the compressor.
    layout: write the "CF timeline" layout of the custom scalars page.
    completed: what HParams says of the run when it is closed; set it to False before that if the
        run has not come to its end.
    ImportError, naming the extra to install, without the tensorboard package.
    """

    def __init__(
        self,
        log_dir: str | Path | Any,
        interval: int | None = None,
        *,
        hparams: Mapping[str, Any] | None = None,
        layout: bool = True,
    ) -> None:
        if interval is not None and (
            isinstance(interval, bool) or not isinstance(interval, int) or interval < 1
        ):
            raise ValueError(
                f"interval must be a whole number of steps >= 1 or None, got {interval!r}"
            )
        writer_class = _summary_writer()
        self._own = isinstance(log_dir, (str, Path))
        if not self._own and not isinstance(log_dir, writer_class):
            raise TypeError(f"log_dir must be a folder or a SummaryWriter, got {log_dir!r}")
        # Opened at the first record, so on the writing rank only: TensorBoard follows the latest
        # file of a folder, and one that another rank opened would stay empty.
        self._open = (
            partial(writer_class, str(log_dir), flush_secs=FLUSH_SECONDS)
            if self._own
            else lambda: log_dir
        )
        self.completed = True
        self._writer: Any = None
        self._interval = interval
        self._hparams = dict(hparams or {})
        self._layout = layout
        self._layers = LayerScalars()
        self._used = UsedCFs()
        self._totals = _Totals()
        self._last_cf: float | None = None
        self._due = 0.0
        self._skipped: tuple[StepRecord, float] | None = None

    def start(self, header: Header) -> None:
        known = header_settings(header)
        given = {name: v for name, v in self._hparams.items() if v is not None or name not in known}
        self._hparams = {**known, **given}

    def step(self, record: StepRecord) -> None:
        now = time.time()
        self._totals.add(record)
        self._used.add(record)
        switched = record.report.cf != self._last_cf
        if switched:
            self._write_skipped()
        layers = self._layers.changes(record.layer_cfs, record.report.cf)
        if switched or layers or self._is_due(record.report.step, now):
            self._write(record, now, layers)
        else:
            self._skipped = record, now
        self._last_cf = record.report.cf
        if self._used.due:
            self._add(self._used.histogram(), record.report.step)

    def event(self, event: Event) -> None:
        self._add(switch_summary(event), event.step)

    def close(self) -> None:
        self._finish(figure=True)

    def _finish(self, figure: bool) -> None:
        if self._writer is None:
            return
        atexit.unregister(self._at_exit)
        self._write_skipped()
        self._add(self._used.histogram(), self._totals.last_step)
        if figure:
            self._add(self._used.figure(), self._totals.last_step)
        totals = self._totals
        end_session(self._writer, totals.last_step, totals.metrics(), self.completed)
        self._writer.flush()
        if self._own:
            self._writer.close()
        self._writer = None

    def _at_exit(self) -> None:
        self._finish(figure=False)  # an exiting interpreter may not import matplotlib any more

    def _is_due(self, step: int, now: float) -> bool:
        return now >= self._due if self._interval is None else step % self._interval == 0

    def _write_skipped(self) -> None:
        if self._skipped is not None:
            self._write(*self._skipped, {})

    def _write(self, record: StepRecord, at: float, layers: Mapping[str, float]) -> None:
        self._skipped, self._due = None, at + SHORTEST
        self._add(scalar_summary({**scalars(record), **layers}), record.report.step, at)

    def _add(self, summary: Any, step: int, at: float | None = None) -> None:
        """One record of the event file, for several values at once; nothing if there is none."""
        if summary is None:
            return
        if self._writer is None:
            self._writer = self._open()
            atexit.register(self._at_exit)
            if self._layout:
                self._add(layout_summary(), 0)
            if self._hparams:
                start_session(self._writer, self._hparams)
        self._writer._get_file_writer().add_summary(summary, step, at)


class _Totals:
    """What the run comes to."""

    def __init__(self) -> None:
        self.last_step = 0
        self._last: StepRecord | None = None
        self._seconds, self._timed = 0.0, 0

    def add(self, record: StepRecord) -> None:
        self.last_step, self._last = record.report.step, record
        if isfinite(record.report.median_seconds):
            self._seconds += record.report.median_seconds
            self._timed += 1

    def metrics(self) -> dict[str, float]:
        """By tag. Bytes of one rank."""
        if self._last is None:
            return {}
        values = {"final/bytes_sent": self._last.sent}
        if self._last.sent > 0:
            values["final/wire_factor"] = self._last.dense / self._last.sent
        if self._seconds > 0:
            values["final/steps_per_second"] = self._timed / self._seconds
        return {tag: value for tag, value in values.items() if isfinite(value)}


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "TensorBoardTimeline needs the tensorboard package: "
            "pip install 'adaptive-compression[tensorboard]'"
        ) from error
    return SummaryWriter
