"""How a step's time is split, by hand-made moments."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from math import isnan, nan

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from adaptive import StepRecord
from adaptive.network.timing import ForwardMark, StepTiming, Timestamps, covered
from policies import StepReport
from runs.times import where_time_went

_between = Timestamps(lambda: 0.0).between
moments = st.integers(0, 20).map(float)


@given(st.lists(st.tuples(moments, moments)), moments, moments)
def test_covered_is_the_length_of_the_union(
    spans: list[tuple[float, float]], start: float, stop: float
) -> None:
    seconds = [start + i for i in range(int(max(0, stop - start)))]
    hit = [s for s in seconds if any(began <= s and s + 1 <= ended for began, ended in spans)]
    assert covered(spans, start, stop) == len(hit)


@given(st.lists(st.integers(0, 100), min_size=2))
@example([0, 3, 9])  # 0.3 + 0.6 > 0.9
def test_decoding_all_the_while_leaves_no_time_for_the_network(cuts: list[int]) -> None:
    """Whatever the rounding: a time below zero would be no time."""
    edges = [cut / 10 for cut in sorted(cuts)]
    timing = StepTiming(0.0, 10.0, exchanged=edges[-1], ended=20.0)
    timing.calls = [(0.0, edges[0])]
    timing.decoded = list(pairwise(edges))
    assert 0 <= timing.split(_between)["exchange_seconds"] == pytest.approx(0, abs=1e-12)


def test_the_parts_of_a_step() -> None:
    timing = StepTiming(100.0, 10.0, exchanged=115.0, ended=130.0, forward=120.0)
    timing.calls = [(101.0, 102.0), (106.0, 108.0)]
    timing.waits = [(106.5, 107.5)]
    timing.decoded = [(105.0, 107.0), (110.0, 112.0), (111.0, 113.0)]  # the first hidden
    parts = timing.split(_between)
    assert parts == {
        "seconds": 30,
        "compute_seconds": (8 - 2 - 1) + 10,
        "compress_seconds": 2,
        "decode_seconds": 3,
        "exchange_seconds": 1 + (7 - 3),
    }
    report = StepReport(1, 10.0, **parts)
    assert report.coding_seconds == 5
    assert report.rest_seconds == 120 - 115  # optimizer and input
    timing.forward = None
    assert isnan(timing.split(_between)["compute_seconds"])


def test_waiting_for_means_inside_a_call_is_decoding_while_a_thread_decodes() -> None:
    """As after a step, in parameter space: compressing, waiting for a mean, applying it, twice."""
    timing = StepTiming(100.0, 10.0, ended=130.0, forward=120.0)
    timing.calls = [(101.0, 115.0)]
    timing.arrivals = [(103.0, 107.0), (109.0, 114.0)]
    timing.decoded = [(106.0, 107.0), (108.0, 110.0)]  # the second one partly while it applies
    assert timing.split(_between) == {
        "seconds": 30,
        "compute_seconds": 1 + 10,
        "compress_seconds": 14 - 4 - 5,
        "decode_seconds": 1 + 1,
        "exchange_seconds": 3 + 4,
    }


def test_what_the_device_has_not_passed_has_no_parts() -> None:
    timing = StepTiming(100.0, 10.0, ended=130.0, forward=120.0)
    timing.calls = [(101.0, 115.0)]
    parts = timing.split(lambda start, stop: nan if stop == 130.0 else stop - start)
    assert all(isnan(part) for part in parts.values())


def test_an_older_record_knows_neither_decoding_nor_computing() -> None:
    report = StepReport(1, 10.0, seconds=10.0, compress_seconds=2.0, exchange_seconds=3.0)
    assert (report.coding_seconds, report.rest_seconds) == (2, 5)


def test_where_a_runs_time_went_is_told_by_medians() -> None:
    reports = [StepReport(0, 1.0)] + [
        StepReport(
            i, 1.0, seconds=s, compress_seconds=0.1, exchange_seconds=0.2, decode_seconds=0.3
        )
        for i, s in enumerate((1.0, 9.0, 1.0))
    ]
    records = [StepRecord(report, 0.0, nan, nan) for report in reports]
    times = where_time_went(records)
    assert times.pop("rest") == pytest.approx(400)
    assert times == {"step": 1000, "compress": 100, "decode": 300, "exchange": 200}
    assert where_time_went(records[:1]) == {}


def test_the_first_forward_with_gradients_counts() -> None:
    ticks = iter(range(100))
    mark, net = ForwardMark(lambda: float(next(ticks))), nn.Linear(2, 2)
    net.register_forward_pre_hook(mark)
    with torch.no_grad():
        net(torch.ones(2))
    assert mark.take() is None
    net(torch.ones(2))
    net(torch.ones(2))
    assert mark.take() == 0
    assert mark.take() is None


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_leave_the_clock_behind(twin: object) -> None:
    net = nn.Linear(2, 2)
    mark = ForwardMark(lambda: pytest.fail("the copy's clock was read"))
    net.register_forward_pre_hook(mark)
    twin(net)(torch.ones(2))  # type: ignore[operator]
