"""One bit an element: its sign. Zero counts as positive. Eight neighbours share a byte."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from compressors.norms import on_numpy
from compressors.scratch import scratch


def signs_nbytes(count: int) -> int:
    """Bytes of the signs of `count` elements."""
    return -(-count // 8)


def pack_signs(x: Tensor, packed: Tensor, positive: Tensor) -> None:
    """Fill `positive` (like `x`, flat) with 1 where x >= 0, else 0; `packed` (uint8) with those as
    bits, the first element's the lowest."""
    if on_numpy(x):  # several times faster than torch
        bits = scratch("bits", x.numel(), torch.bool, x.device).numpy()
        np.greater_equal(x.numpy(), 0, out=bits)
        packed.numpy()[:] = np.packbits(bits, bitorder="little")
        np.copyto(positive.numpy(), bits.view(np.uint8))
        return
    positive.copy_(x >= 0)
    filled = x.new_zeros(packed.numel() * 8)
    filled[: x.numel()] = positive
    powers = 2.0 ** torch.arange(8, dtype=x.dtype, device=x.device)
    packed.copy_(filled.view(-1, 8) @ powers)


def unpack_signs(packed: Tensor, out: Tensor) -> None:
    """Fill `out` (floating point) with 1 where a sign is positive, else 0."""
    if on_numpy(out):
        bits = np.unpackbits(packed.numpy(), count=out.numel(), bitorder="little")
        np.copyto(out.numpy(), bits)
        return
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits_of = (packed[:, None] >> shifts) & 1
    out.copy_(bits_of.view(-1)[: out.numel()])
