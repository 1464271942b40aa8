"""Scaling efficiency: from a one-worker time to what result and tables say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adaptive import Summary
from adaptive.network.pace import Pace
from runs.compare.options import make_comparison
from runs.config import TrainConfig
from runs.options import make_config
from runs.parser import UsageError
from runs.records import Recorded
from runs.report.rows import Row
from runs.report.table import columns, make_text, shown
from runs.result import ending, make_result
from runs.tables import text_of
from runs.train import Outcome
from tests.unit.made_runs import made, record

PACE = Pace(steps=9, seconds=9 / 4)
SUMMARY = Summary(10, 1.0, {1.0: 10}, 0, 1e6, 1000, 250.0, 1e6, pace=PACE)
OUTCOME = Outcome(10, 0, False, seconds=2.5, loss=1.0, summary=SUMMARY, quality=5.0)
ALONE = TrainConfig(log_dir="x", policy="ddp", workers=4, one_worker_seconds=0.2)


def test_a_result_tells_it_from_its_own_steps_per_second() -> None:
    result = make_result(ALONE, OUTCOME, [], Recorded([], []))
    assert result["scaling_efficiency"] == pytest.approx(0.2 * 4)
    told = text_of(*ending(ALONE, OUTCOME, result, []))
    assert "scaling efficiency   0.8 (a step of one worker: 0.2 s)" in told


def test_without_a_one_worker_time_nothing_is_told() -> None:
    config = replace(ALONE, one_worker_seconds=None)
    result = make_result(config, OUTCOME, [], Recorded([], []))
    assert result["scaling_efficiency"] is None
    assert "scaling" not in text_of(*ending(config, OUTCOME, result, []))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"workers": 4, "one_worker_seconds": 0.2}, "0.400"),
        ({"fixed_clock": 0.1}, "0.200"),  # a modelled clock knows it
        ({}, "no column"),
    ],
)
def test_a_table_has_a_column_for_it(settings: dict[str, Any], told: str) -> None:
    row = Row("run", (made(**settings),))
    by_name = {one.name: one.text(row) for one in shown(columns([row], []), [row])}
    assert by_name.get("scaling eff.", "no column") == told


def test_over_seeds_it_has_a_spread() -> None:
    runs = [
        made(records=[record(i, seconds=s) for i in range(10)], one_worker_seconds=0.2)
        for s in (1 / 2, 1 / 3)
    ]
    row = Row("run", tuple(runs))
    assert "0.500 ± 0.14" in text_of(*make_text(columns([row], []), [row]))


def test_a_comparison_goes_on_in_the_same_folder_with_it() -> None:
    given = make_comparison({"one_worker_seconds": 0.2})
    assert given.one_worker_seconds == 0.2
    assert given.folder == make_comparison({}).folder


def test_it_is_not_to_be_given_where_the_clock_is_modelled() -> None:
    with pytest.raises(UsageError, match=r"--one-worker-seconds 0\.2: is 0\.1 by --fixed-clock"):
        make_config({"one_worker_seconds": 0.2, "fixed_clock": 0.1})
    with pytest.raises(UsageError, match="--one-worker-seconds"):
        make_comparison({"one_worker_seconds": 0.2, "fixed_clock": 0.1})


def test_no_evaluation_is_in_the_time_of_a_modelled_step() -> None:
    """After every step there is one, and all are known all the same."""
    evaluations = tuple((i + 1, 5.0) for i in range(10))
    assert made(evaluations=evaluations, fixed_clock=0.5).steps_per_second == pytest.approx(2)
