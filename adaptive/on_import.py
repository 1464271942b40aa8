"""The first actions when the library is imported: it refuses a project's folders that Python would
import instead of its packages, explains errors for a project's folders that its packages hide, and
puts the library's name before the lines of its log. Optional features are imported later, by
`load_optional`, when a script names them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAMES = ("compressors", "policies")
"""The library's other packages. Python would import a folder of the same name beside the script
instead."""

OPTIONAL = {
    "Gossip": "gossip",
    "GossipRule": "gossip",
    "HookRung": "hooks",
    "with_hooks": "hooks",
}
"""The classes and functions of `adaptive.contrib` that scripts may use, and the file of each."""


def load_optional(name: str) -> Any:
    """The class or function of this name in `OPTIONAL`. AttributeError if there is none."""
    if name not in OPTIONAL:
        raise AttributeError(f"module 'adaptive' has no attribute {name!r}")
    return getattr(import_module(f"adaptive.contrib.{OPTIONAL[name]}"), name)


def _check() -> None:
    """ImportError, with advice, if importing one of NAMES would import another project's folder."""
    for name in NAMES:
        expected = Path(__file__).parents[1] / name / "__init__.py"
        module = sys.modules.get(name)
        spec = find_spec(name) if module is None else module.__spec__
        if spec is None or not expected.exists():
            continue
        # A folder without an __init__.py has no origin. A folder beside a script comes before an
        # editable install.
        origin = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        if origin is not None and not Path(origin).samefile(expected):
            raise ImportError(
                f"{origin} is in the way: adaptive imports a package {name!r} of its own, "
                f"{expected.parent}; give yours another name, or put it into a package"
            )


class Hidden(MetaPathFinder):
    """The last finder that Python asks for a module. It never finds one. It raises an error if a
    project's folder without `__init__.py` has the module, but a package of this library hides it.
    """

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
    """A log filter that puts the library's name before each line, whatever the script's format."""
    record.msg = f"adaptive: {record.msg}"
    return True


_check()
sys.meta_path.append(Hidden())
logging.getLogger("adaptive").addFilter(name_first)
