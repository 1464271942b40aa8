"""What must be in place before a command begins: the packages of its extra, and this library's own
packages under their names."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runs.parser import UsageError

EXTRAS = {
    "runs": ("docstring_parser", "filelock", "jinja2", "pydantic", "rich", "tyro"),
    "tune": ("optuna",),
    "plots": ("matplotlib",),
}
"""The packages of an extra in pyproject.toml, as they are imported."""

OURS = ("adaptive", "compressors", "policies")
"""Packages that lie beside this one."""


def check_installed(extra: str, what: str = "") -> None:
    """UsageError if a package of the extra cannot be imported. what: needs it, if it is not the
    command itself; an option with its value."""
    missing = [name for name in EXTRAS[extra] if not _importable(name)]
    if missing:
        are = "which is" if len(missing) == 1 else "which are"
        told = f"{what}: " if what else ""
        raise UsageError(
            f"{told}needs {' and '.join(missing)}, {are} not installed: {install(extra)}"
        )


def installed() -> bool:
    """Whether pip knows this library, and its extras by its name."""
    try:
        return bool(version("adaptive-compression"))
    except PackageNotFoundError:  # a source tree
        return False


def install(extra: str) -> str:
    """The command that installs an extra, wherever it is given."""
    name = "adaptive-compression" if installed() else Path(__file__).parents[1]
    return f"pip install '{name}[{extra}]'"


def check_ours() -> None:
    """UsageError if an import of this library's packages would find a file of the user's: `python
    -m` looks into the present folder first."""
    beside = Path(__file__).parents[1]
    for name in OURS:
        origin = _origin(name)
        if origin is not None and not origin.samefile(beside / name / "__init__.py"):
            raise UsageError(
                f"{origin} is in the way: it would be imported in place of this library's package "
                f"{name!r}; accepted: another folder to start in, or another name for it"
            )


REPOSITORY = "a clone of the repository (pip install -e . in it)"

NAMES = {"runs.papers": "the experiments of papers", "runs.bench": "the library's own measurements"}
"""What wheels leave out."""


def has(module: str) -> bool:
    """Whether a module of `NAMES` is there."""
    return _importable(module)


def check_has(module: str, what: str) -> None:
    """UsageError if a module of `NAMES` is not there. what: needs it; an option with its value."""
    if not has(module):
        raise UsageError(
            f"{what}: belongs to {NAMES[module]}, which wheels leave out; accepted: {REPOSITORY}"
        )


def of_papers(module: str, name: str) -> dict[str, Any]:
    """The mapping of that name in a module of `runs.papers`; empty where wheels leave it out."""
    return vars(import_module(f"runs.papers.{module}"))[name] if has("runs.papers") else {}


def left_out() -> str:
    """The end of an error about an unknown task or model: where there are others."""
    others = "tasks of images and words, and their models (resnet8, vgg11, lstm-small, ...), are in"
    return "" if has("runs.papers") else f"; {others} {REPOSITORY}"


def check_beside(script: str) -> None:
    """UsageError if a script would get this library's package where it imports its own of that
    name, from beside it: these commands have imported theirs by then."""
    beside, here = Path(__file__).parents[1], Path(script).resolve().parent
    for name in (*OURS, "runs"):
        for own in (here / name / "__init__.py", here / f"{name}.py"):
            if own.exists() and here != beside:
                raise UsageError(
                    f"-- {script}: {own} is in the way: the script would get this library's "
                    f"package {name!r} in its place; accepted: another name for it, or a package "
                    f"around it"
                )


def _importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # a finder refuses it, or it is None in sys.modules
        return False


def _origin(name: str) -> Path | None:
    """What is imported by this name, if it is there: a file, or a folder that has no
    `__init__.py`."""
    module = sys.modules.get(name)
    spec = find_spec(name) if module is None else module.__spec__
    if spec is None:
        return None
    origin = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    return None if origin is None else Path(origin)
