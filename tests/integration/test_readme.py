"""The scripts in README.md and docs/ run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from tests.distributed.processes import run_ranks
from tests.distributed.setting import loss_of, small_net

ROOT = Path(__file__).parents[2]


def _text(document: str) -> str:
    return (ROOT / document).read_text()


def _run(document: str, name: str, folder: Path) -> str:
    """Standard output of the script called `name` in `document`, on two workers."""
    text = _text(document)
    script = re.search(rf"```python\n(# {re.escape(name)}.*?)```", text, re.S)
    assert script, f"{document} has no script called {name}"
    return _output(script[1], folder / name)


def _output(script: str, path: Path) -> str:
    """Standard output of a script on two workers."""
    path.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, cwd=path.parent, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_five_lines_make_the_script_in_the_readme_a_win(tmp_path: Path) -> None:
    diff = re.search(r"```diff\n(.*?)```", _text("README.md"), re.S)
    assert diff
    lines = diff[1].splitlines()
    added = [line for line in lines if line.startswith("+")]
    assert len(added) == 5
    before = "\n".join(line[1:] for line in lines if line not in added)
    loss = float(re.fullmatch(r"loss ([0-9.]+)\n", _output(before, tmp_path / "ddp.py"))[1])
    after = "\n".join(line[1:] for line in lines)
    output = _output(after, tmp_path / "train.py")
    compressed = float(re.search(r"loss ([0-9.]+)\n", output)[1])
    assert max(loss, compressed) < 1.0  # both start at log(10) = 2.3
    told = re.search(
        r"\n([0-9.]+)x faster than dense on this emulated 20 Mbit/s link "
        r"\([0-9.]+ m?s a step instead of a (?:modelled|measured) [0-9.]+ s\), "
        r"([0-9.]+)% fewer bytes, aiming at dense's quality in equal steps\n",
        output,
    )
    assert told, output
    assert float(told[1]) > 1.5
    assert float(told[2]) > 75
    assert "200 steps" in output
    assert "wire factor" in output


@pytest.mark.long
def test_whether_it_is_the_network(tmp_path: Path) -> None:
    output = _run("docs/slow-second-node.md", "is_it_the_network.py", tmp_path)
    assert re.search(r"compute [0-9.]+ s, with the exchange [0-9.]+ s: [0-9.]+ times", output)
    assert "8 MB a step and worker" in output  # 2.1 million parameters, two workers


@pytest.mark.long
def test_the_recipes_for_other_peoples_compressors(tmp_path: Path) -> None:
    output = _run("docs/own_compressor.md", "recipes.py", tmp_path)
    results = re.findall(r"(.+): loss ([0-9.]+), CF ([0-9.]+), wire factor ([0-9.]+)", output)
    assert [name for name, *_ in results] == ["a class of our contract", "a DDP hook"]
    for _, loss, _, factor in results:
        assert float(loss) < 1.5  # it starts at 2.3
        assert float(factor) > 1.5


def test_the_policy_of_your_own_in_the_docs() -> None:
    text = _text("docs/policies.md")
    source = re.search(r"```python\n(from adaptive import Plan.*?)```", text, re.S)
    assert source
    assert run_ranks(2, _runs, source[1])[0] == [1.0, 10.0] * 3


def _runs(rank: int, source: str) -> list[float]:
    names: dict[str, Any] = {}
    exec(source, names)
    model = DDP(small_net())
    compressor = AdaptiveCompressor("topk", (10, 100), policy=names["HalfOfTheTime"]())
    compressor.attach(model)
    sent = []
    for step in range(6):
        loss_of(model, step, rank).backward()
        sent.append(compressor.cf)
    return sent
