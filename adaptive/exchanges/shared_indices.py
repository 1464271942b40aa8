"""One rank chooses the indices for all, and the values at them are summed.

Tyagi and Swany's AR-Topk: a sparse exchange whose bytes do not grow with the number of ranks. The
ranks take turns in choosing, or the one with the largest error-fed gradient does. Each rank's
residual loses exactly its own values at those indices.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan

import torch
from torch import Tensor

from adaptive.bucket import Unit
from adaptive.bucket_step import BucketStep
from adaptive.exchanges.pipeline import Rounds
from adaptive.multilevel import levels_beside
from compressors import NoCompression
from compressors.base import Payload
from compressors.sparsifier import Sparsifier


def shared_indices(step: BucketStep) -> Rounds:
    """Two collectives a bucket. Bytes a rank sends: (N-1)/N index lists, 2(N-1)/N value lists.

    1. Accumulate. The rank whose turn it is selects, and broadcasts its indices.
    2. All-reduce the values that each rank has at those indices; NaN if its gradients are not
       finite.
    3. Take what we sent off the memory, write the mean - or undo it all.
    """
    exchange, leader = step.exchange, step.leader
    sums = [step.accumulate(unit) for unit in step.units]
    sizes = [_index_nbytes(step, unit) for unit in step.units]
    chosen = torch.zeros(sum(sizes), dtype=torch.uint8, device=step.bucket.work.device)
    if exchange.rank == leader:
        for unit, a, room in zip(step.units, sums, chosen.split(sizes), strict=True):
            if room.numel():
                payload = unit.compressor.compress(a, unit.cf, unit.key)
                room.copy_(_sparse(unit).pack_indices(payload))
    chosen = yield exchange.broadcast(chosen, leader, f"bucket {step.index}, indices")
    rooms = chosen.split(sizes)
    own = [_own(step, *each) for each in zip(step.units, sums, rooms, strict=True)]
    values = torch.cat([payload.parts[-1] for payload in own])
    if not step.bucket.finite:
        values.fill_(nan)
    total = yield exchange.all_reduce(values)
    if not bool(torch.isfinite(total).all()):
        step.undo()
        return
    step.settle(own)
    means = total.split([payload.parts[-1].numel() for payload in own])
    received = [
        payload.with_parts(*payload.parts[:-1], mean)
        for payload, mean in zip(own, means, strict=True)
    ]
    step.decode([received], 1 / exchange.world_size)


def _sparse(unit: Unit) -> Sparsifier:
    assert isinstance(unit.compressor, Sparsifier)
    return unit.compressor


def _index_nbytes(step: BucketStep, unit: Unit) -> int:
    """Bytes of a unit's indices; 0 for one that is sent as it is."""
    if isinstance(unit.compressor, NoCompression):
        return 0
    return _sparse(unit).index_nbytes(unit.numel, unit.cf)


def _own(step: BucketStep, unit: Unit, a: Tensor, indices: Tensor) -> Payload:
    """What this rank has at the chosen `indices` (as packed); the tally takes its norms."""
    measured = step.bucket.finite and not unit.held
    if isinstance(unit.compressor, NoCompression):
        payload = unit.compressor.compress(a, unit.cf, unit.key)
        if measured:
            step.record(unit, levels_beside(unit, a, payload))
        return payload.with_parts(payload.parts[0].clone())
    sparse = _sparse(unit)
    payload = sparse.at(a, indices, unit.cf, unit.key)
    if measured:
        step.record(unit, levels_beside(unit, a, payload))
    return replace(payload, cf=unit.cf)
