"""The "CF timeline" of TensorBoard's custom scalars page: which scalars share a chart."""

from __future__ import annotations

from typing import Any

from adaptive.tensorboard.summaries import layout_value

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
