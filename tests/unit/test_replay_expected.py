"""A replay that had to repeat its record and did not says so; one of something else does not."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from adaptive import Event, Header, StepRecord, StepReport
from policies import Measurement
from runs.config import TrainConfig
from runs.options import make_config
from runs.records import Recorded
from runs.replay.make import start_policy
from runs.replay.replay import replay
from runs.replay.result import make_result
from runs.replay.source import Source

CF_RANGE = (10.0, 1000.0)
OPTIONS = {"policy": "accordion", "interval": 4, "eta": 0.3, "cf_range": CF_RANGE}


def _config(folder: Path, **options: Any) -> TrainConfig:
    return make_config({**OPTIONS, **options, "log_dir": str(folder)})


def _source(folder: Path) -> Source:
    """A record of what the policy decides today."""
    source = Source(folder / "timeline.jsonl", Recorded([_step(0, 10.0)], []), _config(folder))
    assert source.config is not None
    policy = start_policy(source.config, source)
    header = Header(
        policy.name,
        policy.state_dict()["settings"],
        CF_RANGE,
        2,
        "topk",
        "momentum",
        1000,
        4000.0,
        {cf: cf for cf in (1.0, *CF_RANGE)},
        {1.0: 4000.0, 10.0: 500.0, 1000.0: 5.0},
    )
    recorded = Recorded([], [], header)
    before = 1.0
    for i in range(40):
        plan = policy.plan()
        if (plan.send != before and i > 0) or plan.reason:
            recorded.events.append(Event(i, before, plan.send, plan.reason))
        before = plan.send
        sum_norm = 1.0 + (i // 12) if plan.read_sum else nan
        record = _step(i, plan.send, sum_norm=sum_norm, read_sum=plan.read_sum)
        policy.observe(record.report)
        recorded.steps.append(record)
    assert len(recorded.events) > 2
    return replace(source, recorded=recorded)


def _step(i: int, cf: float, sum_norm: float = nan, read_sum: bool = False) -> StepRecord:
    measured = {cf: Measurement(0.5, 0.5, 1, 1, 0.5, 1)}
    report = StepReport(
        i,
        cf,
        measured,
        grad_norm=1.0,
        sum_norm=sum_norm,
        lr=0.1,
        wire_bytes=4000.0 / cf,
        dense_wire_bytes=4000.0,
    )
    return StepRecord(report, 0.0, nan, nan, read_sum=read_sum)


def _notes(source: Source, config: TrainConfig) -> list[str]:
    replayed = replay(start_policy(config, source), source.recorded)
    result = make_result(source, config, replayed)
    notes = [note for note in result["notes"] if "another version" in note]
    assert not (notes and result["identical"])
    return notes


def _at_another_cf(source: Source, i: int) -> Source:
    steps = list(source.recorded.steps)
    steps[i] = _step(i, 333.0)
    return replace(source, recorded=replace(source.recorded, steps=steps))


def test_a_record_that_is_repeated_has_no_note(tmp_path: Path) -> None:
    source = _source(tmp_path)
    assert _notes(source, _config(tmp_path)) == []


def test_a_record_of_another_version_names_the_first_step_that_differs(tmp_path: Path) -> None:
    source = _at_another_cf(_source(tmp_path), 7)
    older = replace(source, recorded=replace(source.recorded, header=None))
    for known in (source, older):
        [note] = _notes(known, _config(tmp_path))
        for part in ("step 7 sent CF 333", "in the replay CF 10)", "another version"):
            assert part in note


def test_other_probes_and_other_reasons_are_told_too(tmp_path: Path) -> None:
    source = _source(tmp_path)
    steps = list(source.recorded.steps)
    more = replace(steps[5].report, measurements={10.0: Measurement(), 20.0: Measurement()})
    steps[5] = replace(steps[5], report=more)
    probed = replace(source, recorded=replace(source.recorded, steps=steps))
    [note] = _notes(probed, _config(tmp_path))
    assert "step 5" in note
    assert "measured CF 10, CF 20, in the replay CF 10)" in note

    events = list(source.recorded.events)
    events[1] = replace(events[1], reason=f"{events[1].reason} or so")
    reworded = replace(source, recorded=replace(source.recorded, events=events))
    [note] = _notes(reworded, _config(tmp_path))
    assert f"step {events[1].step} " in note
    assert "or so" in note
    fewer = replace(source, recorded=replace(source.recorded, events=events[:1]))
    [note] = _notes(fewer, _config(tmp_path))
    assert f"step {source.recorded.events[1].step} " in note
    assert "none, in the replay" in note


@pytest.mark.parametrize(
    "options",
    [
        {"interval": 5},
        {"eta": 0.9},
        {"cf_range": (10.0, 200.0)},
        {"policy": "gravac"},
        {"base": "randomk"},
    ],
)
def test_other_settings_are_not_expected_to_repeat_it(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source = _at_another_cf(_source(tmp_path), 7)
    given = {**OPTIONS, **options}
    if given["policy"] == "gravac":
        given = {"policy": "gravac", "cf_range": CF_RANGE}
    config = make_config({**given, "log_dir": str(tmp_path)})
    assert _notes(source, config) == []


def test_a_record_that_begins_later_need_not_be_repeated(tmp_path: Path) -> None:
    source = _source(tmp_path)
    later = replace(source, recorded=replace(source.recorded, steps=source.recorded.steps[9:]))
    assert _notes(later, _config(tmp_path)) == []


def test_an_interval_longer_than_the_record_is_told(tmp_path: Path) -> None:
    source = _source(tmp_path)
    config = _config(tmp_path, interval=100)
    result = make_result(source, config, replay(start_policy(config, source), source.recorded))
    assert any("longer than the record" in note for note in result["notes"])
