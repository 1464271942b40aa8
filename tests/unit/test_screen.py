"""Screening: many settings on one record, each judged by exactly what its replay alone gives."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from hashlib import sha256
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import pytest

from adaptive import StepRecord, StepReport
from policies import Measurement
from runs.config import TrainConfig
from runs.options import make_config
from runs.records import Recorded
from runs.replay.costs import RecordedCosts
from runs.replay.gains import RecordedGains
from runs.replay.make import start_policy
from runs.replay.replay import replay
from runs.replay.reports import Reports
from runs.replay.source import Source
from runs.tune import screen
from runs.tune.screen import Record
from runs.tune.tuning import Tuning, make_tuning

STEPS = 60
SENT = (1.0, 10.0, 20.0, 160.0)
LADDER = (10.0, 20.0, 40.0, 160.0, 1000.0)
SETTINGS = 20

COMMANDS: dict[str, dict[str, Any]] = {
    "gravac": {"policy": "gravac"},
    "accordion": {"policy": "accordion", "search": ["eta", "interval=2,5,9"]},
    "goodput": {"policy": "goodput", "search": ["margin=0.01..1"]},
    "fixed": {"policy": "fixed", "search": ["cf"]},
}


def _recorded(steady: bool) -> Recorded:
    """A run that went through a few CFs, with gains that fall with CF, and one step that was not
    finite."""
    rng = random.Random(int(steady))
    records = []
    for i in range(STEPS):
        cf, before = SENT[i // 15 % 4], SENT[max(0, i - 1) // 15 % 4]
        finite = i != 33
        total = rng.uniform(5, 10) if finite else nan
        lost = {c: min(1.0, rng.uniform(0.8, 1.2) * (1 - c**-0.3)) for c in LADDER}
        measured = {
            c: Measurement(total * (1 - lost[c]), total * lost[c], total, total, lost[c], 1.0)
            for c in ({cf, 10.0} - {1.0})
        }
        sent = {c: 5000 / c if c > 1 else 4000.0 for c in (cf, before)}
        seconds = 1e-2 + 1e-5 * sent[before] * rng.uniform(0.9, 1.1)
        report = StepReport(
            i,
            cf,
            measured,
            timed_cf=before if i >= 2 else nan,
            seconds=seconds if i >= 2 else nan,
            median_seconds=seconds if i >= 2 else nan,
            compress_seconds=1e-3 * (before > 1),
            exchange_seconds=seconds - 1e-2,
            wire_bytes=sent[cf],
            dense_wire_bytes=4000.0,
            timed_bytes=sent[before],
            grad_norm=rng.uniform(1, 2) if finite else inf,
            lr=0.1,
            steady_gain={c: 1 - lost[c] for c in LADDER} if steady and finite else {},
        )
        records.append(StepRecord(report, 0.0, nan, nan))
    return Recorded(records, [])


def _source(steady: bool, folder: Path) -> Source:
    return Source(folder / "timeline.jsonl", _recorded(steady), None)


def _tuning(name: str, folder: Path, settings: int = SETTINGS) -> Tuning:
    command = {"steps": STEPS, "timeline": "x", "proxy": "replay", "replays": settings}
    return make_tuning({**command, **COMMANDS[name], "log_dir": str(folder)})


def _alone(config: TrainConfig, source: Source) -> tuple[float, bytes]:
    """As `runs replay` does it, and the objective from models that nobody else has used."""
    plans = replay(start_policy(config, source), source.recorded).plans
    gains = RecordedGains(source.recorded.steps)
    costs = RecordedCosts(source.recorded.steps)
    kept = 0.0
    for i, plan in enumerate(plans):
        gain = 1.0 if plan.send == 1 else gains.steady(i, (plan.send,))[0].get(plan.send, nan)
        kept += gain if isfinite(gain) else 0.0
    sent = array("d", (plan.send for plan in plans))
    return kept / sum(costs.seconds(plan.send) for plan in plans), sha256(sent).digest()


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_setting_is_judged_by_what_its_replay_alone_gives(
    name: str, steady: bool, tmp_path: Path
) -> None:
    tuning, source = _tuning(name, tmp_path), _source(steady, tmp_path)
    shared = Record(source)
    runs = set()
    for number in range(SETTINGS):
        config = tuning.config(screen.draw(tuning.space, number))
        found = shared.t_comp(config)
        assert found == _alone(config, source)
        assert found == shared.t_comp(config)
        runs.add(found[1])
    assert len(runs) > 1  # the settings matter on this record


def test_processes_find_what_one_alone_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "FEW", 4)
    tuning = _tuning("gravac", tmp_path, settings=35)
    found = []
    for processors in (1, 3):
        monkeypatch.setattr(screen, "_processors", lambda n=processors: n)
        found.append(screen.replay_all(tuning, Record(_source(True, tmp_path))))
    assert found[0] == found[1]
    assert len(found[0]) > 1


def _fails(number: int) -> int:
    if number == 9:
        raise RuntimeError("number 9")
    return number


def test_an_error_in_another_process_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "FEW", 4)
    monkeypatch.setattr(screen, "_processors", lambda: 2)
    assert list(screen.in_order(_fails, 8)) == list(range(8))
    with pytest.raises(RuntimeError, match="number 9"):
        list(screen.in_order(_fails, 40))


def test_reports_that_fill_the_memory_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _source(True, tmp_path)
    config = make_config({"policy": "gravac", "window": 4, "log_dir": str(tmp_path)})
    expected = replay(start_policy(config, source), source.recorded)
    monkeypatch.setattr("runs.replay.reports.MOST", 7)
    reports = Reports(source.recorded)
    for _ in range(2):
        found = replay(start_policy(config, source), source.recorded, reports)
        assert replace(found, costs=expected.costs) == expected


def test_a_probe_makes_another_report(tmp_path: Path) -> None:
    reports = Reports(_recorded(False))
    bare, _ = reports.modelled_at(5, 20.0, (), 10.0, ())
    probed, _ = reports.modelled_at(5, 20.0, (40.0,), 10.0, ())
    assert set(bare.measurements) == {20.0}
    assert set(probed.measurements) == {20.0, 40.0}
    assert reports.modelled_at(5, 20.0, (), 10.0, ())[0] is bare
    assert reports.modelled_at(5, 20.0, (), 1.0, ())[0].timed_cf == 1.0
