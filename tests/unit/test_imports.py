"""Imports go one way: `runs -> adaptive -> {policies, compressors}`, and inside these packages
without a circle. Every import in a file counts, also in functions and under `TYPE_CHECKING`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import adaptive

ROOT = Path(adaptive.__file__).parent.parent
PACKAGES = ("adaptive", "policies", "compressors")

KERNELS = "compressors.kernels.triton."
"""Modules that are loaded for tensors on a GPU only."""

INTEGRATIONS = "adaptive.integrations."
"""Modules that users of a framework load."""

CIRCULAR: set[tuple[str, str]] = set()
"""Imports that close a circle, each (file, what it imports): none."""

Graph = Mapping[str, set[str]]
"""For each module, the names of what it imports, of any package."""


def graph_of(root: Path, packages: tuple[str, ...], when_loaded: bool = False) -> Graph:
    """The imports of all files of some packages. when_loaded: only those that loading a file
    runs."""
    paths = sorted(path for package in packages for path in (root / package).rglob("*.py"))
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }
    graph = {}
    for module, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found: set[str] = set()
        for node in tree.body if when_loaded else ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module, f"{path}: imports are absolute"
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in files else node.module for name in names}
        graph[module] = found
    return graph


def circles(graph: Graph) -> list[frozenset[str]]:
    """The largest sets of modules that all import one another, directly or by way of others."""
    reached: dict[str, set[str]] = {}
    for module in graph:
        found, waiting = set[str](), [module]
        while waiting:
            new = (graph[waiting.pop()] & graph.keys()) - found
            found |= new
            waiting += new
        reached[module] = found
    sets = {frozenset(o for o in reached[m] if m in reached[o]) for m in graph}
    return sorted((each for each in sets if each), key=sorted)


GRAPH = graph_of(ROOT, PACKAGES)
LOADED = graph_of(ROOT, PACKAGES, when_loaded=True)


def test_no_files_import_one_another_in_a_circle() -> None:
    gone = {(module, target) for module, target in CIRCULAR if target not in GRAPH[module]}
    assert not gone, f"no longer there, and to be taken off CIRCULAR: {gone}"
    graph = {m: {o for o in GRAPH[m] if (m, o) not in CIRCULAR} for m in GRAPH}
    assert circles(graph) == []


def room_of(module: str) -> str:
    """A folder of `adaptive`, or a file of it that lies in none; another package whole."""
    return ".".join(module.split(".")[: 2 if module.startswith("adaptive.") else 1])


def rooms(graph: Graph) -> Graph:
    """For each room the others that it imports."""
    found: dict[str, set[str]] = {room_of(module): set() for module in graph}
    for module, imported in graph.items():
        here = room_of(module)
        found[here] |= {room_of(other) for other in imported & graph.keys()} - {here}
    return found


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each room: one above the highest of those that it imports. No circles."""
    found: dict[str, int] = {}
    while len(found) < len(graph):
        for room in graph.keys() - found.keys():
            if graph[room] <= found.keys():
                found[room] = 1 + max((found[other] for other in graph[room]), default=0)
    return found


def test_rooms_stand_on_one_another() -> None:
    """No arrow goes up, and a stranger can hold them in mind (docs/architecture.md draws them)."""
    house = rooms(GRAPH)
    assert circles(house) == []
    assert len(house) <= 16, sorted(house)
    assert max(floors(house).values()) <= 9, floors(house)
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for room in house:
        name = room.replace(".", "/")
        assert f"`{name}/`" in text or f"`{name}.py`" in text, room


SPINE = ("network", "model", "statistics", "exchange.bucket", "exchange.bucket_memory")
SPINE += ("step.config", "step.averager", "step.reducer", "step.controller")
SPINE += ("session.session", "session.checkpoint")
"""Rooms and files that every run goes through, and the check of its settings."""

GUESTS = ("sync", "exchange.strategies", "exchange.votes", "exchange.two_level", "contrib", "fsdp")
GUESTS += ("memory.momentum", "memory.updates", "memory.rule", "memory.muon")
"""Where classes are that some runs need: synchronisers, strategies, memories, what serves one kind
of optimizer, and sharded models."""

ROOTS = {"Synchroniser", "Strategy", "Outgoing", "Received", "start", "gradients_or_steps"}
"""The contracts of these, and the functions that pick one."""


def test_nothing_in_the_spine_names_what_only_some_runs_need() -> None:
    spine = {m for m in GRAPH if any(f"{m}.".startswith(f"adaptive.{room}.") for room in SPINE)}
    assert len(spine) > 20
    names: dict[str, str] = {}
    paths = {module: ROOT / f"{module.replace('.', '/')}.py" for module in GRAPH}
    paths = {module: path for module, path in paths.items() if path.is_file()}  # no folders
    for module, path in paths.items():
        if any(f"{module}.".startswith(f"adaptive.{guest}.") for guest in GUESTS):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found = (node.name for node in tree.body if isinstance(node, ast.ClassDef))
            names |= {name: module for name in found if name[0] != "_"}
    names |= dict.fromkeys(("ParameterServer", "LocalSteps", "Delayed", "EveryStep"), "options")
    names |= dict.fromkeys(("SGD", "Adam", "AdamW", "Muon"), "torch")
    for module in sorted(spine & paths.keys()):
        for node in ast.walk(ast.parse(paths[module].read_text(encoding="utf-8"))):
            name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
            assert name in ROOTS or name not in names, f"{module} names {name}"


def test_a_circle_is_found_wherever_its_imports_stand(tmp_path: Path) -> None:
    sources = {
        "adaptive/__init__.py": "",
        "adaptive/a.py": "from adaptive.b import x",
        "adaptive/b.py": "def f():\n    import adaptive.c",
        "adaptive/c.py": "if TYPE_CHECKING:\n    from adaptive import a",
        "adaptive/d.py": "import adaptive.a",
    }
    (tmp_path / "adaptive").mkdir()
    for name, source in sources.items():
        (tmp_path / name).write_text(source, encoding="utf-8")
    circle = frozenset({"adaptive.a", "adaptive.b", "adaptive.c"})
    assert circles(graph_of(tmp_path, ("adaptive",))) == [circle]
    assert circles(graph_of(tmp_path, ("adaptive",), when_loaded=True)) == []


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("policies", {"torch", "numpy", "adaptive", "compressors", "runs"}),
        ("compressors", {"adaptive", "policies", "runs"}),
        ("adaptive", {"runs"}),
    ],
)
def test_no_file_imports_a_package_above_its_own(package: str, never: set[str]) -> None:
    for module, imported in GRAPH.items():
        if module.split(".")[0] == package:
            assert not {name.split(".")[0] for name in imported} & never, module


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("policies", {"policies"}),
        ("compressors", {"compressors", "torch", "numpy"}),
        ("adaptive", {"adaptive", "policies", "compressors", "torch", "numpy"}),
    ],
)
def test_loading_a_file_needs_torch_and_numpy_at_most(package: str, allowed: set[str]) -> None:
    known = {*allowed, *sys.stdlib_module_names}
    for module, imported in LOADED.items():
        if module.split(".")[0] == package and not module.startswith((KERNELS, INTEGRATIONS)):
            assert {name.split(".")[0] for name in imported} <= known, module


def test_triton_is_not_needed_to_load_anything_but_its_kernels() -> None:
    kernels = {module for module in LOADED if module.startswith(KERNELS)}
    assert kernels
    for module in LOADED.keys() - kernels:
        assert not LOADED[module] & kernels, module
        assert not any(name.split(".")[0] == "triton" for name in LOADED[module]), module


def test_contrib_is_imported_when_it_is_named_and_named_by_nobody() -> None:
    contrib = {module for module in LOADED if ".contrib." in module}
    assert len(contrib) >= 6
    for module in GRAPH.keys() - contrib - {"adaptive", "compressors"}:
        assert not GRAPH[module] & contrib, module
    for module in LOADED.keys() - contrib:
        assert not LOADED[module] & contrib, module
    found = "[name for name in sys.modules if '.contrib.' in name]"
    named = "AdaptiveCompressor('topk'); adaptive.Gossip; make_compressor('sidco')"
    script = (
        f"import sys, adaptive; from adaptive import AdaptiveCompressor; "
        f"from compressors import make_compressor; first = {found}; {named}; print(first, {found})"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert told.startswith("[] [")
    for name in ("adaptive.contrib.gossip", "compressors.contrib.sidco"):
        assert name in told
    assert "hooks" not in told


def test_integrations_are_loaded_by_nobody_else() -> None:
    integrations = {module for module in LOADED if module.startswith(INTEGRATIONS)}
    assert len(integrations) >= 2
    for module in LOADED.keys() - integrations:
        assert not LOADED[module] & integrations, module
