"""Every example of a framework runs on two processes, compresses, and goes on where it stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.frameworks import needs

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NEEDS = {
    "lightning_gpt.py": "lightning",
    "accelerate_image.py": "accelerate",
    "trainer_tiny.py": "transformers",
}


def _run(name: str, folder: Path, *options: str) -> str:
    launcher = () if name == "lightning_gpt.py" else TORCHRUN
    command = [sys.executable, *launcher, f"examples/{name}", "--folder", str(folder), *options]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs(NEEDS[n])) for n in NEEDS])
def test_an_example_runs_and_resumes(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = _run(name, folder, "--steps", "4")
    assert "4 steps" in said
    assert "wire factor" in said
    to_go = {"accelerate_image.py": ["2", "--resume"], "trainer_tiny.py": ["6", "--resume"]}
    of_lightning = ["6", "--resume", f"{folder}/last.ckpt"]
    assert "6 steps" in _run(name, folder, "--steps", *to_go.get(name, of_lightning))
