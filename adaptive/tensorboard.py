"""The timeline as TensorBoard scalars: cf/*, gain/*, throughput/*, bytes/*, time/*, policy/*."""

from __future__ import annotations

from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from adaptive.timeline import Event, StepRecord, Timeline


class TensorBoardTimeline(Timeline):
    """Writes event files that `tensorboard --logdir` shows.

    log_dir: folder for the event files, or an existing `SummaryWriter`.
    interval: write every this many steps (a switch is always written).
    ImportError, naming the extra to install, without the tensorboard package.
    """

    def __init__(self, log_dir: str | Path | Any, interval: int = 1) -> None:
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f"interval must be a whole number of steps >= 1, got {interval!r}")
        writer_class = _summary_writer()
        self._own = isinstance(log_dir, (str, Path))
        if not self._own and not hasattr(log_dir, "add_scalar"):
            raise TypeError(f"log_dir must be a folder or a SummaryWriter, got {log_dir!r}")
        # Opened at the first record, so on the writing rank only: TensorBoard follows the latest
        # file of a folder, and one that another rank opened would stay empty.
        self._open = partial(writer_class, str(log_dir)) if self._own else lambda: log_dir
        self._lazy_writer: Any = None
        self._interval = interval
        self._last_cf: float | None = None

    def step(self, record: StepRecord) -> None:
        report = record.report
        if report.step % self._interval and report.cf == self._last_cf:
            return
        self._last_cf = report.cf
        for tag, value in _scalars(record).items():
            if isfinite(value):
                self._writer.add_scalar(tag, value, report.step)

    def event(self, event: Event) -> None:
        text = f"CF {event.cf_before:g} -> {event.cf:g}: {event.reason}"
        self._writer.add_text("policy/switch", text, event.step)

    def close(self) -> None:
        if self._lazy_writer is not None:
            self._lazy_writer.flush()
            if self._own:
                self._lazy_writer.close()

    @property
    def _writer(self) -> Any:
        if self._lazy_writer is None:
            self._lazy_writer = self._open()
        return self._lazy_writer


def _scalars(record: StepRecord) -> dict[str, float]:
    report = record.report
    scalars = {
        "cf/sent": report.cf,
        "throughput/t_sys": record.t_sys,
        "throughput/t_comp": record.t_comp,
        "bytes/sent": report.wire_bytes,
        "bytes/wire_factor": record.wire_factor,
        "time/step": report.seconds,
        "time/compress": report.compress_seconds,
        "time/exchange": report.exchange_seconds,
        "time/decode": report.decode_seconds,
        "time/compute": report.compute_seconds,
        "time/rest": report.rest_seconds,
        "gradient/norm": report.grad_norm,
    }
    if report.cf in report.measurements:
        sent = report.measurements[report.cf]
        for kind in ("error_fed", "raw", "gradient"):
            scalars[f"gain/{kind}"] = sent.gain(kind)
    for name, value in record.status.items():
        group = "cf" if name in ("candidate", "floor") else "policy"
        scalars[f"{group}/{name}"] = value
    return scalars


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "TensorBoardTimeline needs the tensorboard package: "
            "pip install 'adaptive-compression[tensorboard]'"
        ) from error
    return SummaryWriter
