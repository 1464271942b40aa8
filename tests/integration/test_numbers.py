"""All that tells of a run says the same number: the end of `train`, its files, the report, the
dashboard, and `compare`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from adaptive.timeline.summary import headline_of
from adaptive.timeline.tensorboard import HEADLINE
from policies.words import seconds_in_words
from runs.progress import number_text
from runs.records import read_records
from runs.report.run import Run
from runs.report.source import read_folder
from tests.integration.commands import LIMIT, ROOT, python_m

pytestmark = pytest.mark.long

SMALL = ("--batch-size", "1")


def _run(command: str, *words: object) -> tuple[dict[str, Any], str]:
    """What the command says as JSON, and to people."""
    done = subprocess.run(
        (*python_m(command), *map(str, words), "--json"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def _tells(headline: str, seconds: float) -> bool:
    """It names these seconds a step, in two digits or three."""
    return any(f"{seconds_in_words(seconds, digits)} a step" in headline for digits in (2, 3))


def _as_the_dashboard_has_it(run: Run) -> tuple[float, float, str]:
    """The rate at the end, the one that seconds of steps give, and the headline."""
    events = EventAccumulator(str(run.folder)).Reload()
    (rate,) = [event.value for event in events.Scalars("final/steps_per_second")]
    seconds = events.Scalars("time/total")[-1]
    headline = events.Tensors(HEADLINE)[-1].tensor_proto.string_val[0].decode()
    return rate, seconds.step / seconds.value, headline


@pytest.mark.parametrize("options", [("--network", "10mbit"), ()], ids=["slow", "fast"])
def test_one_run_has_one_number(options: tuple[str, ...], text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    words = ("--data", text, *SMALL, "--steps", 40, *options, "--log-dir", folder)
    result, told = _run("train", *words)
    rate, headline = result["steps_per_second"], result["headline"]
    assert result["summary"]["step_seconds"] == pytest.approx(1 / rate)
    assert told.splitlines()[-1] == headline
    assert any(line.split() == ["steps/s", number_text(rate, 3)] for line in told.splitlines())
    assert _tells(headline, 1 / rate)
    if options:
        assert headline.endswith("aiming at dense's quality in equal steps")

    reported, _ = _run("report", folder)
    (row,) = reported["rows"]
    assert row["steps_per_second"]["mean"] == pytest.approx(rate)
    assert row["seconds"]["mean"] == pytest.approx(40 / rate)
    assert [*reported["headlines"].values()] == [headline]

    run = read_folder(folder, "")
    recorded = read_records(folder / "timeline.jsonl")
    assert recorded.header is not None
    assert headline_of(recorded.steps[-1], recorded.header) == headline
    shown, by_seconds, last = _as_the_dashboard_has_it(run)
    assert (shown, by_seconds) == pytest.approx((rate, rate), rel=1e-5)
    assert last == headline
    if "dense is right" in told:
        assert "faster than dense" not in told


def test_a_comparison_and_a_report_of_it_say_the_same(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    words = ["--data", text, *SMALL, "--steps", 24, "--slice", 12, "--network", "10mbit"]
    for contender in ("dense", "topk@100"):
        words += ["--contender", contender]
    compared, _ = _run("compare", *words, "--log-dir", folder)
    (headline,) = compared["headlines"].values()
    assert "dense on this emulated 10 Mbit/s link" in headline
    folders = sorted(path.parent for path in folder.glob("runs/*/result.json"))
    rates = {
        f.name: json.loads((f / "result.json").read_text())["steps_per_second"] for f in folders
    }
    ours, dense = compared["rows"][1], compared["rows"][0]
    for row, name in ((dense, "dense-seed0"), (ours, "topk@100-seed0")):
        assert row["steps_per_second"]["mean"] == pytest.approx(rates[name])
    assert _tells(headline, 1 / rates["topk@100-seed0"])
    reported, _ = _run("report", *folders)
    assert [*reported["headlines"].values()] == [headline]
