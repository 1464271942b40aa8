"""The CF of means on their way back, chosen as the policy chooses the CF of gradients.

GraVAC's authors name this as future work. In the sharded exchange the rank that owns a shard
compresses the mean of the ranks' payloads a second time. A second instance of the run's policy
chooses the CF of that. Each way is judged by what it loses itself, and by its own share of the time
that a step waits for the network. So a switch of one way is no other network for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from math import isfinite, nan

from adaptive.exchange.strategies import Means
from adaptive.statistics.vector import Statistics
from policies import DENSE, Context, Measurement, Policy, StepReport
from policies.base import DeclaredPolicy
from policies.state import Stateful, declare, saved
from policies.words import named


@dataclass(eq=False)
class MeansPolicy(Stateful):
    """The policy of the means. Only steps that compress gradients count as its steps.

    policy: a second instance of the run's policy, not started. means: the exchange's. wire_bytes:
    of a step, by the CF of gradients and that of means. known_gains: CFs whose gains are assumed
    and not measured."""

    _fields = declare(policy=Policy)

    policy: Policy
    means: Means
    wire_bytes: Callable[[float, float], float]
    known_gains: Collection[float] = ()

    cf: float = saved(DENSE)  # of the means
    _switch: tuple[int, str] = saved((0, ""))  # the step of the last switch, and why

    def start(self, context: Context) -> None:
        """context: of the run's policy. ValueError if the policy's settings do not fit."""
        assumed = {cf: gain for cf, gain in context.assumed.items() if cf in self.known_gains}
        self.policy.start(
            replace(
                context,
                assumed=assumed,
                unknown=frozenset(),
                local_steps=(1,),
                layers={},
                wire_bytes=self._one_way,
            )
        )
        self.cf = self.means.cf = self.policy.plan().send

    def _one_way(self, cf: float) -> float:
        """Bytes of one way of a sharded exchange."""
        return self.wire_bytes(cf, cf) / 2

    def bytes_of_gradients(self, cf: float) -> float:
        """Bytes of the gradients alone, in a step at this CF of gradients."""
        return self.wire_bytes(cf, self.cf) - self._one_way(self.cf)

    def report_of_gradients(self, report: StepReport, cf_before: float | None) -> StepReport:
        """The report for the policy of gradients: it has only the wait for the gradients' bytes.

        cf_before: see `observe`."""
        cf = self.cf if cf_before is None else cf_before
        return _with_wait(report, 1 - self._share(report, cf))

    def _share(self, report: StepReport, cf: float) -> float:
        """The share of means at this CF in the bytes of the timed step."""
        known = isfinite(report.timed_cf)
        total = self.wire_bytes(report.timed_cf, cf) if known else 0.0
        return self._one_way(cf) / total if total else 0.0

    def begin_step(self, step: int, compresses: bool) -> str:
        """Plan the means of a step. Returns why their CF changes, "" if it does not.

        compresses: means are compressed in this step."""
        self.means.measured = ()
        if not compresses:
            return ""
        plan = self.policy.plan()
        wanted = {plan.send, *plan.probe}
        if self.policy.shadow and not plan.skip_gains:
            wanted |= {*self.policy.candidates()}
        switches = plan.send != self.cf
        self.cf = self.means.cf = plan.send
        self.means.measured = tuple(sorted(wanted - {DENSE, *self.known_gains}))
        if switches:
            self._switch = step, plan.reason
        return plan.reason if switches else ""

    def observe(
        self, report: StepReport, agreed: Statistics, cf: float | None, cf_before: float | None
    ) -> dict[str, float]:
        """Take in a step. Returns what is recorded of its means.

        report: of the gradients. agreed: the ranks' statistics. cf, cf_before: the CF of the means
        in this step and in the step before; None: there were none."""
        if cf is None:
            return {}
        total = nan if agreed.nonfinite else agreed.mean_total
        levels = zip(agreed.tally.mean_cfs, agreed.mean_kept, agreed.mean_error, strict=True)
        found = {
            level: Measurement(kept, error, total, total, error, total)
            for level, kept, error in levels
        }
        gains = {level: measured.gain("error_fed") for level, measured in found.items()}
        if cf_before is not None:
            report = _with_wait(report, self._share(report, cf_before))
        report = replace(
            report,
            cf=cf,
            timed_cf=nan if cf_before is None else cf_before,
            measurements=found,
            steady_gain={cf: gain for cf, gain in gains.items() if isfinite(gain)},
            layer_norms={},
            signal={},
            signal_total=nan,
            peers={},
            peers_total=nan,
            peers_energy=nan,
        )
        self.policy.observe(report)
        gain = self.policy.gain_at(cf)
        if gain is None:
            gain = report.gain(cf, self.policy.gain)
        return {"down_cf": cf, "down_gain": 1.0 if cf == DENSE else gain}

    def explain(self) -> str:
        step, reason = self._switch
        return f"means come back at {named(self.cf)} since step {step}" + (reason and f": {reason}")


def _with_wait(report: StepReport, share: float) -> StepReport:
    """The report with a share of its wait. The rest of that counts as work."""
    return replace(
        report,
        exchange_seconds=share * report.exchange_seconds,
        network_seconds=share * report.network_seconds,
    )


def another(policy: Policy) -> Policy:
    """A second instance with the same settings, which has seen nothing yet."""
    if not isinstance(policy, DeclaredPolicy):
        return deepcopy(policy)
    values = {each.name: getattr(policy, each.name) for each in fields(policy) if each.init}
    inner = {name: another(value) for name, value in values.items() if isinstance(value, Policy)}
    return replace(policy, **inner)
