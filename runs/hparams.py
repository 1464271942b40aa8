"""What TensorBoard's HParams page shows of a run: its settings, and final metrics.

They are written into the run itself. `SummaryWriter.add_hparams` would make a run of its own, which
the page lists apart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from adaptive import Header
from adaptive.timeline.tensorboard import write_scalars

METRICS = (
    "eval/quality",
    "train/loss",
    "final/steps_per_second",
    "final/bytes_sent",
    "final/wire_factor",
)
"""Scalars whose last value the HParams page shows; one that a run does not have stays empty."""

_COLUMNS = ("policy", "base", "cf", "cf_range", "epsilon", "memory", "world_size")
"""What the HParams page shows of a compressor's settings, beside those of the task."""

_FIRST = ("policy", "base")
"""Columns that the page would else put among the others by their names, and not show at once: it
has those first that are said to differ between runs."""


def start_run(writer: Any, settings: Mapping[str, Any], header: Header | None) -> None:
    """Write what a run was started with, for the HParams page: `settings` of the task, by name, and
    those of the compressor that its header has. A setting that is None is taken from the header."""
    known: dict[str, Any] = {}
    if header is not None:
        known = {
            **header.settings,
            **{name: getattr(header, name) for name in ("policy", "base", "memory")},
            "cf_range": "{:g} to {:g}".format(*header.cf_range),
            "world_size": header.world_size,
            "numel": header.numel,
        }
    given = {name: v for name, v in settings.items() if v is not None or name not in known}
    columns = dict.fromkeys([*_COLUMNS, *settings] if header is not None else settings)
    known |= given
    start_session(writer, known, [name for name in columns if name in known])


def start_session(writer: Any, settings: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Write settings by name. What is no bool, number or string is written as its text.

    writer: a `SummaryWriter`. columns: the settings that the page shows. A setting that is None is
    not written, but gets its column: the page takes its columns from one of the runs, so runs to be
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
    for name in columns:
        experiment.hparam_infos.add(name=name, type=kinds[name], differs=name in _FIRST)
    _write_hparams(writer, metadata.EXPERIMENT_TAG, experiment=experiment)
    _write_hparams(writer, metadata.SESSION_START_INFO_TAG, session_start_info=start)


def end_session(
    writer: Any, step: int, metrics: Mapping[str, float], completed: bool = True
) -> None:
    """Write the final `metrics`, by tag, as scalars of this step, and that the run has ended.
    completed: as it should."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    write_scalars(writer, metrics, step)
    status = api_pb2.STATUS_SUCCESS if completed else api_pb2.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    _write_hparams(writer, metadata.SESSION_END_INFO_TAG, session_end_info=end)


def _write_hparams(writer: Any, tag: str, **data: Any) -> None:
    """The page reads metadata only; the tensor that carries them is empty."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**data))
    value = Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)
    writer._get_file_writer().add_summary(Summary(value=[value]))
