"""Replaying a policy: the record while it follows, the model where it leaves it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import isnan, nan, sqrt
from pathlib import Path
from typing import Any

import pytest

from adaptive import Event, Fixed, GraVAC, Plan, Policy, StepRecord, StepReport
from policies import Measurement
from policies.base import Context
from policies.goodput import Goodput
from runs.records import Recorded, read_records
from runs.replay.costs import FROM_WAITING, NO_TIMES, RecordedCosts
from runs.replay.gains import RecordedGains
from runs.replay.replay import replay

DENSE_BYTES = 4000.0


def _measured(lost: float, total: float = 8.0) -> Measurement:
    """A measurement that lost this share, of the whole and of the sample."""
    return Measurement(
        kept=(1 - lost) * total,
        error=lost * total,
        total=total,
        grad=total / 2,
        sample_error=lost * total / 4,
        sample_total=total / 4,
    )


def _bytes(cf: float) -> float:
    return DENSE_BYTES if cf == 1 else 1.25 * DENSE_BYTES / cf


def _record(step: int, cf: float, lost: dict[float, float], **changes: Any) -> StepRecord:
    """Steps take 1 ms and 1 us a byte sent, dense or at 5/4 of dense / CF; compression takes 2 ms,
    the time comes a report later."""
    sent = _bytes(cf)
    compress = 0.0 if cf == 1 else 2e-3
    seconds = 1e-3 + 1e-6 * sent + compress
    timed = step >= 2
    values: dict[str, Any] = {
        "timed_cf": cf if timed else nan,
        "seconds": seconds if timed else nan,
        "median_seconds": seconds if timed else nan,
        "compress_seconds": compress if timed else nan,
        "exchange_seconds": 1e-6 * sent if timed else nan,
        "wire_bytes": sent,
        "dense_wire_bytes": DENSE_BYTES,
        "timed_bytes": sent if timed else nan,
        "grad_norm": 2.0,
        "lr": 0.1,
    }
    measurements = {c: _measured(share) for c, share in lost.items()}
    report = StepReport(step, cf, measurements, **{**values, **changes})
    return StepRecord(report, 0.0, nan, nan)


def _run(cfs: Sequence[float]) -> list[StepRecord]:
    return [_record(i, cf, {} if cf == 1 else {cf: 0.1}) for i, cf in enumerate(cfs)]


class Scripted(Policy):
    """Sends what it is told to, and keeps what it is told."""

    name = "scripted"

    def __init__(self, *plans: Plan) -> None:
        self.plans = plans
        self.seen: list[StepReport] = []

    def start(self, context: Context) -> None: ...

    def plan(self) -> Plan:
        return self.plans[len(self.seen)]

    def observe(self, report: StepReport) -> None:
        self.seen.append(report)

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None: ...


def _started(policy: Policy, cf_range: tuple[float, float] = (10, 1000)) -> Policy:
    policy.start(Context(cf_range, world_size=2, wire_bytes=_bytes))
    return policy


def test_a_record_is_read_back_with_cfs_for_keys(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    report = {"step": 3, "cf": 10.0, "measurements": {"10.0": {"kept": 0.1, "error": None}}}
    line = {"kind": "step", "report": report, "elapsed": 0.5, "t_sys": 1.0, "t_comp": None}
    path.write_text(json.dumps({**line, "status": {"floor": None}}) + "\n")
    [record] = read_records(path).steps
    assert record.report.measurements[10].kept == 0.1
    assert isnan(record.report.measurements[10].error)
    assert isnan(record.status["floor"])


# -- gains -------------------------------------------------------------------------------------


def test_gains_are_recorded_ones_or_lie_between_in_log_cf() -> None:
    gains = RecordedGains([_record(0, 10, {10: 0.2, 1000: 0.8})])
    assert gains.at(0, 10) == _measured(0.2)
    between = gains.at(0, 100)  # half way from 10 to 1000 in log CF
    assert between.gain("error_fed") == pytest.approx(0.5)
    assert between.gain("gradient") == pytest.approx(0.5)
    assert between.gain("raw") == pytest.approx(min(1, sqrt(0.5 * 8 / 4)))
    assert gains.at(0, 1000 * sqrt(10)).gain("raw") == pytest.approx(sqrt(0.05 * 8 / 4))
    assert gains.at(0, sqrt(10)).gain("error_fed") == pytest.approx(0.9)  # dense loses nothing
    assert gains.at(0, 100_000).gain("error_fed") == 0  # the line goes on, down to nothing


def test_norms_lie_between_recorded_ones_too() -> None:
    measured = [
        replace(_measured(lost), kept_norms=kept, grad_norms=5.0)
        for lost, kept in ((0.2, 4.0), (0.8, 2.0))
    ]
    report = StepReport(0, 10, dict(zip((10.0, 1000.0), measured, strict=True)), grad_norm=2.0)
    gains = RecordedGains([StepRecord(report, 0.0, nan, nan)])
    assert gains.at(0, 100).gain("raw") == pytest.approx(0.6)
    assert gains.at(0, sqrt(10)).gain("raw") == pytest.approx(0.9)


def test_a_gain_is_the_newest_one_with_the_totals_of_its_step() -> None:
    records = [
        _record(0, 1, {}),
        _record(1, 10, {10: 0.2, 20: 0.4}),
        _record(2, 10, {10: 0.3}),
        _record(3, 20, {20: 0.5}),
        _record(4, 20, {20: nan}, grad_norm=nan),
    ]
    gains = RecordedGains(records)
    assert gains.at(0, 20).gain("gradient") == pytest.approx(0.6)  # the first one, beforehand
    assert gains.at(2, 20).gain("gradient") == pytest.approx(0.6)
    assert gains.at(3, 10).gain("gradient") == pytest.approx(0.7)
    assert gains.at(2, 20).total == 8.0
    assert isnan(gains.at(4, 10).gain("gradient"))  # a step that was not finite
    assert isnan(RecordedGains(_run([1, 1])).at(1, 10).gain("gradient"))


def test_steady_gains_are_recorded_ones_or_error_fed_ones_stand_in() -> None:
    with_ladder = _record(0, 10, {10: 0.2}, steady_gain={10.0: 0.5, 20.0: 0.3, 40.0: 0.2})
    gains = RecordedGains([with_ladder, _record(1, 10, {10: 0.4, 100: 0.8})])
    assert gains.steady(0, (10.0, 20.0)) == (with_ladder.report.steady_gain, False)
    stand_in = {10: pytest.approx(0.6), 100: pytest.approx(0.2)}
    assert gains.steady(1, (10.0, 100.0)) == (stand_in, True)


# -- costs -------------------------------------------------------------------------------------


def test_costs_are_measured_or_on_the_fitted_line() -> None:
    costs = RecordedCosts(_run([1, 1, 1, 1, 10, 10, 10, 10]))
    assert costs.nbytes(1) == 4000
    assert costs.nbytes(10) == 500
    assert costs.nbytes(100) == pytest.approx(50)  # in proportion to 1 / CF
    assert costs.nbytes(5) == pytest.approx(1000)
    assert costs.nbytes(1.1) == 4000  # never more than dense
    assert costs.seconds(1) == pytest.approx(5e-3)
    assert costs.seconds(10) == pytest.approx(3.5e-3)
    assert costs.seconds(100) == pytest.approx(1e-3 + 50e-6 + 2e-3)
    assert costs.compress(100) == pytest.approx(2e-3)
    assert costs.exchange(10) == pytest.approx(500e-6)
    assert costs.exchange(100) == pytest.approx(50e-6)


def test_bytes_between_two_cfs_that_were_sent() -> None:
    records = [_record(0, 10, {}, wire_bytes=400.0), _record(1, 1000, {}, wire_bytes=100.0)]
    assert RecordedCosts(records).nbytes(100) == pytest.approx(200)


def test_costs_of_a_run_at_one_cf_go_by_its_waiting() -> None:
    costs = RecordedCosts(_run([10] * 5))
    assert costs.basis == FROM_WAITING
    assert costs.seconds(100) == pytest.approx(1e-3 + 50e-6 + 2e-3)
    costs = RecordedCosts(_run([10]))
    assert costs.basis == NO_TIMES
    assert isnan(costs.seconds(100))


# -- sums --------------------------------------------------------------------------------------


def test_sums_are_recorded_ones_over_the_same_interval_only() -> None:
    read = {3: 0.7, 6: 0.9}
    records = [
        replace(_record(i, 10, {10: 0.1}, sum_norm=read.get(i, nan)), read_sum=i in read)
        for i in range(8)
    ]

    def sums(*steps: int) -> tuple[dict[int, float], int]:
        policy = Scripted(*[Plan(10, read_sum=i in steps) for i in range(8)])
        replayed = replay(policy, Recorded(records, []))
        found = {i: report.sum_norm for i, report in enumerate(policy.seen)}
        return {i: norm for i, norm in found.items() if not isnan(norm)}, replayed.sums

    assert sums(*read) == (read, 0)
    assert sums(2, 6) == ({2: 2 * 2.0, 6: 4 * 2.0}, 2)  # norms of the steps since


# -- the replay --------------------------------------------------------------------------------


def test_what_was_recorded_is_seen_until_the_policy_leaves_it() -> None:
    records = _run([10] * 6)
    policy = Scripted(*[Plan(10)] * 3, *[Plan(100, (10,), reason="why")] * 3)
    replayed = replay(policy, Recorded(records, []))
    assert policy.seen[:3] == [record.report for record in records[:3]]
    assert replayed.followed == 3
    assert not replayed.identical
    assert [(e.step, e.cf_before, e.cf) for e in replayed.events] == [
        (3, 10, 100),
        (4, 100, 100),
        (5, 100, 100),
    ]
    left, after = policy.seen[3], policy.seen[4]
    assert (left.cf, left.wire_bytes) == (100, pytest.approx(50))
    assert set(left.measurements) == {10, 100}
    assert left.measurements[10] == records[3].report.measurements[10]
    assert left.measurements[100].gain("gradient") == pytest.approx(0.8)  # 10 % lost a decade
    assert (left.timed_cf, after.timed_cf) == (10, 100)
    assert after.median_seconds == pytest.approx(3.05e-3)
    assert after.timed_bytes == pytest.approx(50)
    assert after.grad_norm == records[4].report.grad_norm


def test_a_probe_that_was_not_recorded_is_a_departure_too() -> None:
    policy = Scripted(*[Plan(10, (20,))] * 2)
    replayed = replay(policy, Recorded(_run([10, 10]), []))
    assert replayed.followed == 0
    assert set(policy.seen[0].measurements) == {10, 20}


def test_its_own_plans_from_its_own_reports() -> None:
    """A record made by the policy itself, in another place, is replayed to the letter."""
    policy = _started(GraVAC(window=5, dense_window=3, cooldown=2))
    records, events, before = [], [], 1.0
    for i in range(200):
        plan = policy.plan()
        if (plan.send != before and i > 0) or plan.reason:
            events.append(Event(i, before, plan.send, plan.reason))
        before = plan.send
        lost = dict.fromkeys(sorted({plan.send, *plan.probe} - {1}), 0.2 + 0.1 * (i % 3))
        records.append(_record(i, plan.send, lost))
        policy.observe(records[-1].report)
    replayed = replay(_started(GraVAC(window=5, dense_window=3, cooldown=2)), Recorded(records, []))
    assert replayed.identical
    assert list(replayed.events) == events
    assert len(events) > 3


def test_a_policy_that_wants_steady_gains_gets_them() -> None:
    steady = {cf: 10 / (cf + 10) for cf in (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1000.0)}
    records = [_record(i, 1, {}, steady_gain=steady) for i in range(40)]
    policy = _started(Goodput(gain="error_fed"))
    replayed = replay(policy, Recorded(records, []))
    assert replayed.guessed == 0
    assert {plan.send for plan in replayed.plans} == {10.0}  # half the gain in a third of the time
    assert replay(_started(Goodput()), Recorded(_run([1] * 4), [])).guessed == 4


def test_a_fixed_policy_over_a_dense_run_without_gains() -> None:
    replayed = replay(_started(Fixed(10)), Recorded(_run([1] * 4), []))
    assert [plan.send for plan in replayed.plans] == [10] * 4
    assert replayed.largest == 1
