"""`python -m runs doctor` with scripts of a user's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands import Start, assert_refused, python_m, starting

SCRIPT = """
import sys
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(60, 40))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if "attach" in sys.argv:
    from adaptive import AdaptiveCompressor
    AdaptiveCompressor(cf_range=(20, 100)).attach(model, optimizer=optimizer)
try:
    for step in range(int(sys.argv[1])):
        model(torch.randn(4, 60)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained to the end")
finally:
    print("cleaned up", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work
"""


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with starting(tmp_path_factory.mktemp) as start:
        yield start


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.long
@pytest.mark.parametrize(("how", "low"), [("plain", 10.0), ("attach", 20.0)])
def test_the_doctor_looks_at_a_script(
    start: Start, script: Path, tmp_path: Path, how: str, low: float
) -> None:
    """It ends the script, whether it attaches a compressor, whose settings are tried, or not."""
    report = tmp_path / "verdict.json"
    run = start(*python_m("doctor"), "--json", report, "--", script, 200, how)
    assert run.end() == 0, run.err
    assert run.out.count("doctor: ") == 1
    assert run.out.count("cleaned up") == 2
    assert "trained to the end" not in run.out
    found: dict[str, Any] = json.loads(report.read_text())
    expected = dict(found["expected"])
    assert found["ranks"] == 2
    assert min(cf for cf in expected if cf > 8) == low  # below are rungs
    assert found["low"] <= found["speedup"] <= found["high"]


@pytest.mark.long
def test_under_torchrun_too(start: Start, script: Path) -> None:
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = start(sys.executable, *words, "-m", "runs", "doctor", "--", script, 200, "plain")
    assert run.end() == 0, run.err
    assert run.out.count("doctor: ") == 1


@pytest.mark.long
def test_a_script_that_ends_too_soon_is_no_verdict(start: Start, script: Path) -> None:
    run = start(*python_m("doctor"), "--", script, 9, "plain")
    assert run.end() == 1
    assert "ended after 9 steps" in run.err
    assert "the doctor needs 30" in run.err


@pytest.mark.long
def test_a_compressor_that_it_cannot_rehearse_is_one_line(start: Start, script: Path) -> None:
    script.write_text(SCRIPT.replace("cf_range=(20, 100)", "'int4'"))
    run = start(*python_m("doctor"), "--", script, 99, "attach")
    assert run.end() == 2
    assert "own AdaptiveCompressor: base must be a sparsifier for the doctor" in run.err
    assert "Traceback" not in run.err


@pytest.mark.long
@pytest.mark.parametrize("when", ["while workers start", "in mid-run"])
def test_ctrl_c_is_no_failure(start: Start, script: Path, when: str) -> None:
    script.write_text(SCRIPT.replace("try:", "print('up', flush=True)\ntry:"))
    run = start(*python_m("doctor"), "--steps", 10**9, "--", script, 10**9, "plain")
    run.until(lambda: run.out.count("up") == 2 if when == "in mid-run" else len(run.workers()) == 2)
    run.interrupt()
    assert run.end() == 130, run.err
    assert "failed" not in run.err
    assert "Traceback" not in run.err


def test_wrong_options_are_one_line(capfd: Any, tmp_path: Path) -> None:
    assert_refused(capfd, "doctor", parts=["-- SCRIPT: none given"])
    gone = tmp_path / "gone.py"
    assert_refused(capfd, "doctor", "--", gone, parts=[f"{gone}: there is no such script"])
    words = ["--json", tmp_path / "nowhere" / "verdict.json", "--", __file__]
    assert_refused(capfd, "doctor", *words, parts=["--json", "a folder that can be written to"])
    assert_refused(capfd, "doctor", "--steps", "9", parts=["must be an integer >= 25"])
