"""What importing the library does first: it refuses folders of a project that take the place of
its packages, and puts the library's name before the lines of its log."""

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


def name_first(record: logging.LogRecord) -> bool:
    """A filter: every line of this logger begins with its name, whatever the script's format."""
    record.msg = f"adaptive: {record.msg}"
    return True


_check()
logging.getLogger("adaptive").addFilter(name_first)
