"""What a wheel would hold: every package, every file that is not Python, and the plugin."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from tensorboard.plugins.base_plugin import TBLoader

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
PACKAGES = [pattern.removesuffix("*") for pattern in SETUPTOOLS["packages"]["find"]["include"]]


def _files() -> list[Path]:
    """Of all packages, relative to the root."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*"))
    return [path.relative_to(ROOT) for path in found if path.is_file() and path.suffix != ".pyc"]


def test_folders_of_modules_are_packages() -> None:
    folders = {path.parent for path in _files() if path.suffix == ".py"}
    assert Path("runs/dashboard") in folders
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()] == []


def test_other_files_are_package_data() -> None:
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
    ]
    others = [path.as_posix() for path in _files() if path.suffix != ".py"]
    assert "runs/dashboard/static/index.js" in others
    missing = [path for path in others if not any(fnmatch(path, pattern) for pattern in patterns)]
    assert missing == []


def test_the_plugin_is_where_the_entry_point_says() -> None:
    ((name, value),) = PROJECT["project"]["entry-points"]["tensorboard_plugins"].items()
    assert issubclass(EntryPoint(name, value, "tensorboard_plugins").load(), TBLoader)
