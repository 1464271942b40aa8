"""Output that outlives its reader, its disk, or its encoding: `train | head` must not end the
training."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any, TextIO


def outlive_readers() -> None:
    """What is printed where nobody reads, or the disk is full, is lost without an error. A
    character that the terminal's encoding lacks, as in the name of a folder, is escaped."""
    sys.stdout, sys.stderr = _Lasting(_opened(sys.stdout, 1)), _Lasting(_opened(sys.stderr, 2))


def _opened(stream: TextIO | None, number: int) -> TextIO:
    """A standard stream. stream: None, as Python has it, if the command was started with the file
    descriptor `number` closed (`>&-`). It then leads nowhere, and no other file takes its place."""
    if stream is None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere == number:
            os.set_inheritable(number, True)  # also of the workers
        else:
            os.dup2(nowhere, number)
            os.close(nowhere)
        return os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace")
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


class _Lasting:
    """A text stream, as it is until its pipe is closed at the other end, or its disk is full.

    lost: why what is printed goes nowhere, if it is not the reader who wanted that.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = ""

    def write(self, text: str) -> int:
        self._do(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._do(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _do(self, work: Callable[..., object], *args: object) -> None:
        """If it fails, what is buffered goes nowhere, too: it would be an error again at exit."""
        try:
            work(*args)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.lost = error.strerror or str(error)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
