"""What importing the library does first: it refuses folders of a project that take the place of
its packages, says where its packages hide a project's, and puts the library's name before the lines
of its log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
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
        if spec is None or not ours.exists():
            continue
        # A folder without an __init__.py has no origin; one beside a script comes before an
        # editable install.
        origin = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        if origin is not None and not Path(origin).samefile(ours):
            raise ImportError(
                f"{origin} is in the way: adaptive imports a package {name!r} of its own, "
                f"{ours.parent}; give yours another name, or put it into a package"
            )


class Hidden(MetaPathFinder):
    """A finder that Python asks last, when nobody has found a module. It finds none: it says which
    package of this library hides a project's folder that has the module, and no `__init__.py`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        package, _, module = fullname.partition(".")
        if package in (*NAMES, "adaptive", "runs") and module:
            for folder in (Path(entry, package) for entry in sys.path):
                if PathFinder.find_spec(fullname, [str(folder)]) is not None:
                    raise ModuleNotFoundError(
                        f"No module named {fullname!r}: this library's package {package!r} hides "
                        f"{folder}; give yours another name, or put it into a package",
                        name=fullname,
                    )


def name_first(record: logging.LogRecord) -> bool:
    """A filter: every line of this logger begins with its name, whatever the script's format."""
    record.msg = f"adaptive: {record.msg}"
    return True


_check()
sys.meta_path.append(Hidden())
logging.getLogger("adaptive").addFilter(name_first)
