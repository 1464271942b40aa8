"""Run a policy over a record: agreed statistics in, plans out.

While the policy plans what was recorded, it sees the recorded reports, bit for bit. From the first
step on where it plans otherwise, it sees what it would have seen by a model (reports.py). Norms of
summed gradients it sees where its own plans read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan

from adaptive import Event, StepRecord
from policies import DENSE, Plan, Policy
from runs.parser import UsageError
from runs.records import Recorded
from runs.replay.costs import RecordedCosts
from runs.replay.reports import Reports
from runs.stages import counted


@dataclass(frozen=True)
class Replayed:
    """What a policy would have done on a record.

    plans: one a step. events: switches and judgements, as the controller would record them.
    followed: steps, from the first on, whose plans are those of the record. largest: the largest
    CF whose gain was ever measured. sums: readings of a summed gradient that are modelled.
    guessed: steps whose steady-state gains are.
    """

    plans: tuple[Plan, ...]
    events: tuple[Event, ...]
    followed: int
    largest: float
    sums: int
    guessed: int
    costs: RecordedCosts
    verdict: str

    @property
    def identical(self) -> bool:
        """All CFs and probes are those of the record."""
        return self.followed == len(self.plans)


def replay(
    policy: Policy, recorded: Recorded, reports: Reports | None = None, told: bool = False
) -> Replayed:
    """The policy must have been started. reports: of the same record, if there are any yet. told:
    say how far it is, if that takes long. UsageError if the policy reads norms of layers that were
    not recorded."""
    records = recorded.steps
    reports = Reports(recorded) if reports is None else reports
    assumed = recorded.header.assumed if recorded.header is not None else {}
    known = {DENSE, *assumed}
    ladder = tuple(cf for cf in policy.candidates() if cf not in known) if policy.shadow else ()
    readings = _Readings(records, policy.layerwise)
    plans: list[Plan] = []
    events: list[Event] = []
    followed = guessed = 0
    before = DENSE
    shown = counted(records, len(records), "replaying", "steps") if told else records
    for i, record in enumerate(shown):
        plan = policy.plan()
        plans.append(plan)
        if (plan.send != before and i > 0) or plan.reason:
            events.append(Event(record.report.step, before, plan.send, plan.reason))
        if followed == i and _same_plan(plan, record):
            followed += 1
        wanted = () if plan.skip_gains else ladder
        if followed > i:
            report, modelled = reports.recorded_at(i, wanted)
        else:
            report, modelled = reports.modelled_at(i, plan.send, plan.probe, before, wanted)
        guessed += modelled
        if plan.read_sum:
            sum_norm, layers = readings.read(i)
            report = replace(report, sum_norm=sum_norm, layer_norms=layers)
        readings.pass_by(i)
        policy.observe(report)
        before = plan.send
    return Replayed(
        tuple(plans),
        tuple(events),
        followed,
        max(reports.gains.cfs, default=DENSE),
        readings.modelled,
        guessed,
        reports.costs,
        policy.verdict(),
    )


def _same_plan(plan: Plan, record: StepRecord) -> bool:
    """The record does not hold the plan, but what was sent and which CFs were measured."""
    report = record.report
    measured = {plan.send, *plan.probe} - {DENSE}
    return (
        plan.send == report.cf
        and measured == set(report.measurements)
        and dict(plan.layers) == record.layer_cfs
    )


class _Readings:
    """What a replayed policy reads now and then: the norm of the gradients summed since it last
    did, and with `layerwise` the norm of each layer's part of the sum.

    Recorded ones are of the steps since the recorded policy last read. If those are others, the sum
    of the gradients' norms stands in for the norm of their sum (modelled: how often), and nothing
    tells what a layer's would be.
    """

    def __init__(self, records: Sequence[StepRecord], layerwise: bool) -> None:
        self._records, self._layerwise = records, layerwise
        self._ours = self._theirs = 0  # where the replayed and the recorded policy have last read
        self.modelled = 0

    def read(self, i: int) -> tuple[float, Mapping[str, float]]:
        """The norms that the report of step `i` has. UsageError for layers of which the recorded
        policy has not read the same."""
        report = self._records[i].report
        same = self._was_read(i) and self._ours == self._theirs
        if self._layerwise and not (same and report.layer_norms):
            raise UsageError(self._unknown(report.step))
        sum_norm = report.sum_norm if same else self._modelled(i)
        self._ours = i
        return sum_norm, report.layer_norms if self._layerwise else {}

    def pass_by(self, i: int) -> None:
        """Step `i` is over, whether the replayed policy has read in it or not."""
        self._theirs = i if self._was_read(i) else self._theirs

    def _was_read(self, i: int) -> bool:
        """Whether the recorded policy has read (older records say only what)."""
        record = self._records[i]
        return record.read_sum or isfinite(record.report.sum_norm)

    def _modelled(self, i: int) -> float:
        norms = [record.report.grad_norm for record in self._records[self._ours : i]]
        self.modelled += bool(norms)
        return sum(norms) if norms else nan

    def _unknown(self, step: int) -> str:
        first = self._records[self._ours].report.step
        return (
            f"TIMELINE: at step {step} this policy reads the norm of each layer's gradients since "
            f"step {first}, which cannot be told from the record, since no policy read them there; "
            f"accepted: a record of the same policy with the same interval (train --policy "
            f"'Accordion(per_layer=True)'), or one CF for all layers"
        )
