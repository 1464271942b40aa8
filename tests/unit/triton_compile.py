"""Compiling Triton's kernels for a GPU that need not be there, which shows that they are valid.

This is a process of its own, `python -m tests.unit.triton_compile MODULE KERNELS`, since nothing
can be compiled in a process that interprets kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import pytest


class Kernel(NamedTuple):
    """A kernel, with a type for each argument ("*fp32", "i32", ...) that is not a constant.

    aligned: all pointers and integers but those in `odd` are multiples of 16."""

    name: str
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: bool = True
    odd: tuple[str, ...] = ()
    warps: int = 4


def assembly(module: str, kernels: Sequence[Kernel]) -> list[str]:
    """The PTX of each of the module's kernels, for an H100. Skips the test where Triton cannot
    compile for NVIDIA's GPUs."""
    from triton.backends import backends

    if "nvidia" not in backends:
        pytest.skip("this Triton cannot compile for NVIDIA's GPUs")
    command = [sys.executable, "-m", "tests.unit.triton_compile", module, json.dumps(kernels)]
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def _compiled(module: Any, kernel: Kernel) -> str:
    import triton
    from triton.backends.compiler import GPUTarget

    function = getattr(module, kernel.name)
    names: list[str] = function.arg_names
    multiples = [n for n in names if kernel.aligned and n not in (*kernel.constants, *kernel.odd)]
    source = triton.compiler.ASTSource(
        function,
        {n: "constexpr" if n in kernel.constants else kernel.types[n] for n in names},
        {(names.index(n),): value for n, value in kernel.constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in multiples},
    )
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": kernel.warps}
    found: str = triton.compile(source, target, options).asm["ptx"]
    return found


if __name__ == "__main__":
    of = import_module(sys.argv[1])
    print(json.dumps([_compiled(of, Kernel(*each)) for each in json.loads(sys.argv[2])]))
