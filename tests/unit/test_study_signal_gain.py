"""The experiment on signal gain: the runs that it makes, and what it makes of their records."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import isnan, nan, sqrt
from pathlib import Path

import pytest

from adaptive import JSONLTimeline, StepRecord, StepReport
from docs.studies import signal_gain
from docs.studies.signal_gain import bytes_at, errors, gains, phases
from policies import Measurement

CFS = (10.0, 100.0)
STEPS = 20


def _report(step: int, cf: float) -> StepReport:
    total = 2.0 + (-1) ** step
    return StepReport(
        step,
        cf,
        {other: Measurement(1 / other, 0, 1, 1, 1 - 1 / other, 1) for other in CFS},
        grad_norm=1.0,
        steady_gain={other: 2 / other for other in CFS},
        signal={other: -total * 5 / other for other in CFS},
        signal_total=-total,
        peers={other: total * 8 / other for other in CFS},
        peers_total=total,
    )


def _pretend(command: str, words: Sequence[str], folder: Path) -> None:
    """Leaves what a run leaves: better and more bytes the smaller the CF."""
    told = " ".join(words)
    fixed = re.search(r"--cf (\d+)", told)
    cf = float(fixed[1]) if fixed else 30.0
    timeline = JSONLTimeline(folder / "timeline.jsonl")
    for step in range(STEPS):
        timeline.step(StepRecord(_report(step, cf), 0.0, 1.0, 1.0))
    timeline.close()
    result = {
        "quality": 50 - cf / 10,
        "quality_name": "accuracy %",
        "higher_is_better": True,
        "summary": {"bytes_sent": 1e6 / cf, "steps_at_cf": [[1.0, 7], [30.0, 13]]},
    }
    (folder / "result.json").write_text(json.dumps(result))


def test_it_trains_at_every_cf_and_compares_what_was_chosen_with_fixed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def train(command: str, words: Sequence[str], folder: Path) -> None:
        trained.append(" ".join([command, *words]))
        folder.mkdir(parents=True)
        _pretend(command, words, folder)

    monkeypatch.setattr(signal_gain, "train", train)
    words = ["--cfs", "10", "100", "--steps", str(STEPS), "--log-dir", str(tmp_path), "--seed", "3"]
    signal_gain.main(words)
    assert len(trained) == 1 + 4 + 2 + 4
    assert all("--lr-drop 12 --base topk+fp32" in line and "--seed 3" in line for line in trained)
    assert [line for line in trained if "Schedule({0: 10, 12: 100}" in line]
    assert [line for line in trained if "Schedule({0: 100, 12: 10}" in line]
    text = (tmp_path / "table.txt").read_text()
    gains_of_dense = next(line for line in text.splitlines() if line.startswith("dense"))
    assert "0.80/0.08 (" in gains_of_dense
    assert "0.50/0.05 (-" in gains_of_dense
    chosen = [line.split() for line in text.splitlines() if line.startswith("chosen")]
    between = 1e4 * 10 ** ((49 - 47) / -(49 - 40)) * 10  # at CF 30, between 10 and 100 of the fixed
    assert len(chosen) == 4
    for row in chosen:
        assert float(row[4]) == pytest.approx(between / (1e6 / 30), rel=0.01)
        assert row[5:] == ["dense:", "7,", "30:", "13"]
    assert (tmp_path / "signal.png").stat().st_size > 1000


def test_gains_are_ratios_of_means_and_errors_those_of_the_denominators() -> None:
    reports = [_report(step, 10.0) for step in range(9)]
    found = gains([*reports, StepReport(9, 10.0)], CFS)
    totals = [2.0 + (-1) ** step for step in range(9)]
    mean = sum(totals) / 9
    spread = sqrt(sum((total - mean) ** 2 for total in totals) / 8)
    assert errors([0.0, nan, *totals]) == pytest.approx(mean / spread * 3)
    assert isnan(errors([2.0]))
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
