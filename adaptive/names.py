"""The names of this package: its version, and whether other people's modules are in the way.

`compressors` and `policies` are names that scripts use, too. Whoever has a `policies.py` beside the
script would be told that it holds no `Accordion`.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path

BESIDE = ("compressors", "policies")
"""The packages that lie beside this one, which imports them."""


def check_names() -> None:
    """ImportError, naming the file, if an import of one of the packages beside this one finds
    another."""
    for name in BESIDE:
        ours, found = Path(__file__).parents[1] / name / "__init__.py", _found(name)
        if found is not None and ours.is_file() and not ours.samefile(found):
            raise ImportError(
                f"{found} is in the way: it is imported as {name!r}, the name of a package of "
                f"adaptive-compression ({ours.parent}). Rename the file, or move it into a package"
            )


def version() -> str:
    """Of the installed distribution, as in pyproject.toml."""
    try:
        return installed_version("adaptive-compression")
    except PackageNotFoundError:  # a source tree on sys.path
        return "0+unknown"


def _found(name: str) -> Path | None:
    """The file that an import of `name` leads to; None if it leads to no file."""
    module = sys.modules.get(name)
    spec = find_spec(name) if module is None else getattr(module, "__spec__", None)
    origin = getattr(module, "__file__", None) or getattr(spec, "origin", None)
    return Path(origin) if origin and Path(origin).is_file() else None
