"""Budgets of bytes and of time, on hand-made networks."""

from __future__ import annotations

import json
from itertools import pairwise
from math import inf, isnan, nan
from random import Random

import pytest

from policies.base import DENSE, Context, StepReport
from policies.budget import BRIEF, Budget, WireBytes
from tests.unit.plans import reasons, switches

RANGE = (10.0, 1000.0)
DENSE_BYTES = 1e6


class Network:
    """A compressed step sends `overhead` times dense / CF, and 100 bytes of headers."""

    def __init__(self, policy, *, compute=0.1, rate=1e7, overhead=2.0, noise=None):
        self.policy, self.compute, self.rate, self.overhead = policy, compute, rate, overhead
        self.compress, self.latency, self.noise = 0.01, 0.0, noise
        self.plans, self.last = [], None
        self.silent = False  # no times are reported
        policy.start(self.context())

    def context(self):
        return Context(RANGE, 2, wire_bytes=lambda cf: self.bytes(cf))

    def bytes(self, cf):
        return DENSE_BYTES if cf == DENSE else self.overhead * DENSE_BYTES / cf + 100

    def share(self, cf):
        exchange = self.bytes(cf) / self.rate
        return exchange / (self.compute + self.latency + exchange + self.compress * (cf != DENSE))

    def step(self):
        plan = self.policy.plan()
        timing = {}
        if self.last is not None and not self.silent:
            cf = self.last.send
            compress = self.compress * (cf != DENSE)
            noise = self.noise() if self.noise else 1.0
            exchange = noise * (self.latency + self.bytes(cf) / self.rate)
            seconds = noise * self.compute + exchange + compress
            timing = {"timed_cf": cf, "seconds": seconds, "median_seconds": seconds}
            timing |= {"compress_seconds": compress, "exchange_seconds": exchange}
        self.plans.append(plan)
        self.last = plan
        self.policy.observe(
            StepReport(
                len(self.plans) - 1,
                plan.send,
                wire_bytes=self.bytes(plan.send),
                dense_wire_bytes=DENSE_BYTES,
                **timing,
            )
        )
        return plan

    def run(self, steps):
        return [self.step() for _ in range(steps)]


def grid():
    policy = Budget()
    policy.start(Context(RANGE, 2))
    return (DENSE, *policy.candidates())


# Bytes


@pytest.mark.parametrize("limit", [1e6, 4e4, 2500])
def test_the_smallest_cf_within_the_bytes(limit):
    run = Network(Budget(bytes_per_step=limit))
    plans = run.run(40)
    wanted = next(cf for cf in grid() if run.bytes(cf) <= limit)
    assert {plan.send for plan in plans} == {wanted}


def test_it_moves_when_a_step_sends_other_bytes_than_computed():
    run = Network(Budget(bytes_per_step=4e4))
    sent = run.step().send
    run.overhead = 8.0
    plans = run.run(10)
    assert plans[0].send == sent
    assert plans[1].reason.startswith(f"scale up {sent:.4g} -> ")
    assert plans[1].reason.endswith("; bytes_per_step allows 40000")
    assert len(reasons(plans)) == switches(plans) == 1
    assert run.bytes(plans[-1].send) <= 4e4


def test_a_budget_that_nothing_keeps_to():
    run = Network(Budget(bytes_per_step=10.0))
    assert {plan.send for plan in run.run(20)} == {1000.0}


def test_bytes_do_not_flap_when_sizes_do():
    run = Network(Budget(bytes_per_step=4e4))
    dice = Random(0)
    for _ in range(500):
        run.overhead = 2.0 + dice.uniform(-0.2, 0.2)
        run.step()
    assert switches(run.plans) <= 8


def test_reports_without_bytes_move_nothing():
    policy = Budget(bytes_per_step=4e4)
    policy.start(Context(RANGE, 2, wire_bytes=lambda cf: 1e9 / cf))
    for step in range(10):
        assert policy.plan().send == 1000.0
        policy.observe(StepReport(step, 1000.0))


# Share


@pytest.mark.parametrize("rate", [1e4, 1e6, 1e7, 1e9])
@pytest.mark.parametrize("overhead", [1.5, 8.0])
def test_the_smallest_cf_within_the_share(rate, overhead):
    run = Network(Budget(share=0.2), rate=rate, overhead=overhead)
    run.run(150)
    wanted = next((cf for cf in grid() if run.share(cf) <= 0.2), 1000.0)
    sent = run.policy.plan().send
    assert abs(grid().index(sent) - grid().index(wanted)) <= 1  # hysteresis may keep a neighbour
    assert run.share(sent) <= 0.2 * 1.25 or sent == 1000.0


def test_opening_dense_then_the_choice():
    plans = Network(Budget(share=0.2)).run(BRIEF + 1)
    assert [plan.send for plan in plans[:BRIEF]] == [DENSE] * BRIEF
    assert plans[BRIEF].reason == (
        "scale up 1 -> 10: communication takes 50% of a dense step (0.10 s of 0.20 s), more than "
        "20%; CF 10 is predicted to need 17%"
    )


def test_dense_where_the_network_is_fast_enough():
    run = Network(Budget(share=0.2), rate=1e9)
    plans = run.run(400)
    assert [plan.send for plan in plans].count(DENSE) == 400 - BRIEF
    looks, back = reasons(plans)  # once on this network
    assert looks == "scale up 1 -> 10: looks at CF 10 for 5 steps, to tell latency from rate"
    assert back == (
        "back to dense from CF 10: after the look, communication takes 0.99% of a dense step "
        "(1.0 ms of 0.10 s), within 20%"
    )


@pytest.mark.parametrize("rate", [1e7, 1e9])
def test_latency_does_not_count(rate):
    """No CF makes it shorter."""
    run = Network(Budget(share=0.2), rate=rate)
    run.latency = 0.1
    run.run(300)
    wanted = next(cf for cf in grid() if run.share(cf) <= 0.2)
    assert run.policy.plan().send == wanted
    assert run.policy.status()["bandwidth"] == pytest.approx(rate)


@pytest.mark.parametrize("offset", [0, 13])
@pytest.mark.parametrize(("first", "then"), [(1e8, 2e6), (2e6, 1e8), (2e6, 2e5), (2e5, 2e6)])
def test_a_network_that_changes_is_followed_within_two_windows(first, then, offset):
    run = Network(Budget(share=0.2), rate=first)
    run.run(100 + offset)
    before = run.policy.plan().send
    run.rate = then
    run.run(40)
    sent = run.policy.plan().send
    assert (sent > before) == (then < first)
    wanted = next(cf for cf in grid() if run.share(cf) <= 0.2)
    assert abs(grid().index(sent) - grid().index(wanted)) <= 1


def test_a_machine_that_slows_down_is_not_taken_for_the_network():
    run = Network(Budget(share=0.2), rate=2e6)
    run.run(100)
    before = run.policy.plan().send
    run.compute = 0.13
    run.run(60)
    assert run.policy.plan().send <= before  # more compute: the same bytes are a smaller share
    assert run.share(run.policy.plan().send) <= 0.25


@pytest.mark.parametrize("seed", range(2))
def test_noise_moves_it_rarely_and_not_far(seed):
    dice = Random(seed)
    run = Network(Budget(share=0.2), rate=2e6, noise=lambda: dice.lognormvariate(0, 0.05))
    run.run(200)
    plans = run.run(2000)
    homes = [b.send for a, b in pairwise(plans) if a.send != b.send][1::2]
    assert switches(plans) <= 2000 / 25
    assert {run.share(cf) for cf in homes} <= {s for s in map(run.share, grid()) if 0.1 < s < 0.35}


def test_without_times_it_stays_dense():
    policy = Budget(share=0.2)
    policy.start(Context(RANGE, 2))
    for step in range(200):
        assert policy.plan().send == DENSE
        policy.observe(StepReport(step, DENSE, wire_bytes=1e6, dense_wire_bytes=1e6))
    assert isnan(policy.status()["bandwidth"])


@pytest.mark.parametrize("told", [True, False])
def test_the_largest_cf_looks_at_a_smaller_one_and_comes_back(told):
    run = Network(Budget(share=0.2, look_every=2), rate=1e4)
    run.run(50)
    assert run.policy.plan().send == 1000.0
    run.rate = 5e3  # nothing is known of the other CFs on this network
    plans = run.run(40)
    run.silent = not told
    plans += run.run(40)
    assert plans[-1].send == 1000.0
    [looks, back] = [plan for plan in plans if plan.reason]
    assert 100.0 < looks.send < 1000.0
    assert "after the look, communication takes " in back.reason


def test_with_nobody_to_send_to_it_is_dense_and_looks_at_nothing():
    run = Network(Budget(share=0.2))
    run.bytes = lambda cf: 0.0
    run.policy.start(Context(RANGE, 1, wire_bytes=run.bytes))
    assert {plan.send for plan in run.run(400)} == {DENSE}
    status = run.policy.status()
    assert (status["share"], status["exploring"]) == (0.0, 0.0)


def test_a_range_of_one_cf():
    run = Network(Budget(share=0.2), rate=1e6)
    run.policy.start(Context((50.0, 50.0), 2))
    assert {plan.send for plan in run.run(100)} == {DENSE, 50.0}
    assert run.policy.plan().send == 50.0
    policy = Budget()
    policy.start(Context((1.0, 1.0), 2))
    run.policy = policy
    assert {plan.send for plan in run.run(100)} == {DENSE}


def test_status_tells_share_and_bandwidth():
    run = Network(Budget(share=0.2))
    run.run(100)
    status = run.policy.status()
    assert status["bandwidth"] == pytest.approx(1e7)
    assert status["share"] == pytest.approx(run.share(run.policy.plan().send))


@pytest.mark.parametrize("settings", [{"share": 0.2}, {"bytes_per_step": 4e4}])
@pytest.mark.parametrize("at", [0, 7, 60, 142])
def test_goes_on_exactly_from_its_state(settings, at):
    def history(reload_at):
        run = Network(Budget(**settings), rate=1e8)
        for step in range(300):
            run.rate = 1e8 if step < 110 else 1e6
            if step == reload_at:
                state = json.dumps(run.policy.state_dict(), allow_nan=False)
                run.policy = Budget(**settings)
                run.policy.start(run.context())
                run.policy.load_state_dict(json.loads(state))
            run.step()
        return run.plans

    assert history(at) == history(None)


def test_refuses_the_state_of_other_settings():
    one, other = Budget(share=0.2), Budget(share=0.3)
    for policy in (one, other):
        policy.start(Context(RANGE, 2))
    with pytest.raises(ValueError, match=r"'budget'.*share=0\.2.*0\.3"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"bytes_per_step": 0}, ValueError, "bytes_per_step=0: must be a finite number > 0"),
        ({"bytes_per_step": "1"}, TypeError, "bytes_per_step='1'"),
        ({"bytes_per_step": inf}, ValueError, "bytes_per_step=inf"),
        ({"share": 0}, ValueError, r"share=0: must be in \(0, 1\]"),
        ({"share": 1.1}, ValueError, "share=1.1"),
        ({"share": 0.2, "bytes_per_step": 5}, ValueError, "share=0.2: must not be given with"),
        ({"window": 4}, ValueError, "window=4: must be an int >= 5"),
        ({"look_every": 0}, ValueError, "look_every=0"),
        ({"hysteresis": -1}, ValueError, "hysteresis=-1"),
    ],
)
def test_settings_are_checked(settings, error, message):
    with pytest.raises(error, match=message):
        Budget(**settings)


# The parts


def sent(cf, nbytes, dense=DENSE_BYTES):
    return StepReport(0, cf, wire_bytes=nbytes, dense_wire_bytes=dense)


def test_bytes_measured_then_computed():
    wire = WireBytes(lambda cf: 1e6 / cf)
    wire.observe(sent(DENSE, 9e5))
    assert (wire.at(20.0), wire.at(DENSE)) == (5e4, 9e5)
    wire.observe(sent(20.0, 9.0))
    assert (wire.at(20.0), wire.at(DENSE)) == (9.0, 9e5)
    wire.observe(sent(40.0, nan))
    assert wire.at(40.0) == 2.5e4
    wire.observe(sent(DENSE, 1e5, dense=1e5))  # another model, so to speak
    assert (wire.at(20.0), wire.at(DENSE)) == (5e4, 1e5)
