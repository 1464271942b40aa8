"""Compiles the kernels of coded values and sparse payloads, for a GPU that need not be there.

A process of its own, `python -m tests.unit.triton_compile_codec`, since nothing can be compiled in
one that interprets kernels. Prints a line for each kernel: its name, and whether its code loads 16
bytes at once and takes small numbers for zero.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from compressors import Key, make_compressor
from compressors.base import Spec
from compressors.kernels import blocks
from compressors.kernels.triton import codec as triton_codec
from compressors.kernels.triton import select as triton_select
from compressors.kernels.triton import sparse as triton_sparse

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}
CASES = {"topk+int4": 100.0, "dgc+bf16": 2.0, "int8": 4.0, "qsgd": 6.4, "natural": 4.0}

_done: set[Any] = set()


def compile_instead(
    kernel: Any, grid: tuple[int, ...], where: Any, *arguments: Any, **sizes: Any
) -> None:
    """Stands in for `launch`: compiles the kernel for these arguments, and starts nothing. Triton
    takes a whole number that is 1 for a constant, and notes what is a multiple of 16."""
    names: list[str] = kernel.arg_names
    signature, constants, attributes = dict.fromkeys(names, "constexpr"), dict(sizes), {}
    for i, (name, value) in enumerate(zip(names, arguments, strict=False)):
        special = name not in kernel.do_not_specialize
        at = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(value, float):
            signature[name] = "fp32"
        elif special and value is at == 1:
            constants[name] = 1
        else:
            signature[name] = POINTERS[value.dtype] if value is not at else "i32"
            if special and at % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
    key = (kernel.__name__, *signature.items(), *sorted(constants.items()))
    if key not in _done:
        _done.add(key)
        source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
        options = {"enable_fp_fusion": False}
        ptx: str = triton.compile(source, target=TARGET, options=options).asm["ptx"]
        print(kernel.__name__, ".v4." in ptx or ".v2.b64" in ptx, ".ftz" in ptx)


def run(name: str, cf: float, numel: int, ranks: int) -> None:
    """All that happens to a gradient, but that no kernel runs."""
    compressor, key = make_compressor(name), Key("w")
    memory, gradient = torch.zeros(numel), torch.randn(numel)
    payload = compressor.compress(memory, Spec.of(memory, cf, key), gradient)
    rows = torch.zeros(ranks, payload.nbytes, dtype=torch.uint8)
    payload.write(rows[0])
    received = compressor.read(rows, Spec((numel,), cf, torch.float32, key))
    compressor.add_to(memory, received[0], -1.0)
    compressor.mean_of(memory, received, 1 / ranks, torch.tensor(False))
    compressor.add_all(memory, received, -1 / ranks, torch.tensor(False))


if __name__ == "__main__":
    blocks.force_device_path = blocks.force_triton = True
    triton_codec.launch = triton_sparse.launch = compile_instead
    triton_select.launch = lambda *_, **__: None  # its kernels are compiled by triton_compile.py
    for name, cf in CASES.items():
        run(name, cf, 51_200, 4)
    run("natural", 4.0, 1, 1)  # numbers that are 1
