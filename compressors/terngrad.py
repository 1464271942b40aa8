"""TernGrad: each element becomes -s, 0 or +s at random, with the right mean.

Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning"
(NeurIPS 2017): equation 3 (the rounding), section 3.3 (a scale for each tensor, clipping).
"""

from __future__ import annotations

from math import sqrt

import torch

from compressors.dither import STEP, fill_random16
from compressors.formats import Block, BlockFormat, Blocks, Layout, Parts, norm2, widened
from compressors.quantizer import Quantizer
from compressors.scratch import like
from compressors.ternary import pack_digits, ternary_nbytes, unpack_digits

_WIDER = 1 + 2.0**-20  # so that rounding errors never put an element past the scale


class Ternary(BlockFormat):
    """x -> s * t, t = -1, 0 or 1, E[s * t] = x for |x| <= s; s = max|x| over the tensor, after
    clipping to +-clip * sqrt(mean x^2).

    parts: s (one element), digits t + 1 (five to a byte).
    """

    shared = 1

    def __init__(self, name: str, clip: float | None, seed: int) -> None:
        self.name, self.clip, self.seed = name, clip, seed

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((min(count, 1), widened(dtype)), (ternary_nbytes(count), torch.uint8))

    def survey(self, blocks: Blocks, shared: Parts) -> None:
        (scale,) = shared
        scale.zero_()
        for block in blocks:
            magnitude = torch.abs(block.x, out=like("work", block.x))
            torch.maximum(scale, magnitude.amax(), out=scale)
        if self.clip is not None:
            scale.clamp_(max=self.clip * sqrt(blocks.total / blocks.x.numel()))
        scale.mul_(_WIDER).clamp_(min=torch.finfo(scale.dtype).tiny)

    def encode_block(self, block: Block, parts: Parts) -> tuple[float, float]:
        scale, packed = parts
        steps, t = torch.div(block.x, scale, out=like("work", block.x)), like("levels", block.x)
        fill_random16(t, self.seed, block.key.name, block.key.step, block.start, block.norm)
        if self.clip is None:
            torch.add(steps, t, alpha=STEP, out=t)
        else:
            clipped = torch.clamp(steps, -1, 1, out=like("clipped", steps))
            torch.add(clipped, t, alpha=STEP, out=t)
        t.floor_()
        square, energy = float(scale) ** 2, norm2(t)
        error = norm2(steps.sub_(t))
        pack_digits(t.add_(1), packed)
        return square * energy, square * error

    def decode_block(self, parts: Parts, out: torch.Tensor) -> None:
        scale, packed = parts
        steps = torch.tensor([-1.0, 0.0, 1.0], dtype=out.dtype, device=out.device)
        unpack_digits(packed, steps * scale, out)


class TernGrad(Quantizer):
    """CF 20: 1.6 bits an element.

    clip: in standard deviations, taken about zero; the paper's 2.5 makes the scale and with it the
        variance smaller, at the price of a bias. None: no clipping; then C is unbiased.
    seed: of the random numbers, which also depend on the tensor's name, the step and the data.

    Not a contraction (the error is several times the gradient), so it is not fed back.
    """

    name = "terngrad"
    error_feedback = False

    def __init__(self, clip: float | None = 2.5, seed: int = 0) -> None:
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be None or above 0 (standard deviations), got {clip!r}")
        self.clip, self.seed = clip, seed
        super().__init__({20.0: Ternary(self.name, clip, seed)})
