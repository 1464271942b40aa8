"""What the experiments share: training by `python -m runs`, and tables of text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from runs.__main__ import main
from runs.result import RESULT_FILE
from runs.tables import table, text_of


def train(command: str, words: Sequence[str], folder: Path) -> None:
    """`python -m runs COMMAND WORDS --log-dir FOLDER`, in this process. Its exit code ends this
    process if it has left no result there; one that has diverged has left one."""
    code = main([command, *words, "--log-dir", str(folder)])
    if code and not (folder / RESULT_FILE).exists():
        sys.exit(code)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text; the first one names the columns."""
    return text_of(table(rows[0], rows[1:], left=range(len(rows[0]))))


def write(text: str, folder: Path) -> None:
    """On stdout, and into the folder's table.txt."""
    print(f"\n{text}\nfiles in {folder}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.txt").write_text(text + "\n", encoding="utf-8")
