"""What a command needs is looked for before it begins, and told in a sentence."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from adaptive.on_import import NAMES
from runs.__main__ import COMMANDS, main
from runs.needs import EXTRAS, OURS, install

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

HANDLED = {
    *("tensorboard", "google", "werkzeug"),  # without them there are no event files, or no plugin
    "tqdm",  # without it progress is told in lines
    *("markupsafe", "typing_extensions", "sqlalchemy"),  # of jinja2, pydantic and optuna
}
"""Imported under `runs` without being looked for."""

BLOCKED = """
import sys

class Blocker:
    names = frozenset()

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

blocker = Blocker()
sys.meta_path.insert(0, blocker)
from runs.__main__ import COMMANDS, main

for name, extra in ARGUMENTS:
    blocker.names = {name}
    for command in COMMANDS if extra == "runs" else [extra]:
        words = ["--", "train"] if command == "netlab" else []
        print(command, name, main([command, *words]))
        sys.stdout.flush()
    if extra == "runs":
        assert not blocker.names & set(sys.modules), "a command has begun"
"""


def _python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_command_without_each_package_says_so_before_it_begins(tmp_path: Path) -> None:
    asked = [(name, extra) for extra in ("runs", "tune") for name in EXTRAS[extra]]
    done = _python(BLOCKED.replace("ARGUMENTS", repr(asked)), tmp_path)
    assert done.returncode == 0, done.stderr
    expected = [
        (command, name, extra)
        for name, extra in asked
        for command in (COMMANDS if extra == "runs" else [extra])
    ]
    assert done.stdout.splitlines() == [f"{command} {name} 2" for command, name, _ in expected]
    assert done.stderr.splitlines() == [
        f"python -m runs {command}: error: needs {name}, which is not installed: {install(extra)}"
        for command, name, extra in expected
    ]
    assert list(tmp_path.iterdir()) == []


def test_all_that_is_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    for name in ("pydantic", "rich"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["train"]) == 2
    said = capfd.readouterr().err
    assert said.endswith(f"needs pydantic and rich, which are not installed: {install('runs')}\n")


def test_what_is_looked_for_is_what_the_extras_install() -> None:
    for extra, names in EXTRAS.items():
        listed = PROJECT["project"]["optional-dependencies"][extra]
        packages = [re.split(r"[<>=\[]", each)[0].replace("-", "_") for each in listed]
        looked_at = {"optuna_dashboard"}  # by people: no command imports it
        assert sorted(names) == sorted(set(packages) - looked_at - {"adaptive_compression"})


def test_nothing_else_is_imported_by_commands() -> None:
    """A package that is new to `runs` is declared, or it is known what happens without it."""
    known = {*sys.stdlib_module_names, *OURS, *HANDLED, "runs", "torch", "numpy"}
    known |= {name for names in EXTRAS.values() for name in names}
    found = set()
    for path in (ROOT / "runs").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            found |= {name.partition(".")[0] for name in names}
    assert "filelock" in found
    assert found - known == set()


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py"])
def test_a_file_in_the_present_folder_that_is_in_the_way_is_named(
    name: str, form: str, tmp_path: Path
) -> None:
    path = tmp_path / form.format(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise SystemExit('not this one')\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "runs", "train", "--steps", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"python -m runs train: error: {path} is in the way: it would be imported in place of this "
        f"library's package {name!r}; accepted: another folder to start in, or another name for "
        f"it\n"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", ["", "import {}\n"])
def test_a_projects_own_package_is_named_where_a_script_imports_ours(
    name: str, before: str, tmp_path: Path
) -> None:
    """A script lies beside a package of that name, and has imported it, or not."""
    path = tmp_path / name / "__init__.py"
    path.parent.mkdir()
    path.write_text("MINE = 1\n", encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(f"{before.format(name)}import adaptive\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {path} is in the way: adaptive imports a package {name!r} of its own, "
        f"{ROOT / name}; give yours another name, or put it into a package"
    )


EDITABLE = f"""
import sys
from importlib.machinery import PathFinder

class Finder:
    find_spec = staticmethod(
        lambda name, path=None, target=None: PathFinder.find_spec(name, path or [{str(ROOT)!r}])
    )

sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Finder)
"""
"""What `pip install -e` leaves: it finds packages after those that lie beside a script."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "then", ["import adaptive", "from runs.__main__ import main; main(['tune'])"]
)
def test_a_folder_without_init_that_is_imported_in_place_of_ours_is_named(
    name: str, then: str, tmp_path: Path
) -> None:
    (tmp_path / name).mkdir()
    script = tmp_path / "train.py"
    script.write_text(EDITABLE + then, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stderr.splitlines()[-1]
    assert f"{tmp_path / name} is in the way: " in said
    assert f"package {name!r}" in said


IMPORTED = """
import importlib, sys, adaptive

sys.path.insert(0, FOLDER)
for name in NAMES:
    for module in (f"{name}.mine", f"{name}.other"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            print(error)
"""


def test_a_module_in_a_folder_that_ours_hides_is_named(tmp_path: Path) -> None:
    names = [*NAMES, "adaptive", "runs"]
    expected = []
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mine.py").touch()
        expected += [
            f"No module named '{name}.mine': this library's package {name!r} hides {folder}; give "
            f"yours another name, or put it into a package",
            f"No module named '{name}.other'",
        ]
    code = IMPORTED.replace("FOLDER", repr(str(tmp_path))).replace("NAMES", repr(names))
    done = _python(code, ROOT)
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize("command", ["doctor", "compare", "tune"])
@pytest.mark.parametrize("form", ["runs.py", "policies/__init__.py"])
def test_a_scripts_own_package_is_not_replaced_in_silence(
    command: str, form: str, tmp_path: Path, capfd: Any
) -> None:
    """The commands have imported this library's package of that name by then."""
    path = tmp_path / form
    path.parent.mkdir(exist_ok=True)
    path.write_text("MINE = 1\n", encoding="utf-8")
    script = tmp_path / "train.py"
    name = form.partition("/")[0].removesuffix(".py")
    script.write_text(f"from {name} import MINE\n", encoding="utf-8")
    words = ["--metric", "loss {}"] if command != "doctor" else []
    assert main([command, *words, "--", str(script)]) == 2
    assert capfd.readouterr().err == (
        f"python -m runs {command}: error: -- {script}: {path} is in the way: the script would get "
        f"this library's package {name!r} in its place; accepted: another name for it, or a "
        f"package around it\n"
    )
