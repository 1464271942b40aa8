"""The record: JSON lines that any parser reads, TensorBoard scalars, and the summary's table."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path

import pytest

from adaptive import Event, Header, JSONLTimeline, MemoryTimeline, StepRecord, StepReport, Summary
from adaptive.timeline.sinks import SafeTimeline
from policies import Measurement
from runs.records import keep_before, read_records

MEASUREMENT = Measurement(
    kept=3.0, error=1.0, total=4.0, grad=2.0, sample_error=0.5, sample_total=1.0
)


def _record(step: int, cf: float = 10.0) -> StepRecord:
    report = StepReport(
        step,
        cf,
        {cf: MEASUREMENT, 1 / 3: MEASUREMENT},
        seconds=0.1,
        compress_seconds=0.02,
        exchange_seconds=0.03,
        decode_seconds=0.01,
        wire_bytes=100.0,
        dense_wire_bytes=1000.0,
        lr=nan,
    )
    return StepRecord(report, 1.5, 10.0, 7.5, {"candidate": 20.0, "floor": nan, "epsilon": 0.3})


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="path must be the name of a file, got 5"):
        JSONLTimeline(5)  # type: ignore[arg-type]


def test_json_lines_are_strict_json_at_full_precision(tmp_path: Path) -> None:
    timeline = JSONLTimeline(tmp_path / "deep" / "timeline.jsonl")
    timeline.step(_record(0))
    timeline.event(Event(1, 10.0, 20.0, "scale up"))
    timeline.close()
    again = JSONLTimeline(timeline.path, append=True)
    again.step(_record(2, cf=1.5))
    again.close()
    lines = timeline.path.read_text().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    first, event, last = (json.loads(line, parse_constant=refuse) for line in lines)
    assert first["kind"] == "step"
    assert first["report"]["lr"] is None
    assert first["wire_factor"] == 10
    assert float(list(first["report"]["measurements"])[1]) == 1 / 3
    assert event == {
        "kind": "event",
        "step": 1,
        "cf_before": 10,
        "cf": 20,
        "reason": "scale up",
    }
    assert last["report"]["cf"] == 1.5


def test_the_header_is_the_first_line_and_read_back(tmp_path: Path) -> None:
    header = Header(
        policy="gravac",
        settings={"epsilon": 0.3, "cooldown": None},
        cf_range=(10.0, 1000.0),
        world_size=2,
        base="topk",
        memory="residual",
        numel=1000,
        dense_bytes=4000.0,
        supported={1 / 3: 10.0},
        wire_bytes={10.0: 400.5},
    )
    memory, path = MemoryTimeline(), tmp_path / "timeline.jsonl"
    timeline = SafeTimeline([memory, JSONLTimeline(path)])
    timeline.start(header)
    timeline.step(_record(0))
    timeline.event(Event(1, 10.0, 20.0, "scale up"))
    timeline.step(_record(1))
    timeline.close()
    assert memory.header == header
    recorded = read_records(path)
    assert recorded.header == header
    assert [record.report.step for record in recorded.steps] == [0, 1]
    keep_before(path, 1)  # as resuming does
    again = read_records(path)
    assert again.header == header
    assert (len(again.steps), len(again.events)) == (1, 0)


def test_several_sinks_see_the_same() -> None:
    sinks = [MemoryTimeline(), MemoryTimeline()]
    several = SafeTimeline(sinks)
    several.step(_record(0))
    several.event(Event(0, 1.0, 10.0, "why"))
    assert sinks[0].steps[0] is sinks[1].steps[0]
    assert sinks[0].events == sinks[1].events == [Event(0, 1.0, 10.0, "why")]


class _Failing(MemoryTimeline):
    """Has no room for a second record."""

    def step(self, record: StepRecord) -> None:
        if self.steps:
            raise OSError(28, "No space left on device")
        super().step(record)

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_sink_that_fails_is_dropped_with_one_warning_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, others = _Failing(), [MemoryTimeline(), MemoryTimeline()]
    timeline = SafeTimeline([others[0], failing, others[1]])
    for step in range(4):
        timeline.step(_record(step))
    timeline.flush()
    timeline.close()
    assert [len(sink.steps) for sink in (others[0], failing, others[1])] == [4, 1, 4]
    [said] = caplog.records
    assert "_Failing has failed" in said.getMessage()
    assert "No space left" in said.getMessage()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_file_on_a_full_disk_is_given_up_without_an_error_at_exit() -> None:
    sink = JSONLTimeline("/dev/full")
    sink.step(_record(0))  # buffered
    with pytest.raises(OSError, match="No space left"):
        sink.close()
    sink.close()  # as at exit


def test_the_summary_prints_a_table() -> None:
    summary = Summary(
        steps=4,
        local_steps=4,
        cf=10.0,
        steps_at_cf={1.0: 1, 10.0: 3},
        switches=1,
        bytes_sent=2e6,
        payload_bytes=1_000_000,
        floats_sent=5e5,
        dense_bytes=8e6,
        verdict="stays dense: because",
    )
    summary.add_gain(10.0, 0.7)
    summary.add_gain(10.0, 0.8)
    summary.add_gain(10.0, nan)  # a step without one is skipped
    assert summary.mean_gain == {10.0: 0.75, 1.0: 1.0}
    assert summary.wire_factor == 4
    text = str(summary)
    for words in (
        "dense",
        "75.0%",
        "0.7500",
        "1 switches",
        "2 MB of 8 MB",
        "factor 4.0",
        "because",
    ):
        assert words in text
    again = Summary(cf=10.0, verdict=summary.verdict)
    again.load_state_dict(summary.state_dict())
    assert again == summary


def test_a_rung_has_its_name_and_its_gain_is_assumed() -> None:
    summary = Summary(steps=2, local_steps=2, steps_at_cf={8.0: 2}, rungs={8.0: "int4"})
    summary.add_gain(8.0, 0.95)
    assert "int4 (CF 8)        2  100.0%    assumed" in summary.table()
    assert "0.95" not in summary.table()
