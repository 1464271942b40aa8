"""The sink that writes TensorBoard's event files.

Scalars are those of thinned.py. Those of a step are written as one record of the file: that costs a
tenth of as many calls of `SummaryWriter.add_scalar`. Beside them go the whole records of all steps,
which TensorBoard passes over, and from which reports are made and policies replayed.

Importing this needs no tensorboard package; making a `TensorBoardTimeline` does.
"""

from __future__ import annotations

import atexit
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from adaptive.timeline.records import Event, Header, StepRecord, as_line, headline_of
from adaptive.timeline.thinned import ThinnedTimeline, settings_of

PLUGIN = "cf_timeline"
"""The name of the dashboard (`runs.dashboard`); tensors written for it are marked with it."""

SWITCHES = f"{PLUGIN}/switches"
HEADLINE = f"{PLUGIN}/headline"

RECORDS = "cf_records"
"""The tag of whole records: lines of JSON as `JSONLTimeline` writes them, compressed by zlib. Also
the name of the plugin that they are for, which is none of TensorBoard's."""

METRICS = (
    "eval/quality",
    "train/loss",
    "final/steps_per_second",
    "final/bytes_sent",
    "final/wire_factor",
)
"""Scalars whose last value the HParams page shows; one that a run does not have stays empty."""

_CHARTS = {
    "CF sent": "cf/sent",
    "step time (seconds)": "time/step",
    "bytes a rank sent in a step": "bytes/sent",
    "gain of what was sent": "gain/sent",
    "T_comp: throughput x gain": "throughput/t_comp",
}
"""The charts of the custom scalars page, which shows the last one first: a tag each, by title.
They are margin charts without a margin, the only ones that the page does not smooth: across a
switch that would draw a CF, or a step time, that never was."""

_COLUMNS = ("policy", "base", "cf", "cf_range", "epsilon", "memory", "world_size")
"""What the HParams page shows of a compressor's settings, beside those that the user names."""

_FIRST = ("policy", "base")
"""Columns that the page would else put among the others by their names, and not show at once: it
has those first that are said to differ between runs."""

HEADLINE_SECONDS = 10.0
"""Between two headlines; one is written with every switch, and at the end, too."""

_HELD = 1000
"""Records that wait for scalars to be written with, at most."""

_HISTOGRAM_STEPS = 200
_DECADES = 0.04
"""Width of a bar of the histogram: a factor of 1.1."""


def start_session(
    writer: Any, settings: Mapping[str, Any], columns: Sequence[str] | None = None
) -> None:
    """Write what a run was started with into the run itself, for the HParams page
    (`SummaryWriter.add_hparams` would make a run of its own, which the page lists apart).

    writer: a `SummaryWriter`. settings: by name; what is no bool, number or string is written
    as its text. columns: those that the page shows; None: all. None is not
    written, but gets its column: the page takes its columns from one of the runs, so runs to be
    compared should name the same settings.
    """
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    experiment = api_pb2.Experiment(
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in METRICS]
    )
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    kinds = {}
    for name, value in settings.items():
        kind = api_pb2.DATA_TYPE_STRING
        if isinstance(value, bool):
            kind = api_pb2.DATA_TYPE_BOOL
            start.hparams[name].bool_value = value
        elif isinstance(value, (int, float)):
            kind = api_pb2.DATA_TYPE_FLOAT64
            start.hparams[name].number_value = value
        elif value is not None:
            start.hparams[name].string_value = str(value)
        kinds[name] = kind
    for name in settings if columns is None else columns:
        experiment.hparam_infos.add(name=name, type=kinds[name], differs=name in _FIRST)
    _write_hparams(writer, metadata.EXPERIMENT_TAG, experiment=experiment)
    _write_hparams(writer, metadata.SESSION_START_INFO_TAG, session_start_info=start)


def end_session(
    writer: Any, step: int, metrics: Mapping[str, float], completed: bool = True
) -> None:
    """Write the final `metrics`, by tag, as scalars of this step, and that the run has ended.
    completed: as it should."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    _write_scalars(writer, metrics, step)
    status = api_pb2.STATUS_SUCCESS if completed else api_pb2.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    _write_hparams(writer, metadata.SESSION_END_INFO_TAG, session_end_info=end)


class TensorBoardTimeline(ThinnedTimeline):
    """A sink that writes event files, which `tensorboard --logdir` shows.

    log_dir: folder for the event files, or an existing `torch.utils.tensorboard.SummaryWriter`,
        which stays open.
    interval: write scalars every this many steps; None: every step, but no more than 10 a second. A
        step with another CF than the one before is always written, and so is the one before it.
    hparams: settings of the run by name, for the HParams page, beside those of the compressor.
    records: also write the whole record of every step, so that `python -m runs report` and `replay`
        can read the folder. It takes some 0.5 kB a step, and as long as a JSONLTimeline.
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
        records: bool = True,
    ) -> None:
        super().__init__(interval)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoardTimeline needs the tensorboard package: "
                "pip install 'adaptive-compression[tensorboard]'"
            ) from error
        self._own = isinstance(log_dir, (str, Path))
        if not self._own and not isinstance(log_dir, SummaryWriter):
            raise TypeError(f"log_dir must be a folder or a SummaryWriter, got {log_dir!r}")
        self._open = (
            partial(SummaryWriter, str(log_dir), flush_secs=10) if self._own else lambda: log_dir
        )
        self.completed = True
        self._writer: Any = None
        self._hparams = dict(hparams or {})
        self._columns: list[str] | None = None
        # Records that are not written yet.
        self._whole: list[Header | StepRecord | Event] | None = [] if records else None
        self._recent_cfs: list[float] = []
        self._t_comp: dict[float, tuple[float, int]] = {}  # sum and number of steps, by CF
        self._network, self._gossip, self._headline_due = "", False, 0.0

    def start(self, header: Header) -> None:
        self._network, self._gossip = header.network, header.gossip
        known = settings_of(header)
        given = {name: v for name, v in self._hparams.items() if v is not None or name not in known}
        columns = dict.fromkeys([*_COLUMNS, *self._hparams])
        self._hparams = {**known, **given}
        self._columns = [name for name in columns if name in self._hparams]
        self._keep(header)

    def step(self, record: StepRecord) -> None:
        self._keep(record)
        super().step(record)
        self._count(record)
        if time.time() >= self._headline_due:
            self._headline_due = time.time() + HEADLINE_SECONDS
            self._write_headline()

    def event(self, event: Event) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        text = f"CF {event.cf_before:g} -> {event.cf:g}: {event.reason}"
        switch = {"cf_before": event.cf_before, "cf": event.cf, "reason": event.reason}
        values = [
            string_value("policy/switch", "text", text.encode()),
            string_value(SWITCHES, PLUGIN, json.dumps(switch).encode()),
        ]
        self._opened()._get_file_writer().add_summary(Summary(value=values), event.step)
        self._write_headline()
        self._keep(event)
        self._write_whole(event.step)

    def flush(self) -> None:
        if self._writer is not None:
            self._write_whole()
            self._writer.flush()

    def _write_headline(self) -> None:
        """Whether compression was worth it so far, for the text page and the dashboard."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._last is None:
            return
        if text := headline_of(self._last, self._network, self._gossip):
            values = [
                string_value("policy/headline", "text", text.encode()),
                string_value(HEADLINE, PLUGIN, text.encode()),
            ]
            writer = self._opened()._get_file_writer()
            writer.add_summary(Summary(value=values), self._last.report.step)

    def close(self) -> None:
        if self._writer is None:
            return
        atexit.unregister(self.close)
        self._write_skipped()
        self._write_whole()
        step = 0
        if self._last is not None:
            step = self._last.report.step
            self._write_headline()
            self._write_histogram(step)
            self._write_figure(step)
        end_session(self._writer, step, self._final_numbers(), self.completed)
        self._writer.flush()
        if self._own:
            self._writer.close()
        self._writer = None

    def _opened(self) -> Any:
        """The writer. Opened at the first record, so on the writing rank only: TensorBoard follows
        the latest file of a folder, and one that another rank opened would stay empty."""
        if self._writer is None:
            self._writer = self._open()
            atexit.register(self.close)
            charts = {title: ["Margin", [tag] * 3] for title, tag in reversed(_CHARTS.items())}
            self._writer.add_custom_scalars({"CF timeline": charts})
            if self._hparams:
                start_session(self._writer, self._hparams, self._columns)
        return self._writer

    def _write_numbers(self, values: Mapping[str, float], step: int, at: float) -> None:
        _write_scalars(self._opened(), values, step, at)
        self._write_whole(step)

    def _keep(self, recorded: Header | StepRecord | Event) -> None:
        """To be written with the next scalars."""
        if self._whole is not None:
            self._whole.append(recorded)
            if len(self._whole) == _HELD:
                self._write_whole()

    def _write_whole(self, step: int | None = None) -> None:
        """Write the records since the last time; `step` is the newest step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._whole:
            lines = zlib.compress("".join(map(as_line, self._whole)).encode())
            self._whole = []
            summary = Summary(value=[string_value(RECORDS, RECORDS, lines)])
            self._opened()._get_file_writer().add_summary(summary, step)

    def _count(self, record: StepRecord) -> None:
        """Take a step into the histogram and the figure."""
        cf = record.report.cf
        self._recent_cfs.append(cf)
        if len(self._recent_cfs) == _HISTOGRAM_STEPS:
            self._write_histogram(record.report.step)
        if isfinite(record.t_comp):
            total, steps = self._t_comp.get(cf, (0.0, 0))
            self._t_comp[cf] = (total + record.t_comp, steps + 1)

    def _write_histogram(self, step: int) -> None:
        """Which CFs the steps since the last histogram had, on a logarithmic axis."""
        if self._recent_cfs:
            decades = np.log10(self._recent_cfs)
            bins = np.arange(-_DECADES / 2, decades.max() + _DECADES, _DECADES)
            self._opened().add_histogram("cf/log10_used", decades, step, bins=bins)
            self._recent_cfs.clear()

    def _write_figure(self, step: int) -> None:
        """Mean T_comp against CF, if it is known and matplotlib can be imported: an exiting
        interpreter may refuse to."""
        try:
            from matplotlib import pyplot  # noqa: F401
            from matplotlib.figure import Figure
        except (ImportError, RuntimeError):
            return
        if not self._t_comp:
            return
        means = {cf: total / steps for cf, (total, steps) in sorted(self._t_comp.items())}
        figure = Figure(figsize=(6, 3.6), dpi=110, layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.plot(list(means), list(means.values()), "o-", color="#2166ac")
        for cf, mean in means.items():
            steps = self._t_comp[cf][1]
            axes.text(cf, mean, f"{steps} steps\n", ha="center", va="bottom", fontsize=8)
        axes.set_xticks(list(means), [f"{cf:g}" for cf in means])
        axes.set_xticks([], minor=True)
        axes.margins(x=0.08)
        axes.set_ylim(0, 1.15 * max(means.values()) or 1)
        axes.set(xlabel="CF (1: dense)", ylabel="mean T_comp")
        self._writer.add_figure("throughput/t_comp_by_cf", figure, step)


def string_value(tag: str, plugin: str, content: bytes) -> Any:
    """A tensor of one string, for this plugin of TensorBoard's."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

    data = summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin)
    metadata = summary_pb2.SummaryMetadata(
        plugin_data=data, data_class=summary_pb2.DATA_CLASS_TENSOR
    )
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[content])
    return summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def _write_scalars(
    writer: Any, values: Mapping[str, float], step: int, at: float | None = None
) -> None:
    """Write those of the values that are finite. at: seconds since the epoch; None: now."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    known = [Summary.Value(tag=tag, simple_value=v) for tag, v in values.items() if isfinite(v)]
    if known:
        writer._get_file_writer().add_summary(Summary(value=known), step, at)


def _write_hparams(writer: Any, tag: str, **data: Any) -> None:
    """The page reads metadata only; the tensor that carries them is empty."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**data))
    value = Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)
    writer._get_file_writer().add_summary(Summary(value=[value]))
