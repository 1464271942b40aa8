"""`examples/hsdp.py` on a CPU: four processes, two replicas of two shards."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from runpy import run_path

import pytest
import torch

from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "hsdp.py"


def _train(rank: int, words: list[list[str]]) -> list[str]:
    """What several runs of it say, one after the other."""
    example, said = run_path(str(EXAMPLE)), []
    for each in words:
        out = io.StringIO()
        with redirect_stdout(out):
            arguments = example["read_arguments"](["--replicas", "2", "--policy", "fixed", *each])
            example["train"](arguments, torch.device("cpu"))
        said.append(out.getvalue())
    return said


def test_it_learns_with_fewer_bytes_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = ["--checkpoint", str(tmp_path)]
    runs = [["--steps", "12"], ["--steps", "7", *checkpoint], ["--steps", "12", *checkpoint]]
    whole, _, resumed = run_ranks(4, _train, runs)[0]
    first, *_, last = (line for line in whole.splitlines() if line.startswith("step "))
    assert float(last.split()[3].rstrip(",")) < 0.7 * float(first.split()[3].rstrip(","))
    assert last in resumed
    assert first not in resumed
    assert float(whole.split("wire factor ")[1].split()[0]) > 15
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank{i}.pt" for i in range(4)]
