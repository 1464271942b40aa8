"""The contract between a policy and the controller, and the base class of declared policies.

A policy is a pure state machine over agreed statistics. The same reports lead to the same plans.
So a policy can be replayed from a record, and never makes two ranks disagree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from inspect import signature
from math import inf, isfinite, isnan, nan, sqrt
from numbers import Real
from typing import Any, Literal, Self

from policies import checks
from policies.ladder import make_ladder
from policies.state import Stateful, read

DENSE = 1.0
"""The CF of an uncompressed step."""

GainKind = Literal["gradient", "error_fed", "raw"]
"""The definitions of the gain of a CF.

"gradient": the share of energy that compression keeps of the gradient before error feedback.
"error_fed": the share of energy that it keeps of the error-fed gradient (GraVAC's paper).
"raw": kept norms / norms of the gradients, both summed over the tensors that are compressed as one
    (GraVAC's released code). A ratio of norms: 0.7 is about 0.49 by the other definitions."""


@dataclass(frozen=True)
class Context:
    """The facts of a run that a policy gets once, before its first plan. CFs are floats >= 1."""

    cf_range: tuple[float, float]  # smallest and largest CF that may be sent besides dense
    world_size: int
    supported: Callable[[float], float] = float  # the nearest CF that the compressor can reach
    # Names of the compressors at CFs whose gains are assumed: {8: "int4"}.
    rungs: Mapping[float, str] = field(default_factory=dict)
    # Assumed gains by CF, of hooks of other libraries and of quantizers below the range. The CFs
    # are candidates as well.
    assumed: Mapping[float, float] = field(default_factory=dict)
    # CFs at which a step is dense in fewer bits, without compressing or decoding.
    uncoded: frozenset[float] = frozenset()
    # CFs of hooks without an assumed gain. They are sent only if the user names them.
    unknown: frozenset[float] = frozenset()
    # Numbers of local steps that a rank may take for each exchange, ascending. With one number the
    # policy has no choice.
    local_steps: tuple[int, ...] = (1,)
    # Local steps that may pass while an exchange is under way (policies/step_time.py).
    overlap: int | None = 0
    # Steps after which the mean of a step may replace it, ascending. With one number the policy has
    # no choice. 0: before the next step begins.
    delays: tuple[int, ...] = (0,)
    # Exponent of the gain in T_comp for the tensors that are sent (gradients or updates): how fast
    # progress falls with the gain.
    power: float = 0.5
    # The largest CF that was seen to keep dense's quality from the first step on, while the
    # learning rate is at least a fourth of its highest. 1: the smallest CF of the ladder.
    early: float = DENSE
    # The largest CF of a sparsifier that was seen to keep dense's quality in equal steps, among so
    # many ranks. 1: none; inf: all.
    proven: float = inf
    # Bytes that a rank puts on the wire in a step at a CF. The default only compares CFs.
    wire_bytes: Callable[[float], float] = lambda cf: 1 / cf
    # The link when the run began: (latency in seconds, seconds for each byte of wire_bytes). 0: not
    # known.
    link: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    # Latency of a message in seconds, when the run began. On a busy machine the measured latency is
    # too long. 0: not known.
    latency: Callable[[], float] = lambda: 0.0
    # Shape, by name and in the model's order, of each layer (parameter) that may have its own CF.
    # Empty if the layers are not known or must all have the same CF.
    layers: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.cf_range(self.cf_range)

    def check(self, name: str, cf: float) -> float:
        """`cf` if it may be sent; ValueError names the argument otherwise."""
        low, high = self.cf_range
        if not low <= cf <= high and cf not in (DENSE, *self.assumed):
            others = "".join(f" or {cf:g}" for cf in self.assumed)
            raise ValueError(
                f"{name}={cf:g}: must be 1 (dense) or inside cf_range ({low:g}, {high:g}){others}"
            )
        return cf

    def ladder(self, step_size: float, scaling: str = "geometric") -> tuple[float, ...]:
        """The ascending CFs to choose from (`make_ladder`), as the compressor can reach them."""
        rungs = make_ladder(self.cf_range, scaling, step_size)
        return tuple(sorted({self.supported(cf) for cf in rungs}))


@dataclass(frozen=True)
class Plan:
    """A policy's order for the next step: what to send, to measure and to report."""

    send: float  # the CF. 1 is dense
    probe: tuple[float, ...] = ()  # CFs to measure without sending them, also while dense is sent
    # Why the plan changes: a first line in words, and further lines with the numbers behind it. "":
    # no change.
    reason: str = ""
    accumulate: bool = False  # keep the sum of the decoded mean gradients (as large as the model)
    local_sum: bool = False  # keep the sum of each rank's local gradients instead
    # Put the norm of the sum into this step's report, and start a new sum. With `layerwise = True`
    # the report also has the norm of each layer's part.
    read_sum: bool = False
    # CFs of single layers, by name. All other layers are sent at `send`. Only policies with
    # `layerwise = True` may fill it.
    layers: Mapping[str, float] = field(default_factory=dict)
    # Local steps of each rank until the next exchange, one of `Context.local_steps`. 0: unchanged.
    local_steps: int = 0
    # Steps after which the mean of this step replaces it, one of `Context.delays`. Means under way
    # arrive no sooner than planned before. None: unchanged.
    delay: int | None = None
    # No decision needs the gain of `send`, or in a dense step the norm of gradients: both are
    # measured in a few steps only, for the record.
    skip_gains: bool = False
    # Measure the energies kept at `send` and `probe` for each layer, too
    # (`StepReport.layer_measurements`). Only policies with `layerwise = True` may ask for it.
    by_layer: bool = False
    # Call `Policy.measure` in this step.
    measure: bool = False


@dataclass(frozen=True)
class Measurement:
    """The energies that compression at one CF kept and lost in one step.

    Energies are squared norms, summed over tensors and ranks. nan: not measured. g is the local
    gradient, a the error-fed gradient, c = C(a), and s a fixed strided sample of g."""

    kept: float = nan  # ||c||^2
    error: float = nan  # ||a - c||^2
    total: float = nan  # ||a||^2
    grad: float = nan  # ||g||^2
    sample_error: float = nan  # ||s - C(s)||^2
    sample_total: float = nan  # ||s||^2
    # Norms for the gain "raw", summed over ranks and over the units that are compressed as one
    # tensor. A second compression does not lower `kept_norms`.
    kept_norms: float = nan  # ||c||
    grad_norms: float = nan  # ||g||

    def terms(self, kind: GainKind) -> tuple[float, float]:
        """Numerator and denominator of a gain, to be averaged separately."""
        if kind == "error_fed":
            return _surviving(self.total, self.error), self.total
        if kind == "raw" and isnan(self.grad_norms):  # the same if there is only one unit
            return _root(self.kept), _root(self.grad)
        if kind == "raw":
            return self.kept_norms, self.grad_norms
        return _surviving(self.sample_total, self.sample_error), self.sample_total

    def gain(self, kind: GainKind) -> float:
        """This step's gain, in [0, 1]; nan if it is not known."""
        return _ratio(*self.terms(kind))

    @property
    def energy_over_gradient(self) -> float:
        """||c||^2 / ||g||^2, with the gradient before error feedback in the denominator. Above 1 if
        much of the residual is sent. nan: not known."""
        known = isfinite(self.kept) and isfinite(self.grad) and self.grad > 0
        return self.kept / self.grad if known else nan

    @property
    def energy_ratio(self) -> float:
        """||c||^2 / ||a||^2, the ratio that GraVAC's paper names gain. nan: not known.

        It equals the gain "error_fed" if the base sends elements unchanged. A base that rounds or
        scales elements may have any ratio, also above 1, so no policy decides by it."""
        known = isfinite(self.kept) and isfinite(self.total) and self.total > 0
        return self.kept / self.total if known else nan


def _ratio(top: float, bottom: float) -> float:
    """top / bottom, within [0, 1]; nan unless both are finite and bottom is positive."""
    known = isfinite(top) and isfinite(bottom) and bottom > 0
    return min(1.0, max(0.0, top / bottom)) if known else nan


def _root(energy: float) -> float:
    return sqrt(energy) if energy >= 0 else nan


def _surviving(total: float, error: float) -> float:
    """total - error, at least 0; nan unless both are finite (max() would make 0 of a nan)."""
    return max(0.0, total - error) if isfinite(total) and isfinite(error) else nan


@dataclass(frozen=True)
class StepReport:
    """The statistics of one step, the same on every rank. Times are in seconds. nan: not known."""

    step: int  # index, from 0
    cf: float  # the CF sent in this step
    measurements: Mapping[float, Measurement] = field(default_factory=dict)  # CF sent and probed
    # All times are those of the step before, because a step's time is known when the next begins.
    # timed_cf and timed_bytes: CF and wire bytes of that step.
    timed_cf: float = nan
    timed_steps: int = 1  # steps of each rank in that time, more than one with local steps
    seconds: float = nan  # wall time, mean over ranks
    median_seconds: float = nan  # mean of the ranks' medians over the last steps at timed_cf
    compress_seconds: float = nan  # compression, mean over ranks
    exchange_seconds: float = nan  # wait after backward for network and slower ranks, mean
    wire_bytes: float = nan  # bytes that a rank put on the wire in this step
    dense_wire_bytes: float = nan  # bytes that a dense all-reduce would have put on the wire
    timed_bytes: float = nan
    grad_norm: float = nan  # root of the mean over ranks of ||g||^2
    # Norm of the sum of the mean gradients since the last reading, if the plan reads it. With
    # `local_sum`: mean of the ranks' norms.
    sum_norm: float = nan
    lr: float = nan  # of the first parameter group, if an optimizer was handed over
    # `sum_norm` of each layer, by name, if the policy is `layerwise` and the plan reads the sum.
    layer_norms: Mapping[str, float] = field(default_factory=dict)
    # `kept`, `error` and `total` by layer and by the CF at which the layer was sent or probed, if
    # the plan asks for them (`by_layer`). The error of a second compression, of means, is left out.
    # Empty if a gradient was not finite.
    layer_measurements: Mapping[str, Mapping[float, Measurement]] = field(default_factory=dict)
    # The sums of the results of the policy's `measure`, if the plan asks for them. Empty if a
    # gradient was not finite.
    measured: Sequence[float] = field(default_factory=list)
    decode_seconds: float = nan  # decoding what was received, mean over ranks
    compute_seconds: float = nan  # forward and backward, mean over ranks. nan without a model
    statistics_bytes: float = 0.0  # the part of wire_bytes that does not depend on the model's size
    down_bytes: float = 0.0  # the part of wire_bytes that brings means back. nan with shards
    # Energies of the means of the sharded exchange, by the CF at which they are sent back, if a
    # policy chooses that CF.
    means: Mapping[float, Measurement] = field(default_factory=dict)
    hops: int = 1  # messages that waited for one another. dense_hops: of a dense step
    dense_hops: int = 1
    # exchange_seconds of the rank that waited least. That rank was ready last and waited for no
    # other rank, so this is the time of the network alone.
    network_seconds: float = nan

    def gain(self, cf: float, kind: GainKind) -> float:
        """This step's gain of a CF, in [0, 1]; nan if it is not known."""
        return self.measurements.get(cf, Measurement()).gain(kind)

    @property
    def coding_seconds(self) -> float:
        """Seconds of compressing and, where known, of decoding."""
        return self.compress_seconds + _known(self.decode_seconds)

    @property
    def wait_seconds(self) -> float:
        """Seconds of waiting for the network. Where network_seconds is not known, the wait for
        slower ranks is included."""
        known = isfinite(self.network_seconds)
        return self.network_seconds if known else self.exchange_seconds

    @property
    def rest_seconds(self) -> float:
        """All other seconds: the optimizer, waiting for input, unknown work."""
        coding, compute = self.coding_seconds, _known(self.compute_seconds)
        rest = self.seconds - compute - coding - self.exchange_seconds
        return 0.0 if rest < 0 else rest  # an exchange may overlap with computing


def _known(seconds: float) -> float:
    return seconds if isfinite(seconds) else 0.0


class Policy(ABC):
    """A rule that decides which CF is sent in each step.

    On every rank the controller calls `start(context)` once, then `plan()` before and
    `observe(report)` after each step. A user's own policy overrides at least the abstract methods.
    """

    name: str = ""
    gain: GainKind = "gradient"  # the gain that decides. T_comp in the timeline uses it too
    layerwise: bool = False  # plans may give single layers their own CFs
    needs_sparsifier: bool = False  # the rule holds only for bases that keep the largest elements
    chooses_local_steps: bool = False  # plans may set the number of local steps
    chooses_delay: bool = False  # plans may set the delay
    measures: int = 0  # how many numbers `measure` returns
    promise: str = "with no promise of dense's quality"  # the end of the headline, about quality

    @abstractmethod
    def start(self, context: Context) -> None:
        """Learn the CF range and the world size. ValueError if the settings do not fit them."""

    @abstractmethod
    def plan(self) -> Plan:
        """The plan for the next step."""

    def observe(self, report: StepReport) -> None:  # noqa: B027 - a fixed rule needs no report
        """Learn from the statistics of a step that was planned."""

    def measure(self, gradients: Any) -> Any:
        """The policy's own statistics: counts, sums or sums of squares. Called in steps whose plan
        has `measure=True`. The results are summed over all gradients and ranks
        (`StepReport.measured`).

        gradients: some of this rank's gradients (flat); updates in a step that sends updates.
        Returns a tensor of `measures` numbers, on the device of `gradients`. Must change no tensor,
        and read no value of a tensor (`if`, `float`): the host would wait for the device."""
        raise NotImplementedError(f"policy {self.name!r} must define measure()")

    def candidates(self) -> Sequence[float]:
        """After start(): the CFs that plans may send besides the ends of cf_range and dense."""
        return ()

    def status(self) -> Mapping[str, float]:
        """Numbers for the timeline (candidate, floor, averages, throughputs), by short name."""
        return {}

    def gain_at(self, cf: float) -> float | None:
        """The average of the deciding gain at a CF. None: not known, or no average is kept."""
        return None

    def notes(self) -> Sequence[str]:
        """Further lines of `explain()`."""
        return ()

    def verdict(self) -> str:
        """The policy's conclusion in one sentence. "": none yet."""
        return ""

    @property
    def compression(self) -> Mapping[str, Any]:
        """The policy's own defaults for arguments of `AdaptiveCompressor`, such as those of its
        paper, used for arguments that the user leaves out."""
        return {}

    def rescale(self) -> None:  # noqa: B027 - a fixed rule does not depend on ranks
        """Forget all that depends on the number of ranks: step times, bytes on the wire, norms of
        mean gradients. Called after a state of another number of ranks was loaded."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The whole state, from which a policy goes on exactly, in plain JSON-like values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`. ValueError if it is of other settings or damaged. It is
        called on a copy (`policies.state.twin`), so it must replace the policy's objects, and not
        change them in place."""


def checked_plan(policy: Policy, context: Context) -> Plan:
    """A policy's next plan, in Python's own numbers: `torch.load` refuses a state with NumPy's.

    context: the policy's. TypeError or ValueError, with the policy's name, if the plan is not one
    that this policy may make."""
    plan, name = policy.plan(), policy.name or type(policy).__name__
    if not isinstance(plan, Plan):
        raise TypeError(f"policy {name!r}: plan() must return a Plan, got {plan!r}")
    for cf in (plan.send, *plan.probe, *plan.layers.values()):
        if not isinstance(cf, Real) or not 1 <= cf < inf:
            raise ValueError(
                f"policy {name!r} plans a CF of {cf!r}: it must be a finite number >= 1"
            )
    if (plan.layers or plan.by_layer) and not policy.layerwise:
        raise ValueError(f"policy {name!r} plans for layers, and must say layerwise = True")
    if unknown := plan.layers.keys() - context.layers.keys():
        raise ValueError(
            f"policy {name!r} plans for {', '.join(sorted(map(repr, unknown)))}: "
            f"layers must be of those in Context.layers"
        )
    if plan.measure and not policy.measures:
        raise ValueError(
            f"policy {name!r} plans to measure, and must say how many numbers: measures = 1, say"
        )
    if plan.local_steps not in (0, *context.local_steps):
        raise ValueError(
            f"policy {name!r} plans {plan.local_steps!r} local steps: it must be "
            f"one of {', '.join(map(str, context.local_steps))}, or 0"
        )
    if plan.delay not in (None, *context.delays):
        raise ValueError(
            f"policy {name!r} plans a delay of {plan.delay!r}: it must be one of "
            f"{', '.join(map(str, context.delays))}, or None"
        )
    return replace(
        plan,
        send=float(plan.send),
        probe=tuple(map(float, plan.probe)),
        layers={layer: float(cf) for layer, cf in plan.layers.items()},
        local_steps=int(plan.local_steps),
        delay=None if plan.delay is None else int(plan.delay),
    )


def setting(
    default: Any, check: Callable[..., Any], *, or_none: bool = False, **limits: Any
) -> Any:
    """A dataclass field that is an argument of a `DeclaredPolicy`.

    check: one of policies/checks.py, called as `check(name, value, **limits)` when the policy is
    made. or_none: None is accepted too."""
    return field(default=default, metadata={"check": partial(check, **limits), "or_none": or_none})


@dataclass(eq=False)
class DeclaredPolicy(Stateful, Policy):
    """A policy that is a dataclass. Its state is its `saved` fields, settings and candidates.

    A state of other settings or candidates is refused, because the run would go on differently."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """TypeError, naming the accepted settings, for a setting that the policy does not have."""
        known = signature(cls.__init__)
        try:
            known.bind_partial(None, *args, **settings)
        except TypeError as error:
            accepted = ", ".join([*known.parameters][1:])
            raise TypeError(f"{cls.__name__}: {error}; accepted: {accepted}") from None
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if "check" in each.metadata and not (value is None and each.metadata["or_none"]):
                setattr(self, each.name, each.metadata["check"](each.name, value))

    def _saved_settings(self) -> dict[str, Any]:
        """The settings that a saved state must have, too, in JSON-like values."""
        names = [each.name for each in fields(self) if "check" in each.metadata]
        settings = {name: getattr(self, name) for name in names}
        return {**settings, "candidates": list(self.candidates())}

    def state_dict(self) -> dict[str, Any]:
        return {"settings": self._saved_settings(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        here, there = self._saved_settings(), read(state, "settings", Mapping)
        for name in sorted({*here, *there}):
            now, then = here.get(name, "nothing"), there.get(name, "nothing")
            if now != then:
                raise ValueError(
                    f"state of policy {self.name!r} was saved with {name}={then!r}: it can only be "
                    f"loaded with the same, here it is {now!r}"
                )
        super().load_state_dict(state)


def counted_steps(number: int) -> str:
    """A number of steps in words."""
    return f"{number} step{'' if number == 1 else 's'}"
