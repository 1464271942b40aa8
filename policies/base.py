"""The contract between a policy and the controller that feeds it, and what policies have in common.

A policy is a pure state machine over agreed statistics: given the same reports it makes the same
plans, so it can be replayed from a record, and can never make two ranks disagree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from math import isfinite, isnan, log, nan, sqrt
from typing import Any, Literal

from policies import checks
from policies.state import Stateful, read

DENSE = 1.0
"""The CF that means that nothing is compressed."""

GainKind = Literal["gradient", "error_fed", "raw", "signal"]
"""How the gain of a CF is defined: "gradient" by the energy that compression keeps of the gradient
before error feedback, "error_fed" by what it keeps of the error-fed gradient (GraVAC's definition),
"raw" as GraVAC's released code does (norms of what is kept over norms of the gradients, both summed
over what is compressed as one: norms, not energies, so that 0.7 is about 0.49 of the others),
"signal" by the part of the true gradient that gets through (policies/signal_gain.py)."""


@dataclass(frozen=True)
class Context:
    """The facts of a run that a policy is told once, before its first plan. CFs are floats >= 1."""

    cf_range: tuple[float, float]  # smallest and largest CF that may be sent besides dense
    world_size: int
    supported: Callable[[float], float] = float  # the nearest CF that the compressor can really do
    # For hooks of other libraries and for quantizers below the range, whose gain the shadow ladder
    # cannot measure: gains by CF, which are candidates as well, and CFs whose gain is not even
    # assumed, which are sent only if the user names them.
    assumed: Mapping[float, float] = field(default_factory=dict)
    unknown: frozenset[float] = frozenset()
    # How many steps of its own a rank may take for each exchange, ascending; one number if that is
    # not for the policy to choose.
    local_steps: tuple[int, ...] = (1,)
    # And how many of these may pass while an exchange is under way (policies/step_time.py).
    overlap: int | None = 0
    # What is fed back and sent is not gradients but updates, or how far ranks have come by
    # themselves: no optimizer multiplies it once it is there.
    updates: bool = False
    # Bytes that a rank puts on the wire in a step at a CF; without any, how they compare.
    wire_bytes: Callable[[float], float] = lambda cf: 1 / cf
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
        """The ascending CFs to choose from (`make_ladder`) that the compressor can do."""
        rungs = make_ladder(self.cf_range, scaling, step_size)
        return tuple(sorted({self.supported(cf) for cf in rungs}))


@dataclass(frozen=True)
class Plan:
    """A policy's order for the next step: what to send, to measure and to report."""

    send: float  # the CF; 1 is dense
    probe: tuple[float, ...] = ()  # CFs to measure without sending them, also while dense is sent
    reason: str = ""  # why it differs from the plan before, in words and numbers; "" if it does not
    accumulate: bool = False  # keep the sum of the decoded mean gradients (as large as the model)
    local_sum: bool = False  # the sum is of each rank's own gradients instead
    # Put the norm of that sum into this step's report (for a policy with `layerwise = True` also
    # the norm of each layer's part), and start a new sum.
    read_sum: bool = False
    # The CFs of single layers, by name; layers not named are sent at `send`. Only policies with
    # `layerwise = True` may fill it.
    layers: Mapping[str, float] = field(default_factory=dict)
    # Steps of its own that each rank takes until the next exchange, one of `Context.local_steps`;
    # 0: as many as before.
    local_steps: int = 0
    rest: bool = False  # measure no gains of the shadow ladder in this step


@dataclass(frozen=True)
class Measurement:
    """The energies that compression at one CF kept and lost in one step: squared norms, summed over
    tensors and ranks; nan where they were not measured. g is the local gradient, a the error-fed
    one, c = C(a) the compressed one, and s a fixed strided sample of g."""

    kept: float = nan  # ||c||^2
    error: float = nan  # ||a - c||^2
    total: float = nan  # ||a||^2
    grad: float = nan  # ||g||^2
    sample_error: float = nan  # ||s - C(s)||^2
    sample_total: float = nan  # ||s||^2
    # For the gain "raw": norms, both summed over the ranks and over what is compressed as one, a
    # tensor or several (what a second compression loses of `kept_norms` is not taken off them).
    kept_norms: float = nan  # ||c||
    grad_norms: float = nan  # ||g||

    def terms(self, kind: GainKind) -> tuple[float, float]:
        """Numerator and denominator of a gain, to be averaged separately; nan for "signal", which
        does not follow from the energies of one step."""
        if kind == "signal":
            return nan, nan
        if kind == "error_fed":
            return _surviving(self.total, self.error), self.total
        if kind == "raw" and isnan(self.grad_norms):  # the same where all is compressed as one
            return _root(self.kept), _root(self.grad)
        if kind == "raw":
            return self.kept_norms, self.grad_norms
        return _surviving(self.sample_total, self.sample_error), self.sample_total

    def gain(self, kind: GainKind) -> float:
        """This step's gain, in [0, 1]; nan if it is not known."""
        return _ratio(*self.terms(kind))

    @property
    def energy_ratio(self) -> float:
        """||c||^2 / ||a||^2, the ratio that GraVAC's paper names gain; nan if it is not known. The
        gain "error_fed" is the same for a base that keeps elements as they are. A base that rounds
        or scales them may have any ratio (above 1 for an unbiased one), and no policy decides by
        it."""
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
    """The statistics of one step, the same on every rank. Times are in seconds; nan: not known."""

    step: int  # its index, from 0
    cf: float  # that was sent in this step
    measurements: Mapping[float, Measurement] = field(default_factory=dict)  # CF sent and probed
    # The times are those of the step before this one: how long a step took is known only when the
    # next one begins. timed_cf and timed_bytes: its CF and wire bytes.
    timed_cf: float = nan
    timed_steps: int = 1  # that the ranks took in that time, more than one with local steps
    seconds: float = nan  # wall time, mean over ranks
    median_seconds: float = nan  # mean of the ranks' medians over the last steps at timed_cf
    compress_seconds: float = nan  # that went to compression, mean over ranks
    exchange_seconds: float = nan  # waited after backward, for network and slower ranks, mean
    wire_bytes: float = nan  # that a rank put on the wire in this step
    dense_wire_bytes: float = nan  # that dense all-reduce would have put there
    timed_bytes: float = nan
    grad_norm: float = nan  # root of the mean over ranks of ||g||^2
    # Of the sum of the mean gradients since the last reading, if it was read; mean of the ranks'
    # norms if the plan said `local_sum`.
    sum_norm: float = nan
    lr: float = nan  # of the first parameter group, if an optimizer was handed over
    # Steady-state gain by CF from the shadow ladder, for policies with `shadow = True`.
    steady: Mapping[float, float] = field(default_factory=dict)
    # `sum_norm` of each layer, by name, where the policy is `layerwise` and the plan read the sum.
    layer_norms: Mapping[str, float] = field(default_factory=dict)
    decode_seconds: float = nan  # that went to decoding what was received, mean over ranks
    compute_seconds: float = nan  # forward and backward, mean over ranks; nan without a model
    # For policies with the gain "signal", of the step before this one: <c, g> by CF of the shadow
    # ladder, where c is what plain error feedback would have sent then and g this step's gradient,
    # and <that step's gradient, g>. Both are noisy and may be negative. peers: <c, g> and <g, g> of
    # different ranks in that step, as noisy, but the expectation of <g, g> is never negative.
    signal: Mapping[float, float] = field(default_factory=dict)
    signal_total: float = nan
    peers: Mapping[float, float] = field(default_factory=dict)
    peers_total: float = nan
    # ||g||^2 by the same sketches, where the policy chooses the number of local steps. Their ratio,
    # by the number of other ranks, is the cosine of two ranks' gradients.
    peers_energy: float = nan
    statistics_bytes: float = 0.0  # the part of wire_bytes that does not depend on the model's size
    down_bytes: float = 0.0  # the part of wire_bytes that brings means back; nan with shards
    # exchange_seconds of the rank that waited least. That rank was ready last and waited for
    # nobody, so this is the time of the network alone.
    network_seconds: float = nan

    def gain(self, cf: float, kind: GainKind) -> float:
        """This step's gain of a CF, in [0, 1]; nan if it is not known."""
        if kind == "signal":
            return _ratio(self.peers.get(cf, nan), self.peers_total)
        return self.measurements.get(cf, Measurement()).gain(kind)

    @property
    def coding_seconds(self) -> float:
        """Seconds of compressing and, where known, of decoding."""
        return self.compress_seconds + _known(self.decode_seconds)

    @property
    def wait_seconds(self) -> float:
        """Seconds of waiting for the network; if it is not known alone, for other ranks too."""
        known = isfinite(self.network_seconds)
        return self.network_seconds if known else self.exchange_seconds

    @property
    def rest_seconds(self) -> float:
        """Seconds of the optimizer, waiting for input, and whatever else is not known."""
        coding, compute = self.coding_seconds, _known(self.compute_seconds)
        rest = self.seconds - compute - coding - self.exchange_seconds
        return 0.0 if rest < 0 else rest  # an exchange may overlap with computing


def _known(seconds: float) -> float:
    return seconds if isfinite(seconds) else 0.0


class Policy(ABC):
    """A rule that decides which CF is sent in each step.

    The controller calls, on every rank alike, `start(context)` once, then `plan()` before and
    `observe(report)` after each step. A user's own policy overrides at least the abstract methods.
    """

    name: str = ""
    gain: GainKind = "gradient"  # by which it decides; T_comp in the timeline uses it too
    shadow: bool = False  # it needs the steady-state gains of its candidates
    layerwise: bool = False  # its plans may give layers CFs of their own
    chooses_local_steps: bool = False  # its plans may say how many local steps the ranks take

    @abstractmethod
    def start(self, context: Context) -> None:
        """Learn the CF range and the world size. ValueError if the settings do not fit them."""

    @abstractmethod
    def plan(self) -> Plan:
        """The plan for the next step."""

    def observe(self, report: StepReport) -> None:  # noqa: B027 - a fixed rule need not look
        """Take in the statistics of the step just planned."""

    def candidates(self) -> Sequence[float]:
        """After start(): the CFs that it may send besides the ends of cf_range and dense."""
        return ()

    def status(self) -> Mapping[str, float]:
        """Numbers for the timeline (candidate, floor, averages, throughputs), by short name."""
        return {}

    def gain_at(self, cf: float) -> float | None:
        """The average of the gain by which it decides, at a CF; None if it keeps or knows none."""
        return None

    def verdict(self) -> str:
        """One sentence if the policy has reached a conclusion worth telling; else ""."""
        return ""

    def rescale(self) -> None:  # noqa: B027 - a fixed rule knows nothing of ranks
        """Another number of ranks has saved the state that was loaded: forget what depends on it
        (step times, bytes on the wire, norms of mean gradients)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly from here, in plain JSON-like values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`. ValueError if it is of other settings or damaged; the policy
        may be half loaded then (the controller puts it back)."""


def setting(
    default: Any, check: Callable[..., Any], *, or_none: bool = False, **limits: Any
) -> Any:
    """A dataclass field that is an argument of a `DeclaredPolicy`, checked when the policy is made:
    by `check(name, value, **limits)`, one of policies/checks.py. or_none: None is accepted too."""
    return field(default=default, metadata={"check": partial(check, **limits), "or_none": or_none})


@dataclass(eq=False)
class DeclaredPolicy(Stateful, Policy):
    """A policy that is a dataclass, its state its `saved` fields. A state of other settings or
    candidates is refused: the run would go on as something else."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if "check" in each.metadata and not (value is None and each.metadata["or_none"]):
                setattr(self, each.name, each.metadata["check"](each.name, value))
        self.shadow = self.shadow or self.gain == "signal"

    def _saved_settings(self) -> dict[str, Any]:
        """What a saved state must agree with, in JSON-like values."""
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


class WrappingPolicy(DeclaredPolicy):
    """A policy that lets others decide, and says what the one that decides now says."""

    @property
    @abstractmethod
    def _active(self) -> Policy:
        """The policy that decides now."""

    def status(self) -> Mapping[str, float]:
        return self._active.status()

    def gain_at(self, cf: float) -> float | None:
        return self._active.gain_at(cf)

    def verdict(self) -> str:
        return self._active.verdict()

    def rescale(self) -> None:
        self._active.rescale()


def change(old: float, new: float, why: str) -> str:
    """The reason of a plan whose CF goes from `old` to `new`."""
    if old == new:
        return why
    if new == DENSE:
        return f"back to dense from CF {old:.4g}: {why}"
    return f"scale {'up' if new > old else 'down'} {old:.4g} -> {new:.4g}: {why}"


def counted_steps(number: int) -> str:
    """A number of steps in words."""
    return f"{number} step{'' if number == 1 else 's'}"


SCALINGS = ("exponential", "geometric")
"""GraVAC's scaling policies (section 3.2). From 10 to 1000 with step_size 2, "exponential" makes
10, 20, 40, 160, 1000: the first CF x step_size^1, ^2, ^4, ^8, ...; "geometric" makes 10, 20, 40,
..., 640, 1000: each CF step_size times the one before."""

MAX_RUNGS = 1000
"""More rungs than this are a mistake in step_size, not a plan."""


def make_ladder(cf_range: tuple[float, float], scaling: str, step_size: float) -> tuple[float, ...]:
    """Ascending CFs from one end of the range to the other. ValueError if more than MAX_RUNGS."""
    low, top = cf_range
    if log(top / low) > MAX_RUNGS * log(step_size):
        raise ValueError(
            f"step_size={step_size!r}: from CF {low:g} to {top:g} it makes more than "
            f"{MAX_RUNGS} candidates; take a larger step"
        )
    rungs, factor, rung = [low], step_size, low * step_size
    while rung < top * (1 - 1e-9):  # a rung within rounding of the top is the top
        rungs.append(rung)
        factor *= factor  # squaring doubles the exponent
        rung = low * factor if scaling == "exponential" else rung * step_size
    return tuple(rungs) if rungs[-1] == top else (*rungs, top)
