"""The study command: the runs that it makes, and what it makes of their records."""

from __future__ import annotations

import json
from math import isnan, nan, sqrt
from pathlib import Path
from typing import Any

import pytest

from adaptive import JSONLTimeline, StepRecord, StepReport
from policies import Measurement
from runs.__main__ import main
from runs.config import TrainConfig
from runs.study.frontier import bytes_at
from runs.study.phases import gains, phases

CFS = (10.0, 100.0)
STEPS = 20


def _report(step: int, cf: float) -> StepReport:
    total = 2.0 + (-1) ** step
    return StepReport(
        step,
        cf,
        {other: Measurement(1 / other, 0, 1, 1, 1 - 1 / other, 1) for other in CFS},
        grad_norm=1.0,
        steady={other: 2 / other for other in CFS},
        signal={other: -total * 5 / other for other in CFS},
        signal_total=-total,
        peers={other: total * 8 / other for other in CFS},
        peers_total=total,
    )


def _pretend(config: TrainConfig, until: int) -> int:
    """Leaves what a run leaves: better and more bytes the smaller the CF."""
    cf = {"fixed": config.cf, "schedule": 20.0, "gravac": 30.0}[config.policy] or 1.0
    config.save()
    timeline = JSONLTimeline(config.folder / "timeline.jsonl")
    for step in range(config.steps):
        timeline.step(StepRecord(_report(step, cf), 0.0, 1.0, 1.0))
    timeline.close()
    result = {
        "quality": 50 - cf / 10 + config.seed,
        "quality_name": "accuracy %",
        "higher_is_better": True,
        "summary": {
            "bytes_sent": 1e6 / cf,
            "wire_factor": cf,
            "steps_at_cf": [[1.0, 7], [30.0, 13]],
        },
    }
    (config.folder / "result.json").write_text(json.dumps(result))
    return 0


def _study(tmp_path: Path, *words: str) -> int:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 400)
    options = ["--data", str(text), "--steps", str(STEPS), "--log-dir", str(tmp_path / "log")]
    return main(["study", "signal", *options, *words])


def test_it_trains_what_is_not_there_and_reports(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[TrainConfig] = []

    def train(config: TrainConfig, until: int) -> int:
        trained.append(config)
        return _pretend(config, until)

    monkeypatch.setattr("runs.compare.slice.train_until", train)
    words = ["--cfs", "10", "100", "--seeds", "0", "3", "--epsilons", "0.3", "0.1", "--json"]
    assert _study(tmp_path, *words) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(trained) == 2 * (1 + 4 + 2 + 8)
    assert {config.lr_drop for config in trained} == {12}
    assert {c.gain for c in trained if c.policy == "gravac"} == {
        "gradient",
        "error_fed",
        "raw",
        "signal",
    }
    moved = {config.schedule for config in trained if config.policy == "schedule"}
    assert moved == {("0:10", "12:100"), ("0:100", "12:10")}
    dense = next(row for row in result["gains"] if row["sent"] == "dense")
    assert dense["peers"] == {"10": pytest.approx(0.8), "100": pytest.approx(0.08)}
    assert dense["next"] == {"10": pytest.approx(5 / 10), "100": pytest.approx(5 / 100)}
    assert dense["errors"]["next"] < 0 < dense["errors"]["peers"]
    for run in result["runs"]:
        if run["part"] == "chosen":  # at CF 30, between 10 and 100 of the fixed ones
            assert 1e4 < run["bytes_of_fixed"] < 1e5
            assert run["steps_at_cf"] == {"dense": 7, "30": 13}
    assert "bytes of fixed CFs" in (tmp_path / "log" / "table.txt").read_text()
    assert (tmp_path / "log" / "signal.png").stat().st_size > 1000
    before = len(trained)
    assert _study(tmp_path, *words) == 0
    assert len(trained) == before  # nothing is trained twice


def test_it_stops_where_a_run_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runs.compare.slice.train_until", lambda config, until: 130)
    assert _study(tmp_path) == 130


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cfs", "10"], "--cfs 10: must be at least two"),
        (["--cfs", "1", "10"], "--cfs 1 10: must be at least two different CFs > 1"),
        (["--epsilons", "2"], "--epsilon=2.0: must be in (0, 1]"),
        (["--task", "nothing"], "--task"),
    ],
)
def test_bad_options_are_one_line(words: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    assert _study(tmp_path, *words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_gains_are_ratios_of_means_and_errors_those_of_the_denominators() -> None:
    reports = [_report(step, 10.0) for step in range(9)]
    found = gains([*reports, StepReport(9, 10.0)], CFS)
    totals = [2.0 + (-1) ** step for step in range(9)]
    mean = sum(totals) / 9
    spread = sqrt(sum((total - mean) ** 2 for total in totals) / 8)
    assert found["errors"]["peers"] == pytest.approx(mean / spread * 3)
    assert found["errors"]["next"] == pytest.approx(-mean / spread * 3)
    assert found["gradient"][10.0] == pytest.approx(0.1)
    assert found["error_fed"] == {10.0: pytest.approx(0.2), 100.0: pytest.approx(0.02)}
    assert isnan(gains([], CFS)["peers"][10.0])


def test_phases_cover_all_steps() -> None:
    for drop, steps in [(60, 100), (1, 2), (1, 1), (90, 90)]:
        covered = [step for part in phases(drop, steps).values() for step in part]
        assert covered == list(range(steps))


@pytest.mark.parametrize("sign", [1, -1])
def test_bytes_at_a_quality_are_those_of_the_best_fixed_cfs(sign: int) -> None:
    points = [(1e6, 50.0 * sign), (1e5, 40.0 * sign), (2e5, 39.0 * sign), (1e4, 20.0 * sign)]
    at = [bytes_at(points, quality * sign, sign > 0) for quality in (50.0, 45.0, 40.0, 30.0)]
    assert at == [pytest.approx(b) for b in (1e6, sqrt(1e11), 1e5, sqrt(1e9))]
    assert isnan(bytes_at(points, 51.0 * sign, sign > 0))
    assert isnan(bytes_at([], nan, sign > 0))
