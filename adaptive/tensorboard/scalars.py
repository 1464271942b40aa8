"""Which numbers of a step become which scalar: cf/*, gain/*, throughput/*, bytes/*, time/*,
policy/*, gradient/*, and cf_layer/* when layers have CFs of their own."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from adaptive.timeline import StepRecord
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
