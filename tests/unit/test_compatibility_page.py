"""docs/compatibility.md says nothing that no test shows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
TESTS = (ROOT / "docs" / "compatibility_tests.txt").read_text(encoding="utf-8")


def _rows() -> list[list[str]]:
    """The cells of each row, without the heads of the tables."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in rows if row[0] not in ("what", "---")]


def _shown() -> dict[str, list[tuple[str, str]]]:
    """Files and tests by the first cell of the row that they show."""
    shown: dict[str, list[tuple[str, str]]] = {}
    for line in TESTS.splitlines()[1:]:
        if not line.startswith(" "):
            tests = shown.setdefault(line, [])
        else:
            file, _, test = line.strip().partition("::")
            tests.append((file, test))
    return shown


def test_every_row_is_shown_by_tests_or_on_another_page() -> None:
    rows = {row[0] for row in _rows() if not row[1].startswith("see [")}
    assert len(rows) > 30
    assert rows == set(_shown())
    assert all(_shown().values())


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for file, test in (each for tests in _shown().values() for each in tests):
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
    newest = re.search(r"^NEWEST_TORCH := (\d+\.\d+)", (ROOT / "Makefile").read_text(), re.M)
    assert newest
    assert f"| torch {run[1]} | what CI runs" in PAGE
    assert f"| torch {newest[1]} | every fourth run of CI" in PAGE
    assert f"| torch {least[1]} to {major}.{int(minor) - 1} | `pip` lets them in" in PAGE
