"""Two-bit threshold quantization: +t for what is at or above t, -t at or below -t, else nothing.

Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing" (Interspeech 2015):
the values and the error feedback; MXNet's gradient compression ("2bit"): every element in two bits.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from compressors.formats import Block, BlockFormat, Blocks, Layout, Parts, norm2, widened
from compressors.packing import pack, packed_nbytes, padded, unpack
from compressors.quantizer import Quantizer
from compressors.scratch import like, scratch

_OF_RMS = 0.9


class Threshold2(BlockFormat):
    """x -> t * q, q = -1, 0 or 1 as x <= -t, in between, or x >= t.

    threshold: t, or None: 0.9 times the root mean square of the tensor, which loses least of
        normally distributed values (34%) and next to least of Laplace-distributed ones (42%).
    parts: t (one element), codes q + 1 (two bits each).
    """

    shared = 1

    def __init__(self, name: str, threshold: float | None) -> None:
        self.name, self.threshold = name, threshold

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((min(count, 1), widened(dtype)), (packed_nbytes(count, 2), torch.uint8))

    def survey(self, blocks: Blocks, shared: Parts) -> None:
        for _ in blocks:
            pass
        fitted = _OF_RMS * sqrt(blocks.total / blocks.x.numel())
        (t,) = shared
        t.fill_(fitted if self.threshold is None else self.threshold + 0 * fitted)  # nan stays nan
        t.clamp_(min=torch.finfo(t.dtype).tiny)

    def encode_block(self, block: Block, parts: Parts) -> tuple[float, float]:
        t, packed = parts
        steps = torch.div(block.x, t, out=like("work", block.x))
        q = torch.clamp(steps, -1, 1, out=like("levels", steps))
        codes = scratch("codes", padded(q.numel()), torch.uint8, q.device)
        codes[q.numel() :] = 0
        own = codes[: q.numel()].view(torch.int8)
        q.copy_(own.copy_(q))  # rounds towards 0; trunc_ is 20 times slower
        own.add_(1)
        pack(codes, 2, packed)
        square = float(t) ** 2
        return square * norm2(q), square * norm2(steps.sub_(q))

    def decode_block(self, parts: Parts, out: Tensor) -> None:
        t, packed = parts
        codes = scratch("codes", padded(out.numel()), torch.uint8, out.device)
        unpack(packed, 2, codes)
        out.copy_(codes[: out.numel()]).sub_(1).mul_(t)


class TwoBit(Quantizer):
    """CF 16. An element moves by t a step at most; the rest of it is fed back.

    threshold: t > 0, the same for all tensors and steps (MXNet's default is 0.5), or None: fitted
        to each tensor. Only the fitted one is a contraction, but either loses nothing.
    """

    name = "twobit"

    def __init__(self, threshold: float | None = None) -> None:
        if threshold is not None and not 0 < threshold < float("inf"):
            raise ValueError(f"threshold must be None or a number above 0, got {threshold!r}")
        self.threshold = threshold
        super().__init__({16.0: Threshold2(self.name, threshold)})
