"""Output that outlives its reader, or its disk: `train | head` must not end the training."""

from __future__ import annotations

import os
import sys
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
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        """Also what is buffered goes nowhere, or it would be an error again at exit."""
        if not isinstance(error, BrokenPipeError):
            self.lost = error.strerror or str(error)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
