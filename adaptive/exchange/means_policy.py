"""A policy for the CF of means in the sharded exchange: a second instance of the run's policy.

GraVAC's authors name this as future work. In the sharded exchange the rank that owns a shard
compresses the mean of the ranks' payloads, at a CF of its own. The two directions (gradients to the
owners, means back) have separate policies. Each policy sees the gains of its direction, and its
direction's share of the time that a step waits for the network. So if one direction switches its
CF, the other policy does not take the switch for a change of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from math import isfinite, nan
from typing import Any

from adaptive.exchange.strategies import Means
from policies import DENSE, Context, Plan, Policy, StepReport
from policies.base import DeclaredPolicy, checked_plan
from policies.state import Stateful, declare, saved
from policies.words import in_short, joined, named


@dataclass(eq=False)
class MeansPolicy(Stateful, Policy):
    """The run's policy, together with a second instance that chooses the CF of means. The second
    instance counts only the steps that compress gradients.

    own: the run's policy, not started. policy: the second instance. means: the exchange's.
    wire_bytes(gradient_cf, mean_cf): bytes that one rank sends in a step."""

    _fields = declare(own=Policy, policy=Policy)

    own: Policy
    policy: Policy
    means: Means
    wire_bytes: Callable[[float, float], float]

    cf: float = saved(DENSE)  # of the means
    _before: float | None = saved(None)  # CF of means in the last step; None: it sent no means
    _switch: tuple[int, str] = saved((0, ""))  # (step, reason) of the last switch
    _steps: int = saved(0)  # number of planned steps
    _planned: list[float] = saved([])  # CFs of means in the planned steps not yet observed

    def __post_init__(self) -> None:
        names = ("name", "gain", "layerwise", "measures", "needs_sparsifier")
        for name in (*names, "chooses_local_steps", "chooses_delay"):
            setattr(self, name, getattr(self.own, name))
        self._recorded: Mapping[str, float] = {}

    def start(self, context: Context) -> None:
        self._uncompressed = {DENSE, *context.uncoded}
        self._assumed, self._rungs = context.assumed.keys(), context.rungs
        self.own.start(replace(context, wire_bytes=self._bytes_of_gradients))
        back = replace(context, unknown=frozenset(), local_steps=(1,), layers={})
        self._context = replace(back, wire_bytes=self._one_way)
        self.policy.start(self._context)
        self.cf = self.means.cf = checked_plan(self.policy, self._context).send

    def _one_way(self, cf: float) -> float:
        """Bytes of one direction of a sharded exchange."""
        return self.wire_bytes(cf, cf) / 2

    def _bytes_of_gradients(self, cf: float) -> float:
        """Bytes of the gradients alone, in a step at this CF of gradients."""
        return self.wire_bytes(cf, self.cf) - self._one_way(self.cf)

    def _share(self, report: StepReport, cf: float) -> float:
        """The share of the means in the bytes of the timed step, if means had this CF."""
        known = isfinite(report.timed_cf)
        total = self.wire_bytes(report.timed_cf, cf) if known else 0.0
        return self._one_way(cf) / total if total else 0.0

    def plan(self) -> Plan:
        """The plan of the run's policy. Sets, in `means`, the CF of means and the CFs at which
        means are measured."""
        plan, step = self.own.plan(), self._steps
        self._steps += 1
        self.means.measured = ()
        if plan.send not in self._uncompressed:
            plan = self._with_means(plan, step)
        self._planned.append(self.cf)
        return plan

    def _with_means(self, plan: Plan, step: int) -> Plan:
        back = checked_plan(self.policy, self._context)
        wanted = {back.send, *back.probe}
        switches = back.send != self.cf
        self.cf = self.means.cf = back.send
        self.means.measured = tuple(sorted(wanted - {DENSE, *self._assumed}))
        if not switches:
            return plan
        self._switch = step, back.reason
        reason = back.reason and f"means at {named(self.cf, self._rungs)}: {back.reason}"
        return replace(plan, reason=joined(plan.reason, reason))

    def measure(self, gradients: Any) -> Any:
        return self.own.measure(gradients)

    def observe(self, report: StepReport) -> None:
        planned, before = self._planned.pop(0), self._before
        now = self._before = None if report.cf in self._uncompressed else planned
        share = self._share(report, self.cf if before is None else before)
        self.own.observe(_with_wait(report, 1 - share))
        self._recorded = {"down_cf": nan, "down_gain": nan}
        if now is not None:
            self._observe_means(report, now, before)

    def _observe_means(self, report: StepReport, cf: float, before: float | None) -> None:
        if before is not None:
            report = _with_wait(report, self._share(report, before))
        report = replace(
            report,
            cf=cf,
            timed_cf=nan if before is None else before,
            measurements=report.means,
            layer_norms={},
            layer_measurements={},
            measured=[],
        )
        self.policy.observe(report)
        gain = self.policy.gain_at(cf)
        if gain is None:
            gain = report.gain(cf, self.policy.gain)
        self._recorded = {"down_cf": cf, "down_gain": 1.0 if cf == DENSE else gain}

    def notes(self) -> Sequence[str]:
        step, reason = self._switch
        since = f"means come back at {named(self.cf, self._rungs)} since step {step}"
        return [since + (reason and f": {in_short(reason)}"), *self.own.notes()]

    def status(self) -> Mapping[str, float]:
        return {**self.own.status(), **self._recorded}

    def candidates(self) -> Sequence[float]:
        return self.own.candidates()

    def gain_at(self, cf: float) -> float | None:
        return self.own.gain_at(cf)

    @property
    def promise(self) -> str:  # type: ignore[override]
        return self.own.promise

    def verdict(self) -> str:
        return self.own.verdict()

    def rescale(self) -> None:
        self.own.rescale()
        self.policy.rescale()


def _with_wait(report: StepReport, share: float) -> StepReport:
    """The report with this share of its wait for the network. The rest of the wait counts as
    work."""
    return replace(
        report,
        exchange_seconds=share * report.exchange_seconds,
        network_seconds=share * report.network_seconds,
    )


def another(policy: Policy) -> Policy:
    """A second instance with the same settings, which has not observed any step."""
    if not isinstance(policy, DeclaredPolicy):
        return deepcopy(policy)
    values = {each.name: getattr(policy, each.name) for each in fields(policy) if each.init}
    inner = {name: another(value) for name, value in values.items() if isinstance(value, Policy)}
    return replace(policy, **inner)
