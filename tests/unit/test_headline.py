"""The headline: whether compression was worth it, in one sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive.network.pace import DenseStep, Pace
from adaptive.timeline.records import StepRecord
from adaptive.timeline.summary import headline, headline_of
from policies import DENSE, Fixed, Goodput, StepReport
from policies.words import bytes_in_words, costs, percent, progress, seconds_in_words
from runs.report.rows import Row
from runs.report.run import Ending, Slice
from runs.report.verdict import beside, headlines, pace_beside
from tests.unit.made_runs import DENSE as DENSE_RUN
from tests.unit.made_runs import made, record


def paced(seconds, dense=nan, measured=True, doubt=0.0):
    """Ten steps that took so long each, and a dense step in place of each."""
    pace = Pace()
    pace.add(10 * seconds, 10, DenseStep(dense, measured, doubt))
    return pace


@pytest.mark.parametrize(
    ("seconds", "dense", "saved", "share", "told"),
    [
        (0.19, 1.6, 0.98, 0.0, "8.4x faster than dense on this network (0.19 s a step instead of a "
         "measured 1.6 s), 98% fewer bytes"),
        (0.1, 1.6, 0.98, 0.0, "16x faster than dense"),
        (1.0, 1.02, 0.5, 0.0, "about as fast as dense on this network (1.0 s a step), 50%"),
        (1.0, 0.5, 0.98, 0.0, "2.0x slower than dense on this network (1.0 s a step instead of a "
         "measured 0.50 s), 98% fewer bytes"),
        (1.0, 1.0, 0.1, 0.9, "mostly dense on this network: 1.0 s a step, 90% of the steps dense"),
        (1.0, 1.0, 0.0, 1.0, "dense all along: 1.0 s a step"),
        (nan, nan, 0.9, 0.0, "90% fewer bytes than dense; no step was timed"),
        (1.0, nan, 0.9, 0.0, "90% fewer bytes than dense, 1.0 s a step; dense was not timed on"),
        (1.0, 4.0, -0.5, 0.0, "4.0x faster"),
        (0.116, 0.124, 0.0, 0.0, "1.1x faster than dense on this network (0.116 s a step instead "
         "of a measured 0.124 s), as many bytes"),
    ],
)  # fmt: skip
def test_the_sentence(seconds, dense, saved, share, told):
    said = headline(paced(seconds, dense), saved, dense_share=share)
    assert said.startswith(told)
    assert "\n" not in said
    assert not re.search(r"nan|inf\b|T_comp|e[+-]\d", said)


def test_what_is_only_modelled_is_no_verdict_for_dense():
    said = headline(paced(0.45, 0.42, measured=False), 0.77)
    assert said.startswith("dense may be as fast on this network (0.45 s a step, dense a modelled ")


def test_what_is_within_the_doubt_is_no_difference():
    assert headline(paced(1.0, 1.3, doubt=0.1), 0.9).startswith("1.3x faster")
    assert headline(paced(1.0, 1.3, doubt=0.3), 0.9).startswith("about as fast as dense")
    assert headline(paced(1.3, 1.0, doubt=0.3), 0.9).startswith("about as fast as dense")


@given(
    st.floats(1e-4, 1e3), st.floats(1e-4, 1e3), st.floats(0, 0.99), st.floats(-1, 0.99),
    st.booleans(),
)  # fmt: skip
def test_beside_a_verdict_for_dense_nothing_is_called_faster(seconds, dense, share, saved, timed):
    verdict = "dense is right: no CF promises more progress a second"
    pace = paced(seconds, dense) if timed else paced(nan)
    said = headline(pace, saved, cf=DENSE, dense_share=share, verdict=verdict)
    assert said.startswith("dense is right on this network: ")
    assert not re.search("faster|slower|as fast", said)


def test_what_keeps_dense_for_the_gradients_sake_does_not_judge_the_network():
    verdict = "no gain reaches GraVAC's epsilon 0.7, so it sends dense"
    said = headline(paced(1.2), 0.1, cf=DENSE, dense_share=0.9, verdict=verdict, network="link")
    assert said == f"{verdict} on this link: 1.2 s a step, 90% of the steps dense; 10% fewer bytes"


@given(st.floats(1e-4, 1e3), st.floats(0.3, 3))
def test_two_times_that_are_compared_differ_or_are_left_out(seconds, ratio):
    for said in (
        headline(paced(seconds, ratio * seconds), 0.5),
        costs(ratio * seconds, seconds, 0.5),
    ):
        pair = re.search(r"([\d.]+ \w+) a step instead of (?:a measured )?([\d.]+ \w+)", said)
        assert pair is None or pair[1] != pair[2]
        assert pair is not None or 0.9 < ratio < 1.1


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
    assert headline_of(StepRecord(report, 1.0, 1.0, 1.0), None) == ""
    pace = paced(0.2, 1.6, measured=False)
    known = StepRecord(report, 1.0, 1.0, 1.0, sent=1.0, dense=50.0, pace=pace)
    assert headline_of(known, None, "emulated 10 Mbit/s link") == (
        "8.0x faster than dense on this emulated 10 Mbit/s link (0.20 s a step instead of a "
        "modelled 1.6 s), 98% fewer bytes"
    )
    concluded = replace(known, report=StepReport(9, DENSE), verdict="dense is right: so it is")
    assert headline_of(concluded, None).startswith("dense is right on this network: 0.20 s a step")


def test_it_says_what_the_policy_promises_of_quality():
    promises = {
        Goodput(): "aiming at dense's quality in equal steps",
        Goodput(goal="time"): "with no promise of dense's quality",
        Fixed(100): "with no promise of dense's quality",
    }
    for policy, promise in promises.items():
        said = headline(paced(0.2, 1.6), 0.98, promise=policy.promise)
        assert said.endswith(f"98% fewer bytes, {promise}")
        quality = "1.4 points behind dense in equal steps"
        beside_dense = headline(paced(0.2, 1.6), 0.98, promise=policy.promise, quality=quality)
        assert beside_dense.endswith(f"98% fewer bytes, {quality}")  # what is known, not promised
        dense = headline(paced(1.6, 1.6), 0.0, cf=DENSE, dense_share=1.0, promise=policy.promise)
        assert dense == "dense all along: 1.6 s a step on this network"
        local = headline(paced(0.2, 1.6), 0.98, promise=policy.promise, caveat="local steps")
        assert "quality" not in local


# -- beside a dense run --------------------------------------------------------------------------


def beside_dense(ours=0.5, dense=1.6, turns=2, trained=10):
    """Two runs of one comparison that took turns."""
    known = {"sent": 1.0, "dense": 50.0}
    a = made("ours", [record(i, 10.0, ours, **known) for i in range(trained)], ((trained, 5.70),))
    b = made("dense", [record(i, 1.0, dense) for i in range(10)], ((10, 5.68),), **DENSE_RUN)
    firsts = [10 * turn // turns for turn in range(turns)]
    return [
        Row(one.name, (replace(one, slices=tuple(Slice(i, i + 5, paced(s)) for i in firsts)),))
        for one, s in ((a, ours), (b, dense))
    ]


def test_quality_is_told_beside_a_dense_run_and_only_there():
    rows = beside_dense()
    told = headlines(rows)
    assert [*told] == ["ours"]
    assert told["ours"].startswith("3.2x faster than dense on this network (0.50 s a step instead ")
    assert "a measured 1.6 s), 98% fewer bytes" in told["ours"]
    same = "the same quality in equal steps (perplexity 5.7 against 5.68, one seed, within 1%)"
    assert told["ours"].endswith(same)
    assert headlines(rows[:1])["ours"].startswith("98% fewer bytes than dense, 0.50 s a step; dens")
    longer = beside_dense(trained=20)
    assert "the same quality after 20 steps instead of 10 (perplexity" in headlines(longer)["ours"]


def test_of_several_dense_runs_that_of_the_same_seed_is_beside():
    ours, dense = beside_dense()
    lower = replace(dense.run, name="lower", evaluations=((10, 4.0),))
    other = replace(ours.run, config=replace(ours.run.config, seed=1))
    twin = replace(dense.run, config=replace(dense.run.config, seed=1))
    rows = [Row("lower", (lower,)), Row("twin", (twin,)), Row("other", (other,))]
    told = headlines(rows)["other"]
    assert told.startswith("3.2x faster than dense")
    assert "(perplexity 5.7 against 5.68, one seed" in told
    assert "against 4," in headlines([rows[0], rows[2]])["other"]  # no dense run of its seed


def test_a_dense_run_of_other_workers_is_not_beside():
    ours, dense = beside_dense()
    other = replace(dense.run, config=replace(dense.run.config, workers=4))
    assert "against" not in headlines([ours, Row("dense", (other,))])["ours"]


def test_a_headline_says_how_many_runs_have_diverged():
    ours, dense = beside_dense()
    bad = replace(ours.run, ending=Ending(diverged="the loss was nan"))
    told = headlines([Row("ours", (bad,)), dense])["ours"]
    assert told.endswith("98% fewer bytes, the run diverged")
    both = Row("ours", (ours.run, replace(bad, config=replace(bad.config, seed=1))))
    told = headlines([both, dense])["ours"]
    assert "the same quality in equal steps" in told
    assert told.endswith(", 1 of 2 runs diverged")
    # Of the one that has not come to its end the steps count as little as the quality.
    early = replace(bad, trained=3, recorded=replace(bad.recorded, steps=bad.records[:3]))
    both = Row("ours", (early, replace(ours.run, config=replace(ours.run.config, seed=1))))
    twin = replace(dense.run, config=replace(dense.run.config, seed=1))
    told = headlines([both, Row("dense", (dense.run, twin))])["ours"]
    assert "the same quality in equal steps" in told
    assert told.endswith("1 of 2 seeds, within 1%), 1 of 2 runs diverged")


def test_a_headline_says_that_a_run_ended_in_no_finite_quality():
    """As a script does that goes on after its loss is nan."""
    ours, dense = beside_dense()
    bad = replace(ours.run, evaluations=((5, 5.7), (10, nan)))
    told = headlines([Row("ours", (bad,)), dense])["ours"]
    assert told.endswith("98% fewer bytes, the run ended in no finite quality")
    assert "its last evaluation was not finite" in bad.notes
    assert not ours.run.ends_unknown
    assert not replace(bad, ending=Ending(diverged="the loss was nan")).ends_unknown


def test_no_more_than_all_steps_of_runs_are_dense():
    """Also if the first of them has ended early."""
    own = {"sent": 9.0, "dense": 10.0}
    runs = [
        made(f"ours{count}", [record(i, 1.0, **own, dense_steps=i) for i in range(count)])
        for count in (5, 100)
    ]
    told = headlines([Row("ours", tuple(runs))])["ours"]
    assert "90% of the steps dense" in told  # (4 / 5 + 99 / 100) / 2


def test_runs_that_were_made_at_different_times_are_not_compared_by_their_seconds():
    ours, dense = beside_dense(turns=0)
    assert pace_beside(ours, dense) is None
    told = headlines([ours, dense])["ours"]
    assert "faster" not in told
    assert told.endswith(
        "the same quality in equal steps (perplexity 5.7 against 5.68, one seed, within 1%)"
    )


def test_turns_that_contradict_one_another_show_no_difference():
    ours, dense = beside_dense()
    slow, fast = (Slice(first, first + 5, paced(s)) for first, s in ((0, 1.0), (5, 4.0)))
    dense = Row("dense", (replace(dense.run, slices=(slow, fast)),))
    ours = Row("ours", (replace(ours.run, slices=(replace(slow, pace=paced(1.5)),
                                                  replace(fast, pace=paced(2.0)))),))  # fmt: skip
    assert headlines([ours, dense])["ours"].startswith("about as fast as dense")


def test_by_one_modelled_clock_runs_compare_at_any_time():
    clock = {"fixed_clock": 0.1}
    ours = made("ours", [record(i, 10.0, 0.5) for i in range(10)], **clock)
    dense = made("dense", [record(i, 1.0, 1.6) for i in range(10)], **clock, **DENSE_RUN)
    pace = pace_beside(Row("ours", (ours,)), Row("dense", (dense,)))
    assert pace.speedup == pytest.approx(3.2)
    assert not pace.is_measured
    other = replace(dense, config=replace(dense.config, fixed_clock=0.2))
    assert pace_beside(Row("ours", (ours,)), Row("dense", (other,))) is None


def test_a_quality_is_the_same_within_what_the_promise_allows():
    def told(ours, dense, name="perplexity", higher=False):
        return beside(dict(enumerate(ours)), dict(enumerate(dense)), name, higher)

    same = "the same quality in equal steps (perplexity "
    assert told([5.14], [5.1]).startswith(same + "5.14 against 5.1, one seed, within 1%)")
    assert told([5.06], [5.1]).startswith(same)
    assert told([5.3, 5.1], [5.0, 5.2]).endswith("2 seeds, within the spread)")
    assert told([5.3, 5.9], [5.2, 5.2]) == (
        "7.7% behind dense in equal steps (perplexity 5.6 against 5.2, 2 seeds)"
    )
    assert told([4.9], [5.1]).startswith("3.9% ahead of dense in equal steps")
    accuracy = "accuracy %", True
    assert told([70.9], [70.0], *accuracy).endswith("one seed, within 1 point)")
    assert told([68.6], [70.0], *accuracy).startswith("1.4 points behind dense in equal steps")
    assert told([0.72], [0.70], "accuracy", True).startswith("2.9% ahead of dense")
    assert told([nan], [70.0], *accuracy) == ""
    assert told([5.0] * 3, [5.0, 5.01, 5.02]).endswith("3 seeds, within 1%)")
    # A seed that one of them does not know says nothing of a difference.
    assert told([5.0, nan], [5.0, 9.0]).endswith("5 against 5, 1 of 2 seeds, within 1%)")
    assert told([5.0, 9.0, 5.2], [5.0, nan, 5.2]).endswith("2 of 3 seeds, within the spread)")
    assert told([nan, 5.0], [5.0]).endswith("of different seeds, within 1%)")
