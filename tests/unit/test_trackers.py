"""The sinks for experiment trackers, read back from what these write without a server."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adaptive import Event, Header, MLflowTimeline, StepRecord, StepReport, Timeline, WandbTimeline
from adaptive.timeline.trackers import STEP
from policies import Measurement

HEADER = Header("gravac", {"epsilon": 0.3}, (10, 100), 2, "topk", "residual", 9, 36.0, {}, {})


def _record(step: int, cf: float) -> StepRecord:
    report = StepReport(
        step,
        cf,
        {cf: Measurement(0.5, 0.25, 1.0, 1.0)},
        seconds=0.1,
        median_seconds=0.1,
        wire_bytes=36.0 / cf,
        dense_wire_bytes=36.0,
    )
    return StepRecord(report, 0.1 * step, 10.0, 7.5, {"floor": cf}, sent=100.0, dense=1000.0)


def _play(timeline: Timeline) -> None:
    """Ten steps at CF 10, one at 20, one switch between them."""
    timeline.start(HEADER)
    for step in range(10):
        timeline.step(_record(step, 10.0))
    timeline.event(Event(10, 10.0, 20.0, "scale up"))
    timeline.step(_record(10, 20.0))
    timeline.flush()
    timeline.close()


def _messages(content: bytes) -> Iterator[bytes]:
    """Of a log as LevelDB writes it, which W&B keeps an offline run in: parts of messages behind a
    checksum, a length and a kind (whole, first, middle, last), none across a block's end."""
    at, block, message = 7, 2**15, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield message
            message = b""


def _wandb_rows(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """History, summary and configuration of the offline run in a folder."""
    from wandb.proto import wandb_internal_pb2

    [path] = folder.glob("wandb/offline-run-*/*.wandb")
    rows, summary, config = [], {}, {}
    for _ in range(300):  # W&B goes on writing after `finish`
        records = [*map(wandb_internal_pb2.Record.FromString, _messages(path.read_bytes()))]
        if any(record.HasField("exit") for record in records):
            break
        time.sleep(0.1)
    for record in records:
        items = [(i.key or "/".join(i.nested_key), i) for i in record.history.item]
        if items:
            rows.append({key: json.loads(item.value_json) for key, item in items})
        for item in record.summary.update:
            summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        for item in (*record.run.config.update, *record.config.update):
            config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return rows, summary, config


@pytest.mark.parametrize("own", [True, False])
def test_wandb_has_the_numbers_the_settings_and_the_reasons(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    how = {"mode": "offline", "dir": str(tmp_path), "project": "x"}
    if own:
        _play(WandbTimeline(**how))
    else:
        run = wandb.init(**how)
        _play(WandbTimeline())
        assert wandb.run is run  # is not ours to end
        run.log({"loss": 1.0})
        run.finish()
    assert wandb.run is None
    rows, summary, config = _wandb_rows(tmp_path)
    sent = {row[STEP]: row["cf/sent"] for row in rows if "cf/sent" in row}
    assert {step: sent.get(step) for step in (0, 9, 10)} == {0: 10, 9: 10, 10: 20}
    assert len(sent) < 9  # some of the others are left out
    [switch] = [row for row in rows if "policy/switch" in row]
    assert (switch[STEP], switch["policy/switch"]) == (10, "CF 10 -> 20: scale up")
    assert summary["final/wire_factor"] == 10
    assert config["compression"]["policy"] == "gravac"
    assert config["compression"]["epsilon"] == 0.3
    assert own or any("loss" in row for row in rows)


@pytest.mark.parametrize("own", [True, False])
def test_mlflow_has_the_numbers_the_settings_and_the_reasons(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    mlflow.set_experiment("x")
    if own:
        _play(MLflowTimeline(experiment="x"))
    else:
        with mlflow.start_run():
            _play(MLflowTimeline())
            assert mlflow.active_run() is not None
            mlflow.log_metric("loss", 1.0)
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    [run] = mlflow.search_runs(search_all_experiments=True, output_format="list")
    history = client.get_metric_history(run.info.run_id, "cf/sent")
    sent = {metric.step: metric.value for metric in history}
    assert {step: sent.get(step) for step in (0, 9, 10)} == {0: 10, 9: 10, 10: 20}
    assert run.data.metrics["final/wire_factor"] == 10
    assert run.data.params["compression.policy"] == "gravac"
    assert run.info.status == "FINISHED"
    uri = f"runs:/{run.info.run_id}/cf_switches.txt"
    path = mlflow.artifacts.download_artifacts(uri, dst_path=str(tmp_path / "down"))
    assert Path(path).read_text() == "step 10: CF 10 -> 20: scale up\n"
    assert own or run.data.metrics["loss"] == 1


@pytest.mark.parametrize("sink", [WandbTimeline, MLflowTimeline])
def test_without_the_package_the_extra_is_named(sink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = sink.__name__.removesuffix("Timeline").lower()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"adaptive-compression\[{package}\]"):
        sink()


def test_importing_the_library_imports_no_tracker() -> None:
    code = "import sys, adaptive; sys.exit(bool({'wandb', 'mlflow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
