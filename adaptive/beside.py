"""The packages beside this one: a project may have folders of the same names, which Python finds
first when a script lies beside them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

NAMES = ("compressors", "policies")


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


_check()
