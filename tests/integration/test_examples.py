"""The scripts in examples/ run as they stand, on two workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.frameworks import needs

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def _run(name: str, *options: str) -> str:
    """What the script prints."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", "2", str(ROOT / "examples" / name), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+), CF", output)]


def _wire_factor(output: str) -> float:
    found = re.search(r"wire factor ([0-9.]+)", output)
    assert found, output
    return float(found[1])


def test_a_gpt_learns_is_saved_and_goes_on(tmp_path: Path) -> None:
    options = ("--batch-size", "4", "--network", "10mbit")
    first = _run("gpt_two_nodes.py", "--steps", "20", *options, "--save", str(tmp_path))
    assert _losses(first)[-1] < _losses(first)[0] < 5.7  # log(256) = 5.5 knows nothing
    assert _wire_factor(first) > 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.pt", "rank1.pt"]
    again = _run("gpt_two_nodes.py", "--steps", "24", *options, "--resume", str(tmp_path))
    assert [line.split(":")[0] for line in again.splitlines() if "loss" in line] == [
        f"step {step}" for step in (22, 24)
    ]
    assert _losses(again)[-1] < _losses(first)[0]
    assert "24 steps" in again  # of them 20 in the run before


def test_an_image_model_learns_in_mixed_precision() -> None:
    output = _run("images_amp.py", "--steps", "80", "--batch-size", "16", "--network", "10mbit")
    assert _losses(output)[-1] < _losses(output)[0]
    accuracy = re.search(r"accuracy ([0-9.]+) on 1000 other images", output)
    assert accuracy
    assert float(accuracy[1]) > 0.3  # 0.1 knows nothing
    assert _wire_factor(output) > 5


def test_a_policy_of_ones_own_compresses_on_a_slow_link() -> None:
    output = _run("budget_policy.py", "--steps", "60", "--network", "1mbit")
    assert re.search(r"step 60: loss [0-9.]+, CF [1-9][0-9]", output)
    assert _wire_factor(output) > 2


def test_a_compressor_of_graces_trains() -> None:
    output = _run("grace.py", "--steps", "60")
    assert _losses(output)[-1] < _losses(output)[0]
    assert _wire_factor(output) > 5


def test_an_exchange_memories_and_a_sparsifier_of_ones_own_train() -> None:
    scripts = ["ring_exchange.py"], ["own_memory.py"], ["own_memory.py", "--memory", "ef21"]
    for words in (*scripts, ["own_sparsifier.py"]):
        output = _run(*words)
        assert float(re.findall(r"loss ([0-9.]+)", output)[0]) < 1.5  # log(10) = 2.3 knows nothing
        assert _wire_factor(output) > 5


def test_a_function_of_a_tracker_gets_numbers_and_reasons() -> None:
    output = _run("trackers.py", "--steps", "60", "--interval", "10")
    assert [*re.findall(r"step (\d+): \{'cf/sent'", output)][:3] == ["0", "9", "10"]
    assert "final/wire_factor" in output.splitlines()[-1]
    assert re.search(r"step \d+: CF .* -> .*: ", output)


@pytest.mark.parametrize(
    "script",
    [
        "deco_sgd.py",
        "demo_rule.py",
        "entropy_rank.py",
        "layer_budget.py",
        "noloco.py",
        "sparse_loco.py",
        "streaming_diloco.py",
    ],
)
def test_a_rule_of_a_paper_trains(script: str) -> None:
    output = _run(script)
    assert float(re.findall(r"loss ([0-9.]+)", output)[0]) < 2.1  # log(16) = 2.8 knows nothing
    assert _wire_factor(output) > 5


@needs("torchft")
def test_replicas_of_torchft_learn() -> None:
    output = _run("torchft_ddp.py", "--steps", "20")
    first, last = re.findall(r"step [12]0: loss ([0-9.]+), 2 replicas", output)
    assert float(last) < float(first)
    assert re.search(r"[5-9]\.[0-9] times fewer bytes than dense", output)


def test_each_example_is_run_here() -> None:
    told = Path(__file__).read_text(encoding="utf-8")
    elsewhere = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    for script in (ROOT / "examples").glob("*.py"):
        assert script.name in told or script.name in elsewhere
