"""Settings and final metrics for TensorBoard's HParams page, in the run that they belong to.

`SummaryWriter.add_hparams` makes a run of its own for them, which the page then lists apart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from adaptive.tensorboard.summaries import scalar_summary
from adaptive.timeline import Header

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
