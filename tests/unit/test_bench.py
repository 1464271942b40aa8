"""`python -m runs bench`: how rows are printed, and the bench for a GPU, without one."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

import pytest
import torch

from runs.__main__ import main
from runs.bench.command import Benching
from runs.bench.gpu import Sizes, bench_gpu
from runs.bench.timing import Row


def test_rows_as_json_and_to_be_read(capsys: Any) -> None:
    words = ["bench", "compressors", "--numel", "20000", "--rounds", "1"]
    main([*words, "--json"])
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    assert {row["what"].split()[0] for row in rows} > {"topk", "qsgd", "powersgd", "topk+int4"}
    assert all(row["ratio"] > 0 for row in rows)
    main(words)
    told = capsys.readouterr()
    assert all(f"  {row['what']}  (" in told.out for row in rows)
    assert told.err == "measuring 1 of 1: compressors\n"


@pytest.mark.parametrize(
    ("ratio", "goal", "short"),
    [
        (2.0, "<= 2", False),
        (2.1, "<= 2", True),
        (0.5, ">= 1.5", True),
        (1.5, ">= 1.5", False),
        (float("nan"), "<= 2", True),
        (9.0, "", False),
    ],
)
def test_rows_that_fall_short_are_told_and_end_it_with_1(
    ratio: float, goal: str, short: bool, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row("what was measured", ratio, goal, "")
    monkeypatch.setattr("runs.bench.memory.bench_memory", lambda _: [row])
    assert main(["bench", "memory"]) == (1 if short else 0)
    told = capsys.readouterr().out
    assert told.count("what was measured") == (2 if short else 1)
    assert ("1 of 1 rows fall short" in told) == short


@pytest.mark.parametrize(
    "words", [["time"], ["memory", "--numel", "ten"], ["memory", "--rounds", "0"]]
)
def test_errors_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", *words])
    except SystemExit as error:  # argparse's way
        code = int(error.code or 0)
    assert code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert words[-1] in told.err


def test_the_gpu_bench_tells_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: python -m runs bench gpu")
    assert main(["bench", "gpu"]) == 2
    assert "BENCH gpu needs a CUDA device" in capsys.readouterr().err


def test_the_gpu_bench_runs_as_a_whole() -> None:
    """On a CPU, where its figures mean nothing."""
    sizes = Sizes((5000,), 32, layers=1, width=16, heads=2, vocab=32, length=8, batch=2)
    rows = bench_gpu(Benching(rounds=1), device="cpu", sizes=sizes)
    assert all(isfinite(row.ratio) for row in rows)
    assert sum("launches / 40" in row.what for row in rows) == 3
