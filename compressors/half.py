"""Half precision: IEEE fp16 (10 bits of mantissa, largest number 65504) and bfloat16 (7 bits, the
range of fp32), as in Micikevicius et al., "Mixed Precision Training" (ICLR 2018), and PyTorch's
`fp16_compress_hook` and `bf16_compress_hook`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.formats import Block, BlockFormat, Layout, Parts, norm2
from compressors.quantizer import Quantizer
from compressors.scratch import like


class Half(BlockFormat):
    """Each value rounded to the nearest half-precision number. What is beyond the largest one is
    cut down to it: the difference is part of the error, and is fed back with it.

    headroom: cut to the largest number divided by this, so that so many can be summed.
    parts: values (float16 or bfloat16).
    """

    def __init__(self, name: str, half: torch.dtype, headroom: float = 1.0) -> None:
        self.name = name
        self.half = half
        self.limit = torch.finfo(half).max / headroom

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((count, self.half),)

    def encode_block(self, block: Block, parts: Parts) -> tuple[float, float]:
        (values,) = parts
        work = torch.clamp(block.x, -self.limit, self.limit, out=like("work", block.x))
        values.copy_(work)
        work.copy_(values)
        energy = norm2(work)
        return energy, norm2(torch.sub(block.x, work, out=work))

    def decode_block(self, parts: Parts, out: Tensor) -> None:
        out.copy_(parts[0])


class HalfPrecision(Quantizer):
    """Base of `fp16` and `bf16`: CF 2, summed by an all-reduce.

    The sum is formed on the wire in half precision, and what that rounds away is in nobody's
    residual: error feedback covers what this rank rounds, not what the summing rounds.

    peers: ranks whose values can be summed without overflow. Values beyond the largest number /
        peers (fp16: 1023 for 64) are cut there, and the rest is sent in later steps; scaling all
        values down instead would make the small ones vanish, which fp16 is more prone to.
    """

    linear = True
    half: torch.dtype

    def __init__(self, peers: int = 64) -> None:
        if isinstance(peers, bool) or not isinstance(peers, int) or peers < 1:
            raise ValueError(f"peers must be a whole number >= 1, got {peers!r}")
        self.peers = peers
        super().__init__({2.0: Half(self.name, self.half, peers)})

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.half


class FP16(HalfPrecision):
    """IEEE half precision; numbers below 6e-8 in magnitude are kept in the residual."""

    name = "fp16"
    half = torch.float16


class BF16(HalfPrecision):
    """bfloat16: the range of fp32 with two to three decimal digits."""

    name = "bf16"
    half = torch.bfloat16
