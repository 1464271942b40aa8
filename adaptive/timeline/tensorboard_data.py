"""What TensorBoard shows of a record: names of scalars, the layout of their charts, summaries.

Scalars are cf/*, gain/*, throughput/*, bytes/*, time/*, policy/*, gradient/*, and cf_layer/* where
layers have CFs of their own. The values of event files are made by hand: many in one record cost a
tenth of as many calls of `SummaryWriter.add_scalar`. Every function that makes one needs the
tensorboard package, and imports it when called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite, log10
from typing import Any

from adaptive.timeline.records import Event, StepRecord
from policies.base import GainKind

KINDS: tuple[GainKind, ...] = ("gradient", "error_fed", "raw")

_MOVED = {
    "candidate": "cf/candidate",
    "floor": "cf/floor",
    "gain_candidate": "gain/candidate",
    "gain_floor": "gain/floor",
}
"""Numbers of a policy's status that belong on a chart with others; the rest is policy/*."""


def scalars(record: StepRecord) -> dict[str, float]:
    """Value by tag, those that are known. Seconds, bytes a rank; throughput in steps/s or
    samples/s."""
    report = record.report
    values = {
        "cf/sent": report.cf,
        "throughput/t_sys": record.t_sys,
        "throughput/t_comp": record.t_comp,
        "bytes/sent": report.wire_bytes,
        "bytes/wire_factor": record.wire_factor,
        "time/step": report.seconds,
        "time/total": record.active,
        "time/compress": report.compress_seconds,
        "time/exchange": report.exchange_seconds,
        "time/network": report.network_seconds,
        "time/decode": report.decode_seconds,
        "time/compute": report.compute_seconds,
        "time/rest": report.rest_seconds,
        "gradient/norm": report.grad_norm,
    }
    if report.cf in report.measurements:
        sent = report.measurements[report.cf]
        values |= {f"gain/{kind}": sent.gain(kind) for kind in KINDS}
    values["gain/signal"] = report.gain(report.cf, "signal")
    values |= {_MOVED.get(name, f"policy/{name}"): value for name, value in record.status.items()}
    return {tag: value for tag, value in values.items() if isfinite(value)}


class LayerScalars:
    """cf_layer/NAME, only where it changes: a reader holds the last value.

    Nothing is written until layers differ; from then on a layer that a record does not name has
    the CF of the whole model.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def changes(self, layer_cfs: Mapping[str, float], cf: float) -> dict[str, float]:
        """Value by tag, of the layers whose CF is not the one written last."""
        now = {**dict.fromkeys(self._last, cf), **layer_cfs}
        changed = {name: value for name, value in now.items() if self._last.get(name) != value}
        self._last = now
        return {f"cf_layer/{name}": value for name, value in changed.items()}


CHARTS = {
    "CF: sent, candidate, floor": ("cf/(sent|candidate|floor)",),
    "gain, and epsilon": ("gain/.*", "policy/epsilon"),
    "throughput: T_sys, T_comp": ("throughput/(t_sys|t_comp)",),
    "step time and its parts (seconds)": (
        "time/(step|compute|compress|decode|exchange|network|rest)",
    ),
    "bytes a rank sent": ("bytes/sent",),
    "wire factor": ("bytes/wire_factor",),
}
"""Regular expressions of tags, by title."""


def layout_summary() -> Any:
    """The layout, in the form that the page reads. Needs the tensorboard package."""
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG

    charts = [
        layout_pb2.Chart(
            title=title,
            multiline=layout_pb2.MultilineChartContent(tag=[f"^{tag}$" for tag in tags]),
        )
        for title, tags in CHARTS.items()
    ]
    category = layout_pb2.Category(title="CF timeline", chart=charts)
    layout = layout_pb2.Layout(category=[category])
    return layout_value(CONFIG_SUMMARY_TAG, layout.SerializeToString())


PLUGIN = "cf_timeline"
"""The dashboard's name: its tensors are marked with it (`runs.dashboard` reads them)."""

SWITCHES = f"{PLUGIN}/switches"


def scalar_summary(values: Mapping[str, float]) -> Any:
    """One scalar a tag."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()])


def switch_summary(event: Event) -> Any:
    """A text for TensorBoard's own page, and JSON for the dashboard."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    text = f"CF {event.cf_before:g} -> {event.cf:g}: {event.reason}"
    known = {"cf_before": event.cf_before, "cf": event.cf, "reason": event.reason}
    return Summary(
        value=[
            _string("policy/switch", "text", text.encode()),
            _string(SWITCHES, PLUGIN, json.dumps(known).encode()),
        ]
    )


def layout_value(tag: str, layout: bytes) -> Any:
    """A serialized layout of the custom scalars page."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[_string(tag, "custom_scalars", layout)])


def histogram_summary(tag: str, counts: Mapping[float, int]) -> Any:
    """Histogram of the base-10 logarithms of positive values that occurred so many times."""
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto
    from tensorboard.compat.proto.summary_pb2 import Summary

    at = {log10(value): number for value, number in sorted(counts.items())}
    limits, numbers = [min(at) - _HALF], [0]
    for x, number in at.items():
        if x - _HALF > limits[-1]:  # an empty bucket up to this one
            limits.append(x - _HALF)
            numbers.append(0)
        limits.append(x + _HALF)
        numbers.append(number)
    histogram = HistogramProto(
        min=min(at),
        max=max(at),
        num=sum(at.values()),
        sum=sum(x * n for x, n in at.items()),
        sum_squares=sum(x * x * n for x, n in at.items()),
        bucket_limit=limits,
        bucket=numbers,
    )
    return Summary(value=[Summary.Value(tag=tag, histo=histogram)])


_HALF = 0.02  # half of a bucket's width, in decades: 5% of a CF


def image_summary(tag: str, png: bytes, width: int, height: int) -> Any:
    """One RGBA picture of width x height pixels."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _string(tag: str, plugin: str, content: bytes) -> Any:
    """A tensor of one string, for this plugin."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

    data = summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin)
    metadata = summary_pb2.SummaryMetadata(
        plugin_data=data, data_class=summary_pb2.DATA_CLASS_TENSOR
    )
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[content])
    return summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
