"""docs/compatibility.md says nothing that no test shows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")


def _rows() -> list[list[str]]:
    """The cells of each row, without the heads of the tables."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in rows if row[0] != "what" and set(row[0]) != {"-", " "}]


def test_every_row_names_tests_or_another_page() -> None:
    rows = [row for row in _rows() if not set("".join(row)) <= set("-| ")]
    assert len(rows) > 30
    for what, how, shown in (row[:3] if len(row) > 2 else [*row, ""] for row in rows):
        assert "::test_" in shown or how.startswith("see `docs/"), what


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) == PAGE.count("::test_")
    missing = []
    for file, test in named:
        path = ROOT / "tests" / file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not re.search(rf"^def {test}\(", source, re.M):
            missing.append(f"{file}::{test}")
    assert missing == []


def test_the_versions_of_torch_are_those_of_the_project() -> None:
    run = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    least = re.search(r'"torch>=(\d+\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert run
    assert least
    major, minor = run[1].split(".")
    assert f"| torch {run[1]} | what CI runs" in PAGE
    assert f"| torch {least[1]} to {major}.{int(minor) - 1} | `pip` lets them in" in PAGE
