"""Races: a network that is late, and poisons what it has yet to fill, changes no bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.late_network import FAMILIES

ROOT = Path(__file__).parents[2]
LIMIT = 85
"""Seconds of one run. The first one compiles kernels."""


def run(mode: str, results: Path, family: str, **environment: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.late_network", mode, str(results), family]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{mode}: not through in {LIMIT} s\n{(late.stdout or b'').decode()}")
    assert not done.returncode, f"{mode}:\n{done.stdout}\n{done.stderr[-2000:]}"


@pytest.mark.timeout(2 * LIMIT + 10)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_the_same_to_the_bit_under_a_late_network(family: str, tmp_path: Path) -> None:
    results = tmp_path / "right"
    run("serial", results, family, CUDA_LAUNCH_BLOCKING="1")  # nothing overlaps
    run("late", results, family)
