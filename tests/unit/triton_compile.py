"""Compiles every kernel that compressors start, for a GPU that need not be there.

A script of its own: where Triton's interpreter is switched on, as in the tests of what kernels do,
nothing is compiled. Prints the name of each kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from compressors import Key, make_compressor
from compressors.kernels import blocks, triton_codec, triton_sparse

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
CASES = {
    "topk+int4": (100.0, 50.0),
    "topk": (2.0,),
    "dgc+qsgd": (20.0,),
    "topk+bf16": (20_000.0,),
    "topk+fp16": (10.0,),
    "int8": (4.0,),
    "qsgd": (4.0, 6.4, 8.0),
    "bf16": (2.0,),
    "fp16": (2.0,),
    "natural": (4.0,),
}

_done: set[Any] = set()


def compile_instead(
    kernel: Any, grid: tuple[int, ...], where: Any, *arguments: Any, **sizes: Any
) -> None:
    """Stands in for `launch`: compiles the kernel for these arguments, and starts nothing. Triton
    takes a whole number that is 1 for a constant."""
    names = kernel.arg_names
    signature, constants = dict.fromkeys(names, "constexpr"), dict(sizes)
    for name, value in zip(names, arguments, strict=False):
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name not in kernel.do_not_specialize:
            constants[name] = 1
        else:
            signature[name] = "i32" if abs(value) < 1 << 31 else "i64"
    key = (kernel.__name__, *signature.items(), *sorted(constants.items()))
    if key not in _done:
        _done.add(key)
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
        options = {"enable_fp_fusion": False}
        assert triton.compile(source, target=TARGET, options=options).asm["cubin"]


def run(name: str, cf: float, numel: int, ranks: int) -> None:
    """All that happens to a gradient, but that no kernel runs."""
    compressor, key = make_compressor(name), Key("w")
    memory, gradient = torch.zeros(numel), torch.randn(numel)
    payload = compressor.compress_sum(memory, gradient, cf, key)
    rows = torch.zeros(ranks, payload.nbytes, dtype=torch.uint8)
    payload.write(rows[0])
    received = compressor.read_all(rows, numel, cf, torch.float32, key)
    compressor.subtract_from(memory, received[0])
    compressor.write_mean(memory, received, 1 / ranks, torch.tensor(False))


if __name__ == "__main__":
    blocks.force_device_path = blocks.force_triton = True
    triton_codec.launch = triton_sparse.launch = compile_instead
    for name, cfs in CASES.items():
        for cf in cfs:
            run(name, cf, 50_000, 4)
    for name in ("topk+int4", "natural"):  # as many numbers as can be are 1
        run(name, 1.0, 1, 1)
    print(*sorted({name for name, *_ in _done}))
