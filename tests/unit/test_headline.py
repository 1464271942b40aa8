"""The headline: whether compression was worth it, and the dense step that it compares with."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf, isnan, nan

import pytest

from adaptive.exchange.link import LinkCost, LinkSpec
from adaptive.headline import DenseStep, DenseTimer, headline
from adaptive.timeline.records import StepRecord, headline_of
from policies import DENSE, StepReport
from policies.words import bytes_in_words, percent, progress, seconds_in_words
from runs.modelled_clock import ModelledClock
from runs.report.rows import Row
from runs.report.verdict import beside, headlines
from tests.unit.made_runs import DENSE as DENSE_RUN
from tests.unit.made_runs import made, record

NBYTES = 1e6  # of a dense step


def timer(clock=lambda: 0.0, spec=None, cost=None):
    return DenseTimer(lambda cf: NBYTES / cf, 2, 0, clock, spec, lambda: cost)


def timed(cf, exposed, work=0.1):
    """A step that waits so long for the network."""
    seconds = work + exposed
    times = {"seconds": seconds, "median_seconds": seconds, "exchange_seconds": exposed}
    return StepReport(0, cf, timed_cf=cf, compress_seconds=0.0, **times)


def fed(made, *reports):
    for report in reports:
        made.observe(report)
    return made


def test_a_dense_step_that_was_run_is_measured():
    steps = [timed(DENSE, 0.9)] * 4 + [timed(10.0, 0.09)] * 4
    step = fed(timer(spec=LinkSpec(1e9)), *steps).step(10.0)
    assert step.measured
    assert step.seconds == pytest.approx(1.0)


def test_one_that_was_not_is_modelled_by_the_emulated_link_and_never_too_long():
    step = fed(timer(spec=LinkSpec(8e6)), *[timed(10.0, 0.1)] * 4).step(10.0)
    assert not step.measured
    assert 1.0 <= step.seconds <= 1.1  # 1 s for the bytes, of which backward may hide some


def test_one_on_the_measured_link_is_modelled_unless_steps_contradict_it():
    slow = LinkCost(0.0, 1e6)
    assert fed(timer(cost=slow), *[timed(10.0, 0.1)] * 4).step(10.0).seconds > 1.0
    # Two CFs that wait for nothing: the network must have become faster.
    idle = [timed(10.0, 0.0)] * 4 + [timed(20.0, 0.0)] * 4
    assert isnan(fed(timer(cost=slow), *idle).step(20.0).seconds)


@pytest.mark.parametrize("cost", [None, LinkCost(0.0, inf)])
def test_where_nothing_is_known_nothing_is_said(cost):
    step = fed(timer(cost=cost), *[timed(10.0, 0.1)] * 4).step(10.0)
    assert isnan(step.seconds)
    assert "dense was not timed" in headline(0.2, step, 0.9)


def test_a_modelled_clock_knows_exactly():
    clock = ModelledClock(0.25, LinkSpec(8e6))
    made = fed(timer(clock), timed(10.0, 0.1))
    assert made.step(10.0) == DenseStep(clock.step(NBYTES))
    assert made.network == "modelled 8 Mbit/s link"


@pytest.mark.parametrize(
    ("seconds", "dense", "saved", "share", "told"),
    [
        (0.19, 1.6, 0.98, 0.0, "8.4x faster than dense on this network (0.19 s a step instead of a "
         "measured 1.6 s), 98% fewer bytes"),
        (0.1, 1.6, 0.98, 0.0, "16x faster than dense"),
        (1.0, 1.02, 0.5, 0.0, "as fast as dense on this network"),
        (1.0, 0.5, 0.98, 0.0, "dense is right on this network: 0.50 s a step (measured), 1.0 s in"),
        (1.0, 1.0, 0.1, 0.9, "dense is right on this network"),
        (1.0, 1.0, 0.0, 1.0, "dense all along: 1.0 s a step"),
        (nan, nan, 0.9, 0.0, "90% fewer bytes than dense; no step was timed"),
        (1.0, 4.0, -0.5, 0.0, "4.0x faster"),
    ],
)  # fmt: skip
def test_the_sentence(seconds, dense, saved, share, told):
    said = headline(seconds, DenseStep(dense, measured=True), saved, dense_share=share)
    assert said.startswith(told)
    assert "\n" not in said
    assert not re.search(r"nan|inf\b|T_comp|e[+-]\d", said)


def test_what_is_only_modelled_is_no_verdict_for_dense():
    said = headline(0.45, DenseStep(0.42), 0.77)
    assert said.startswith("dense may be as fast on this network (0.45 s a step, dense a modelled ")
    assert headline(0.45, DenseStep(0.42), 0.1, dense_share=0.9).startswith("dense is right")


def test_bytes_are_never_all_saved():
    assert bytes_in_words(0.98) == "98% fewer bytes"
    assert bytes_in_words(0.99996) == "99.996% fewer bytes"
    assert bytes_in_words(0.98, "dense") == "98% fewer bytes than dense"
    assert bytes_in_words(0.0, "dense") == "as many bytes as dense"
    assert bytes_in_words(-0.5) == "50% more bytes"
    assert bytes_in_words(-2.0) == "3 times the bytes"
    assert bytes_in_words(0.001) == bytes_in_words(nan) == "as many bytes"


def test_numbers_as_people_write_them():
    numbers = (130.0, 12.3, 1.6, 0.187, 0.0042, 3e-5)
    told = ["130 s", "12 s", "1.6 s", "0.19 s", "4.2 ms", "30 us"]
    assert list(map(seconds_in_words, numbers)) == told
    assert [percent(x) for x in (0.48, 0.031, 0.0004, 1.5, -0.1)] == [
        "48%", "3.1%", "0%", "150%", "10%",
    ]  # fmt: skip
    assert progress(1.03, "CF 10") == "3% more progress a second than CF 10"
    assert progress(2.7, "dense") == "2.7 times as much progress a second as dense"


def test_a_record_tells_it_and_one_of_before_does_not():
    report = StepReport(9, 10.0)
    record = StepRecord(report, 1.0, 1.0, 1.0)
    assert headline_of(record) == ""
    known = {"active": 2.0, "active_steps": 10, "sent": 1.0, "dense": 50.0}
    record = StepRecord(report, 1.0, 1.0, 1.0, **known, dense_step=DenseStep(1.6))
    assert headline_of(record, "emulated 10 Mbit/s link") == (
        "8.0x faster than dense on this emulated 10 Mbit/s link (0.20 s a step instead of a "
        "modelled 1.6 s), 98% fewer bytes"
    )


def test_quality_is_told_beside_a_dense_run_and_only_there():
    ours = made("ours", evaluations=((10, 5.70),))
    bare = made("dense", [record(i, 1.0, 1.6) for i in range(10)], ((10, 5.68),), **DENSE_RUN)
    rows = [Row(run.name, (run,)) for run in (ours, bare)]
    told = headlines(rows)
    assert [*told] == ["ours"]
    assert told["ours"].endswith("perplexity 0.35% worse than dense's (5.7 against 5.68, one seed)")
    assert "3.2x faster" in told["ours"]
    assert "a measured 1.6 s" in told["ours"]
    assert headlines(rows[:1]) == {}  # nor does its own record tell
    longer = Row("longer", (made("longer", evaluations=((20, 5.70),), steps=20),))
    longer = replace(longer, runs=(replace(longer.run, trained=20),))
    assert headlines([longer, rows[1]])["longer"].endswith("after 20 steps instead of 10")


def test_qualities_are_compared_as_far_as_seeds_tell():
    assert beside([5.0, 5.2], [5.1, 5.2], "perplexity", False).startswith("perplexity as dense's")
    assert beside([6.52701], [6.52702], "perplexity", False).startswith("perplexity as dense's (")
    assert beside([71.0], [70.0], "accuracy", True).startswith("accuracy 1 points better")
    assert beside([nan], [70.0], "accuracy", True) == ""
