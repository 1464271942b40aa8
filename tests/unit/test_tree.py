"""The core's files: who imports whom, and how far it is from DDP's hook to a compressor."""

from __future__ import annotations

import ast
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import adaptive
from adaptive import AdaptiveCompressor, TopK
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, loss_of, small_net

ROOT = Path(adaptive.__file__).parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("adaptive", "policies", "compressors")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def _imports(module: str) -> set[str]:
    """What a module imports when it is loaded, of any package."""
    found: set[str] = set()
    for node in ast.parse(FILES[module].read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & FILES.keys()
            found |= inside or {node.module}
    return found


KERNELS = "compressors.kernels.triton."
"""Modules that are loaded where a tensor is for them."""

INTEGRATIONS = "adaptive.integrations."
"""Modules that are loaded by whoever uses a framework."""

GRAPH = {module: _imports(module) for module in FILES}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("policies", {"policies"}),
        ("compressors", {"compressors", "torch", "numpy"}),
        ("adaptive", {"adaptive", "policies", "compressors", "torch", "numpy"}),
    ],
)
def test_packages_import_one_way(package: str, allowed: set[str]) -> None:
    known = {*allowed, *sys.stdlib_module_names}
    for module, imported in GRAPH.items():
        if module.split(".")[0] == package and not module.startswith((KERNELS, INTEGRATIONS)):
            assert {name.split(".")[0] for name in imported} <= known, module


def test_triton_is_not_needed_to_load_anything_but_its_kernels() -> None:
    kernels = {module for module in GRAPH if module.startswith(KERNELS)}
    assert kernels
    for module in GRAPH.keys() - kernels:
        assert not GRAPH[module] & kernels, module
        assert not any(name.split(".")[0] == "triton" for name in GRAPH[module]), module


def test_integrations_are_imported_by_nobody_else() -> None:
    integrations = {module for module in GRAPH if module.startswith(INTEGRATIONS)}
    assert len(integrations) >= 3
    for module in GRAPH.keys() - integrations:
        assert not GRAPH[module] & integrations, module


def test_no_module_imports_itself_by_a_detour() -> None:
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way, module])
        if module not in done:
            for other in sorted(GRAPH[module] & FILES.keys()):
                visit(other, (*way, module))
            done.add(module)

    for module in FILES:
        visit(module, ())


class _Looking(TopK):
    """Notes who has called it."""

    deepest = 0

    def compress(self, tensor: Tensor, cf: float, key: Any) -> Any:
        self._look()
        return super().compress(tensor, cf, key)

    def compress_sum(self, memory: Tensor, tensor: Tensor, cf: float, key: Any) -> Any:
        self._look()
        return super().compress_sum(memory, tensor, cf, key)

    def _look(self) -> None:
        names = [frame.name for frame in traceback.extract_stack()[:-2]]
        if "adaptive_hook" in names:
            between = len(names) - 1 - names.index("adaptive_hook")
            self.deepest = max(self.deepest, between)


def _depth(rank: int) -> int:
    base = _Looking()
    model = DDP(small_net(torch.float32))
    AdaptiveCompressor(base, (2, 100), policy=Scripted([10.0])).attach(model)
    for step in range(3):
        loss_of(model, step, rank).backward()
    return base.deepest


def test_the_way_from_the_hook_to_a_compressor_is_short() -> None:
    assert 1 <= run_ranks(1, _depth)[0] <= 10
