"""The bench that trains a GPT over an emulated link: real processes, here on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from runs.bench.gpu_training import Point, main, table

SMALL = ["--layers", "1", "--width", "16", "--heads", "2"]


@pytest.mark.long
def test_contenders_start_alike_and_the_table_has_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for name in ("test.txt", "valid.txt"):
        rng.integers(97, 105, 4_000, dtype=np.uint8).tofile(tmp_path / name)
    points = tmp_path / "points.json"
    words = ["--text", str(tmp_path), "--device", "cpu", "--seconds", "0.5", "--every", "0.2"]
    words += ["--contenders", "dense", "the default", "--network", "100mbit", *SMALL]
    assert main([*words, "--points", str(points)]) == 0
    found = json.loads(points.read_text())
    first = [found[name][0] for name in ("dense", "the default")]
    assert first[0]["loss"] == first[1]["loss"]
    for own in found.values():
        steps = [point["step"] for point in own]
        assert steps == sorted(steps)
        assert own[-1]["seconds"] >= 0.5
        assert own[-1]["mb"] > 0
    told = capsys.readouterr().out
    assert "dense " in told
    assert "the default " in told


def test_when_a_contender_came_to_the_loss_at_which_another_ended() -> None:
    slow = [Point(0, 0, 5.0, 0, 1), Point(10, 2, 4.0, 80, 1)]
    fast = [Point(0, 0, 5.0, 0, 1), Point(1, 3, 3.9, 1, 100), Point(10, 30, 2.0, 9, 100)]
    _, first, second = table({"slow": slow, "fast": fast})
    assert first.endswith("fast never")
    assert second.endswith("slow 1 s (step 3)")


def test_a_folder_without_the_text_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--text", str(tmp_path), "--device", "cpu"])
    assert "has no test.txt" in capsys.readouterr().err
