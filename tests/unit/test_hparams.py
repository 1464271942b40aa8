"""What a run leaves for TensorBoard's HParams page, read back as TensorBoard reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from torch.utils.tensorboard import SummaryWriter

from adaptive import Header
from runs.hparams import end_session, start_run


def _read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


@pytest.mark.parametrize("completed", [True, False])
def test_settings_and_final_metrics_are_in_the_run_itself(tmp_path: Path, completed: bool) -> None:
    settings: dict[str, Any] = {"policy": "off", "epsilon": 0.3, "masking": True, "link": None}
    with SummaryWriter(str(tmp_path)) as writer:
        start_run(writer, {**settings, "cf_range": (10, 1000)}, None)
        end_session(writer, 4, {"final/steps_per_second": 10.0}, completed)
    assert [path.suffix for path in tmp_path.iterdir() if path.is_dir()] == []  # no run of its own
    events = _read(tmp_path)

    def content(tag: str) -> bytes:
        return events.SummaryMetadata(tag).plugin_data.content

    experiment = hparams_metadata.parse_experiment_plugin_data(content("_hparams_/experiment"))
    assert [i.name for i in experiment.hparam_infos] == [*settings, "cf_range"]
    metrics = {info.name.tag for info in experiment.metric_infos}
    assert {"eval/quality", "final/bytes_sent", "final/wire_factor"} < metrics
    start = hparams_metadata.parse_session_start_info_plugin_data(
        content("_hparams_/session_start_info")
    )
    assert start.hparams["policy"].string_value == "off"
    assert start.hparams["epsilon"].number_value == 0.3
    assert start.hparams["masking"].bool_value is True
    assert start.hparams["cf_range"].string_value == "(10, 1000)"
    assert "link" not in start.hparams
    end = hparams_metadata.parse_session_end_info_plugin_data(content("_hparams_/session_end_info"))
    assert (end.status == api_pb2.STATUS_SUCCESS) == completed
    [pace] = events.Scalars("final/steps_per_second")
    assert (pace.step, pace.value) == (4, 10)


def test_the_header_gives_settings_and_the_tasks_own_go_before(tmp_path: Path) -> None:
    settings = {"epsilon": 0.3, "omega": 0.1}
    header = Header("gravac", settings, (10, 1000), 2, "topk", "residual", 99, 4.0, {}, {})
    with SummaryWriter(str(tmp_path)) as writer:
        start_run(writer, {"omega": None, "memory": "mine", "lr": 0.1}, header)
    content = _read(tmp_path).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    written = hparams_metadata.parse_session_start_info_plugin_data(content).hparams
    numbers = {name: value.number_value for name, value in written.items() if value.number_value}
    assert numbers == {"epsilon": 0.3, "omega": 0.1, "lr": 0.1, "world_size": 2, "numel": 99}
    texts = {name: value.string_value for name, value in written.items() if value.string_value}
    assert texts == {
        "policy": "gravac",
        "base": "topk",
        "memory": "mine",
        "cf_range": "10 to 1000",
    }
