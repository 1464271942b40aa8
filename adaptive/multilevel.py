"""Multi-level compression (GraVAC section 3.2): several CFs for the price of one selection.

The gain before error feedback is measured on a fixed strided sample of each gradient, since a
second full selection would cost as much as the compression itself. Small tensors are taken whole;
of large ones enough is taken that a candidate keeps some elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adaptive.bucket import EXACT, Unit
from adaptive.statistics.vector import Tally
from compressors import Compressor
from compressors.base import Payload
from policies import DENSE

WHOLE = 4096
"""Elements up to which a tensor is its own sample."""

SHARE = 256
"""Of what exceeds WHOLE, one element in this many."""


def sample_stride(numel: int) -> int:
    """Distance between sampled elements of a tensor of `numel` elements."""
    wanted = min(numel, WHOLE + numel // SHARE)
    return max(1, numel // max(1, wanted))


def strided_sample(grad: Tensor) -> Tensor:
    """Every `sample_stride`-th element of `grad` (flat), contiguous; `grad` itself if small."""
    stride = sample_stride(grad.numel())
    return grad if stride == 1 else grad[::stride].contiguous()


Compress = Callable[[Compressor, float], Payload]


def compress_levels(
    compressor: Compressor, first: Compress, again: Compress, cfs: Sequence[float]
) -> list[Payload]:
    """A payload for each of `cfs`: the smallest CF's by `first`, from the full tensor, each larger
    one's from the payload before it; by `again` from the full tensor if the compressor does not
    compress in levels. CF 1 is the tensor itself, whatever the compressor."""
    payloads: dict[float, Payload] = {}
    before: Payload | None = None
    for cf in sorted(set(cfs)):
        how = EXACT if cf == DENSE else compressor
        if not payloads:
            payloads[cf] = first(how, cf)
        elif compressor.multilevel and before is not None:
            payloads[cf] = compressor.recompress(before, max(1.0, cf / before.cf))
        else:
            payloads[cf] = again(how, cf)
        if how is compressor:
            before = payloads[cf]
    return [payloads[cf] for cf in cfs]


def levels_beside(unit: Unit, a: Tensor, sent: Payload) -> list[Payload]:
    """A payload of `a` for each of a unit's levels, where one of them was `sent` (or made to be):
    those of larger CFs are found in it, the others anew."""
    payloads = {unit.cf: sent}
    for cf in sorted(set(unit.levels) - {unit.cf}):
        if cf > unit.cf and unit.compressor is unit.base and unit.base.multilevel:
            payloads[cf] = unit.base.recompress(sent, cf / unit.cf)
        else:
            how = EXACT if cf == DENSE else unit.base
            payloads[cf] = how.compress(a, cf, unit.key)
    return [payloads[cf] for cf in unit.levels]


def record_levels(unit: Unit, levels: Sequence[Payload], sample: Tensor, tally: Tally) -> None:
    """Add what `levels`, a payload for each of the unit's, keep and lose to the tally.

    Where a sample tells nothing of the whole, the numbers of the whole stand in for its own."""
    sampled = levels
    if unit.base.sampled:
        own = unit.key._replace(shape=())

        def direct(compressor: Compressor, cf: float) -> Payload:
            return compressor.compress(sample, cf, own)

        sampled = compress_levels(unit.base, direct, direct, unit.levels)
    tally.add_levels(_energies(levels), _energies(sampled))


def _energies(payloads: Sequence[Payload]) -> Tensor:
    """(payloads, 3)."""
    known = [payload.energies for payload in payloads if payload.energies is not None]
    return known[0][None] if len(known) == 1 else torch.stack(known)
