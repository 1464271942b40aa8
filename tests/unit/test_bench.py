"""`python -m runs bench`, with the one bench that measures no time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runs.__main__ import main


def test_rows_as_json_and_to_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "wire", "--numel", "20000"]
    assert main([*words, "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    assert rows
    goals = [row for row in rows if row["goal"]]
    assert goals
    assert all(row["ratio"] <= float(row["goal"].removeprefix("<= ")) for row in goals)
    assert main(words) == 0
    told = capsys.readouterr()
    assert told.out.count("bytes / kept element") == len(rows)
    assert told.err == "measuring 1 of 1: wire\n"


@pytest.mark.parametrize("words", [["time"], ["wire", "--numel", "ten"], ["wire", "--rounds", "0"]])
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
