"""The model of the step time, from exposed times with noise in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive.network.link import LinkSpec
from policies.base import DENSE, StepReport
from policies.step_time import BACKWARD, KEPT, RUNG_CODING, SLOWER, WORKS, StepTime
from runs.modelled_clock import ModelledClock

WORK = 0.05


def _model(exposed: Sequence[float], cf: float = 10.0) -> StepTime:
    model = StepTime(lambda cf: 1e6 / cf)
    _run(model, cf, exposed)
    return model


def _run(model: StepTime, cf: float, exposed: Sequence[float]) -> None:
    for step, seconds in enumerate(exposed):
        whole = WORK + seconds
        times = {"seconds": whole, "median_seconds": whole, "exchange_seconds": seconds}
        model.observe(StepReport(step, cf, timed_cf=cf, compress_seconds=0.0, **times))


@settings(max_examples=30)
@given(st.floats(0.001, 10.0), st.integers(1, 9), st.sampled_from([1.0, 2.0, 5.0, 20.0, 100.0]))
def test_a_steady_exchange_grows_with_the_bytes(exposed: float, steps: int, cf: float) -> None:
    seconds = _model([exposed] * steps).seconds(cf)
    assert seconds == pytest.approx(WORK + exposed * 10 / cf)


@pytest.mark.parametrize("waits", [(0.0, 0.0, 0.5), (0.1, 0.1, 0.5)])
def test_what_is_predicted_does_not_depend_on_the_order_of_cfs(waits: tuple[float, ...]) -> None:
    """Two of them wait as long as each other."""
    found = []
    for order in ((0, 1, 2), (1, 0, 2)):
        model = StepTime(lambda cf: 1e6 / cf, link=lambda: (0.0, 1e-6))
        for i in order:
            _run(model, (100.0, 50.0, 10.0)[i], [waits[i]] * 6)
        found.append(model.exposed(14.0))
    assert found[0] == found[1]


@given(
    exposed=st.floats(0.001, 10.0),
    steps=st.integers(2, 32),
    overlap=st.integers(0, 32),
    cf=st.sampled_from([1.0, 5.0, 100.0]),
    other=st.integers(2, 32),
)
def test_local_steps_hide_as_much_of_an_exchange_as_may_pass_meanwhile(
    exposed: float, steps: int, overlap: int, cf: float, other: int
) -> None:
    """What one CF and one number of local steps have shown, tells of all others; the clock that
    models step times reckons alike."""

    def seconds(cf: float, steps: int) -> float:
        link = LinkSpec(8e6 / (10 * exposed))  # 100,000 bytes at CF 10
        return ModelledClock(WORK, link, overlap=overlap).step(1e6 / cf, 0.0, steps)

    model = StepTime(lambda cf: 1e6 / cf, overlap)
    for step in range(6):
        times = {"seconds": seconds(10.0, steps), "exchange_seconds": exposed}
        times["median_seconds"] = times["seconds"]
        model.observe(
            StepReport(step, 10.0, timed_cf=10.0, timed_steps=steps, compress_seconds=0.0, **times)
        )
    assert model.seconds(cf) == pytest.approx(seconds(cf, steps))
    assert model.seconds(cf, other) == pytest.approx(seconds(cf, other))
    assert model.without_coding(cf, other) == pytest.approx(seconds(cf, other))


@pytest.mark.parametrize("more", [0, 5])
def test_what_a_busy_machine_makes_it_wait_does_not_grow_with_the_bytes(more: int) -> None:
    """On a link that carries all of a dense step's in 2 ms."""
    model = StepTime(lambda cf: 1e6 / cf, link=lambda: (0.0, 2e-9))
    _run(model, 10.0, [0.004, 0.0002, 0.008, 0.0004, 0.005])
    _run(model, 20.0, [0.001, 0.0002, 0.0003, 0.001, 0.002][:more])
    assert model.seconds(10.0) == pytest.approx(WORK + 0.004)  # still paid where it is
    assert WORK <= model.seconds(1.0) <= WORK + 0.004 + SLOWER * 0.002


@settings(max_examples=30)
@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4), st.integers(0, 4))
def test_one_step_that_waited_for_nothing_does_not_make_a_slow_network_fast(
    others: list[float], place: int
) -> None:
    model = _model([*others[:place], 0.0, *others[place:]])
    assert model.seconds(1.0) >= WORK + 10 * 0.5


@settings(max_examples=30)
@given(st.floats(0.1, 1.0), st.integers(5, 30), st.sampled_from([1.0, 5.0]))
def test_what_backward_hides_at_a_large_cf_is_not_free_at_a_small_one(
    exposed: float, steps: int, cf: float
) -> None:
    """That is looked at once, since the network may as well be a faster one by now."""
    model = _model([exposed] * 6)
    _run(model, 100.0, [0.0] * 9)
    assert model.seconds(cf) >= WORK + exposed
    _run(model, 100.0, [0.0])
    assert model.seconds(cf) == pytest.approx(WORK)
    _run(model, 10.0, [exposed] * 6)
    _run(model, 100.0, [0.0] * steps)
    assert model.seconds(cf) >= WORK + exposed
    assert model.seconds(1000.0) == pytest.approx(WORK)


def test_a_network_is_looked_at_again_once_only() -> None:
    """A second look at the same network would show the same, and the CF would go to and fro."""
    model = _model([1.0] * 6)
    _run(model, 20.0, [0.0] * 10)
    assert model.timed() == (20.0,)
    _run(model, 10.0, [1.0] * 6)
    _run(model, 5.0, [1.0] * 12)  # 3 seconds were predicted
    assert model.timed() == (20.0, 10.0, 5.0)
    _run(model, 5.0, [10.0] * 5)  # another network
    _run(model, 10.0, [0.0] * 10)
    assert model.timed() == (10.0,)


def test_a_wait_that_the_link_explains_is_no_reason_to_look_again() -> None:
    """Most of what CF 10 waits for is latency, so a dense step waits for little more."""
    model = StepTime(lambda cf: 1e6 / cf, link=lambda: (0.0, 1e-9))
    _run(model, 10.0, [0.05] * 10)
    _run(model, 1.0, [0.052] * 10)
    assert model.timed() == (10.0, 1.0)


@settings(max_examples=30)
@given(st.floats(0.001, 1.0), st.floats(0.0, 0.01), st.sampled_from([1.0, 2.0, 5.0, 40.0, 100.0]))
def test_latency_and_rate_are_told_apart(rate: float, latency: float, cf: float) -> None:
    model = _model([latency + rate] * 5)
    _run(model, 20.0, [latency + rate / 2] * 5)
    expected = latency + rate * 10 / cf
    assert model.seconds(cf) == pytest.approx(WORK + expected, rel=1e-6)


def coding_at(cf: float, seconds: float) -> float:
    """Seconds of coding at a CF above the rungs. seconds: those at a very large CF."""
    return seconds * (1 + KEPT / cf)


def test_above_the_rungs_coding_falls_with_the_elements_kept() -> None:
    model = StepTime(lambda cf: 1e6 / cf)
    for cf in (20.0, 80.0):
        coding = coding_at(cf, 0.03)
        whole = WORK + coding
        times = {"seconds": whole, "median_seconds": whole, "exchange_seconds": 0.0}
        half = {"compress_seconds": coding / 2, "decode_seconds": coding / 2}
        for step in range(5):
            model.observe(StepReport(step, cf, timed_cf=cf, **half, **times))
    cfs = (10.0, 20.0, 80.0, 1000.0)
    expected = [coding_at(cf, 0.03) for cf in cfs]
    assert [model.coding(cf) for cf in cfs] == pytest.approx(expected)
    assert model.coding(DENSE) == 0.0


def test_a_probe_of_a_dense_step_is_no_reason_to_leave() -> None:
    model = StepTime(lambda cf: 1e6 / cf)
    for step in range(12):
        cf = 10.0 if step < 6 else DENSE
        coding, exposed = 0.03 if cf > 1 else 0.01, 0.001 * 10 / cf
        whole = WORK + coding + exposed
        times = {"seconds": whole, "median_seconds": whole, "exchange_seconds": exposed}
        model.observe(StepReport(step, cf, timed_cf=cf, compress_seconds=coding, **times))
    assert model.coding(10.0) == pytest.approx(0.03)
    assert model.coding(DENSE) == 0
    assert model.seconds(DENSE) == pytest.approx(WORK + 0.01)


def test_what_slower_ranks_make_the_others_wait_is_work() -> None:
    """It is there at any CF, whatever the bytes."""
    model, waits = StepTime(lambda cf: 1e6 / cf), 0.02
    for step in range(5):
        whole = WORK + waits + 0.001
        times = {"seconds": whole, "median_seconds": whole, "compress_seconds": 0.0}
        times |= {"exchange_seconds": waits + 0.001, "network_seconds": 0.001}
        model.observe(StepReport(step, 10.0, timed_cf=10.0, **times))
    assert model.seconds(10.0) == pytest.approx(WORK + waits + 0.001)
    assert model.seconds(1.0) == pytest.approx(WORK + waits + 0.01)


@settings(max_examples=8)
@given(st.randoms(use_true_random=False), st.floats(0.02, 0.3))
def test_noise_of_a_busy_machine_is_no_other_network(luck: Random, network: float) -> None:
    """Two steps of three wait for the network alone, the others for a while longer."""
    model = _model([network] * 5)
    _run(model, 20.0, [network / 2] * 5)
    for _ in range(30):
        late = [network / 2 * luck.uniform(1.3, 3.0), *[network / 2 * luck.uniform(1, 1.2)] * 2]
        _run(model, 20.0, luck.sample(late, 3))
    assert set(model.timed()) == {10.0, 20.0}


@settings(max_examples=40)
@given(st.sampled_from([0.2, 0.5, 1.5, 2.0, 10.0]), st.integers(5, 40), st.floats(0.1, 1.0))
def test_five_steps_show_another_network(times: float, before: int, network: float) -> None:
    model = _model([network] * 5)
    _run(model, 20.0, [network / 2] * before)
    _run(model, 20.0, [network / 2 * times] * 4)
    # beyond five the last ones wait until they agree: no promise rests on some of them
    assert model.seconds(1.0) == pytest.approx(WORK + network * 10)
    _run(model, 20.0, [network / 2 * times])
    assert model.timed() == (20.0,)
    assert model.seconds(20.0) == pytest.approx(WORK + network / 2 * times)
    assert model.seconds(1.0) == pytest.approx(WORK + network * 10 * times)


@settings(max_examples=40)
@given(st.integers(0, 3), st.integers(0, 4), st.sampled_from([20.0, 50.0]))
def test_steps_held_up_before_a_change_are_no_part_of_it(
    held_up: int, more: int, last: float
) -> None:
    """Neither is a single step that is held up after it."""
    model = _model([0.01] * 10, cf=1.0)
    _run(model, 1.0, [0.02] * held_up + [20.0] * (4 - held_up + more) + [last])
    assert model.timed() == (1.0,)
    assert model.seconds(10.0) == pytest.approx(WORK + 2)


@settings(max_examples=40)
@given(st.integers(0, 2), st.integers(5, 40))
def test_a_change_in_the_first_steps_at_a_cf_is_corrected(old: int, steps: int) -> None:
    model = _model([0.001] * 5)
    _run(model, 1.0, [0.01] * old + [20.0] * steps)
    assert model.seconds(1.0) == pytest.approx(WORK + 20)
    assert old + steps < 6 or model.seconds(2.0) > WORK + 5


@settings(max_examples=30)
@given(st.integers(0, 5), st.booleans())
def test_more_bytes_that_take_less_are_of_another_network(fewer: int, slower: bool) -> None:
    """So are fewer bytes that take longer."""
    model = _model([1.0] * 5)
    _run(model, 20.0, [0.5] * (5 + fewer))
    _run(model, *((100.0, [5.0] * 5) if slower else (1.0, [0.1] * 5)))
    assert len(model.timed()) == 1


@pytest.mark.parametrize("steps", [1, 5, 6, 11, 29])
@pytest.mark.parametrize("after", [1e6, 1e9])
def test_a_dip_of_the_network_is_not_remembered(steps: int, after: float) -> None:
    """It moves to CF 320 in it, and finds its way back when it is over."""
    model = _model([0.13] * 20, cf=40.0)
    _run(model, 40.0, [1.3] * 5)
    _run(model, 320.0, [0.1625] * steps)
    rate = 5.2e6 / after  # seconds a byte x CF
    _run(model, 320.0, [rate / 320] * 10)
    assert model.timed() == (320.0,)


def test_on_another_network_a_cf_that_was_left_and_taken_again_is_measured_as_before() -> None:
    """By the first steps there, not by the last few, as if the network changed all the time."""
    model = _model([0.1] * 10)
    _run(model, 20.0, [0.05] * 10)
    _run(model, 10.0, [0.1] * 5 + [0.4] * 15 + [0.48] * 3)
    assert model.exposed(10.0) == pytest.approx(0.4)


@pytest.mark.parametrize(("waits", "least"), [(0.35, 0.3 - BACKWARD * WORK), (0.05, 0.05)])
def test_no_payload_is_so_small_that_it_needs_no_latency(waits: float, least: float) -> None:
    """A step that was faster than the latency shows that the latency is shorter."""
    model = StepTime(lambda cf: 1e6 / cf, link=lambda: (0.3, 1e-9))
    _run(model, 10.0, [waits] * 5)
    assert model.exposed(1000.0) == pytest.approx(least, abs=1e-3)


def test_a_network_that_slows_down_by_and_by_is_followed() -> None:
    model = _model([1.0] * 5)
    _run(model, 20.0, [0.5] * 20)
    _run(model, 20.0, [0.5 * 1.01**step for step in range(100)])
    assert model.seconds(20.0) == pytest.approx(WORK + 0.5 * 1.01**100, rel=0.3)
    assert model.timed() == (20.0,)


def test_a_saved_model_goes_on() -> None:
    model = _model([0.4, 0.5, 0.6] * 5)
    _run(model, 20.0, [0.1, 0.2, 0.3, 0.1] * 4)
    other = StepTime(lambda cf: 1e6 / cf)
    other.load_state_dict(json.loads(json.dumps(model.state_dict())))
    for more in ([], [0.2], [0.9] * 3):
        for each in (model, other):
            _run(each, 20.0, more)
        for cf in (1.0, 10.0, 20.0, 100.0):
            assert other.seconds(cf) == model.seconds(cf)


# What else it is asked


def _run_timed(*steps: tuple[float, float, float]) -> StepTime:
    """Five steps at each CF: its exposed time, and that of compression."""
    model = StepTime(lambda cf: 1e6 / cf)
    for cf, exposed, compress in steps:
        seconds = WORK + exposed + compress
        times = {"seconds": seconds, "median_seconds": seconds}
        times |= {"exchange_seconds": exposed, "compress_seconds": compress}
        for step in range(5):
            model.observe(StepReport(step, 77.0, timed_cf=cf, **times))
    return model


def test_nothing_is_known_before_the_first_step() -> None:
    model = StepTime(lambda cf: 1e6 / cf)
    assert model.seconds(10.0) is model.measured(10.0) is model.bound() is None
    assert model.timed() == ()


@pytest.mark.parametrize("part", ["seconds", "exchange_seconds", "compress_seconds", "timed_cf"])
@pytest.mark.parametrize("bad", [nan, -1.0])
def test_a_report_without_all_times_is_skipped(part: str, bad: float) -> None:
    model = _run_timed((10.0, 0.2, 0.01))
    before = model.state_dict()
    times = {"seconds": 0.5, "exchange_seconds": 0.1, "compress_seconds": 0.1, "timed_cf": 10.0}
    model.observe(StepReport(0, 10.0, **{**times, part: bad if part != "timed_cf" else nan}))
    assert model.state_dict() == before


def test_a_cf_that_was_run_keeps_its_time_when_the_network_changes() -> None:
    model = _run_timed((DENSE, 1.0, 0.02), (10.0, 0.1, 0.01), (10.0, 0.5, 0.01))
    assert model.timed() == (10.0,)
    assert model.seconds(DENSE) == pytest.approx(WORK + 5.0)
    assert model.measured(DENSE) == pytest.approx(WORK + 1.0)  # compression only measured others
    assert model.measured(10.0) == pytest.approx(WORK + 0.51)
    assert model.measured(20.0) is None


def test_the_bound_has_nothing_on_the_wire_and_the_fastest_compression() -> None:
    model = _run_timed((DENSE, 1.1, 0.0))
    assert model.bound() == pytest.approx(WORK)
    codings = coding_at(10.0, 0.04), coding_at(20.0, 0.03)
    model = _run_timed((DENSE, 1.1, 0.0), (10.0, 0.2, codings[0]), (20.0, 0.15, codings[1]))
    assert model.bound() == pytest.approx(WORK + 0.1 + 0.03)


@pytest.mark.parametrize(
    ("goal", "here", "sent"),
    [
        (20.0, 160.0, 20.0),
        (10.0, 160.0, 20.0),
        (DENSE, 10.0, DENSE),  # no CF lies between
        (DENSE, 1000.0, 160.0),
        (640.0, 160.0, 640.0),
    ],
)
def test_the_bytes_grow_in_strides(goal: float, here: float, sent: float) -> None:
    cfs = (DENSE, 10.0, 20.0, 160.0, 640.0, 1000.0)
    assert StepTime(lambda cf: 1e6 / cf).within_reach(goal, here, cfs) == sent
    assert StepTime(lambda cf: nan).within_reach(goal, here, cfs) == sent
    assert _run_timed((DENSE, 1.0, 0.0)).within_reach(goal, here, cfs) == goal


# What a prediction may promise


@settings(max_examples=40)
@given(st.floats(0.0, 3.0), st.sampled_from([1.0, 2.0, 10.0]), st.booleans())
def test_no_prediction_is_faster_than_the_link(rate: float, cf: float, exposes: bool) -> None:
    """Whether CF 20 shows the link or backward hides all of it."""
    hidden = BACKWARD * WORK
    model = StepTime(lambda cf: 1e6 / cf, link=lambda: (0.0, rate / 1e6))
    _run(model, 20.0, [rate / 20 if exposes else max(0.0, rate / 20 - hidden)] * 10)
    seconds = model.seconds(cf)
    assert seconds is not None
    assert seconds >= max(WORK, rate / cf) - 1e-9
    assert seconds <= WORK + rate / cf + 1e-9


@pytest.mark.parametrize(("seconds_a_byte", "dense"), [(1e-9, 0.054), (1e-7, 0.45), (0.0, 0.5)])
def test_what_a_small_payload_waits_for_is_mostly_no_matter_of_its_bytes(
    seconds_a_byte: float, dense: float
) -> None:
    """Of a fast link. A slow one may account for all of it, and an unknown one must."""
    model = StepTime(lambda cf: 1e6 / cf, link=lambda: (0.0, seconds_a_byte))
    _run(model, 10.0, [0.05] * 10)
    expected = {1e-9: 0.05 + SLOWER * 0.9e-3, 1e-7: 0.05 + SLOWER * 0.09, 0.0: 0.5}
    assert model.exposed(1.0) == pytest.approx(expected[seconds_a_byte])
    assert model.exposed(1.0) == pytest.approx(dense, rel=0.1)
    assert model.exposed(20.0) == pytest.approx(0.025)  # fewer bytes may be worth a try
    _run(model, 10.0, [0.5] * 10)  # the network is no longer as it was
    assert model.changed
    assert model.exposed(1.0) == pytest.approx(5.0)


def test_steps_that_are_faster_than_the_link_is_said_to_be_are_believed() -> None:
    model = StepTime(lambda cf: 1e6 / cf, link=lambda: (0.0, 1e-5))
    _run(model, 10.0, [0.2] * 10)
    seconds = model.seconds(1.0)
    assert seconds is not None
    assert WORK + 2.0 <= seconds <= WORK + 2.0 + 10 * BACKWARD * WORK


def test_a_network_that_became_faster_is_not_bound_by_what_it_was() -> None:
    for after, bound in ((0.0, 0.0), (3.0, 10.0)):
        model = StepTime(lambda cf: 1e6 / cf, link=lambda: (0.0, 1e-5))
        _run(model, 10.0, [1.0] * 10 + [after] * 10)
        assert model.changed
        assert model.seconds(1.0) >= bound


def test_what_was_measured_is_remembered_as_long_as_the_network_is_the_same() -> None:
    """Backward hides the exchange at CF 4, so that nothing but the visit tells what dense takes."""
    model = _model([0.001] * 10, cf=4.0)
    _run(model, DENSE, [0.3] * 5)
    for _ in range(3):
        _run(model, 4.0, [0.001] * 30)
        assert model.seconds(DENSE) == pytest.approx(WORK + 0.3)
        _run(model, 20.0, [0.0] * 12)
        assert model.seconds(DENSE) == pytest.approx(WORK + 0.3)


@settings(max_examples=30)
@given(st.lists(st.floats(1.0, 4.0), min_size=1, max_size=60), st.integers(0, 20))
def test_other_processes_change_nothing_that_is_predicted(loads: list[float], quiet: int) -> None:
    """They lengthen work and coding alike, for a while, whatever CF is sent meanwhile."""
    model, coding = StepTime(lambda cf: 1e6 / cf), 0.02

    def steps(cf: float, loads: Sequence[float]) -> None:
        for step, load in enumerate(loads):
            own = load * (WORK + coding_at(cf, coding))
            times = {"seconds": own + 1 / cf, "median_seconds": own + 1 / cf}
            times |= {"exchange_seconds": 1 / cf, "compress_seconds": load * coding_at(cf, coding)}
            model.observe(StepReport(step, cf, timed_cf=cf, **times))

    steps(10.0, [1.0] * (10 + quiet))
    steps(20.0, loads)
    for cf in (1.0, 10.0, 20.0, 100.0):
        expected = WORK + 1 / cf + (coding_at(cf, coding) if cf > 1 else 0.0)
        assert model.seconds(cf) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("after", [0.1, 0.5])
def test_what_a_busy_machine_hides_is_no_faster_network(after: float) -> None:
    """Backward that takes long hides all of an exchange. A network that slows down meanwhile is
    seen."""
    model = _model([0.1] * 20)
    _run(model, 20.0, [0.05] * 10)
    for step in range(30):
        exposed = max(0.0, after / 2 - 0.1)
        times = dict.fromkeys(("seconds", "median_seconds"), 4 * WORK + exposed)
        report = StepReport(step, 20.0, timed_cf=20.0, compress_seconds=0.0, **times)
        model.observe(replace(report, exchange_seconds=exposed))
    assert model.changed == (after > 0.1)
    assert model.seconds(20.0) == pytest.approx(WORK + (0.15 if after > 0.1 else 0.05))


def test_a_machine_that_has_become_slower_for_good_is_noticed() -> None:
    model = _model([0.1] * 20)
    for step in range(WORKS):
        times = dict.fromkeys(("seconds", "median_seconds"), 3 * WORK + 0.1)
        report = StepReport(step, 10.0, timed_cf=10.0, compress_seconds=0.0, **times)
        model.observe(replace(report, exchange_seconds=0.1))
    assert model.seconds(10.0) == pytest.approx(3 * WORK + 0.1)


def test_fewer_bytes_save_at_least_the_links_time() -> None:
    """Backward hides a part of the exchange, and at fewer bytes it hides as much."""
    model = StepTime(lambda cf: 1e6 / cf, link=lambda: (0.0, 1e-6))
    _run(model, 10.0, [0.07] * 10)  # of 0.1
    assert model.exposed(20.0) == pytest.approx(0.02)
    assert model.exposed(100.0) == 0.0


def test_what_a_rung_takes_to_code_says_nothing_of_larger_cfs() -> None:
    model = StepTime(lambda cf: 1e6 / cf, rungs=(4.0, 8.0))
    for cf, coding in ((8.0, 0.03), (10.0, coding_at(10.0, 0.02))):
        whole = WORK + coding
        times = {"seconds": whole, "median_seconds": whole, "exchange_seconds": 0.0}
        for step in range(5):
            model.observe(StepReport(step, cf, timed_cf=cf, compress_seconds=coding, **times))
    expected = [coding_at(cf, 0.02) for cf in (20.0, 1000.0)]
    assert [model.coding(cf) for cf in (20.0, 1000.0)] == pytest.approx(expected)
    assert model.coding(8.0) == pytest.approx(0.03)
    assert model.coding(4.0) == pytest.approx(0.03)


def test_a_rung_that_was_not_sent_codes_faster_than_a_larger_cf() -> None:
    more = coding_at(10.0, 1.0)
    for here, other, ratio in ((10.0, 8.0, RUNG_CODING / more), (8.0, 10.0, more)):
        model = StepTime(lambda cf: 1e6 / cf, rungs=(4.0, 8.0))
        times = {"seconds": WORK + 0.03, "median_seconds": WORK + 0.03, "exchange_seconds": 0.0}
        model.observe(StepReport(0, here, timed_cf=here, compress_seconds=0.03, **times))
        assert model.coding(other) == pytest.approx(ratio * 0.03)


def test_a_dense_step_in_fewer_bits_has_nothing_to_code() -> None:
    model = StepTime(lambda cf: 1e6 / cf, rungs=(2.0, 4.0, 8.0), uncoded=(2.0,))
    whole = WORK + 0.03
    times = {"seconds": whole, "median_seconds": whole, "exchange_seconds": 0.0}
    for step in range(5):
        model.observe(StepReport(step, 8.0, timed_cf=8.0, compress_seconds=0.03, **times))
    assert model.coding(2.0) == 0.0
    assert model.seconds(2.0) == pytest.approx(WORK)
    for step in range(5):  # what takes that long is a probe
        model.observe(StepReport(step, 2.0, timed_cf=2.0, compress_seconds=0.03, **times))
    assert model.coding(2.0) == 0.0
    assert model.coding(4.0) == pytest.approx(0.03)
