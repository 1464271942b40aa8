"""Replays of policies that read layers: what was recorded, and what cannot be told from it."""

from __future__ import annotations

import random
from dataclasses import replace
from math import isnan, nan, prod
from pathlib import Path

import pytest

from adaptive import Event, Fixed, Header, Plan, Policy, StepRecord, StepReport
from policies import Accordion, Measurement
from policies.base import Context
from runs.config import TrainConfig
from runs.options import make_config
from runs.parser import UsageError
from runs.records import Recorded
from runs.replay.make import start_policy
from runs.replay.replay import replay
from runs.replay.source import Source

SHAPES = {"a": (40, 100), "b": (10, 100), "c": (10, 1)}
CF_RANGE = (10.0, 1000.0)
STEPS, POISONED = 90, 37


def _started(policy: Policy) -> Policy:
    policy.start(Context(CF_RANGE, world_size=2, layers=SHAPES))
    return policy


def _norm(step: int) -> float:
    """Of the whole gradient."""
    return nan if step == POISONED else 1 + random.Random(step).random()


def _report(step: int, plan: Plan, reads_layers: bool, since: int) -> StepReport:
    """What a controller might have said; of layers, only what the plan reads."""
    rng = random.Random(1000 + step)
    norms = {name: rng.uniform(1, 2) for name in SHAPES}
    if since <= POISONED < step:
        norms = dict.fromkeys(SHAPES, nan)
    return StepReport(
        step,
        plan.send,
        {cf: Measurement(0.5, 0.5, 1, 1, 0.5, 1) for cf in {plan.send, *plan.probe} - {1}},
        grad_norm=_norm(step),
        lr=0.1,
        sum_norm=rng.uniform(1, 2) if plan.read_sum else nan,
        layer_norms=norms if plan.read_sum and reads_layers else {},
        wire_bytes=100.0,
        dense_wire_bytes=4.0 * sum(map(prod, SHAPES.values())),
    )


def _record_of(policy: Policy, steps: int = STEPS) -> tuple[list[Plan], Recorded]:
    """A run of a policy, in another place than a replay."""
    plans: list[Plan] = []
    recorded = Recorded([], [])
    before, since = 1.0, 0
    for i in range(steps):
        plan = policy.plan()
        if (plan.send != before and i > 0) or plan.reason:
            recorded.events.append(Event(i, before, plan.send, plan.reason))
        report = _report(i, plan, policy.layerwise, since)
        policy.observe(report)
        layer_cfs = dict(plan.layers)
        recorded.steps.append(
            StepRecord(report, 0.0, nan, nan, layer_cfs=layer_cfs, read_sum=plan.read_sum)
        )
        plans.append(plan)
        before, since = plan.send, i if plan.read_sum else since
    return plans, recorded


def _accordion(interval: int = 6) -> Policy:
    return _started(Accordion(interval=interval, eta=0.2, per_layer=True))


class Reads(Policy):
    """Reads in the steps that it is told to, and keeps what it finds."""

    def __init__(self, steps: dict[int, Plan], layerwise: bool = True) -> None:
        self.steps, self.layerwise = steps, layerwise
        self.seen: list[StepReport] = []

    def start(self, context: Context) -> None: ...

    def plan(self) -> Plan:
        return self.steps.get(len(self.seen), Plan(10))

    def observe(self, report: StepReport) -> None:
        self.seen.append(report)

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None: ...


BOTH = Plan(10, read_sum=True)


def _seen(recorded: Recorded, steps: dict[int, Plan], layerwise: bool = True) -> Reads:
    policy = Reads(steps, layerwise)
    replay(policy, recorded)
    return policy


@pytest.fixture(scope="module")
def by_layer() -> Recorded:
    """Read at steps 5, 11, 17, ..., each time of the six steps before (five at first)."""
    return _record_of(_accordion())[1]


# -- one's own record --------------------------------------------------------------------------


def test_a_policy_of_layers_replays_its_own_record_bit_for_bit() -> None:
    plans, recorded = _record_of(_accordion())
    replayed = replay(_accordion(), recorded)
    assert list(replayed.plans) == plans
    assert list(replayed.events) == recorded.events
    assert replayed.identical
    assert (replayed.sums, replayed.guessed) == (0, 0)
    assert len({str(plan.layers) for plan in plans}) > 2, "one that never moved proves nothing"


def test_the_readings_of_ones_own_record_are_those_recorded(by_layer: Recorded) -> None:
    reads = {i: BOTH for i, record in enumerate(by_layer.steps) if record.report.layer_norms}
    seen = _seen(by_layer, reads).seen
    assert repr([report.layer_norms for report in seen]) == repr(  # nan is nan
        [record.report.layer_norms for record in by_layer.steps]
    )


# -- other intervals ---------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [1, 2, 5, 7, 12, 60])
def test_another_interval_cannot_be_told_from_the_record(interval: int, by_layer: Recorded) -> None:
    first = interval - 1
    with pytest.raises(UsageError, match=f"at step {first} .*since step 0, which cannot be told"):
        replay(_accordion(interval), by_layer)


def test_an_interval_longer_than_the_record_reads_nothing(by_layer: Recorded) -> None:
    assert not any(plan.read_sum for plan in replay(_accordion(2 * STEPS), by_layer).plans)


def test_readings_of_the_same_steps_are_those_recorded_whatever_is_sent(by_layer: Recorded) -> None:
    """After plans that are not the record's, too: the gradients are taken to be the same."""
    reads = {i: replace(BOTH, send=50.0) for i in (5, 11, 17)}
    seen = _seen(by_layer, reads).seen
    for i in reads:
        assert repr(seen[i].layer_norms) == repr(by_layer.steps[i].report.layer_norms)
    with pytest.raises(UsageError, match="since step 5, which cannot"):
        _seen(by_layer, {5: BOTH, 17: BOTH})


def test_what_a_policy_does_not_read_is_not_seen(by_layer: Recorded) -> None:
    """Followed or modelled: a report has what this policy asked for, not the recorded one."""
    for send in (10.0, 50.0):
        alone = {4: Plan(send), 5: Plan(send, read_sum=True), 23: Plan(send, read_sum=True)}
        seen = _seen(by_layer, alone, layerwise=False).seen
        assert [i for i, report in enumerate(seen) if not isnan(report.sum_norm)] == [5, 23]
        assert not any(report.layer_norms for report in seen)


# -- refusals ----------------------------------------------------------------------------------


def test_a_record_without_what_is_read_is_refused_and_says_how_to_record_it() -> None:
    nothing = _record_of(_started(Fixed(10)))[1]
    whole = _record_of(_started(Accordion(interval=6, eta=0.2)))[1]
    for recorded in (whole, nothing):
        with pytest.raises(UsageError, match=r"cannot be told.*train --policy 'Accordion"):
            replay(_accordion(), recorded)


@pytest.mark.parametrize("header", [True, False])
def test_a_record_that_names_no_layers_says_what_to_do(
    header: bool, by_layer: Recorded, tmp_path: Path
) -> None:
    head = Header(
        "gravac", {}, CF_RANGE, 2, "topk", "momentum", 5010, 20040.0, {1.0: 1.0}, {1.0: 20040.0}
    )
    recorded = Recorded(by_layer.steps, [], head if header else None)
    given = {"policy": "accordion", "per_layer": True, "log_dir": str(tmp_path)}
    config: TrainConfig = make_config(given)
    source = Source(tmp_path / "timeline.jsonl", recorded, None)
    named = "--policy Accordion(per_layer=True)"
    with pytest.raises(UsageError) as error:
        start_policy(config, source)
    for part in (named, "layers are not known", "train --policy", "without CFs of layers"):
        assert part in str(error.value)
