"""Goodput on a simulated network: straight to the best CF, and on when the network changes."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from math import inf, nan
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies import DENSE, Context, Goodput, StepReport, make_policy
from policies.goodput import FALLS, HASTE

LADDER = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1000.0)
OPENING = 10.0
WORK, COMPRESS, MODEL = 0.1, 0.005, 4e6  # seconds, seconds, bytes of a dense step


def nbytes(cf):
    return MODEL if cf == DENSE else MODEL * 1.3 / cf


def exposed(cf, rate):
    return nbytes(cf) / rate


def step_seconds(cf, rate):
    return WORK + (COMPRESS if cf != DENSE else 0.0) + exposed(cf, rate)


def t_comp(cf, rate, power=0.5):
    return cf ** (-FALLS * power) / step_seconds(cf, rate)


def best(rate):
    return max((DENSE, *LADDER), key=lambda cf: t_comp(cf, rate))


def started(steps=1000, local_steps=(1,), suits=0.5, **options):
    """A policy at the first CF of a run that has had so many steps: enough for any CF."""
    policy = Goodput(goal="time", **options)
    policy.start(Context((10, 1000), 2, wire_bytes=nbytes, local_steps=local_steps, power=suits))
    policy.load_state_dict({**policy.state_dict(), "steps": steps})
    return policy


def report(step, cf, rate, **changes):
    values = {
        "timed_cf": cf,
        "seconds": step_seconds(cf, rate),
        "median_seconds": step_seconds(cf, rate),
        "compress_seconds": 0.0 if cf == DENSE else COMPRESS,
        "exchange_seconds": exposed(cf, rate),
    }
    return StepReport(step, cf, **{**values, **changes})


def run(policy, rates):
    """CFs sent, when step i runs on a network of rates[i] bytes a second."""
    sent = []
    for step, rate in enumerate(rates):
        sent.append(policy.plan().send)
        policy.observe(report(step, sent[step], rate))
    return sent


@pytest.mark.parametrize("rate", [1e9, 1e8, 3e7, 1e7, 3e6, 1e6, 1e5, 1e4])
def test_straight_to_the_best_cf_and_never_another(rate):
    sent = run(started(), [rate] * 100)
    assert sent[:5] == [OPENING] * 5
    assert sent[15:] == [sent[15]] * 85
    assert t_comp(sent[15], rate) >= t_comp(best(rate), rate) / 1.05  # within the margin
    way = [cf for cf, _ in groupby(sent)]
    assert way == sorted(way, reverse=sent[15] < OPENING)  # no detour
    for before, after in pairwise(way):
        assert nbytes(after) <= 8 * nbytes(before) or after == DENSE  # that has no rung on the way


@pytest.mark.parametrize(("before", "after"), [(1e9, 1e6), (1e6, 1e9), (1e7, 3e5), (3e5, 1e7)])
def test_a_changed_network_is_followed_within_forty_steps(before, after):
    sent = run(started(), [before] * 60 + [after] * 80)
    assert t_comp(sent[59], before) >= t_comp(best(before), before) / 1.05
    assert t_comp(sent[100], after) >= t_comp(best(after), after) / 1.1
    assert len(set(sent[100:])) <= 2


RATES = st.floats(4.5, 9).map(lambda digits: 10**digits)


@settings(max_examples=30)
@given(RATES, RATES, st.integers(1, 80))
def test_a_change_at_any_time_is_followed(before, after, at):
    sent = run(started(), [before] * at + [after] * 80)
    reached = sum(t_comp(cf, after) for cf in sent[-20:]) / 20
    assert reached >= t_comp(best(after), after) / 1.3


@settings(max_examples=30)
@given(RATES, RATES, RATES, st.integers(20, 80), st.integers(1, 30))
@example(1e8, 10**7.5, 1e8, 20, 5)  # over just when it leaves dense
def test_a_change_in_between_is_not_remembered(before, for_a_while, after, at, steps):
    sent = run(started(), [before] * at + [for_a_while] * steps + [after] * 80)
    reached = sum(t_comp(cf, after) for cf in sent[-20:]) / 20
    assert reached >= t_comp(best(after), after) / 1.3


@pytest.mark.parametrize(("before", "after"), [(1e9, 1e6), (1e6, 1e9)])
def test_a_median_that_lags_behind_does_not_hold_it_up(before, after):
    policy, seconds, sent = started(), [], []
    for step in range(100):
        rate = before if step < 60 else after
        cf = policy.plan().send
        sent.append(cf)
        seconds = [*seconds, step_seconds(cf, rate)][-32:]
        policy.observe(report(step, cf, rate, median_seconds=median(seconds)))
    assert sent[59] != sent[70]
    assert set(sent[80:]) == {sent[80]}
    assert t_comp(sent[80], after) >= t_comp(best(after), after) / 1.05


def test_it_asks_for_no_gains():
    policy = started()
    for step in range(60):
        assert policy.plan().skip_gains
        policy.observe(report(step, policy.plan().send, 1e6))


def test_a_dense_step_in_fewer_bits_has_nothing_to_compress():
    """Other CFs are slow to compress, so it is the best one, and is tried before it was timed."""
    rate, bf16 = 1e8, 2.0
    policy, sent = Goodput(goal="time"), []
    told = {"assumed": {bf16: 0.95, 8.0: 0.95}, "uncoded": frozenset({bf16})}
    policy.start(Context((10, 1000), 2, wire_bytes=nbytes, **told))
    for step in range(200):
        sent.append(policy.plan().send)
        coding = 0.0 if sent[step] in (DENSE, bf16) else 0.05
        whole = WORK + coding + exposed(sent[step], rate)
        times = {"seconds": whole, "median_seconds": whole, "compress_seconds": coding}
        policy.observe(report(step, sent[step], rate, **times))
    assert set(sent[40:]) == {bf16}


@pytest.mark.parametrize(
    ("ranks", "rate", "first"),
    [
        (2, 1e10, DENSE),  # an exchange that is over soon
        (2, 1.5e8, 8.0),
        (2, 1e6, 10.0),  # none is: what takes least
        (16, 1e6, 8.0),
        (2, 0.0, 10.0),  # the link is not known
        (16, 0.0, 8.0),
    ],
)
def test_it_begins_at_the_smallest_cf_that_takes_little_or_at_what_takes_least(ranks, rate, first):
    """Sparse payloads go to each of the other ranks, those of CF 4 and 8 once round in shards."""

    def wire(cf):
        sparse = (ranks - 1) * 1.2 / cf
        return 25e6 * (sparse if cf > 8 else 2 * (ranks - 1) / ranks * 4 / cf)

    policy = Goodput()
    link = (0.0, 1 / rate if rate else 0.0)
    assumed = {4.0: 0.98, 8.0: 0.98}
    proven = 1.0 if ranks > 8 else inf
    told = {"assumed": assumed, "link": lambda: link, "proven": proven}
    policy.start(Context((10, 1000), ranks, wire_bytes=wire, **told))
    assert policy.plan().send == first


@pytest.mark.parametrize(
    ("rate", "early", "first"),
    [
        (1e10, 40.0, DENSE),
        (2.5e8, 40.0, 4.0),  # half a second, but a dense step would take four times as long
        (1e6, DENSE, 10.0),
        (1e6, 40.0, 40.0),
        (1e6, 30.0, 20.0),  # the largest of the ladder that may be sent early
        (0.0, 40.0, 10.0),
    ],
)
def test_a_large_model_begins_with_less_compression_or_where_its_updates_may(rate, early, first):
    policy = Goodput()
    link = (0.0, 1 / rate if rate else 0.0)
    told = {"assumed": {4.0: 0.98, 8.0: 0.98}, "link": lambda: link, "early": early}
    policy.start(Context((10, 1000), 2, wire_bytes=lambda cf: 5e8 / cf, **told))
    assert policy.plan().send == first


@pytest.mark.parametrize("goal", ["quality", "time"])
@pytest.mark.parametrize("opening", [1, 2, 3, 4, 5])
def test_a_run_that_begins_at_the_early_cf_does_not_leave_it_as_too_late(goal, opening):
    policy, sent = Goodput(goal=goal, opening=opening), []
    link = (0.0, 1 / 2e4)
    told = {"wire_bytes": nbytes, "link": lambda: link, "early": 40.0}
    policy.start(Context((10, 1000), 2, **told))
    for step in range(20):
        sent.append(policy.plan().send)
        policy.observe(report(step, sent[-1], 2e4))
    assert min(sent) == 40.0


@pytest.mark.parametrize("steps", [1, 4, 16, 50])
@pytest.mark.parametrize(("ranks", "first"), [(2, 10.0), (16, 8.0)])
def test_with_local_steps_it_begins_where_it_does_without(steps, ranks, first):
    policy = Goodput()
    told = {"assumed": {8.0: 0.98}, "local_steps": (steps,), "link": lambda: (0.0, 1e-6)}
    told["proven"] = 1.0 if ranks > 8 else inf
    policy.start(Context((10, 1000), ranks, wire_bytes=lambda cf: 1e8 / min(cf, 10), **told))
    assert policy.plan().send == first


def seen(proven, goal="quality", assumed=(8.0,)):
    """The CFs that a run on a slow link sends."""
    policy, sent = Goodput(goal=goal), []
    of = dict.fromkeys(assumed, 0.98)
    policy.start(Context((10, 1000), 16, wire_bytes=nbytes, assumed=of, proven=proven))
    for step in range(200):
        sent.append(policy.plan().send)
        policy.observe(report(step, sent[step], 1e5))
    return {*sent}, policy


def test_among_many_ranks_only_what_is_assumed_to_lose_nothing_is_sent():
    assert max(seen(inf)[0]) > 20
    sent, policy = seen(1.0)
    assert sent == {8.0}
    assert policy.status()["allowed"] == 8
    sent, policy = seen(20.0)
    assert sent == {10, 20}  # int4 would exchange gradients, the others updates
    assert policy.status()["allowed"] == 20
    assert max(seen(1.0, goal="time")[0]) > 20
    assert max(seen(1.0, assumed=())[0]) > 20  # there is nothing else


def test_a_dense_step_in_fewer_bits_exchanges_what_sparse_cfs_do():
    """So among many ranks it may be sent beside them, where int4 may not."""
    policy, assumed = Goodput(), {2.0: 1.0, 8.0: 0.98}
    policy.start(Context((10, 1000), 16, assumed=assumed, uncoded=(2.0,), proven=20.0))
    assert [policy.allowed_from(cf) for cf in (2.0, 8.0)] == [1, inf]


def test_a_state_of_few_ranks_goes_on_among_many():
    """It leaves its CF at once, and says why."""
    _, few = seen(inf)
    many = Goodput()
    many.start(Context((10, 1000), 16, wire_bytes=nbytes, assumed={8.0: 0.98}, proven=1.0))
    many.load_state_dict(few.state_dict())
    many.rescale()
    sent, reasons = [], []
    for step in range(200, 260):
        sent.append(many.plan().send)
        reasons.append(many.plan().reason)
        many.observe(report(step, sent[-1], 1e5))
    assert sent[0] > 10
    assert sent[-1] == 8
    assert any("among 16 ranks" in reason for reason in reasons)


@pytest.mark.parametrize(("rate", "says"), [(1e9, "dense is right"), (1e6, "")])
def test_it_says_when_dense_is_right(rate, says):
    policy = started()
    run(policy, [rate] * 40)
    assert policy.verdict().startswith(says)
    assert bool(policy.verdict()) == bool(says)


def test_reasons_carry_the_numbers():
    policy = started()
    reasons = []
    for step in range(20):
        plan = policy.plan()
        reasons.append(plan.reason)
        policy.observe(report(step, plan.send, 1e6))
    told = next(reason for reason in reasons if reason)
    assert told.splitlines()[0].endswith("as much progress a second as CF 10")
    for words in (" a step instead of ", "97% fewer bytes", "instead of 0.750 of dense's progress"):
        assert words in told
    assert "T_comp" not in told
    assert policy.status()["t_comp"] == pytest.approx(t_comp(320.0, 1e6), rel=0.01)


def test_noise_does_not_make_it_flap():
    generator = __import__("random").Random(0)
    policy = started()
    switches, last = 0, DENSE
    for step in range(600):
        send = policy.plan().send
        switches += send != last
        last = send
        seconds = step_seconds(send, 1e6) * generator.uniform(0.9, 1.1)
        policy.observe(report(step, send, 1e6, seconds=seconds))
    assert switches <= 6


def test_a_pause_between_two_steps_does_not_count():
    policy = started()
    run(policy, [1e6] * 30)
    before = policy.t_comp()
    policy.observe(report(30, 20.0, 1e6, seconds=50.0, exchange_seconds=40.0))
    assert policy.t_comp() == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("stop", [0, 5, 10, 11, 40, 70])
def test_goes_on_from_its_state(stop):
    rates = [1e7] * 40 + [3e5] * 60
    straight = run(started(), rates)
    first, second = started(), started()
    sent = run(first, rates[:stop])
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert sent + run(second, rates[stop:]) == straight


anything = st.one_of(st.floats(), st.floats(0, 10))


@settings(max_examples=30)
@given(
    moves=st.lists(st.tuples(anything, anything, anything), max_size=40),
    cf_range=st.sampled_from([(10.0, 1000.0), (1.0, 40.0), (64.0, 64.0), (1.0, 1.0)]),
)
def test_any_reports_leave_it_inside_the_range(moves, cf_range):
    policy = Goodput(goal="time", opening=2, cooldown=1)
    policy.start(Context(cf_range, 4))
    for step, (seconds, compress, exchange) in enumerate(moves):
        plan = policy.plan()
        assert plan.send == DENSE or cf_range[0] <= plan.send <= cf_range[1]
        policy.observe(
            report(
                step,
                plan.send,
                1e6,
                seconds=seconds,
                compress_seconds=compress,
                exchange_seconds=exchange,
            )
        )
        json.dumps(policy.state_dict(), allow_nan=False)


def test_what_is_not_known_is_no_promise():
    policy = started()
    assert policy.t_comp() == {}
    policy.observe(StepReport(0, DENSE, timed_cf=nan))
    assert policy.t_comp() == {}
    assert policy.plan().send == OPENING


def test_no_large_cf_is_sent_early():
    """The first gradients are the largest, and would wait the longest."""
    sent = run(started(steps=0), [1e4] * 60)
    for step, cf in enumerate(sent):
        assert cf <= max(OPENING, HASTE * step)
    assert sent[5] == 40.0
    assert sent[-1] > 100


@pytest.mark.parametrize(("share", "goes_to"), [(1.005, 20.0), (1.02, 10.0)])
def test_a_smaller_cf_must_promise_a_fifth_of_the_margin(share, goes_to):
    """share: what CF 10 promises beside CF 20, once its wait is as short as that takes."""
    policy = Goodput(goal="time", opening=1, cooldown=1)
    policy.start(Context((10, 20), 2, wire_bytes=nbytes))
    run(policy, [1e6] * 10)
    assert policy.plan().send == 20.0
    here = policy.t_comp()[20.0]
    policy._time._typical[10.0] += 10 ** (-FALLS * 0.5) / (share * here) - policy._time.seconds(
        10.0
    )
    assert policy.t_comp()[10.0] == pytest.approx(share * here)
    policy.observe(report(10, 20.0, 1e6))
    assert policy.plan().send == goes_to


def test_times_may_be_as_large_as_numbers_go():
    policy = started()
    times = dict.fromkeys(("seconds", "median_seconds", "exchange_seconds"), 1e308)
    for step in range(30):
        policy.observe(report(step, policy.plan().send, 1e6, **times))
        json.dumps(policy.state_dict(), allow_nan=False)


@pytest.mark.parametrize(("named", "suits", "power"), [(2.0, 0.5, 2.0), (None, 0.2, 0.2)])
def test_the_gain_counts_to_a_power(named, suits, power):
    """The one that suits what is sent, unless the script names another."""
    rate = 1e6
    policy = started(power=named, suits=suits)
    run(policy, [rate] * 300)
    promised = policy.t_comp()
    for cf in LADDER:
        assert promised[cf] == pytest.approx(t_comp(cf, rate, power), rel=0.02)
    assert promised[policy.plan().send] >= max(promised.values()) / 1.06


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"margin": 0}, "margin=0"),
        ({"cooldown": 0}, "cooldown=0"),
        ({"step_size": 1}, "step_size=1"),
        ({"opening": 0}, "opening=0"),
        ({"power": 0}, "power=0"),
    ],
)
def test_errors_name_the_argument(options, named):
    with pytest.raises(ValueError, match=named):
        make_policy("goodput", **options)


def test_dense_is_no_conclusion_before_its_cooldown_is_over():
    policy, told = started(cooldown=4, opening=2), []
    for step in range(10):
        plan = policy.plan()
        told.append((plan.send, bool(policy.verdict())))
        policy.observe(report(step, plan.send, 1e9))
    assert told == [(OPENING, False)] * 2 + [(DENSE, False)] * 4 + [(DENSE, True)] * 4


STEPS = (1, 2, 4, 8, 16, 32)


def run_with_local_steps(policy, rates):
    """(CF, local steps) of each exchange, when round i runs on a network of rates[i] bytes a
    second."""
    taken, chosen = 1, []
    for step, rate in enumerate(rates):
        plan = policy.plan()
        chosen.append((plan.send, plan.local_steps))
        seconds = step_seconds(plan.send, rate) + (taken - 1) * WORK
        times = {"seconds": seconds, "median_seconds": seconds, "timed_steps": taken}
        policy.observe(report(step, plan.send, rate, **times))
        taken = plan.local_steps
    return chosen


def with_local_steps(**options):
    return started(local_steps=STEPS, **options)


def test_on_a_fast_network_it_takes_no_local_steps():
    chosen = run_with_local_steps(with_local_steps(), [1e8] * 300)
    assert {steps for _, steps in chosen} == {1}


def test_on_a_slow_network_it_takes_local_steps_and_gives_them_up_on_a_faster_one():
    policy = with_local_steps()
    rates = [1e4] * 200 + [1e9] * 100
    chosen = run_with_local_steps(policy, rates)
    first = next(i for i, (_, steps) in enumerate(chosen) if steps > 1)
    assert len({steps for _, steps in chosen[first + 40 : 200]}) == 1
    cf = chosen[first][0]
    assert all(other >= cf for other, steps in chosen if steps > 1)
    assert chosen[-1] == (best(1e9), 1)


def test_without_a_choice_of_local_steps_it_plans_none():
    assert started().plan().local_steps == 0
    assert with_local_steps().plan().local_steps == 1


def test_a_state_with_another_number_of_local_steps_is_refused():
    policy = with_local_steps()
    run_with_local_steps(policy, [1e4] * 200)
    state = json.loads(json.dumps(policy.state_dict()))
    again = with_local_steps()
    again.load_state_dict(state)
    assert again.plan() == policy.plan()
    assert again.plan().local_steps > 1
    with pytest.raises(ValueError, match="local_steps"):
        with_local_steps().load_state_dict({**state, "local_steps": 3})


def test_a_network_that_becomes_fast_ends_local_steps():
    chosen = run_with_local_steps(with_local_steps(), [1e4] * 200 + [1e9] * 200)
    assert chosen[199][1] > 1
    assert chosen[-1][1] == 1


def test_local_steps_come_and_stay_a_cooldown_long():
    """Also where a CF need stay for its `opening` only, whenever the network changes."""
    for slow in range(12, 45, 3):
        policy = with_local_steps(opening=2, cooldown=12)
        chosen = run_with_local_steps(policy, [1e4] * slow + [1e9] * 60)
        at = [0, *(i for i in range(1, len(chosen)) if chosen[i] != chosen[i - 1]), len(chosen)]
        for before, i, after in zip(at, at[1:], at[2:], strict=False):
            if chosen[i][1] != chosen[i - 1][1]:
                assert i - before >= 12 <= after - i
        assert max(steps for _, steps in chosen) > 1


@pytest.mark.parametrize("rate", [1e5, 3e5, 1e6])
def test_it_does_not_go_to_and_fro(rate):
    policy = Goodput(goal="time")
    policy.start(Context((10, 1000), 8, wire_bytes=nbytes, local_steps=STEPS))
    chosen = [steps for _, steps in run_with_local_steps(policy, [rate] * 600)]
    assert sum(a != b for a, b in pairwise(chosen)) < 8
    assert len(set(chosen[-200:])) == 1


def test_compression_that_takes_long_is_no_reason_for_local_steps():
    """A network that is fast enough has none, whatever the machine needs to compress."""
    policy, taken = with_local_steps(), 1
    for step in range(100):
        plan = policy.plan()
        coding = 0.0 if plan.send == DENSE else WORK
        seconds = taken * WORK + coding + exposed(plan.send, 1e9)
        times = {"seconds": seconds, "median_seconds": seconds, "compress_seconds": coding}
        policy.observe(report(step, plan.send, 1e9, **times, timed_steps=taken))
        taken = plan.local_steps
        assert taken == 1
