"""Text as bytes for a language model, some files to train on and others held out: the user's, or
what every machine with Python has, the standard library's own sources."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runs.tasks.base import DataNotFoundError

MAX_BYTES = 1 << 30  # of the user's own text; every worker holds it in memory
TRAIN_NAMES = ("train.txt", "wiki.train.tokens", "wiki.train.raw")
VALID_NAMES = ("valid.txt", "wiki.valid.tokens", "wiki.valid.raw")
TEST_NAMES = ("test.txt", "wiki.test.tokens", "wiki.test.raw")

STDLIB_BYTES = 8_000_000

# Beside these, every top-level module. Left out: tables (encodings, pydoc_data), what later
# versions drop (distutils, lib2to3), and what distributions package apart (idlelib, tkinter,
# test, ensurepip).
PACKAGES = (
    "asyncio", "collections", "concurrent", "ctypes", "dbm", "email", "html", "http", "importlib",
    "json", "logging", "multiprocessing", "re", "sqlite3", "tomllib", "unittest", "urllib",
    "venv", "wsgiref", "xml", "xmlrpc", "zoneinfo",
)  # fmt: skip

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, and the names of the files that they came from."""

    train: Bytes
    held_out: Bytes
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def user_corpus(path: Path) -> Corpus:
    """The user's text: a file, a folder of files, or a folder laid out like WikiText's.

    A single file has its last tenth held out. A folder with train.txt (else valid.txt) and
    test.txt, or the same under WikiText's names, is trained on the one and evaluated on the
    other. In any other folder all text files are taken, recursively, hidden and binary ones
    aside, and a tenth of them is held out. Raises DataNotFoundError where there is no text,
    ValueError for more than `MAX_BYTES` of it.
    """
    if path.is_file():
        return _last_tenth_held_out(path)
    if not path.is_dir():
        raise DataNotFoundError(f"data={str(path)!r} does not exist; give a text file or a folder")
    names = [file.relative_to(path).as_posix() for file in path.rglob("*") if _is_text(path, file)]
    train = next((name for name in (*TRAIN_NAMES, *VALID_NAMES) if name in names), None)
    test = next((name for name in TEST_NAMES if name in names), None)
    if train and test:
        return _read(path, [train], [test])
    if not names:
        raise DataNotFoundError(f"data={str(path)!r} holds no text files")
    if len(names) == 1:
        return _last_tenth_held_out(path / names[0])
    return _tenth_held_out(path, names)


def stdlib_corpus() -> Corpus:
    """Sources of the running Python, at most `STDLIB_BYTES`, a tenth of the files held out.

    The same for everybody with the same Python. Raises DataNotFoundError where the sources are
    not installed as files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names, room = [], STDLIB_BYTES
    for name in _by_hash(_source_names(root)):
        room -= (root / name).stat().st_size + 1
        if room < 0:
            break
        names.append(name)
    if len(names) < 2:
        raise DataNotFoundError(
            f"this Python has no .py sources in {root}; name a text file or folder with --data"
        )
    return _tenth_held_out(root, names)


def windows(text: NDArray[np.integer], starts: NDArray[np.int64], length: int) -> list[Tensor]:
    """Two int64 tensors (starts, length): the symbols from each start on, and those one place
    further on."""
    rows = torch.from_numpy(text[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    return [rows[:, :-1].contiguous(), rows[:, 1:].contiguous()]


def _source_names(root: Path) -> Iterator[str]:
    """Readable sources relative to `root`: top-level modules and `PACKAGES`, without tests."""
    files = [file for file in root.glob("*.py") if file.stem in sys.stdlib_module_names]
    for package in PACKAGES:
        files += (root / package).rglob("*.py")
    for file in files:
        name = file.relative_to(root)
        if not {"test", "tests"} & set(name.parts) and os.access(file, os.R_OK):
            yield name.as_posix()


def _by_hash(names: Iterator[str] | Sequence[str]) -> list[str]:
    """The names in an arbitrary order that is the same everywhere."""
    return sorted(names, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())


def _tenth_held_out(root: Path, names: Sequence[str]) -> Corpus:
    """A tenth of the files (at least one): those whose names hash lowest."""
    ordered, count = _by_hash(names), -(-len(names) // 10)
    return _read(root, ordered[count:], ordered[:count])


def _last_tenth_held_out(file: Path) -> Corpus:
    text = _join(file.parent, (file.name,))
    cut = len(text) - len(text) // 10
    return Corpus(text[:cut], text[cut:], (file.name,), (file.name,))


def _is_text(root: Path, file: Path) -> bool:
    if any(part.startswith(".") for part in file.relative_to(root).parts) or not file.is_file():
        return False
    with file.open("rb") as stream:
        return b"\0" not in stream.read(8192)


def _read(root: Path, names: Sequence[str], held_out: Sequence[str]) -> Corpus:
    """Files to train on and others, relative to `root`, each in sorted order."""
    files = tuple(sorted(names)), tuple(sorted(held_out))
    return Corpus(_join(root, files[0]), _join(root, files[1]), *files)


def _join(root: Path, names: Sequence[str]) -> Bytes:
    size = sum((root / name).stat().st_size for name in names)
    if size > MAX_BYTES:
        raise ValueError(f"data={str(root)!r} is {size:,} bytes of text; accepted: {MAX_BYTES:,}")
    text = b"\n".join((root / name).read_bytes() for name in names)
    return np.frombuffer(text, dtype=np.uint8)


def perplexity(nats: float) -> float:
    """The exponential of a mean loss. inf where it is larger than what records hold, 1e100."""
    return inf if nats > log(1e100) else exp(nats)
