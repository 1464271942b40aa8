"""What importing the library does first: it refuses folders of a project that take the place of
its packages, and makes its warnings visible in a script that has set up no logging."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path

NAMES = ("compressors", "policies")
"""The packages beside this one: Python finds folders of the same names that lie beside a script
first."""


def _check() -> None:
    """ImportError, which says what to do, if an import of them would find somebody else's."""
    for name in NAMES:
        ours = Path(__file__).parents[1] / name / "__init__.py"
        module = sys.modules.get(name)
        spec = find_spec(name) if module is None else module.__spec__
        found = Path(spec.origin) if spec is not None and spec.origin is not None else None
        if ours.exists() and found is not None and not found.samefile(ours):
            raise ImportError(
                f"{found} is in the way: adaptive imports a package {name!r} of its own, "
                f"{ours.parent}; give yours another name, or put it into a package"
            )


class Fallback(logging.Handler):
    """A handler that prints to stderr, with the library's name in front, if nobody else handles a
    record of this logger. Python's own handler leaves the name out."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("adaptive: %(message)s"))
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = self._logger
        while logger is not None:
            if any(each is not self for each in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        print(self.format(record), file=sys.stderr, flush=True)


_check()
_logger = logging.getLogger("adaptive")
_logger.addHandler(Fallback(_logger))
