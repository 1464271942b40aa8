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

from runs.stages import counted

log = logging.getLogger("runs")

LONGEST = 16 * 2**20
"""Bytes of a line of JSON; those that we write have some thousands."""

LARGEST = 64 * 2**20
"""Bytes of a file of JSON that is read as a whole."""

_CHUNK = 2**20


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
    """What was wrong in a file of lines: how many were left out, and why the first of them was.

    cut: the last line has no end, and was left out. others: what else there is to say."""

    path: Path
    count: int = 0
    first: str = ""
    unordered: bool = False
    cut: bool = False
    others: list[str] = field(default_factory=list)

    def add(self, line: int, why: str) -> None:
        """That line is left out."""
        self.count += 1
        if self.count == 1:
            self.first = f"line {line}: {why}"

    @property
    def text(self) -> str:
        """In one sentence; "" if nothing was wrong."""
        said = []
        if self.count:
            lines = "a damaged line" if self.count == 1 else f"{self.count} damaged lines"
            said.append(f"{lines} left out ({'first ' if self.count > 1 else ''}{self.first})")
        if self.unordered:
            said.append("its steps are not in order, and were sorted")
        if self.cut:
            said.append("it ends in the middle of a line, which was left out")
        said += self.others
        return f"{self.path}: {'; '.join(said)}" if said else ""

    def warn(self) -> None:
        """Say it on the log, if there is anything to say."""
        if self.text:
            log.warning("%s", self.text)


def raw_lines(path: Path, damage: Damage, told: bool = False) -> Iterator[tuple[int, bytes]]:
    """Line numbers and lines; those that are empty or longer than `LONGEST` are left out. told: say
    how far it is, in a long file."""
    with open_regular(path) as file:
        if told:
            total = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))
            file.seek(0)
            lines = counted(_lines(file), total, f"reading {path}", "lines")
        else:
            lines = _lines(file)
        for number, line in enumerate(lines, start=1):
            if line is None:
                damage.add(number, f"longer than {LONGEST >> 20} MB")
            elif line.strip():
                yield number, line


def json_lines(
    path: Path, told: bool = False, damage: Damage | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and JSON objects of a file of such lines. told: say how far it is, in a long
    file.

    A last line cut short by a crash is left out, and so is every line that is no JSON object, with
    a warning. damage: takes these in; whoever gives it warns. OSError for a file that cannot be
    read.
    """
    found = Damage(path) if damage is None else damage
    for number, line in raw_lines(path, found, told):
        try:
            value = parse_object(line)
        except ValueError as error:
            if line.endswith(b"\n"):
                found.add(number, str(error))
            else:
                found.cut = True
            continue
        yield number, value
    if damage is None:
        found.warn()


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object on a line. ValueError if it is none."""
    value = parse_json(line)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Lines with their ends; None for one that is too long."""
    while line := file.readline(LONGEST):
        if len(line) == LONGEST and not line.endswith(b"\n"):
            while len(line) == LONGEST and not line.endswith(b"\n"):
                line = file.readline(LONGEST)
            yield None
        else:
            yield line
