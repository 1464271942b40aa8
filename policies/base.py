"""The contract between a policy and the controller that feeds it.

A policy is a pure state machine over agreed statistics: given the same reports it makes the same
plans. It imports no torch, does no I/O and reads no clock, so it can be tested from a table,
replayed from a record, and can never make two ranks disagree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any, Literal

DENSE = 1.0
"""The CF that means "not compressed"."""

GainKind = Literal["gradient", "error_fed", "raw", "signal"]


@dataclass(frozen=True)
class Context:
    """What a policy is told once, before its first plan.

    cf_range: smallest and largest CF it may send besides dense; CFs are floats >= 1.
    world_size: number of ranks.
    supported: the nearest CF that the compressor can really do.
    assumed: gains, by CF, of what cannot be measured (foreign hooks); those CFs belong to the
        ladder too.
    wire_bytes: bytes a rank puts on the wire in a step at a CF; nan if that is not known.
    unknown: CFs of which not even that is known: for whoever asks for them by name.
    layers: elements of each layer (parameter) that may have a CF of its own, by name, in order;
        empty if they are not known or must be alike.
    layer_bytes: payload bytes of a layer at a CF.
    """

    cf_range: tuple[float, float]
    world_size: int
    supported: Callable[[float], float] = float
    assumed: Mapping[float, float] = field(default_factory=dict)
    unknown: frozenset[float] = frozenset()
    wire_bytes: Callable[[float], float] = lambda cf: nan
    layers: Mapping[str, int] = field(default_factory=dict)
    layer_bytes: Callable[[str, float], float] = lambda layer, cf: nan


@dataclass(frozen=True)
class Plan:
    """What to do in the next step.

    send: CF to send; 1 is dense.
    probe: CFs to measure without sending them, also while dense is sent.
    reason: why this differs from the plan before, in words and numbers; "" when it does not.
    accumulate: keep the sum of the decoded mean gradients (one gradient-sized accumulator).
    read_sum: report the norm of that sum in this step's report, and start a new sum.
    layers: what a CF of this plan means layer by layer: for `send` or one of `probe`, the CFs of
        the layers that have another. Only from a policy that says `layerwise`.
    read_layers: report what is known of each layer in this step's report, and start anew.
    """

    send: float
    probe: tuple[float, ...] = ()
    reason: str = ""
    accumulate: bool = False
    read_sum: bool = False
    layers: Mapping[float, Mapping[str, float]] = field(default_factory=dict)
    read_layers: bool = False


@dataclass(frozen=True)
class Measurement:
    """Squared norms of one CF in one step, summed over tensors and ranks (agreed).

    kept: ||c||^2; error: ||a - c||^2; total: ||a||^2 with a the error-fed gradient;
    grad: ||g||^2 of the local gradients; sample_error, sample_total: ||s - C(s)||^2 and ||s||^2,
    s a fixed strided sample of the gradient before error feedback.
    """

    kept: float = nan
    error: float = nan
    total: float = nan
    grad: float = nan
    sample_error: float = nan
    sample_total: float = nan

    def terms(self, kind: GainKind) -> tuple[float, float]:
        """Numerator and denominator of a gain, to be averaged apart (ratio of means); nan for
        "signal", which is not told by one step's energies (see `StepReport.signal`)."""
        if kind == "signal":
            return nan, nan
        if kind == "error_fed":
            return _surviving(self.total, self.error), self.total
        if kind == "raw":
            return self.kept, self.grad
        return _surviving(self.sample_total, self.sample_error), self.sample_total

    def gain(self, kind: GainKind) -> float:
        """This step's gain in [0, 1]; nan if it was not measured or is not finite."""
        top, bottom = self.terms(kind)
        if not (isfinite(top) and isfinite(bottom)) or bottom <= 0:
            return nan
        return min(1.0, top / bottom)


def _surviving(total: float, error: float) -> float:
    """total - error, at least 0; nan unless both are finite (max() would make 0 of a nan)."""
    return max(0.0, total - error) if isfinite(total) and isfinite(error) else nan


@dataclass(frozen=True)
class LayerReport:
    """One layer, over the steps since it was last reported (agreed).

    energy: ||g||^2 of the local gradients, summed over steps and ranks.
    sum_norm: norm of the sum of its mean gradients; nan unless the plan read the sum too.
    steady: steady-state gain of each CF of the shadow ladder, if there is one.
    """

    energy: float = nan
    sum_norm: float = nan
    steady: Mapping[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """One step, as all ranks agreed on it. Times in seconds, nan when unknown.

    step: index of the step, from 0. cf: CF that was sent.
    measurements: by CF, for the CF sent and those probed.
    timed_cf: the CF of the step that `seconds` belongs to (the step before this one: a step's
        time is known only when the next begins).
    seconds: mean over ranks of that step's wall time.
    median_seconds: mean over ranks of each rank's median over the last steps sent at timed_cf.
    compress_seconds, exchange_seconds, decode_seconds, compute_seconds: of the timed step, mean
        over ranks: in compression; waiting, after backward, for the network and for slower ranks;
        and for what it brought to be decoded; in forward and backward (nan if the model is not
        known).
    network_seconds: exchange_seconds of the rank that waited least, the last one to be ready: what
        the network took, where the others have waited for that rank as well.
    wire_bytes: bytes a rank put on the wire in this step.
    statistics_bytes: of these, what is no gradient and does not grow with the model.
    dense_wire_bytes: what dense fp32 all-reduce would have put there.
    timed_bytes: wire bytes of the step that `seconds` belongs to.
    grad_norm: root of the mean over ranks of ||g||^2.
    sum_norm: norm of the sum of the mean gradients since the last reading; nan unless read.
    lr: learning rate of the first parameter group; nan if no optimizer was handed over.
    steady: steady-state gain of each CF of the shadow ladder, for a policy that asks for it.
    layers: by name, in the steps whose plan reads them.
    signal: <c, g> of each CF of that ladder, for a policy whose gain is "signal": c what plain
        error feedback would have sent in the step before this one, g this step's gradient.
    signal_total: <g of the step before, g>; both are noisy, and may be negative.
    peers, peers_total: <c, g> and <g, g> of the step before, of different ranks: as noisy, but with
        expectations that are never negative for <g, g>.
    """

    step: int
    cf: float
    measurements: Mapping[float, Measurement] = field(default_factory=dict)
    timed_cf: float = nan
    seconds: float = nan
    median_seconds: float = nan
    compress_seconds: float = nan
    exchange_seconds: float = nan
    wire_bytes: float = nan
    dense_wire_bytes: float = nan
    timed_bytes: float = nan
    grad_norm: float = nan
    sum_norm: float = nan
    lr: float = nan
    steady: Mapping[float, float] = field(default_factory=dict)
    layers: Mapping[str, LayerReport] = field(default_factory=dict)
    decode_seconds: float = nan
    compute_seconds: float = nan
    signal: Mapping[float, float] = field(default_factory=dict)
    signal_total: float = nan
    peers: Mapping[float, float] = field(default_factory=dict)
    peers_total: float = nan
    statistics_bytes: float = 0.0
    network_seconds: float = nan

    def gain(self, cf: float, kind: GainKind) -> float:
        """This step's gain of a CF in [0, 1]; nan if it was not measured or has no meaning."""
        if kind != "signal":
            measured = self.measurements.get(cf)
            return nan if measured is None else measured.gain(kind)
        top, bottom = self.peers.get(cf, nan), self.peers_total
        known = isfinite(top) and isfinite(bottom) and bottom > 0
        return min(1.0, max(0.0, top / bottom)) if known else nan

    @property
    def coding_seconds(self) -> float:
        """What compression costs: compressing and, as far as that is known, decoding."""
        return self.compress_seconds + _known(self.decode_seconds)

    @property
    def wait_seconds(self) -> float:
        """For the network alone, or, where that was not told, for the other ranks as well."""
        known = isfinite(self.network_seconds)
        return self.network_seconds if known else self.exchange_seconds

    @property
    def rest_seconds(self) -> float:
        """Of the timed step, what is left: the optimizer, waiting for input, and all computing
        where that is not known by itself."""
        coding, compute = self.coding_seconds, _known(self.compute_seconds)
        return self.seconds - compute - coding - self.exchange_seconds


def _known(seconds: float) -> float:
    return seconds if isfinite(seconds) else 0.0


class Policy(ABC):
    """Decides which CF to send. The controller calls, on every rank alike:
    `start(context)` once, then `plan()` before and `observe(report)` after each step."""

    name: str = ""
    gain: GainKind = "gradient"
    """The gain it decides on; the timeline's T_comp uses the same."""

    shadow: bool = False
    """It wants the steady-state gains of its candidates: keep a shadow ladder."""

    layerwise: bool = False
    """Its plans may give layers CFs of their own, and read reports of layers."""

    @abstractmethod
    def start(self, context: Context) -> None:
        """Learn the CF range and world size; ValueError if the settings do not fit them."""

    @abstractmethod
    def plan(self) -> Plan:
        """The plan for the next step."""

    def observe(self, report: StepReport) -> None:  # noqa: B027 - a fixed rule need not look
        """Take in what happened in the step just planned."""

    def candidates(self) -> Sequence[float]:
        """After start(): CFs that it may send besides the ends of cf_range and dense. Payload
        sizes are checked at these before training starts."""
        return ()

    def status(self) -> Mapping[str, float]:
        """Numbers for the timeline (candidate, floor, averages, throughputs), by short name."""
        return {}

    def verdict(self) -> str:
        """One sentence when the policy has concluded something worth telling; else ""."""
        return ""

    def outlook(self) -> str:
        """In one sentence, what would make the CF change; "" if the policy does not say."""
        return ""

    def rescale(self) -> None:  # noqa: B027 - a fixed rule knows nothing of ranks
        """A state was loaded that another number of ranks has left: forget what depends on it (step
        times, bytes on the wire, norms of the mean gradient and of sums of it, which begin anew),
        and keep the rest."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly from here, in plain JSON-like values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()` of a policy with the same settings.

        ValueError if the state is of other settings or damaged; the policy may then be half loaded
        (the controller puts back what it was)."""
