"""The script in README.md runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_script_in_the_readme_runs_under_torchrun(tmp_path: Path) -> None:
    script = re.search(r"```python\n(# train\.py.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert script, "README.md has no script called train.py"
    path = tmp_path / "train.py"
    path.write_text(script[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    loss = float(re.search(r"loss ([0-9.]+), CF", done.stdout)[1])
    assert loss < 1.0  # it starts at log(10) = 2.3
    assert "200 steps" in done.stdout
    assert "wire factor" in done.stdout
