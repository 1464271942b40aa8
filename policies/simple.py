"""Policies that use no statistics: one CF, a table of CFs, and a warm-up before another policy.

They are the baselines that adaptive policies are compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, get_args

from policies import checks
from policies.base import (
    DENSE,
    Context,
    DeclaredPolicy,
    GainKind,
    Plan,
    Policy,
    StepReport,
    setting,
)
from policies.state import saved


@dataclass(eq=False)
class Fixed(DeclaredPolicy):
    """A policy that sends the same CF in every step: the static baseline.

    cf: 1 (dense) or inside cf_range; None: the smallest of cf_range.
    probe: other CFs > 1 that are measured without being sent, for the record.
    gain: the definition of gain that is recorded, in one step of ten.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "fixed"

    cf: float | None = setting(None, checks.real, or_none=True, least=1)
    probe: Sequence[float] = ()
    gain: GainKind = setting("gradient", checks.one_of, accepted=get_args(GainKind))

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.probe, str) or not isinstance(self.probe, Iterable):
            raise TypeError(f"probe={self.probe!r}: must be a sequence of CFs > 1")
        self.probe = tuple(sorted({checks.real("probe", cf, above=1) for cf in self.probe}))

    def start(self, context: Context) -> None:
        """Raises ValueError if cf is neither 1 nor inside cf_range."""
        send = context.cf_range[0] if self.cf is None else self.cf
        send = context.supported(context.check("cf", send))
        probe = tuple(cf for cf in self.probe if cf != send)
        self._plan = Plan(send, probe=probe, skip_gains=True)

    def plan(self) -> Plan:
        return self._plan

    def candidates(self) -> tuple[float, ...]:
        return self.plan().send, *self.probe

    def _saved_settings(self) -> dict[str, Any]:
        return {"send": self.plan().send}


@dataclass(eq=False)
class Schedule(DeclaredPolicy):
    """A policy that sends CFs by a table: in each step, the CF of the last piece that has begun.

    pieces: {first step: CF}, e.g. {0: 10, 1000: 100}. Steps are counted from 0, from the first step
        of this policy on (inside `Warmup`: after the warm-up). Before the first piece steps are
        dense. CFs are 1 (dense) or inside cf_range; the nearest CF that the compressor can reach is
        sent.
    gain: the definition of gain that is recorded, in one step of ten.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "schedule"

    pieces: Mapping[int, float]
    gain: GainKind = setting("gradient", checks.one_of, accepted=get_args(GainKind))

    step: int = saved(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.pieces, Mapping):
            raise TypeError(f"pieces={self.pieces!r}: must be a mapping {{step: CF}}")
        if not self.pieces:
            raise ValueError("pieces={}: must have at least one step: CF")
        for step, cf in self.pieces.items():
            checks.whole("pieces: step", step, least=0)
            checks.real(f"pieces[{step!r}]", cf, least=1)

    def start(self, context: Context) -> None:
        """Raises ValueError if a CF is neither 1 nor inside cf_range."""
        self._begin()
        self._cfs = {}  # by first step, CFs that the compressor can reach
        for step, cf in sorted({0: DENSE, **self.pieces}.items()):
            context.check(f"pieces[{step}]", cf)
            self._cfs[step] = DENSE if cf == DENSE else context.supported(cf)

    def _at(self, step: int) -> float:
        """The CF of a step."""
        return self._cfs[max(start for start in self._cfs if start <= step)]

    def plan(self) -> Plan:
        before, now = self._at(max(0, self.step - 1)), self._at(self.step)
        return Plan(now, reason="" if now == before else "scheduled", skip_gains=True)

    def observe(self, report: StepReport) -> None:
        self.step += 1

    def candidates(self) -> tuple[float, ...]:
        return tuple(sorted(set(self._cfs.values())))

    def _saved_settings(self) -> dict[str, Any]:
        return {"cfs": [list(piece) for piece in self._cfs.items()]}


@dataclass(eq=False)
class Warmup(DeclaredPolicy):
    """A policy whose CF grows exponentially at the start of a run. Then another policy takes over
    (Deep Gradient Compression, section 3.4).

    Early gradients are large and change fast. Sending only a few of their elements does permanent
    harm. So the warm-up sends CF factor, factor^2, ... for `steps` steps each, in the paper for an
    epoch each.

    then: the `Policy` that follows. It gets no report of the warm-up. None: the largest CF of
        cf_range for good.
    steps: steps of each stage, >= 1. stages: number of stages, >= 1. factor: > 1.
    as_published: see `paper`.
    CFs outside cf_range become its nearer end.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "warmup"

    then: Policy | None = None
    _: KW_ONLY
    steps: int = setting(100, checks.whole, least=1)
    stages: int = setting(4, checks.whole, least=1)
    factor: float = setting(4.0, checks.real, above=1)
    as_published: bool = setting(False, checks.flag)

    _stages: Schedule = saved()
    _then: Policy = saved()

    def __post_init__(self) -> None:
        if self.then is not None and not isinstance(self.then, Policy):
            raise TypeError(f"then must be a Policy object or None, got {self.then!r}")
        super().__post_init__()
        then = self.then or Fixed()
        self.layerwise, self.measures = then.layerwise, then.measures
        self.needs_sparsifier = then.needs_sparsifier
        self.chooses_local_steps, self.chooses_delay = then.chooses_local_steps, then.chooses_delay

    @classmethod
    def paper(cls, steps: int = 100, **settings: Any) -> Warmup:
        """Deep Gradient Compression as in its paper (sections 3 and 5). `settings` are this
        class's.

        75, 93.75, 98.4375 and 99.6% of the elements are not sent for `steps` steps each (an epoch
        in the paper), then 99.9%. The policy's own defaults (`compression`) are DGC's: selection by
        layers, values of 32 bits, momentum correction and momentum factor masking. Clipping by the
        norm of the whole local gradient and the warm-up of the learning rate belong to the script
        (docs/recipes.md)."""
        return cls(steps=steps, **{"as_published": True, **settings})

    @property
    def compression(self) -> Mapping[str, Any]:
        """With `as_published` DGC's defaults, else those of `then`."""
        if self.as_published:
            whole = {"base": "dgc+fp32", "granularity": "layer", "memory": "momentum"}
            return {**whole, "cf_range": (4.0, 1000.0)}
        return {} if self.then is None else self.then.compression

    def start(self, context: Context) -> None:
        """Raises ValueError if cf_range does not suit `then`."""
        low, high = context.cf_range
        cfs = (min(high, max(low, self.factor**i)) for i in range(1, self.stages + 1))
        self._stages = Schedule({stage * self.steps: cf for stage, cf in enumerate(cfs)})
        self._then = Fixed(high) if self.then is None else self.then
        self._stages.start(context)
        self._then.start(context)
        self.gain = self._then.gain

    @property
    def _active(self) -> Policy:
        return self._stages if self._left else self._then

    @property
    def _left(self) -> int:
        """Steps of the warm-up that are left."""
        return max(0, self.steps * self.stages - self._stages.step)

    def plan(self) -> Plan:
        if self._left:
            return self._stages.plan()
        plan = self._then.plan()
        if self._stages.step > self.steps * self.stages:
            return plan
        # The first plan of the policy that follows has no reason of its own.
        return replace(plan, reason="warm-up is over")

    def observe(self, report: StepReport) -> None:
        if not self._left:
            self._then.observe(report)
        self._stages.observe(report)

    def measure(self, gradients: Any) -> Any:
        return self._then.measure(gradients)

    def candidates(self) -> tuple[float, ...]:
        return *self._stages.candidates(), *self._then.candidates()

    def status(self) -> Mapping[str, float]:
        return self._active.status()

    def gain_at(self, cf: float) -> float | None:
        return self._active.gain_at(cf)

    def verdict(self) -> str:
        return self._active.verdict()

    def rescale(self) -> None:
        self._active.rescale()

    def _saved_settings(self) -> dict[str, Any]:
        return {**super()._saved_settings(), "then": self._then.name}
