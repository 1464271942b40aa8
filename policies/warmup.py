"""Exponential sparsity warm-up (Deep Gradient Compression, section 3.4).

Early gradients change fast and are large; keeping a few of them only does harm that lasts. So
compression grows exponentially over the first epochs: CF 4, 16, 64, 256 (sparsity 75%, 93.75%,
98.4375%, 99.6%), one epoch each, before the final CF.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from policies import checks, saved
from policies.base import DENSE, Context, Plan, Policy, StepReport
from policies.fixed import Fixed
from policies.reasons import change, counted_steps


class Warmup(Policy):
    """Sends factor, factor^2, ... for `steps` steps each, then does as the policy `then` says.

    then: a `Policy`, which sees no report from before; None: the largest CF of cf_range for good.
    steps: steps of each stage (the paper: an epoch). stages: how many. factor: > 1.
    CFs outside cf_range become its nearer end. ValueError or TypeError names what is wrong.
    """

    name = "warmup"

    def __init__(
        self,
        then: Policy | None = None,
        *,
        steps: int = 100,
        stages: int = 4,
        factor: float = 4.0,
    ) -> None:
        if then is not None and not isinstance(then, Policy):
            raise TypeError(f"then must be a Policy object or None, got {then!r}")
        self.steps = checks.whole("steps", steps, least=1)
        self.stages = checks.whole("stages", stages, least=1)
        self.factor = checks.real("factor", factor, above=1)
        self._settings = {"steps": self.steps, "stages": self.stages, "factor": self.factor}
        self._given = then
        self.shadow = then is not None and then.shadow
        self.layerwise = then is not None and then.layerwise
        self._cfs: tuple[float, ...] = ()

    def start(self, context: Context) -> None:
        """Raises ValueError if cf_range does not suit `then`."""
        low, high = checks.cf_range(context.cf_range)
        wanted = (min(high, max(low, self.factor**i)) for i in range(1, self.stages + 1))
        self._cfs = tuple(context.supported(cf) for cf in wanted)
        self._then = Fixed(high) if self._given is None else self._given
        self._then.start(context)
        self.gain = self._then.gain
        self._step = 0

    def plan(self) -> Plan:
        if not self._cfs:
            raise RuntimeError("Warmup needs start(context) before plan()")
        stage, into = divmod(self._step, self.steps)
        if stage >= self.stages:
            plan = self._then.plan()
            first = stage == self.stages and into == 0
            if first:  # what it says of itself is not where the CF comes from
                plan = replace(plan, reason=change(self._cfs[-1], plan.send, "warm-up is over"))
            return plan
        before = self._cfs[stage - 1] if stage else DENSE
        why = f"warm-up, stage {stage + 1} of {self.stages}, {self.steps} steps each"
        return Plan(self._cfs[stage], reason="" if into else change(before, self._cfs[stage], why))

    @property
    def _over(self) -> bool:
        return self._step >= self.steps * self.stages

    def observe(self, report: StepReport) -> None:
        if self._over:
            self._then.observe(report)
        self._step += 1

    def candidates(self) -> tuple[float, ...]:
        if not self._cfs:
            return ()
        return (*self._cfs, *self._then.candidates(), self._then.plan().send)

    def status(self) -> Mapping[str, float]:
        """Of what follows; nothing before, so that it does not seem to explore yet."""
        return self._then.status() if self._cfs and self._over else {}

    def outlook(self) -> str:
        if not self._cfs:
            return ""
        if self._over:
            return self._then.outlook()
        stage, into = divmod(self._step, self.steps)
        left = self.steps - into
        soon = f"in {counted_steps(left)}"
        if stage + 1 < self.stages:
            return f"the next stage begins {soon}, with CF {self._cfs[stage + 1]:g}"
        return self._afterwards(soon)

    def _afterwards(self, soon: str) -> str:
        """What comes after the last stage, in words."""
        last, first = self._cfs[-1], self._then.plan().send
        if self._given is not None:
            return f"{self._then.name} takes over {soon}, with CF {first:g}"
        if first == last:
            return f"it stays at CF {last:g}, where warm-up ends {soon}"
        return f"it goes to CF {first:g} {soon}, and stays there"

    def verdict(self) -> str:
        return self._then.verdict() if self._cfs and self._over else ""

    def rescale(self) -> None:
        if self._over:
            self._then.rescale()

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": self._settings,
            "cfs": list(self._cfs),
            "step": self._step,
            "then": [self._then.name, self._then.state_dict()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After start(). Raises ValueError if the state is of other settings or another policy to
        follow."""
        if not self._cfs:
            raise RuntimeError("Warmup needs start(context) before load_state_dict()")
        checks.same(self.name, self._settings, saved.part(state, "settings"))
        name, inner = saved.nested(state, "then")
        checks.same(
            self.name,
            {"cfs": list(self._cfs), "then": self._then.name},
            {"cfs": saved.numbers(state, "cfs", least=1), "then": name},
        )
        self._step = saved.count(state, "step")
        self._then.load_state_dict(inner)
