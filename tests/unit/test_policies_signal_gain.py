"""Signal gain: a ratio of means where there is one, the root of the error-fed gain elsewhere."""

from __future__ import annotations

import json
from math import inf, isnan, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import DENSE, Context, Goodput, GraVAC, Measurement, StepReport
from policies.signal_gain import CLEAR, LEAST, LOST, WEIGHT, Basis, SignalGain

SIGNAL = {10.0: 0.8, 100.0: 0.5, 1000.0: 0.2}
STEADY = {10.0: 0.4, 100.0: 0.05, 1000.0: 0.01}
few = settings(max_examples=25)


def report(total, step=0, cf=DENSE, **changes):
    values = {"steady_gain": STEADY, "signal": {c: gain * total for c, gain in SIGNAL.items()}}
    return StepReport(step, cf, **{**values, "signal_total": total, "grad_norm": 1.0, **changes})


def fed(*totals, **changes):
    signal = SignalGain()
    signal.observe(report(0.0, steady_gain={}))  # the first step has none before it
    said = [signal.observe(report(total, **changes)) for total in totals]
    return signal, [words for words in said if words]


@few
@given(
    totals=st.lists(st.one_of(st.floats(), st.floats(0.5, 1)), max_size=40),
    kept=st.one_of(st.floats(), st.floats(-1, 2)),
)
def test_whatever_comes_a_gain_is_in_0_1_or_not_known(totals, kept):
    signal = SignalGain()
    for total in totals:
        changes = {"signal": {10.0: kept}, "steady_gain": {10.0: kept}}
        signal.observe(report(total, **changes))
        gain = signal.gain(10.0)
        assert gain is None or 0 <= gain <= 1
    assert signal.gain(77.0) is None


def test_a_clear_signal_decides_after_some_steps_and_says_so():
    signal, said = fed(*([1.0, 2.0] * (LEAST // 2 - 1)), 1.0)
    assert not signal.clear
    assert not said
    assert signal.gain(100.0) == pytest.approx(0.05**0.5)
    words = signal.observe(report(2.0))
    assert signal.clear
    assert words.startswith("gains now rest on a comparison with the next step")
    assert "standard errors" not in words
    assert {cf: signal.gain(cf) for cf in SIGNAL} == {
        cf: pytest.approx(gain) for cf, gain in SIGNAL.items()
    }


@pytest.mark.parametrize("totals", [(-1.0, 0.5), (1.0, -1.0), (-1.0,)], ids=str)
def test_overshoot_and_noise_have_no_signal_gain(totals):
    signal, said = fed(*(totals * 50))
    assert not signal.clear
    assert not said
    assert signal.gain(100.0) == pytest.approx(0.05**0.5)


def test_it_is_lost_later_than_it_was_found():
    signal, said = fed(*([1.0, 2.0] * 20))
    assert len(said) == 1
    errors = []
    while signal.clear:
        words = signal.observe(report(-1.0))
        errors.append(signal.next.errors)
    assert errors[-2] >= LOST > errors[-1]
    assert any(LOST < each < CLEAR for each in errors)
    assert words.startswith("gains now rest on what was clear last")
    assert signal.status()["signal"] == 1.0
    gains = {cf: signal.gain(cf) for cf in SIGNAL}
    for _ in range(200):
        signal.observe(report(-1.0))
    assert {cf: signal.gain(cf) for cf in SIGNAL} == gains  # noise is no reason to compress less


@pytest.mark.parametrize("total", [nan, inf, 0.0, 1e200])
def test_a_step_that_tells_nothing_is_passed_over(total):
    signal, _ = fed(*([1.0, 2.0] * 10))
    before = signal.state_dict()
    signal.observe(report(total, steady_gain={}))
    assert signal.state_dict() == before


def test_the_ranks_own_products_come_first_while_they_are_clear():
    def peers(total):
        return {"peers": dict.fromkeys(SIGNAL, 0.9 * total), "peers_total": total}

    signal, said = fed(*([-1.0, -2.0] * 10), **peers(1.0))  # overshooting, and yet a signal
    assert signal.gain(100.0) == pytest.approx(0.9)
    assert said[0].startswith("gains now rest on a comparison of the ranks")
    assert signal.status()["signal"] == 3.0
    words = ""
    for _ in range(200):
        words = signal.observe(report(1.0, **peers(-1.0))) or words
    assert words.startswith("gains now rest on a comparison with the next step")
    assert signal.status()["signal"] == 2.0
    assert signal.gain(100.0) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["peers", "next"])
def test_steps_count_alike_however_large_their_gradients(kind):
    """Each product is of gradients of two steps, or of the last one, and is divided by theirs."""
    norms = [100.0, 0.01] * 20 + [1.0] * 40
    signal = SignalGain()
    for step, norm in enumerate(norms):
        last = norms[step - 1] if step else 0.0
        size = last * (norm if kind == "next" else last)
        kept = dict.fromkeys(SIGNAL, (0.9 if step <= 40 else 0.1) * size)
        changes = {"peers": kept, "peers_total": size} if kind == "peers" else {"signal": kept}
        signal.observe(report(size if kind == "next" else nan, grad_norm=norm, **changes))
    ratio = getattr(signal, kind)
    weights = WEIGHT * (1 - WEIGHT) ** np.arange(len(norms) - 1)[::-1]
    gains = np.where(np.arange(1, len(norms)) <= 40, 0.9, 0.1)
    assert ratio.value(100.0) == pytest.approx(weights @ gains / weights.sum())
    assert ratio.mean(DENSE) == pytest.approx(1.0)
    before = signal.state_dict()[kind]
    for norm in (nan, 0.0, inf):  # not finite on some rank: neither this step's nor the next's
        signal.observe(report(1.0, steady_gain={}, grad_norm=norm))
        peers = {"peers": dict.fromkeys(SIGNAL, 1.0), "peers_total": 1.0}
        signal.observe(report(1.0, steady_gain={}, grad_norm=1.0, **peers))
    assert signal.state_dict()[kind] == before


def test_one_report_has_a_gain_too():
    def gain(cf, total):
        return report(1.0, peers={100.0: total / 2}, peers_total=total).gain(cf, "signal")

    assert gain(100.0, 2.0) == pytest.approx(0.5)
    assert isnan(gain(100.0, -2.0))
    assert isnan(gain(77.0, 2.0))
    assert all(map(isnan, Measurement(1, 1, 2, 2, 1, 2).terms("signal")))


@pytest.mark.parametrize(
    ("total", "decides", "floor"),
    [(1.0, "comparison with the next step", 0.8), (-1.0, "", 0.4**0.5)],
)
def test_gravac_decides_on_it_while_it_means_something(total, decides, floor):
    policy = GraVAC(gain="signal", window=20, allow_dense=False, scaling="geometric", step_size=10)
    assert policy.shadow
    assert not GraVAC().shadow
    policy.start(Context((10.0, 1000.0), 2))
    reasons, probed = [], []
    for step in range(30):
        plan = policy.plan()
        reasons.append(plan.reason)
        probed += plan.probe
        policy.observe(report(total * (1 + step % 2), step, plan.send))
    assert policy.status()["gain_floor"] == pytest.approx(floor)
    assert policy.status()["signal"] == 2 * bool(decides)
    assert (policy.status()["next_errors"] > 0) == bool(decides)
    assert any(decides in reason for reason in reasons)
    assert not probed  # the shadow ladder knows them all


def test_gravac_climbs_by_signal_gain_where_the_error_fed_gain_would_not():
    sent = {}
    for gain in ("signal", "error_fed"):
        policy = GraVAC(gain=gain, epsilon=0.3, window=20, allow_dense=False, cooldown=1)
        policy.start(Context((10.0, 100.0), 2))
        sent[gain] = set()
        for step in range(200):
            plan = policy.plan()
            sent[gain].add(plan.send)
            ladder = policy.candidates()
            measured = {
                cf: Measurement(error=1 - 4 / cf, total=1.0) for cf in {plan.send, *plan.probe}
            }
            total = 1.0 + step % 2
            policy.observe(
                report(
                    total,
                    step,
                    plan.send,
                    measurements=measured,
                    steady_gain={cf: 4 / cf for cf in ladder},
                    signal={cf: total * (1 - cf / 250) for cf in ladder},
                )
            )
    assert 100.0 in sent["signal"]
    assert max(sent["error_fed"]) == 10.0


def test_goodput_promises_by_it():
    def promised(gain, total):
        policy = Goodput(goal="time", gain=gain, step_size=10)
        policy.start(Context((10.0, 1000.0), 2, wire_bytes=lambda cf: 1e6 / cf))
        for step in range(12):
            policy.observe(
                report(
                    total * (1 + step % 2),
                    step,
                    timed_cf=DENSE,
                    seconds=1.0,
                    median_seconds=1.0,
                    compress_seconds=0.0,
                    exchange_seconds=0.9,
                )
            )
        t_comp, status = policy.t_comp(), policy.status()
        dense = (0.1 + 0.9, 0.1 + 0.09)  # seconds at CF 1 and 10
        return t_comp[10.0] * dense[1] / (t_comp[DENSE] * dense[0]), status

    assert promised("error_fed", 1.0)[0] == pytest.approx(0.4)
    assert "signal" not in promised("error_fed", 1.0)[1]
    gain, status = promised("signal", 1.0)
    assert gain == pytest.approx(0.8**0.5)
    assert status["signal"] == 2.0
    gain, status = promised("signal", -1.0)
    assert gain == pytest.approx(0.4**0.25)
    assert status["signal"] == 0.0


@pytest.mark.parametrize(
    ("shared", "own", "ends_at"), [(0.1, 0.1, 100.0), (2.0, 0.1, 100.0), (0.1, 2.0, 10.0)]
)
def test_goodput_does_not_climb_on_gains_that_noise_may_have_made(shared, own, ends_at):
    """Noise that all CFs have in common does not say that one is better than another."""
    policy = Goodput(goal="time", step_size=10, power=2)
    policy.start(Context((10.0, 100.0), 2, wire_bytes=lambda cf: 1e6 / cf))
    steady = {10.0: 0.8, 100.0: 0.1}
    for step in range(60):
        total = 1 + shared * (-1) ** step
        noise = own * (1 - step // 2 % 2 * 2)
        cf = policy.plan().send
        policy.observe(
            report(
                total,
                step,
                cf,
                steady_gain=steady,
                signal={10.0: 0.8 * total, 100.0: 0.75 * total + noise},
                timed_cf=cf,
                seconds=0.1 + 0.9 / cf,
                median_seconds=0.1 + 0.9 / cf,
                compress_seconds=0.0,
                exchange_seconds=0.9 / cf,
            )
        )
    assert policy.status()["signal"] == 2.0
    promised = policy.t_comp()
    assert promised[100.0] / promised[10.0] > 1.2
    assert policy.plan().send == ends_at


def test_goodput_knows_the_gains_that_have_a_steady_state():
    with pytest.raises(ValueError, match=r"gain='raw'.*'error_fed', 'signal'"):
        Goodput(goal="time", gain="raw")


def test_a_cf_that_is_sure_does_not_wait_for_one_that_promises_more_and_is_not():
    draw, policy = (
        np.random.default_rng(0),
        Goodput(goal="time", step_size=10, power=1, opening=400),
    )
    policy.start(Context((10.0, 1000.0), 2, wire_bytes=lambda cf: 1e6 / cf))
    for step in range(400):
        cf, total = policy.plan().send, 1 + draw.normal(0, 0.1)
        seconds, noise = 0.02 + 0.3 / cf, 5 - step // 2 % 2 * 10
        gains = {10.0: 0.8 * total, 100.0: 0.7 * total, 1000.0: 0.72 * total + noise}
        policy.observe(
            report(
                total,
                step,
                cf,
                signal=gains,
                timed_cf=cf,
                seconds=seconds,
                median_seconds=seconds,
                compress_seconds=0.0,
                exchange_seconds=0.3 / cf,
            )
        )
        if step == 398:
            promised = policy.t_comp()
    assert promised[1000.0] > promised[100.0] > 1.1 * promised[10.0]
    assert policy.plan().send == 100.0


def test_gains_that_are_held_are_no_surer_than_they_were():
    """Else a policy makes, at the moment when noise takes over, the move that doubt forbade."""
    draw = np.random.default_rng(0)
    signal = SignalGain()
    assert signal.doubt(10.0, 100.0) == 0.0

    def observe(total):
        own = {cf: gain * total + draw.normal(0, 0.1) for cf, gain in SIGNAL.items()}
        signal.observe(report(total, signal=own))

    for total in draw.normal(1, 1, 60):
        observe(total)
    assert signal.clear
    doubts = [signal.doubt(10.0, 100.0)]
    for total in draw.normal(0, 3, 400):
        observe(total)
        if not signal.clear:
            break
        doubts.append(signal.doubt(10.0, 100.0))
        gains = [signal.gain(cf) for cf in SIGNAL]
    assert not signal.clear
    assert doubts[-1] > doubts[0] > 0
    assert signal.doubt(10.0, 100.0) == doubts[-1]
    assert [signal.gain(cf) for cf in SIGNAL] == gains


def test_a_larger_cf_never_has_more_of_it():
    rising = {10.0: 0.8, 100.0: 0.2, 1000.0: 0.4}
    signal = SignalGain()
    for _ in range(LEAST + 5):
        signal.observe(report(1.0, signal=rising))
    gains = [signal.gain(cf) for cf in rising]
    assert gains == pytest.approx([0.8, 0.3, 0.3])


def peers(level):
    return {"peers": {cf: gain * level for cf, gain in SIGNAL.items()}, "peers_total": level}


CLEAR_PEERS = [peers(1.0 + step % 2) for step in range(30)]
HIDDEN = [{"signal_total": -1.0, **peers(-1.0)}] * 400


def saved(signal):
    return json.dumps(signal.state_dict(), allow_nan=False)


MID_RUN = {
    Basis.PEERS: CLEAR_PEERS,
    Basis.NEXT: [{}] * 30,
    Basis.LAST_CLEAR: [*CLEAR_PEERS, *HIDDEN],
    Basis.ERROR_FED: HIDDEN[:30],
}


@pytest.mark.parametrize(
    ("basis", "changes"), MID_RUN.items(), ids=["peers", "next", "held", "neither"]
)
def test_it_goes_on_exactly_from_its_state(basis, changes):
    straight, again = SignalGain(), SignalGain()
    for step, each in enumerate(changes):
        straight.observe(report(1.0 + step % 2, **each))
    assert straight.basis == basis
    again.load_state_dict(json.loads(saved(straight)))
    assert saved(again) == saved(straight)
    said = set()
    for step, each in enumerate([{}, *HIDDEN[:150], *CLEAR_PEERS * 8]):
        words = straight.observe(report(1.0 + step % 2, grad_norm=1.0 + step % 3, **each))
        assert again.observe(report(1.0 + step % 2, grad_norm=1.0 + step % 3, **each)) == words
        assert repr(again.status()) == repr(straight.status())
        for cf in SIGNAL:
            assert again.gain(cf) == straight.gain(cf)
            assert again.doubt(cf, 1000.0) == straight.doubt(cf, 1000.0)
        said.add(straight.basis.value)
    assert saved(again) == saved(straight)
    assert len(said) > 1  # what decides has changed on the way
