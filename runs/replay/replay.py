"""Run a policy over a record: agreed statistics in, plans out.

While the policy plans what was recorded, it sees the recorded reports, bit for bit. From the first
step on where it plans otherwise, it sees what it would have seen by a model (reports.py). Sums and
layers it sees where its own plans read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan

from adaptive import Event, StepRecord
from policies import DENSE, LayerReport, Plan, Policy
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
    say how far it is, if that takes long. UsageError if the policy reads of layers what was not
    recorded."""
    records = recorded.steps
    reports = Reports(recorded) if reports is None else reports
    assumed = recorded.header.assumed if recorded.header is not None else {}
    known = {DENSE, *assumed}
    ladder = tuple(cf for cf in policy.candidates() if cf not in known) if policy.shadow else ()
    readings = _Readings(records, ladder)
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
            report, modelled = reports.modelled_at(i, plan.send, plan.probe, before, wanted)
        guessed += modelled
        sum_norm, layers = readings.read(i, plan)
        reads = plan.read_sum or plan.read_layers
        policy.observe(replace(report, sum_norm=sum_norm, layers=layers) if reads else report)
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
    layers = dict(plan.layers.get(plan.send, {}))
    return (
        plan.send == report.cf
        and measured == set(report.measurements)
        and (layers == record.layer_cfs)
    )


class _Readings:
    """What a replayed policy reads now and then, of all steps since it last did: the norm of the
    summed gradient, and each layer's statistics.

    Recorded ones are of the steps since the recorded policy last read. If those are others, the sum
    of the gradients' norms stands in for the norm of their sum (modelled: how often), and nothing
    tells what a layer's would be. ladder: the CFs whose steady-state gains are wanted.
    """

    def __init__(self, records: Sequence[StepRecord], ladder: tuple[float, ...]) -> None:
        self._records, self._ladder = records, ladder
        layers = [layer for record in records for layer in record.report.layers.values()]
        self._has_gains = {cf for layer in layers for cf in layer.steady}.issuperset(ladder)
        # Where the replayed and the recorded policy have last read:
        self._our_sum = self._their_sum = self._our_layers = self._their_layers = 0
        self.modelled = 0

    def read(self, i: int, plan: Plan) -> tuple[float, Mapping[str, LayerReport]]:
        """What the report of step `i` has: nan and nothing where the plan does not read. UsageError
        for layers of which the recorded policy has not read the same."""
        record = self._records[i]
        report = record.report
        read_sum = record.read_sum or isfinite(report.sum_norm)  # older records say only the latter
        same_sum = read_sum and self._our_sum == self._their_sum
        same_layers = bool(report.layers) and self._our_layers == self._their_layers
        sum_norm, layers = nan, {}
        if plan.read_layers:
            if not (same_layers and self._has_gains and (same_sum or not plan.read_sum)):
                raise UsageError(self._unknown(report.step))
            layers = {name: self._asked(layer, plan) for name, layer in report.layers.items()}
            self._our_layers = i
        if plan.read_sum:
            sum_norm = report.sum_norm if same_sum else self._modelled(i)
            self._our_sum = i
        self._their_sum = i if read_sum else self._their_sum
        self._their_layers = i if report.layers else self._their_layers
        return sum_norm, layers

    def _modelled(self, i: int) -> float:
        norms = [record.report.grad_norm for record in self._records[self._our_sum : i]]
        self.modelled += bool(norms)
        return sum(norms) if norms else nan

    def _asked(self, layer: LayerReport, plan: Plan) -> LayerReport:
        steady = {cf: gain for cf, gain in layer.steady.items() if cf in self._ladder}
        return replace(layer, sum_norm=layer.sum_norm if plan.read_sum else nan, steady=steady)

    def _unknown(self, step: int) -> str:
        first = self._records[self._our_layers].report.step
        return (
            f"TIMELINE: at step {step} this policy reads each layer's statistics since step "
            f"{first}, which cannot be told from the record, since no policy read them there; "
            f"accepted: a record of the same policy with the same interval (train --policy "
            f"'Accordion(per_layer=True)', or --layerwise on), or one CF for all layers"
        )
