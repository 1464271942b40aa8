"""Accordion (Agarwal and others, 2021): a small CF in critical regimes, else a large CF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from math import inf, isfinite, nan, prod
from typing import Any

from policies import checks
from policies.base import DENSE, Context, DeclaredPolicy, Plan, StepReport, setting
from policies.state import Stateful, saved
from policies.words import joined, percent

KEPT = 1 / 0.99, 10.0
"""The authors' CFs for top-k: 99% and 10% of the elements are kept."""

LATE = 3
"""Reports lag by fewer steps than this. When a state is saved, all missing reports are observed at
once. So the step in which a sum is read may be left out, or planned twice."""

ALWAYS = 3
"""Number of detection intervals in a row with a drop of the learning rate after which the policy
warns of a schedule that falls all the time."""

FALLS = (
    "the learning rate keeps dropping, so every regime stays critical and the low CF is sent: "
    "with a schedule that falls all the time (cosine, linear) take rate_drop=0.5, by which only a "
    "fall to half or less in one step is a drop"
)

NAMED = 3
"""The largest number of layers that a reason names. Further layers are only counted."""


@dataclass(eq=False)
class Regime(Stateful):
    """The regime of the whole model or of one layer.

    It is critical until the norms of two intervals can be compared. Then it is critical if
    | ||G_old|| - ||G_new|| | / ||G_old|| >= eta (Algorithm 1), and if ||G_old|| is 0."""

    critical: bool = saved(True)
    norm: float | None = saved(None)  # of the summed gradient, in the last interval with a norm

    def detect(self, norm: float, eta: float, stays: bool) -> str:
        """Compare the norm of an interval. Returns the numbers if the regime changes, else "".

        stays: the regime must not change now."""
        if not isfinite(norm) or norm < 0:  # the norm was not read, or is not finite
            return ""
        old, self.norm = self.norm, norm
        if old is None or stays:
            return ""
        relative = abs(old - norm) / old if old > 0 else inf
        was, self.critical = self.critical, relative >= eta
        if self.critical == was:
            return ""
        sign = "at least" if self.critical else "less than"
        change = f"{old:.4g} to {norm:.4g}, a change of {percent(relative)}"
        return f"norm of its accumulated gradient {change}, {sign} eta {percent(eta)}"


@dataclass(eq=False)
class Accordion(DeclaredPolicy):
    """A policy that sends the CF `low` while training is in a critical regime (see `Regime`), else
    `high`.

    A learning rate that drops makes the regime critical at once, for the rest of that interval and
    the next.

    low, high: CFs, 1 (dense) or inside cf_range. None: the ends of cf_range.
    as_ranks: `low` and `high` are PowerSGD's ranks instead, such as 4 and 1, and each layer gets
        the CF at which PowerSGD has that rank. These CFs need not be inside cf_range.
    eta: relative change of the norm that makes a regime critical, > 0.
    interval: steps between detections, >= 1. The paper has 10 epochs.
    rate_drop: a learning rate that falls in one step to this part of itself or less has dropped,
        in (0, 1]. At 0.5 a cosine schedule never drops. At 1 any decrease is a drop.
    per_layer: each layer has its own regime, and so its own CF, as in the paper.
    compress_vectors: False sends tensors of one dimension (norms, biases) dense. They then have no
        regime. It needs per_layer.
    epoch: number of steps, fewer than `interval`, that the rule of the paper sums (see `paper`).
        None: this library's rule, which compares the mean gradients of whole intervals.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "accordion"

    low: float | None = setting(None, checks.real, or_none=True, least=1)
    high: float | None = setting(None, checks.real, or_none=True, least=1)
    _: KW_ONLY
    eta: float = setting(0.5, checks.real, above=0)
    interval: int = setting(100, checks.whole, least=1)
    rate_drop: float = setting(0.5, checks.fraction)
    per_layer: bool = setting(False, checks.flag)
    compress_vectors: bool = setting(True, checks.flag)
    as_ranks: bool = setting(False, checks.flag)
    epoch: int | None = setting(None, checks.whole, or_none=True, least=1)

    _step: int = saved(0)  # of the interval
    _unread: int = saved(LATE)  # steps since the last sum was read
    _dropped: bool = saved(False)  # the learning rate has dropped: regimes stay critical for now
    _fell: bool = saved(False)  # the learning rate has dropped in this interval
    _falling: int = saved(0)  # intervals in a row, before this one, with a drop
    _lr: float | None = saved(None)
    _reason: str = saved("")
    _regimes: dict[str, Regime] = saved()  # by layer; "" is the whole model

    @classmethod
    def paper(
        cls,
        low: float | None = KEPT[0],
        high: float | None = KEPT[1],
        *,
        interval: int = 100,
        epoch: int | None = None,
        **settings: Any,
    ) -> Accordion:
        """Accordion as in its paper (section 4, Algorithm 1) and its released code. `settings` are
        this class's.

        Each layer has its own regime. The rule compares the norms of the layer's *local,
        uncompressed* gradient, summed over the first `epoch` steps of each detection interval
        (None: a tenth of it). The regime is decided as soon as these steps are over. (The released
        code asks rank 0 alone. Here the mean of the ranks' norms decides.) Any drop of the
        learning rate makes all regimes critical until the next detection. Tensors of one dimension
        are sent dense. `low` and `high` keep 99% and 10% of the elements, as the authors do with
        top-k. With PowerSGD the authors use ranks: paper(4, 1, as_ranks=True), or (2, 1). The
        compression is that of the paper, too (`compression`)."""
        tenth = max(1, checks.whole("interval", interval, least=2) // 10)
        epoch = tenth if epoch is None else epoch
        published = {"per_layer": True, "compress_vectors": False, "rate_drop": 1.0}
        return cls(low, high, interval=interval, epoch=epoch, **{**published, **settings})

    @property
    def compression(self) -> Mapping[str, Any]:
        """With the rule of the paper: the policy's two CFs (or ranks of PowerSGD) by layers, values
        of 32 bits, plain error feedback."""
        if self.epoch is None:
            return {}
        published = {"granularity": "layer", "memory": "residual"}
        if self.as_ranks:
            return {"base": "powersgd", **published}
        ends = {} if self.low is None or self.high is None else {"cf_range": (self.low, self.high)}
        return {"base": "topk+fp32", **published, **ends}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layerwise = self.per_layer
        if self.epoch is not None and self.epoch >= self.interval:
            raise ValueError(f"epoch={self.epoch}: must be less than interval={self.interval}")
        if not self.per_layer and (self.as_ranks or not self.compress_vectors):
            raise ValueError("as_ranks=True and compress_vectors=False need per_layer=True")
        if self.as_ranks:
            low, high = _rank("low", self.low), _rank("high", self.high)
            if low < high:
                raise ValueError(f"low={low}: must not be a smaller rank than high={high}")

    def start(self, context: Context) -> None:
        """Raises ValueError if low or high is neither 1 nor inside cf_range, or low > high, or
        layers are wanted and not known, or no layer may be compressed."""
        if self.per_layer and not context.layers:
            raise ValueError("per_layer=True: the layers are not known")
        self._begin()
        shapes = context.layers if self.per_layer else {"": ()}
        self._numels = {name: prod(shape) for name, shape in shapes.items()}
        if self.as_ranks:
            self._low, self._high = self._cfs_at(self.low, shapes), self._cfs_at(self.high, shapes)
        else:
            low = context.cf_range[0] if self.low is None else self.low
            high = context.cf_range[1] if self.high is None else self.high
            if low > high:
                raise ValueError(f"low={low:g}: must not exceed high={high:g}")
            low, high = context.check("low", low), context.check("high", high)
            self._low = dict.fromkeys(shapes, context.supported(low))
            self._high = dict.fromkeys(shapes, context.supported(high))
        self._vectors = [n for n in shapes if not self.compress_vectors and len(shapes[n]) < 2]
        self._regimes = {name: Regime() for name in shapes if name not in self._vectors}
        if not self._regimes:
            raise ValueError("compress_vectors=False: no layer has two dimensions")

    def _cfs_at(self, rank: float | None, shapes: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """By layer, the CF of PowerSGD at a rank: n m / (rank (n + m)), n the first dimension."""
        cfs = {}
        for name, shape in shapes.items():
            n, m = shape[0] if shape else 1, prod(shape[1:])  # a single number has no dimension
            cfs[name] = max(DENSE, n * m / ((rank or 1) * (n + m))) if n * m else DENSE
        return cfs

    def _send(self) -> tuple[float, Mapping[str, float]]:
        """(CF of the plan, CFs of the layers; none if all layers have the same)."""
        cfs = dict.fromkeys(self._vectors, DENSE)
        for name, regime in self._regimes.items():
            cfs[name] = self._low[name] if regime.critical else self._high[name]
        if len(set(cfs.values())) == 1:
            return next(iter(cfs.values())), {}
        # The CF of the plan is that of all layers together: their elements / the elements kept.
        kept = sum(self._numels[name] / cf for name, cf in cfs.items())
        return sum(self._numels[name] for name in cfs) / kept, cfs

    @property
    def critical(self) -> bool:
        """Whether the model, or a layer of it, is in a critical regime. The same on every rank. A
        script may use larger batches outside critical regimes (docs/recipes.md)."""
        return any(regime.critical for regime in self._regimes.values())

    def plan(self) -> Plan:
        send, layers = self._send()
        last = self.interval - 1 if self.epoch is None else self.epoch  # before the sum is read
        missed = self._unread == self.interval + 2 * LATE
        return Plan(
            send,
            reason=self._reason,
            layers=layers,
            accumulate=self.epoch is None or self._step < self.epoch,
            local_sum=self.epoch is not None,
            read_sum=self._step == last or missed,
        )

    def observe(self, report: StepReport) -> None:
        dropped = self._watch_learning_rate(report.lr)
        read = isfinite(report.sum_norm) or bool(report.layer_norms)
        twice = self._unread < min(LATE, self.interval - 1)
        # Also after a drop, because the next sum is compared with this one.
        detected = "" if twice else self._detect(report)
        self._unread = 0 if read else self._unread + 1
        self._step = (self._step + 1) % self.interval
        falls = self._step == 0 and self._end_interval()
        if self._step == 0 or self.epoch is not None:  # by the paper the next detection decides
            self._dropped = False
        self._reason = joined(dropped or detected, FALLS if falls else "")

    def _watch_learning_rate(self, lr: float) -> str:
        """Make all regimes critical if the learning rate has dropped. Returns why if one was not
        critical, else ""."""
        if not isfinite(lr):
            return ""
        before, self._lr = self._lr, lr
        if before is None or before <= 0 or lr >= before or lr / before > self.rate_drop:
            return ""
        self._dropped = self._fell = True
        quiet = [regime for regime in self._regimes.values() if not regime.critical]
        for regime in quiet:
            regime.critical = True
        return f"critical regime: learning rate {before:.4g} -> {lr:.4g}" if quiet else ""

    def _end_interval(self) -> bool:
        """End an interval. Returns whether now, for the first time, the learning rate has dropped
        in ALWAYS intervals in a row."""
        self._falling = self._falling + 1 if self._fell else 0
        self._fell = False
        return self._falling == ALWAYS

    def verdict(self) -> str:
        return FALLS if self._falling >= ALWAYS else ""

    def _detect(self, report: StepReport) -> str:
        """Compare two intervals if one has just ended. Returns why a regime changes, else ""."""
        critical: list[str] = []
        over: list[str] = []
        for name, regime in self._regimes.items():
            norm = report.layer_norms.get(name, nan) if self.per_layer else report.sum_norm
            if numbers := regime.detect(norm, self.eta, stays=self._dropped):
                reason = f"{name}: {numbers}" if self.per_layer else numbers
                (critical if regime.critical else over).append(reason)
        changes = {"critical regime": critical, "critical regime over": over}
        return joined(*(f"{what}\n{_listed(which)}" for what, which in changes.items() if which))

    def candidates(self) -> tuple[float, ...]:
        dense = {DENSE} if self._vectors else set()
        return tuple(sorted({*self._low.values(), *self._high.values(), *dense}))

    def status(self) -> Mapping[str, float]:
        """critical: share of regimes that are critical. sum_norm: of the whole model, in the last
        interval."""
        regimes = self._regimes.values()
        whole = None if self.per_layer else self._regimes[""].norm
        return {
            "critical": sum(regime.critical for regime in regimes) / len(regimes),
            "sum_norm": nan if whole is None else whole,
        }

    def rescale(self) -> None:
        """Forget the norms, because means over more ranks have less noise. Regimes do not change
        until two new sums can be compared."""
        for regime in self._regimes.values():
            regime.norm = None
        self._step, self._unread = 0, LATE

    def _saved_settings(self) -> dict[str, Any]:
        return {**super()._saved_settings(), "layers": list(self._regimes)}


def _rank(name: str, value: float | None) -> int:
    whole = value is not None and value == int(value)
    return checks.whole(name, int(value or 0) if whole else value, least=1)


def _listed(reasons: list[str]) -> str:
    more = f" and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
    return ", ".join(reasons[:NAMED]) + more
