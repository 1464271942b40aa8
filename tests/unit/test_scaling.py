"""Scaling efficiency: from a one-worker time to what result and tables say."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from adaptive import LinkSpec, StepRecord, Summary
from policies import StepReport
from runs.compare.digest import Digest, Exploration
from runs.compare.options import make_comparison
from runs.compare.standing import stand
from runs.compare.table import make_tables
from runs.config import TrainConfig
from runs.options import make_config
from runs.parser import UsageError
from runs.records import Recorded
from runs.report.run import Run
from runs.report.table import cells, head, make_rows
from runs.result import ending, make_result
from runs.tables import text_of
from runs.train import Outcome

SUMMARY = Summary(10, 1.0, {1.0: 10}, 0, 1e6, 1000, 250.0, 1e6)
OUTCOME = Outcome(10, 0, False, seconds=2.5, loss=1.0, summary=SUMMARY, quality=5.0)
ALONE = TrainConfig(log_dir="x", policy="off", workers=4, one_worker_seconds=0.2)


def test_a_result_tells_it_from_its_own_steps_per_second() -> None:
    result = make_result(ALONE, OUTCOME, [], Recorded([], []))
    assert result["scaling_efficiency"] == pytest.approx(0.2 * 10 / 2.5)
    told = text_of(*ending(ALONE, OUTCOME, result, []))
    assert "scaling efficiency   0.8 (a step of one worker: 0.2 s)" in told


def test_without_a_one_worker_time_nothing_is_told() -> None:
    config = replace(ALONE, one_worker_seconds=None)
    result = make_result(config, OUTCOME, [], Recorded([], []))
    assert result["scaling_efficiency"] is None
    assert "scaling" not in text_of(*ending(config, OUTCOME, result, []))


def _records(seconds: float) -> list[StepRecord]:
    reports = [StepReport(i, 1.0, timed_cf=1.0, seconds=seconds) for i in range(10)]
    return [StepRecord(report, 0.0, nan, nan) for report in reports]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (ALONE, "0.400"),
        (TrainConfig(log_dir="x", fixed_clock=0.1), "0.200"),  # a modelled clock knows it
        (TrainConfig(log_dir="x"), "no column"),
    ],
)
def test_a_report_has_a_column_for_it(config: TrainConfig, told: str) -> None:
    run = Run("run", Path("x"), config, Recorded(_records(0.5), []), 10, (), nan, None)
    networks = [LinkSpec.parse("1mbit")]
    (row,) = make_rows([run], {}, networks)
    by_name = dict(zip(head([row], networks), cells(row, [row]), strict=True))
    assert by_name.get(("", "scaling eff."), "no column") == told


def test_a_comparison_has_a_column_where_the_time_is_known() -> None:
    runs = [
        Digest(seed, 5.0, (), 1e6, 1e6, rate, (), (), (), Exploration(0, 0.0))
        for seed, rate in enumerate((2.0, 3.0))
    ]
    standings = stand({"dense": runs}, None, 0, False)
    assert standings[0].scaling_efficiency(0.2).values == pytest.approx((0.4, 0.6))
    assert "0.500 ± 0.14" in text_of(*make_tables(standings, "loss", [], 0.2))
    assert "scaling" not in text_of(*make_tables(standings, "loss", []))


def test_a_comparison_goes_on_in_the_same_folder_with_it() -> None:
    given = make_comparison({"one_worker_seconds": 0.2})
    assert given.one_worker_seconds == 0.2
    assert given.folder == make_comparison({}).folder


def test_it_is_not_to_be_given_where_the_clock_is_modelled() -> None:
    with pytest.raises(UsageError, match=r"--one-worker-seconds 0\.2: is 0\.1 by --fixed-clock"):
        make_config({"one_worker_seconds": 0.2, "fixed_clock": 0.1})
    with pytest.raises(UsageError, match="--one-worker-seconds"):
        make_comparison({"one_worker_seconds": 0.2, "fixed_clock": 0.1})
