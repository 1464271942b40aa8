"""Run a policy over a record: agreed statistics in, plans out.

While the policy plans what was recorded, it sees the recorded reports, bit for bit. From the first
step on where it plans otherwise, it sees what it would have seen by the model of gains.py and
costs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan

from adaptive import Event, StepRecord
from policies import DENSE, Plan, Policy, StepReport
from runs.records import Recorded
from runs.replay.costs import RecordedCosts
from runs.replay.gains import RecordedGains
from runs.replay.sums import RecordedSums


@dataclass(frozen=True)
class Replayed:
    """plans: one a step. events: switches and judgements, as the controller would record them.
    followed: steps, from the first on, whose plans are those of the record. largest: the largest
    CF whose gain was ever measured. sums: readings of a summed gradient that are modelled.
    guessed: steps whose steady-state gains are."""

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
    policy: Policy,
    recorded: Recorded,
    gains: RecordedGains | None = None,
    costs: RecordedCosts | None = None,
) -> Replayed:
    """The policy must have been started. gains, costs: of the same record, if there are any yet."""
    records = recorded.steps
    gains = RecordedGains(records) if gains is None else gains
    costs = RecordedCosts(records, recorded.header) if costs is None else costs
    sums = RecordedSums(records)
    ladder = [cf for cf in policy.candidates() if cf != DENSE] if policy.shadow else []
    plans: list[Plan] = []
    followed = 0
    for i, record in enumerate(records):
        plan = policy.plan()
        plans.append(plan)
        if followed == i and _same_plan(plan, record):
            followed += 1
        report = record.report if followed > i else _modelled(i, plans, records, gains, costs)
        sum_norm, steady = sums.read(i, plan.read_sum), gains.steady(i, ladder)
        policy.observe(replace(report, sum_norm=sum_norm, steady=steady))
    return Replayed(
        tuple(plans),
        tuple(_events(plans, records)),
        followed,
        max(gains.cfs, default=DENSE),
        sums.modelled,
        gains.guessed,
        costs,
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


def _modelled(
    i: int,
    plans: Sequence[Plan],
    records: Sequence[StepRecord],
    gains: RecordedGains,
    costs: RecordedCosts,
) -> StepReport:
    """The report of step `i` had the plans been these."""
    recorded, plan = records[i].report, plans[i]
    timed = plans[i - 1].send if i >= 2 else nan  # the first step of all is never timed
    compress = costs.compress(timed) if i >= 2 else nan
    seconds = costs.seconds(timed) if i >= 2 else nan
    cfs = sorted({plan.send, *plan.probe} - {DENSE})
    return replace(
        recorded,
        cf=plan.send,
        measurements={cf: gains.at(i, cf) for cf in cfs},
        timed_cf=timed,
        seconds=seconds,
        median_seconds=seconds,
        compress_seconds=compress,
        decode_seconds=0.0,  # the model has it in compression
        exchange_seconds=costs.exchange(timed) if i >= 2 else nan,
        wire_bytes=costs.nbytes(plan.send),
        timed_bytes=costs.nbytes(timed) if i >= 2 else nan,
    )


def _events(plans: Sequence[Plan], records: Sequence[StepRecord]) -> list[Event]:
    events, before = [], DENSE
    for i, (plan, record) in enumerate(zip(plans, records, strict=True)):
        if (plan.send != before and i > 0) or plan.reason:
            events.append(Event(record.report.step, before, plan.send, plan.reason))
        before = plan.send
    return events
