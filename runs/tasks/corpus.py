"""Text as bytes for a language model: some files to train on, others held out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runs.tasks.base import DataNotFoundError

MAX_BYTES = 1 << 30  # of the user's own text; every worker holds it in memory
TRAIN_NAMES = ("train.txt", "wiki.train.tokens", "wiki.train.raw")
VALID_NAMES = ("valid.txt", "wiki.valid.tokens", "wiki.valid.raw")
TEST_NAMES = ("test.txt", "wiki.test.tokens", "wiki.test.raw")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, and the names of the files that they came from."""

    train: Bytes
    held_out: Bytes
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def read_files(root: Path, names: Sequence[str], held_out: Sequence[str]) -> Corpus:
    """Read `names` to train on and `held_out`, both relative to `root`, each in sorted order."""
    train_files, held_out_files = tuple(sorted(names)), tuple(sorted(held_out))
    return Corpus(
        _join(root, train_files), _join(root, held_out_files), train_files, held_out_files
    )


def split_by_name(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hold out a tenth of the files (at least one): those whose names hash lowest."""
    ordered = by_hash(names)
    count = -(-len(ordered) // 10)
    return ordered[count:], ordered[:count]


def by_hash(names: Sequence[str]) -> list[str]:
    """The names in an arbitrary order that is the same everywhere."""
    return sorted(names, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())


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
    names = sorted(
        file.relative_to(path).as_posix() for file in path.rglob("*") if _is_text(path, file)
    )
    train = next((name for name in (*TRAIN_NAMES, *VALID_NAMES) if name in names), None)
    test = next((name for name in TEST_NAMES if name in names), None)
    if train and test:
        return read_files(path, [train], [test])
    if not names:
        raise DataNotFoundError(f"data={str(path)!r} holds no text files")
    if len(names) == 1:
        return _last_tenth_held_out(path / names[0])
    return read_files(path, *split_by_name(names))


def _last_tenth_held_out(file: Path) -> Corpus:
    text = _join(file.parent, (file.name,))
    cut = len(text) - len(text) // 10
    return Corpus(text[:cut], text[cut:], (file.name,), (file.name,))


def _is_text(root: Path, file: Path) -> bool:
    if any(part.startswith(".") for part in file.relative_to(root).parts) or not file.is_file():
        return False
    with file.open("rb") as stream:
        return b"\0" not in stream.read(8192)


def _join(root: Path, names: Sequence[str]) -> Bytes:
    size = sum((root / name).stat().st_size for name in names)
    if size > MAX_BYTES:
        raise ValueError(f"data={str(root)!r} is {size:,} bytes of text; accepted: {MAX_BYTES:,}")
    text = b"\n".join((root / name).read_bytes() for name in names)
    return np.frombuffer(text, dtype=np.uint8)
