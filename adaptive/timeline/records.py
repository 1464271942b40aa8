"""The records of a run in a timeline: a header, a record for each step, an event for each switch.

A record holds the whole agreed `StepReport`. So a policy can be run again over a run's records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any, get_args

from adaptive.network.pace import Pace
from policies import DENSE, GainKind, Measurement, StepReport

VERSION = 1
"""The version of the records. Readers of this version may misread a field of a larger version."""


@dataclass(frozen=True)
class Header:
    """The facts of a run that its policy gets at the start. Readers must ignore unknown fields.

    policy, settings: the policy's name and arguments. expression: the Python call that makes the
    policy, "" if its class does not tell it. gain: the kind of gain that the policy decides on.
    assumed: gains by CF that are assumed and not measured. rungs: names of the compressors at these
    CFs. uncoded: see `Context`. base, memory: names of the compressor and of the memory.
    numel: elements of all gradients. layers: shapes, by name, of the parameters whose CFs a policy
    may choose separately.
    dense_bytes: bytes that a rank puts on the wire in a dense step, in the parameters' precision.
    supported: for each CF that the policy may send, the nearest CF that the compressor can reach.
    wire_bytes: by supported CF, the bytes of a step without statistics. link, latency: see
    `Context`.
    local_steps: the numbers of local steps to choose from. overlap: how many local steps may pass
    during an exchange; None: half of them. delays, power, early, proven: see `Context`;
    `proven` is None for infinity, because JSON has no infinity.
    caveat: see `Synchronisation`. promise: see `Policy`.
    network: an emulated or modelled link, in words; "" for the real network.
    """

    policy: str
    settings: Mapping[str, Any]
    cf_range: tuple[float, float]
    world_size: int
    base: str
    memory: str
    numel: int
    dense_bytes: float
    supported: Mapping[float, float]
    wire_bytes: Mapping[float, float]
    link: tuple[float, float] = (0.0, 0.0)
    latency: float = 0.0
    layers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    assumed: Mapping[float, float] = field(default_factory=dict)
    rungs: Mapping[float, str] = field(default_factory=dict)
    uncoded: tuple[float, ...] = ()
    local_steps: tuple[int, ...] = (1,)
    overlap: int | None = 0
    delays: tuple[int, ...] = (0,)
    power: float = 0.5
    early: float = DENSE
    proven: float | None = None
    network: str = ""
    expression: str = ""
    gain: GainKind = "gradient"
    caveat: str = ""
    promise: str = ""
    version: int = VERSION


@dataclass(frozen=True)
class StepRecord:
    """The record of one step; with local steps, of one exchange.

    report: the step's agreed statistics. elapsed: seconds since the first step, on the writing
    rank. t_sys: steps/s, or samples/s where the samples of a step are known. t_comp: t_sys times
    the policy's gain. status: the policy's own numbers, such as candidate and floor.
    layer_cfs: CFs of the layers whose CF is not the report's. read_sum: the policy read the norm of
    the sum of mean gradients in this step, and a new sum began.
    local_steps: steps that each rank took for this exchange.
    gain: the gain of the CF sent, of the policy's kind; 1 when dense. It is the policy's average if
    there is one, else the gain of this step.
    Totals since the run began, also across a resumption: pace, sent (bytes that this rank sent),
    dense (bytes of a dense run), dense_steps (number of dense steps), inside (with two levels:
    bytes that this rank sent inside its node; the other bytes are then those of a node).
    verdict: the policy's conclusion, "" without one.
    """

    report: StepReport
    elapsed: float
    t_sys: float
    t_comp: float
    status: Mapping[str, float] = field(default_factory=dict)
    layer_cfs: Mapping[str, float] = field(default_factory=dict)
    read_sum: bool = False
    sent: float = nan
    dense: float = nan
    local_steps: int = 1
    gain: float = nan
    down_cf: float = nan
    down_gain: float = nan
    dense_steps: int = 0
    inside: float = nan
    pace: Pace = field(default_factory=Pace)
    verdict: str = ""

    @property
    def dense_bytes(self) -> float:
        """Bytes that dense all-reduces would have sent, in the parameters' precision."""
        return self.local_steps * self.report.dense_wire_bytes

    @property
    def wire_factor(self) -> float:
        """dense_bytes / bytes sent; 1 if neither sends."""
        sent = self.report.wire_bytes
        return self.dense_bytes / sent if sent else 1.0


@dataclass(frozen=True)
class Event:
    """A switch of the CF, with its reason. cf_before == cf: a remark without a switch."""

    step: int
    cf_before: float
    cf: float
    reason: str


CFS = ("candidate", "floor")
"""Names of a policy's numbers that are CFs."""

_MOVED = {
    **{name: f"cf/{name}" for name in CFS},
    "gain_candidate": "gain/candidate",
    "gain_floor": "gain/floor",
}
"""Names of a policy's numbers that belong on a chart with others; all others are policy/*."""


def scalars(record: StepRecord) -> dict[str, float]:
    """A step's numbers by name (nan: unknown), in the units of `StepRecord`. Names are cf/*,
    gain/*, gain_of_step/*, throughput/*, bytes/*, time/*, policy/* and gradient/*."""
    report = record.report
    sent = report.measurements.get(report.cf, Measurement())
    parts = ("compress", "exchange", "network", "decode", "compute", "rest")
    return {
        "cf/sent": report.cf,
        "cf/means": record.down_cf,
        "gain/means": record.down_gain,
        "throughput/t_sys": record.t_sys,
        "throughput/t_comp": record.t_comp,
        "bytes/sent": report.wire_bytes,
        "bytes/wire_factor": record.wire_factor,
        "bytes/sent_total": record.sent,
        "bytes/wire_factor_total": record.dense / record.sent if record.sent > 0 else nan,
        "bytes/inside_total": record.inside,
        "time/step": report.seconds,
        "time/total": record.pace.all_seconds,
        "gradient/norm": report.grad_norm,
        **{f"time/{part}": getattr(report, f"{part}_seconds") for part in parts},
        "gain/sent": record.gain,
        **{f"gain_of_step/{kind}": report.gain(report.cf, kind) for kind in get_args(GainKind)},
        "gain_of_step/energy_ratio": sent.energy_ratio,
        "gain_of_step/energy_over_gradient": sent.energy_over_gradient,
        **{_MOVED.get(name, f"policy/{name}"): value for name, value in record.status.items()},
    }


def final_scalars(record: StepRecord) -> dict[str, float]:
    """A run's numbers by name, from the record of its last step: final/* (nan: unknown)."""
    return {
        "final/bytes_sent": record.sent,
        "final/wire_factor": record.dense / record.sent if record.sent > 0 else nan,
        "final/steps_per_second": record.pace.steps_per_second,
    }
