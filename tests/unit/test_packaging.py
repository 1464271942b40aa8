"""What a wheel would hold: every package, every file that is not Python, and the plugin."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, get_args

from tensorboard.plugins.base_plugin import TBLoader

import adaptive
import compressors
import policies
from adaptive.memory.options import NAMED, MemoryName
from runs.needs import NAMES, REPOSITORY

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


WHEEL = """
import sys
from importlib import import_module

class LeftOut:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(EXCLUDED)):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, LeftOut())
for module in MODULES:
    import_module(module)
from runs.__main__ import main

for words in ("bench", "train --task cifar10", "train --model resnet8", "compare --suite gravac"):
    assert main(words.split()) == 2
"""


def test_a_wheel_needs_nothing_that_it_leaves_out(tmp_path: Path) -> None:
    """Neither when its modules are imported, nor where a command asks for it."""
    excluded = [name.removesuffix("*") for name in SETUPTOOLS["packages"]["find"]["exclude"]]
    assert excluded == [name for name in NAMES if (ROOT / name.replace(".", "/")).is_dir()]
    dotted = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in _files()
        if path.parts[0] == "runs" and path.suffix == ".py"
    ]
    held = [name for name in dotted if not name.startswith(tuple(excluded))]
    code = WHEEL.replace("EXCLUDED", repr(excluded)).replace("MODULES", repr(sorted(held)))
    done = _python(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    others = (
        "tasks of images and words, and their models (resnet8, vgg11, lstm-small, ...), are in "
        f"{REPOSITORY}"
    )
    texts = "lstm, gpt, gpt-10m, gpt-121m"
    assert [line.partition(" error: ")[2] for line in done.stderr.splitlines()] == [
        f"bench: belongs to {NAMES['runs.bench']}, which wheels leave out; accepted: {REPOSITORY}",
        f"--task='cifar10' is unknown; accepted: text; {others}",
        f"--model='resnet8' does not go with task 'text'; accepted: {texts}; {others}",
        f"--suite gravac: belongs to {NAMES['runs.papers']}, which wheels leave out; accepted: "
        f"{REPOSITORY}",
    ]


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


def test_every_package_says_that_it_is_typed() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
        assert "py.typed" in SETUPTOOLS["package-data"][package]


def test_the_version_is_that_of_the_metadata() -> None:
    assert adaptive.__version__ in (PROJECT["project"]["version"], "0+unknown")


def test_the_changelog_ends_with_the_present_version() -> None:
    told = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert told[0] == "Unreleased"
    assert told[1] == PROJECT["project"]["version"]


def _python(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a folder of the user's, whose files are found first, with the packages further behind."""
    code = f"import sys; sys.path.append({str(ROOT)!r}); sys.argv = ['adaptive-runs', *{words[1:]}]"
    return subprocess.run(
        [sys.executable, "-c", f"{code}\n{words[0]}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_console_script_is_python_m_runs(tmp_path: Path) -> None:
    ((name, value),) = PROJECT["project"]["scripts"].items()
    assert name == "adaptive-runs"
    module, function = value.split(":")
    code = f"from {module} import {function}; sys.exit({function}())"
    helped = _python(code, "--help", folder=tmp_path)
    assert helped.returncode == 0
    assert "simulate" in helped.stdout
    assert _python(code, "nonsense", folder=tmp_path).returncode == 2


def test_a_runs_py_is_in_nobodys_way_of_the_console_script(tmp_path: Path) -> None:
    (tmp_path / "runs.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    scripts = tmp_path / "bin"
    scripts.mkdir()
    script = scripts / "adaptive-runs"
    script.write_text("import sys\nfrom runs.__main__ import run\nsys.exit(run())\n", "utf-8")
    ended = subprocess.run(
        [sys.executable, str(script), "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "simulate" in ended.stdout, ended.stderr


def test_a_folder_without_modules_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "runs").mkdir()  # TensorBoard's own SummaryWriter makes it
    ended = _python("import adaptive, runs; print(runs.__file__)", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(ROOT / "runs" / "__init__.py")


def test_what_is_public_is_listed_and_there() -> None:
    for package in (adaptive, compressors, policies):
        assert len(set(package.__all__)) == len(package.__all__)
        assert [name for name in package.__all__ if not hasattr(package, name)] == []


def test_choices_that_an_editor_knows_are_those_that_are_accepted() -> None:
    assert set(get_args(policies.PolicyName)) == set(policies.LIBRARY)
    assert set(get_args(MemoryName)) == set(NAMED)


def test_users_install_no_test_tools() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    names = [name for name in extras if name not in ("dev", "browser")]
    for name in names:
        assert not [each for each in extras[name] if re.match("pytest|hypothesis|mypy|ruff", each)]
    assert any(each.startswith("adaptive-compression[all") for each in extras["dev"])
