"""What the TensorBoard sink leaves in the event files, read back as TensorBoard reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from math import nan
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from adaptive import Event, Header, StepRecord, StepReport, TensorBoardTimeline
from adaptive.network.pace import Pace
from adaptive.timeline import sinks
from policies import Measurement

MEASUREMENT = Measurement(
    kept=3.0,
    error=1.0,
    total=4.0,
    grad=2.0,
    sample_error=0.5,
    kept_norms=3,
    grad_norms=2,
    sample_total=1.0,
)


def _record(step: int, cf: float = 10.0, layers: dict[str, float] | None = None) -> StepRecord:
    report = StepReport(
        step,
        cf,
        {cf: MEASUREMENT},
        seconds=0.1,
        median_seconds=0.1,
        compress_seconds=0.02,
        exchange_seconds=0.03,
        network_seconds=0.02,
        decode_seconds=0.01,
        compute_seconds=0.025,
        wire_bytes=100.0,
        dense_wire_bytes=1000.0,
    )
    status = {"candidate": 20.0, "floor": nan, "epsilon": 0.3, "gain_candidate": 0.4}
    pace = Pace(steps=step, seconds=step / 10)
    totals = {"pace": pace, "sent": 100.0 * (step + 1), "dense": 1000.0 * (step + 1)}
    return StepRecord(report, step / 10, 10.0, 7.5, status, layers or {}, **totals, gain=0.6)


def _read(folder: Path) -> EventAccumulator:
    everything = {"scalars": 0, "tensors": 0}
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


def _values(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def _strings(events: EventAccumulator, tag: str) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]


def test_scalars_are_grouped_and_only_the_known_are_there(tmp_path: Path) -> None:
    timeline = TensorBoardTimeline(tmp_path)
    timeline.step(_record(0))
    timeline.close()
    events = _read(tmp_path)
    written = {tag: _values(events, tag)[0][1] for tag in events.Tags()["scalars"]}
    expected = {
        "cf/sent": 10,
        "cf/candidate": 20,  # floor and learning rate were not known
        "gain/sent": 0.6,
        "gain_of_step/error_fed": 0.75,
        "gain_of_step/raw": 1,  # 3 / 2, clipped
        "gain_of_step/gradient": 0.5,
        "gain_of_step/energy_ratio": 0.75,
        "gain_of_step/energy_over_gradient": 1.5,
        "gain/candidate": 0.4,
        "policy/epsilon": 0.3,
        "throughput/t_sys": 10,
        "throughput/t_comp": 7.5,
        "bytes/sent": 100,
        "bytes/wire_factor": 10,
        "bytes/sent_total": 100,
        "bytes/wire_factor_total": 10,
        "time/step": 0.1,
        "time/total": 0,
        "time/compress": 0.02,
        "time/exchange": 0.03,
        "time/network": 0.02,
        "time/decode": 0.01,
        "time/compute": 0.025,
        "time/rest": 0.015,
        "final/bytes_sent": 100,
        "final/wire_factor": 10,
    }
    assert written == pytest.approx(expected)


def test_an_interval_thins_out_but_every_switch_has_the_steps_around_it(tmp_path: Path) -> None:
    timeline = TensorBoardTimeline(tmp_path, interval=10)
    for step in range(25):
        timeline.step(_record(step, cf=10.0 if step < 13 else 20.0))
    timeline.close()
    sent = _values(_read(tmp_path), "cf/sent")
    assert sent == [(0, 10), (10, 10), (12, 10), (13, 20), (20, 20), (24, 20)]


def test_by_default_records_keep_their_distance_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(sinks.time, "time", lambda: now[0])
    monkeypatch.setattr(sinks.time, "monotonic", lambda: now[0])
    timeline = TensorBoardTimeline(tmp_path)
    for step in range(41):
        timeline.step(_record(step))
        now[0] += TensorBoardTimeline.shortest / 10
    timeline.close()
    events = _read(tmp_path).Scalars("cf/sent")
    assert len(events) <= 6
    assert [events[0].step, events[-1].step] == [0, 40]
    assert events[-1].wall_time == pytest.approx(1000 + 4 * TensorBoardTimeline.shortest)


def test_switches_are_texts_and_are_there_for_the_dashboard(tmp_path: Path) -> None:
    timeline = TensorBoardTimeline(tmp_path)
    timeline.start(
        Header(
            "goodput", {}, (10, 100), 2, "topk", "residual", 9, 36.0, {}, {}, rungs={20.0: "int4"}
        )
    )
    timeline.event(Event(13, 10.0, 20.0, "why\narithmetic"))
    timeline.close()
    events = _read(tmp_path)
    assert _strings(events, "policy/switch") == ["int4 (CF 20): why\narithmetic"]
    assert events.SummaryMetadata("policy/switch").plugin_data.plugin_name == "text"
    (switch,) = _strings(events, "cf_timeline/switches")
    assert json.loads(switch) == {
        **{"cf_before": 10, "cf": 20, "reason": "why\narithmetic"},
        "rungs": {"20": "int4"},
    }
    assert events.Tensors("cf_timeline/switches")[0].step == 13


def test_layer_cfs_are_written_where_they_change(tmp_path: Path) -> None:
    timeline = TensorBoardTimeline(tmp_path, interval=1000)
    layers: list[dict[str, float]] = [{}, {"a": 4.0, "b": 10.0}, {"a": 4.0, "b": 10.0}]
    layers += [{"a": 4.0, "b": 40.0}, {}]
    for step, cfs in enumerate(layers):
        timeline.step(_record(step, layers=cfs))
    timeline.close()
    events = _read(tmp_path)
    assert _values(events, "cf_layer/a") == [(1, 4), (4, 10)]  # in the end like the whole model
    assert _values(events, "cf_layer/b") == [(1, 10), (3, 40), (4, 10)]


def test_a_run_that_was_resumed_counts_as_a_whole(tmp_path: Path) -> None:
    for part, steps in (("first", range(3)), ("second", range(3, 7))):
        timeline = TensorBoardTimeline(tmp_path / part)
        for step in steps:
            timeline.step(_record(step))
        timeline.close()
    events = [_read(tmp_path / part) for part in ("first", "second")]
    assert _values(events[1], "final/bytes_sent") == [(6, 700)]
    assert _values(events[1], "final/wire_factor") == [(6, 10)]


def test_an_existing_writer_is_used_and_left_open(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    timeline = TensorBoardTimeline(writer)
    timeline.step(_record(0))
    timeline.close()
    writer.add_scalar("own/value", 1.0, 0)  # still open
    writer.close()
    events = _read(tmp_path)
    assert {"own/value", "cf/sent"} <= set(events.Tags()["scalars"])
    assert len(list(tmp_path.iterdir())) == 1


def test_nothing_is_opened_before_the_first_record(tmp_path: Path) -> None:
    timeline = TensorBoardTimeline(tmp_path / "run")  # as on the ranks that do not write
    timeline.close()
    assert not (tmp_path / "run").exists()


def test_an_exiting_script_that_closes_nothing_loses_nothing(tmp_path: Path) -> None:
    script = (
        "from tests.unit.test_tensorboard import _record, TensorBoardTimeline as T, sys\n"
        "timeline = T(sys.argv[1], interval=100)\n"
        "for step in range(8): timeline.step(_record(step))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    assert _values(_read(tmp_path), "cf/sent") == [(0, 10), (7, 10)]


@pytest.mark.parametrize("interval", [0, -1, True, 1.5])
def test_an_interval_is_a_number_of_steps(tmp_path: Path, interval: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=f"interval={interval!r}: must be an int >= 1"
    ):
        TensorBoardTimeline(tmp_path, interval)


def test_another_writer_is_refused() -> None:
    with pytest.raises(TypeError, match="log_dir must be a folder or a SummaryWriter, got 3"):
        TensorBoardTimeline(3)


def test_importing_the_library_imports_nothing_that_takes_long() -> None:
    slow = ("tensorboard", "torch.distributed.optim")
    script = f"import adaptive, sys; print([m for m in sys.modules if m.startswith({slow})])"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
