"""Values of TensorBoard's event files, made by hand: many in one record cost a tenth of as many
calls of `SummaryWriter.add_scalar`.

Every function needs the tensorboard package, and imports it when called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import log10
from typing import Any

from adaptive.timeline import Event

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
