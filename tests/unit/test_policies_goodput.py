"""Goodput on a simulated network: straight to the best CF, and on when the network changes."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from math import nan
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies import DENSE, Context, Goodput, StepReport, make_policy
from policies.goodput import BRIEF, FILLED, FOREIGN, RESTING, WATCHED

GAINS = {10.0: 0.53, 20.0: 0.38, 40.0: 0.22, 80.0: 0.12, 160.0: 0.07, 320.0: 0.03, 640.0: 0.015}
GAINS[1000.0] = 0.006
OPENING = 10.0
WORK, COMPRESS, MODEL = 0.1, 0.005, 4e6  # seconds, seconds, bytes of a dense step


def nbytes(cf):
    return MODEL if cf == DENSE else MODEL * 1.3 / cf


def exposed(cf, rate):
    return nbytes(cf) / rate


def step_seconds(cf, rate):
    return WORK + (COMPRESS if cf != DENSE else 0.0) + exposed(cf, rate)


def t_comp(cf, rate):
    return (1.0 if cf == DENSE else GAINS[cf]) / step_seconds(cf, rate)


def best(rate):
    return max((DENSE, *GAINS), key=lambda cf: t_comp(cf, rate))


def started(gain="error_fed", updates=False, ranks=2, keeps_momentum=False, **options):
    policy = Goodput(goal="time", gain=gain, **options)
    told = {"updates": updates, "keeps_momentum": keeps_momentum}
    policy.start(Context((10, 1000), ranks, wire_bytes=nbytes, **told))
    return policy


def report(step, cf, rate, **changes):
    values = {
        "timed_cf": cf,
        "seconds": step_seconds(cf, rate),
        "median_seconds": step_seconds(cf, rate),
        "compress_seconds": 0.0 if cf == DENSE else COMPRESS,
        "exchange_seconds": exposed(cf, rate),
        "steady_gain": GAINS,
    }
    return StepReport(step, cf, **{**values, **changes})


def run(policy, rates):
    """CFs sent, when step i runs on a network of rates[i] bytes a second."""
    return run_resting(policy, rates)[0]


def run_resting(policy, rates):
    """The same, and whether gains were left unmeasured."""
    sent, rests = [], []
    for step, rate in enumerate(rates):
        plan = policy.plan()
        sent.append(plan.send)
        rests.append(plan.skip_gains)
        policy.observe(report(step, plan.send, rate, steady_gain={} if plan.skip_gains else GAINS))
    return sent, rests


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
    assert set(sent[70:]) == {sent[70]}
    assert t_comp(sent[70], after) >= t_comp(best(after), after) / 1.05


@pytest.mark.parametrize(("rate", "steps"), [(1e8, WATCHED), (1e9, BRIEF)])
def test_where_dense_is_right_gains_are_measured_by_turns(rate, steps):
    """In few steps of a turn where a CF that kept everything would be no better."""
    could_be_better = max(1 / step_seconds(cf, rate) for cf in GAINS)
    assert (could_be_better > 1.05 / step_seconds(DENSE, rate)) == (steps == WATCHED)
    sent, rests = run_resting(started(), [rate] * 700)
    begin = sent.index(DENSE)
    turn = [False] * steps + [True] * (WATCHED + RESTING - steps)
    assert set(sent[begin:]) == {DENSE}
    assert rests == [False] * begin + (turn * 3)[: 700 - begin]


@pytest.mark.parametrize("asleep", [0, 1, 60, RESTING])
def test_a_network_that_slows_down_is_seen_while_gains_rest(asleep):
    at = run(started(), [1e9] * 30).index(DENSE) + WATCHED + asleep
    sent, rests = run_resting(started(), [1e9] * at + [1e6] * 40)
    assert sent[at - 1] == DENSE
    assert rests[at - 1] or not asleep
    assert sent[at + 20] == best(1e6)
    assert not any(rests[at + 20 :])


def test_a_step_without_gains_fills_no_residual():
    """A CF whose gain was measured in few steps is sent only once it was in more, whatever the
    number of steps between."""
    policy = started("signal", power=0.1)
    sent = []
    for step, rate in enumerate([1e9] * 300 + [1e5] * 30):
        plan = policy.plan()
        sent.append(plan.send)
        products = dict.fromkeys(GAINS, 2.0)
        values = {"peers": products, "peers_total": 4.0, "grad_norm": 2.0, "peers_energy": 4.0}
        values |= {"signal": products, "signal_total": 4.0}
        values = {"steady_gain": {}} if plan.skip_gains else values
        policy.observe(report(step, plan.send, rate, **values))
    measured = 300 - policy._unmeasured
    assert sent[299] == DENSE
    assert measured < 60
    largest = [max(sent[300:at]) for at in range(301, 331)]
    assert all(cf <= FILLED * (measured + i) for i, cf in enumerate(largest, 1))
    assert largest[-1] > FILLED * measured


def test_compressed_steps_never_rest():
    sent, rests = run_resting(started(), [1e6] * 400)
    assert DENSE not in sent
    assert not any(rests)


def test_a_dense_step_in_fewer_bits_has_nothing_to_compress_and_rests():
    """Other CFs are slow to compress, so it is the best one, and is tried before it was timed."""
    rate, bf16 = 1e8, 2.0
    policy = Goodput(goal="time", gain="error_fed")
    told = {"assumed": {bf16: 0.95, 8.0: 0.95}, "uncoded": frozenset({bf16})}
    policy.start(Context((10, 1000), 2, wire_bytes=nbytes, **told))
    sent, rests = [], []
    for step in range(200):
        plan = policy.plan()
        sent.append(plan.send)
        rests.append(plan.skip_gains)
        coding = 0.0 if plan.send in (DENSE, bf16) else 0.05
        whole = WORK + coding + exposed(plan.send, rate)
        times = {"seconds": whole, "median_seconds": whole, "compress_seconds": coding}
        gains = {} if plan.skip_gains else GAINS
        policy.observe(report(step, plan.send, rate, steady_gain=gains, **times))
    assert set(sent[40:]) == {bf16}
    assert rests[-1]
    assert not any(rests[: sent.index(bf16) + BRIEF])


def test_products_with_what_was_before_a_rest_are_passed_over():
    """The first ones after it are with a gradient of RESTING steps ago, the wrong way round."""

    def ended(strange):
        policy = started("signal")
        for step in range(20 + WATCHED + RESTING + 2 * FOREIGN):
            plan = policy.plan()
            since = policy._since - WATCHED - RESTING
            total = -4.0 if strange and 0 <= since < 2 * FOREIGN else 4.0
            products = {cf: total * gain for cf, gain in GAINS.items()}
            values = {"peers": products, "peers_total": total, "grad_norm": 2.0}
            values |= {"signal": products, "signal_total": total}
            if plan.skip_gains:
                values = {"steady_gain": {}}
            policy.observe(report(step, plan.send, 1e9, **values))
        assert policy.plan().send == DENSE
        return policy.state_dict()

    assert ended(strange=True) == ended(strange=False)


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
    assert "more progress a second than CF 10" in told.splitlines()[0]
    for words in ("more progress a second than CF 10", " a step instead of ", "50% fewer bytes"):
        assert words in told
    assert "T_comp" not in told
    assert policy.status()["t_comp"] == pytest.approx(t_comp(20.0, 1e6), rel=0.01)


def test_noise_does_not_make_it_flap():
    generator = __import__("random").Random(0)
    policy = started()
    switches, last = 0, DENSE
    for step in range(600):
        send = policy.plan().send
        switches += send != last
        last = send
        noisy = {cf: gain * generator.uniform(0.8, 1.2) for cf, gain in GAINS.items()}
        seconds = step_seconds(send, 1e6) * generator.uniform(0.9, 1.1)
        policy.observe(report(step, send, 1e6, steady_gain=noisy, seconds=seconds))
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
    moves=st.lists(st.tuples(anything, anything, anything, anything, anything), max_size=40),
    cf_range=st.sampled_from([(10.0, 1000.0), (1.0, 40.0), (64.0, 64.0), (1.0, 1.0)]),
)
def test_any_reports_leave_it_inside_the_range(moves, cf_range):
    policy = Goodput(goal="time", opening=2, cooldown=1)
    policy.start(Context(cf_range, 4))
    for step, (seconds, compress, exchange, gain, other) in enumerate(moves):
        plan = policy.plan()
        assert plan.send == DENSE or cf_range[0] <= plan.send <= cf_range[1]
        steady = dict.fromkeys(policy.candidates(), gain) | {cf_range[1]: other}
        policy.observe(
            report(
                step,
                plan.send,
                1e6,
                seconds=seconds,
                compress_seconds=compress,
                exchange_seconds=exchange,
                steady_gain=steady,
            )
        )
        json.dumps(policy.state_dict(), allow_nan=False)


def test_what_is_not_known_is_no_promise():
    policy = started()
    assert policy.t_comp() == {}
    policy.observe(StepReport(0, DENSE, timed_cf=nan))
    assert policy.t_comp() == {}
    assert policy.plan().send == OPENING


def test_until_signal_gain_is_clear_the_root_of_the_error_fed_one_decides():
    policy, sent = started(gain="signal", power=2.0), []
    for step in range(300):
        sent.append(policy.plan().send)
        products = dict.fromkeys(GAINS, 1.0 - step % 2 / 10)  # as if nothing were lost
        policy.observe(
            report(step, sent[step], 1e6, grad_norm=1.0, peers=products, peers_total=1.0)
        )
    assert sent[:5] == [OPENING] * 5
    assert sent[5:11] == [best(1e6)] * 6  # a root to the power of 2
    assert sent[11] == 80.0  # all promise as much, and that is the largest that has filled
    assert set(sent[270:]) <= {640.0, 1000.0}  # within the margin of each other


def test_no_cf_is_considered_while_its_shadow_residual_is_filling():
    """Gains of residuals that have hardly begun are those of dense steps: too large."""
    policy, sent = started(gain="signal"), []
    early = {cf: cf**-0.1 for cf in GAINS}
    for step in range(60):
        sent.append(policy.plan().send)
        policy.observe(report(step, sent[step], 1e5, steady_gain=early))
    for step, cf in enumerate(sent):
        assert cf <= max(OPENING, FILLED * step)
    assert sent[5] == 40.0
    assert sent[-1] > 100


@pytest.mark.parametrize(("smaller", "goes_to"), [(0.805, 20.0), (0.81, 10.0)])
def test_a_smaller_cf_must_promise_a_fifth_of_the_margin(smaller, goes_to):
    policy, rate = Goodput(goal="time", gain="error_fed", opening=1), 1e5
    policy.start(Context((10, 40), 2, wire_bytes=nbytes))
    worth = {10.0: 0.4, 20.0: 0.9, 40.0: 0.2}  # T_comp, in that of CF 10 at gain 1
    for step in range(200):
        cf = policy.plan().send
        if step == 50:
            assert cf == 20.0
            worth = {10.0: smaller, 20.0: 0.8, 40.0: 0.7}
        gains = {c: w * step_seconds(c, rate) / step_seconds(10.0, rate) for c, w in worth.items()}
        policy.observe(report(step, cf, rate, steady_gain=gains))
    assert policy.plan().send == goes_to


def test_times_and_products_may_be_as_large_as_numbers_go():
    policy, huge = started(gain="signal"), dict.fromkeys(GAINS, 1e300)
    times = dict.fromkeys(("seconds", "median_seconds", "exchange_seconds"), 1e308)
    products = {"peers": huge, "peers_total": 1e308, "signal": huge, "signal_total": 1e308}
    for step in range(30):
        policy.observe(report(step, policy.plan().send, 1e6, grad_norm=1e200, **times, **products))
        json.dumps(policy.state_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("given", "updates", "ranks", "keeps", "power"),
    [
        (0.3, False, 2, False, 0.3),
        (2.0, True, 2, False, 2.0),
        (None, False, 2, False, 0.5),
        (None, True, 2, False, 0.2),
        (None, True, 4, False, 0.5),
        (None, True, 2, True, 0.5),
    ],
)
def test_signal_gain_counts_to_a_power(given, updates, ranks, keeps, power):
    """Unless somebody chooses it, to another one where two ranks send updates."""
    rate = 1e6
    policy = started("signal", updates, ranks, keeps, power=given)
    for step in range(300):
        level = 1.0 - step % 2 / 10
        products = {cf: level * gain for cf, gain in GAINS.items()}
        policy.observe(
            report(
                step,
                policy.plan().send,
                rate,
                grad_norm=1.0,
                peers=products,
                peers_total=level,
                signal=products,
                signal_total=level,
            )
        )
    promised = policy.t_comp()
    for cf, gain in GAINS.items():
        assert promised[cf] == pytest.approx(gain**power / step_seconds(cf, rate), rel=0.02)
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


def run_with_local_steps(policy, rates, cosine):
    """(CF, local steps) of each exchange, when round i runs on a network of rates[i] bytes a
    second, and the gradients of two ranks have this cosine."""
    taken, chosen = 1, []
    for step, rate in enumerate(rates):
        plan = policy.plan()
        chosen.append((plan.send, plan.local_steps))
        seconds = step_seconds(plan.send, rate) + (taken - 1) * WORK
        noise = (1 / cosine - 1) / taken
        policy.observe(
            report(
                step,
                plan.send,
                rate,
                seconds=seconds,
                median_seconds=seconds,
                timed_steps=taken,
                peers_energy=1.0,
                peers_total=1 / (1 + noise),
            )
        )
        taken = plan.local_steps
    return chosen


def with_local_steps(**options):
    policy = Goodput(goal="time", gain="error_fed", **options)
    policy.start(Context((10, 1000), 2, wire_bytes=nbytes, local_steps=STEPS))
    return policy


def test_on_a_fast_network_it_takes_no_local_steps():
    chosen = run_with_local_steps(with_local_steps(), [1e8] * 300, 0.1)
    assert {steps for _, steps in chosen} == {1}


def test_on_a_slow_network_it_takes_local_steps_and_gives_them_up_on_a_faster_one():
    policy = with_local_steps()
    rates = [1e4] * 200 + [1e9] * 100
    chosen = run_with_local_steps(policy, rates, 0.1)
    first = next(i for i, (_, steps) in enumerate(chosen) if steps > 1)
    assert FILLED * first >= 2 * chosen[first][0]  # a larger CF was considered
    assert len({steps for _, steps in chosen[first + 40 : 200]}) == 1
    cf = chosen[first][0]
    assert all(other >= cf for other, steps in chosen if steps > 1)
    assert chosen[-1] == (best(1e9), 1)


def test_ranks_whose_gradients_are_alike_take_more_local_steps():
    """They lose nothing; ranks whose gradients are mere noise lose most."""
    found = [
        run_with_local_steps(with_local_steps(), [3e5] * 200, cosine)[-1][1]
        for cosine in (0.001, 0.3, 0.99)
    ]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_without_a_choice_of_local_steps_it_plans_none():
    assert started().plan().local_steps == 0
    assert with_local_steps().plan().local_steps == 1


def test_a_state_with_another_number_of_local_steps_is_refused():
    policy = with_local_steps()
    run_with_local_steps(policy, [1e4] * 200, 0.1)
    state = json.loads(json.dumps(policy.state_dict()))
    again = with_local_steps()
    again.load_state_dict(state)
    assert again.plan() == policy.plan()
    assert again.plan().local_steps > 1
    with pytest.raises(ValueError, match="local_steps"):
        with_local_steps().load_state_dict({**state, "local_steps": 3})


@pytest.mark.parametrize("cosine", [0.1, 0.5, 0.9, 0.97, 0.999])
def test_a_network_that_becomes_fast_ends_local_steps(cosine):
    chosen = run_with_local_steps(with_local_steps(), [1e4] * 200 + [1e9] * 200, cosine)
    assert chosen[199][1] > 1
    assert chosen[-1][1] == 1


@pytest.mark.parametrize("rate", [1e5, 3e5, 1e6])
def test_it_does_not_go_to_and_fro(rate):
    """Gradients of ranks apart may be less alike than those of ranks together."""
    policy = Goodput(goal="time", gain="error_fed")
    policy.start(Context((10, 1000), 8, wire_bytes=nbytes, local_steps=STEPS))
    chosen, taken = [], 1
    for step in range(600):
        plan = policy.plan()
        chosen.append(plan.local_steps)
        seconds = step_seconds(plan.send, rate) + (taken - 1) * WORK
        noise = (1 / (0.3 if taken == 1 else 0.05) - 1) / taken
        times = {"seconds": seconds, "median_seconds": seconds, "timed_steps": taken}
        peers = {"peers_energy": 1.0, "peers_total": 7 / (1 + noise)}
        policy.observe(report(step, plan.send, rate, **times, **peers))
        taken = plan.local_steps
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
        peers = {"peers_energy": 1.0, "peers_total": 0.1, "timed_steps": taken}
        policy.observe(report(step, plan.send, 1e9, **times, **peers))
        taken = plan.local_steps
        assert taken == 1
