"""The sink that writes TensorBoard's event files.

Scalars and switches as they come; settings and final metrics for the HParams page, in the run that
they belong to (`SummaryWriter.add_hparams` makes a run of its own, which the page lists apart);
which CFs a run used and what each was worth, as a histogram and a figure of T_comp against CF.

Importing this needs no tensorboard package; making a `TensorBoardTimeline` does.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping
from functools import partial
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any

from adaptive.timeline.records import Event, Header, StepRecord, Timeline
from adaptive.timeline.tensorboard_data import (
    LayerScalars,
    histogram_summary,
    image_summary,
    layout_summary,
    scalar_summary,
    scalars,
    switch_summary,
)

METRICS = (
    "eval/quality",
    "train/loss",
    "final/steps_per_second",
    "final/bytes_sent",
    "final/wire_factor",
)
"""Tags of scalars whose last value the page shows; one that a run does not have stays empty."""


def header_settings(header: Header) -> dict[str, Any]:
    """What a timeline's header says of the run's settings, by name."""
    return {
        **header.settings,
        "policy": header.policy,
        "base": header.base,
        "memory": header.memory,
        "cf_range": "{:g} to {:g}".format(*header.cf_range),
        "world_size": header.world_size,
        "numel": header.numel,
    }


def start_session(writer: Any, settings: Mapping[str, Any]) -> None:
    """Write what a run was started with; the page shows it beside `METRICS`.

    writer: a `SummaryWriter`. settings: by name; what is no bool, number or string is written
    as its text. None is not written, but gets its column: the page takes its columns from one of
    the runs, so runs to be compared should name the same settings.
    """
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    known = {name: _plain(settings[name]) for name in sorted(settings)}
    infos = [api_pb2.HParamInfo(name=n, type=_type(value)) for n, value in known.items()]
    columns = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in METRICS]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=columns)
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in known.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, (int, float)):
            start.hparams[name].number_value = value
        elif value is not None:
            start.hparams[name].string_value = value
    data = plugin_data_pb2.HParamsPluginData
    _write(writer, metadata.EXPERIMENT_TAG, data(experiment=experiment))
    _write(writer, metadata.SESSION_START_INFO_TAG, data(session_start_info=start))


def end_session(
    writer: Any, step: int, metrics: Mapping[str, float], completed: bool = True
) -> None:
    """Write the final `metrics`, by tag, as scalars of this step, and that the run has ended.
    completed: as it should."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    if metrics:
        writer._get_file_writer().add_summary(scalar_summary(metrics), step)
    status = api_pb2.STATUS_SUCCESS if completed else api_pb2.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    _write(writer, metadata.SESSION_END_INFO_TAG, data)


def _plain(value: Any) -> bool | int | float | str | None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def _type(value: Any) -> Any:
    from tensorboard.plugins.hparams import api_pb2

    if isinstance(value, bool):
        return api_pb2.DATA_TYPE_BOOL
    return (
        api_pb2.DATA_TYPE_FLOAT64 if isinstance(value, (int, float)) else api_pb2.DATA_TYPE_STRING
    )


def _write(writer: Any, tag: str, data: Any) -> None:
    """The page reads metadata only; the tensor that carries them is empty."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    value = Summary.Value(
        tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR
    )
    writer._get_file_writer().add_summary(Summary(value=[value]))


EVERY = 200
"""Steps in a histogram; the last one of a run holds the rest."""


class UsedCFs:
    """Counts steps by CF. The numbers of the figure are means over all steps at a CF."""

    def __init__(self) -> None:
        self._recent: dict[float, int] = {}
        self._steps = 0
        self._sums: dict[float, tuple[float, int]] = {}

    def add(self, record: StepRecord) -> None:
        cf = record.report.cf
        self._recent[cf] = self._recent.get(cf, 0) + 1
        self._steps += 1
        if isfinite(record.t_comp):
            total, steps = self._sums.get(cf, (0.0, 0))
            self._sums[cf] = (total + record.t_comp, steps + 1)

    @property
    def due(self) -> bool:
        return self._steps >= EVERY

    def histogram(self) -> Any:
        """Of the steps since the last one, as a summary, on a decimal-logarithmic axis; None if
        there were none."""
        recent, self._recent, self._steps = self._recent, {}, 0
        return histogram_summary("cf/log10_used", recent) if recent else None

    def figure(self) -> Any:
        """Mean T_comp against CF, as a summary; None if it is not known or without matplotlib."""
        means = {cf: total / steps for cf, (total, steps) in sorted(self._sums.items())}
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            return None
        if not means:
            return None
        figure = Figure(figsize=(6, 3.6), dpi=110, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.plot(list(means), list(means.values()), "o-", color="#2166ac")
        for cf, mean in means.items():
            steps = self._sums[cf][1]
            axes.annotate(
                f"{steps} steps",
                (cf, mean),
                textcoords="offset points",
                xytext=(0, 7),
                ha="center",
                fontsize=8,
            )
        axes.set_xticks(list(means), [f"{cf:g}" for cf in means], minor=False)
        axes.set_xticks([], minor=True)
        axes.margins(x=0.08, y=0.15)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("CF (1: dense)")
        axes.set_ylabel("mean T_comp")
        axes.spines[["top", "right"]].set_visible(False)
        png = BytesIO()
        figure.savefig(png, format="png")
        width, height = canvas.get_width_height()
        return image_summary("throughput/t_comp_by_cf", png.getvalue(), width, height)


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
