"""Files that somebody else may have written, or that were damaged: a run's folder can come from
anywhere.

Only regular files are opened (a FIFO would never end), and no line is read without a limit. All
that is wrong with a file is an `OSError` or a `ValueError` that says so in one sentence.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedReader
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

log = logging.getLogger("runs")

LONGEST = 16 * 2**20
"""Bytes of a line of JSON; those that we write have some thousands."""

LARGEST = 64 * 2**20
"""Bytes of a file of JSON that is read as a whole."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. OSError if it is none, without waiting for a writer."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        if path.is_dir():
            raise IsADirectoryError(None, "is a folder, not a file", str(path))
        raise OSError(None, "is not a regular file", str(path))
    # Should it have become a FIFO in between, opening it does not wait either.
    file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(None, "is not a regular file", str(path))
    return file


def not_a_link(path: Path) -> Path:
    """A path to write to: a link that somebody has put there is removed, since what would be
    overwritten lies elsewhere."""
    if path.is_symlink():
        path.unlink()
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, whole or not at all: a temporary one beside it, synced and then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = not_a_link(path.with_name(path.name + ".tmp"))
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a whole file or none. OSError if that cannot be done."""
    with whole_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """The same, of JSON to be read by people, too. Numbers that are not finite are no JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The value in a small file of JSON. OSError, or ValueError that says what is wrong with it."""
    with open_regular(path) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"has more than {LARGEST >> 20} MB")
    return parse_json(content)


def known(value: float | None) -> float | None:
    """A number as JSON has it: null for one that is not finite, or not known."""
    return value if value is not None and isfinite(value) else None


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text. ValueError also for what is nested too deep, and for bytes that are
    no UTF-8."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("not JSON (nested too deep)") from None
    except UnicodeDecodeError:
        raise ValueError("not JSON (not UTF-8)") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None


@dataclass
class Damage:
    """What was left out of a file of lines: how many, why the first of them was, and what else
    there is to say."""

    path: Path
    count: int = 0
    first: str = ""
    others: list[str] = field(default_factory=list)

    def add(self, line: int, why: str) -> None:
        """That line is left out."""
        self.count += 1
        self.first = self.first or f"line {line}: {why}"

    @property
    def text(self) -> str:
        """In one sentence; "" if nothing was wrong."""
        said = list(self.others)
        if self.count:
            lines = "a damaged line" if self.count == 1 else f"{self.count} damaged lines"
            said.insert(0, f"{lines} left out (first {self.first})")
        return f"{self.path}: {'; '.join(said)}" if said else ""

    def warn(self) -> None:
        """Say it on the log, if there is anything to say."""
        if self.text:
            log.warning("%s", self.text)


def json_lines(path: Path, damage: Damage) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and JSON objects of a file of such lines; what is no JSON object is left out:
    damage takes it in. OSError for a file that cannot be read."""
    with open_regular(path) as file:
        for number, line in enumerate(_lines(file), start=1):
            if not line.strip():
                continue
            try:
                if len(line) >= LONGEST:
                    raise ValueError(f"longer than {LONGEST >> 20} MB")
                value = parse_json(line)
                if not isinstance(value, dict):
                    raise ValueError("not a JSON object")
            except ValueError as error:
                damage.add(number, str(error) if line.endswith(b"\n") else "has no end")
                continue
            yield number, value


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines with their ends; the beginning of one that is too long."""
    while line := file.readline(LONGEST):
        rest = line
        while len(rest) == LONGEST and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST)
        yield line if rest is line else line[:-1] + b"\n"
