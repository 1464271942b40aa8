"""Where the library's warnings go in a script that has set up no logging: to stderr, with the
library's name before them, which Python's own way leaves out."""

from __future__ import annotations

import logging
import sys


class Fallback(logging.Handler):
    """A handler that prints if nobody else handles a record of this logger."""

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


_logger = logging.getLogger("adaptive")
_logger.addHandler(Fallback(_logger))
