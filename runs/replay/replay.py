"""Run a policy over a record: agreed statistics in, plans out.

While the policy plans what was recorded, it sees the recorded reports, bit for bit. From the first
step on where it plans otherwise, it sees what it would have seen by a model (reports.py). Sums and
layers it sees where its own plans read them (readings.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from adaptive import Event, StepRecord
from policies import DENSE, Plan, Policy
from runs.records import Recorded
from runs.replay.costs import RecordedCosts
from runs.replay.readings import LayerReadings, RecordedSums
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
    say how far it is, if that takes long. UsageError if the policy reads of layers what was not
    recorded."""
    records = recorded.steps
    reports = Reports(recorded) if reports is None else reports
    sums = RecordedSums(records)
    assumed = recorded.header.assumed if recorded.header is not None else {}
    known = {DENSE, *assumed}
    ladder = tuple(cf for cf in policy.candidates() if cf not in known) if policy.shadow else ()
    layers = LayerReadings(records, ladder)
    plans: list[Plan] = []
    events: list[Event] = []
    followed = guessed = 0
    before = DENSE
    shown = counted(records, len(records), "replaying", "steps") if told else records
    for i, record in enumerate(shown):
        plan = policy.plan()
        plans.append(plan)
        if (plan.send != before and i > 0) or plan.reason:
            step, details = record.report.step, policy.details()
            events.append(Event(step, before, plan.send, plan.reason, details))
        if followed == i and _same_plan(plan, record):
            followed += 1
        wanted = () if plan.rest else ladder
        if followed > i:
            report, modelled = reports.recorded_at(i, wanted)
        else:
            report, modelled = reports.modelled_at(i, plan, before, wanted)
        guessed += modelled
        sum_norm, by_layer = sums.read(i, plan.read_sum), layers.read(i, plan)
        reads = plan.read_sum or plan.read_layers
        policy.observe(replace(report, sum_norm=sum_norm, layers=by_layer) if reads else report)
        before = plan.send
    return Replayed(
        tuple(plans),
        tuple(events),
        followed,
        max(reports.gains.cfs, default=DENSE),
        sums.modelled,
        guessed,
        reports.costs,
        policy.verdict(),
    )


def _same_plan(plan: Plan, record: StepRecord) -> bool:
    """The record does not hold the plan, but what was sent and which CFs were measured."""
    report = record.report
    measured = {plan.send, *plan.probe} - {DENSE}
    layers = dict(plan.layers.get(plan.send, {}))
    return (
        plan.send == report.cf
        and measured == set(report.measurements)
        and (layers == record.layer_cfs)
    )
