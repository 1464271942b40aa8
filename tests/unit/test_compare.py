"""Comparisons: what is computed from the files of finished runs."""

from __future__ import annotations

from math import inf, isnan, nan
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs.compare.command import turns
from runs.compare.contender import parse_contender
from runs.compare.options import make_comparison
from runs.compare.report import _notes
from runs.report.rows import Row
from runs.report.source import smoothed
from tests.unit.made_runs import made


def test_a_quality_is_the_mean_of_the_last_evaluations() -> None:
    raw = ((10, 1.0), (20, 2.0), (30, 6.0), (40, 4.0))
    assert smoothed(raw, 1) == raw
    assert smoothed(raw, 2) == ((10, 1.0), (20, 1.5), (30, 4.0), (40, 5.0))
    assert smoothed((*raw[:2], (25, nan), *raw[2:]), 2) == smoothed(raw, 2)
    assert smoothed((), 3) == ()
    diverged = smoothed((*raw, (50, inf)), 2)
    assert diverged == (*smoothed(raw, 2), (50, inf))
    assert isnan(made(evaluations=smoothed((*raw, (50, nan)), 2)).quality)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20), st.integers(1, 25))
def test_smoothing_keeps_the_steps_and_ends_at_the_mean_of_what_there_is(
    values: list[float], count: int
) -> None:
    raw = list(enumerate(values))
    smooth = smoothed(raw, count)
    assert [done for done, _ in smooth] == [done for done, _ in raw]
    assert smooth[-1][1] == pytest.approx(fmean(values[-count:]))


def test_where_step_times_are_modelled_nobody_takes_turns() -> None:
    given = {"contender": ["dense", "topk@10:steps=30"], "steps": 20, "log_dir": "x"}
    taken = turns(make_comparison({**given, "fixed_clock": 0.1}))
    assert [turn.until for turn in taken] == [20, 30]
    asked = make_comparison({**given, "fixed_clock": 0.1, "slice": 10})
    assert len(turns(asked)) == 5


def test_means_over_different_seeds_are_not_set_side_by_side_without_a_word() -> None:
    comparison = make_comparison({"contender": ["dense", "topk@10"], "seeds": (0, 1)})
    first = comparison.config(comparison.contenders[0], 0)
    seeds = tuple(made(f"run{seed}", seed=seed) for seed in (0, 1))
    both, one = Row("dense", seeds), Row("topk@10", seeds[:1])
    told = [
        [note for note in _notes(comparison, first, rows, "dense") if "different" in note]
        for rows in ([both, both], [both, one])
    ]
    assert told == [[], ["rows are of different numbers of seeds: 2 of dense, 1 of topk@10"]]


def test_a_contender_may_be_as_long_as_its_settings_are() -> None:
    """A folder's name may have 255 bytes."""
    steps = ", ".join(f"{step}: 10" for step in range(80))
    longs = [parse_contender(f"Schedule({{{steps}, {last}: 20}})") for last in (100, 101)]
    made = make_comparison({"contender": [one.label for one in longs], "log_dir": "x"})
    folders = {made.config(one, 2**32 - 1).folder.name for one in made.contenders}
    assert len(folders) == 2
    assert max(map(len, folders)) < 240
