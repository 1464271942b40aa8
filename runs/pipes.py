"""Output that outlives its reader, or its disk: `train | head` must not end the training."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


def outlive_readers() -> None:
    """What is printed once nobody reads any more, or the disk is full, is lost without an error."""
    sys.stdout, sys.stderr = _Lasting(sys.stdout), _Lasting(sys.stderr)


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
