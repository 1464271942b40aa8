"""The text that every machine with Python has: the standard library's own sources."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from runs.tasks.base import DataNotFoundError
from runs.tasks.corpus import Corpus, by_hash, read_files, split_by_name

MAX_BYTES = 8_000_000

# Beside these, every top-level module. Left out: tables (encodings, pydoc_data), what later
# versions drop (distutils, lib2to3), and what distributions package apart (idlelib, tkinter,
# test, ensurepip).
PACKAGES = (
    "asyncio", "collections", "concurrent", "ctypes", "dbm", "email", "html", "http", "importlib",
    "json", "logging", "multiprocessing", "re", "sqlite3", "tomllib", "unittest", "urllib",
    "venv", "wsgiref", "xml", "xmlrpc", "zoneinfo",
)  # fmt: skip


def stdlib_corpus() -> Corpus:
    """Sources of the running Python, at most `MAX_BYTES`, a tenth of the files held out.

    The same for everybody with the same Python. Raises DataNotFoundError where the sources are
    not installed as files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = split_by_name(_capped(root, sorted(source_names(root))))
    if not train:
        raise DataNotFoundError(
            f"this Python has no .py sources in {root}; name a text file or folder with --data"
        )
    return read_files(root, train, held_out)


def source_names(root: Path) -> Iterator[str]:
    """Readable sources relative to `root`: top-level modules and `PACKAGES`, without tests."""
    files = [file for file in root.glob("*.py") if file.stem in sys.stdlib_module_names]
    for package in PACKAGES:
        files += (root / package).rglob("*.py")
    for file in files:
        name = file.relative_to(root)
        if not {"test", "tests"} & set(name.parts) and os.access(file, os.R_OK):
            yield name.as_posix()


def _capped(root: Path, names: list[str]) -> list[str]:
    """As many files, in the order of their names' hashes, as fit in `MAX_BYTES`."""
    kept, room = [], MAX_BYTES
    for name in by_hash(names):
        room -= (root / name).stat().st_size + 1
        if room < 0:
            break
        kept.append(name)
    return kept
