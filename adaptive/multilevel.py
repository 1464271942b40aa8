"""Multi-level compression (GraVAC section 3.2): several CFs for the price of one selection.

The gain before error feedback is measured on a fixed strided sample of each gradient, since a
second full selection would cost as much as the compression itself. Small tensors are taken whole;
of large ones enough is taken that a candidate keeps some elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from adaptive.bucket import EXACT, Unit
from adaptive.statistics.vector import Tally
from compressors.base import Payload
from policies import DENSE

WHOLE = 4096
"""Elements up to which a tensor is its own sample."""

SHARE = 256
"""Of what exceeds WHOLE, one element in this many."""


def strided_sample(grad: Tensor) -> Tensor:
    """Elements of `grad` (flat) at equal distances, contiguous; `grad` itself if it is small."""
    numel = grad.numel()
    stride = max(1, numel // max(1, min(numel, WHOLE + numel // SHARE)))
    return grad if stride == 1 else grad[::stride].contiguous()


def compress_levels(
    unit: Unit, target: Tensor, addend: Tensor | None = None, sent: Payload | None = None
) -> list[Payload]:
    """A payload of target + addend, added up in place, for each of the unit's levels: the smallest
    CF's from the full tensor, each larger one's from the payload before it, if the compressor
    compresses in levels. CF 1 is the tensor itself, whatever the compressor. sent: the payload at
    the unit's own CF, if there is one already."""
    base, before = unit.base, None
    payloads = {} if sent is None else {unit.cf: sent}
    for cf in sorted(set(unit.levels)):
        how = EXACT if cf == DENSE else base
        if cf in payloads:
            pass
        elif base.multilevel and before is not None:
            payloads[cf] = base.recompress(before, max(1.0, cf / before.cf))
        elif addend is not None:
            payloads[cf] = how.compress_sum(target, addend, cf, unit.key)
            addend = None
        else:
            payloads[cf] = how.compress(target, cf, unit.key)
        if cf != DENSE:
            before = payloads[cf]
    return [payloads[cf] for cf in unit.levels]


def record_levels(unit: Unit, levels: Sequence[Payload], sample: Tensor, tally: Tally) -> None:
    """Add what `levels`, a payload for each of the unit's, keep and lose to the tally.

    Where a sample tells nothing of the whole, the numbers of the whole stand in for its own."""
    sampled = levels
    if unit.base.sampled:
        sampled = compress_levels(replace(unit, key=unit.key._replace(shape=())), sample)
    tally.add_levels(_energies(levels), _energies(sampled))


def _energies(payloads: Sequence[Payload]) -> Tensor:
    """(payloads, 3)."""
    return torch.stack([p.energies for p in payloads if p.energies is not None])
