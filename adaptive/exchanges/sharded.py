"""Double compression: every rank averages one shard and sends the compressed mean on.

Tang and others, "DoubleSqueeze" (ICML 2019), with the ranks themselves as the server: bytes a rank
sends do not grow with the number of ranks. Its second residual is folded into the first: the owner
of a shard adds N times what the second compression lost to its own residual, which the next mean
divides by N again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import isfinite

from torch import Tensor

from adaptive.bucket import Unit, shard_borders
from adaptive.bucket_step import BucketStep
from adaptive.exchanges.pipeline import Rounds
from adaptive.wire import pack, payload_sizes, unpack
from compressors.base import Payload


def sharded(step: BucketStep) -> Rounds:
    """Two collectives a bucket. Bytes a rank sends: 2(N-1)/N payloads.

    1. Compress each shard, and send each to its owner (all-to-all).
    2. The owner decodes the mean of its shard, compresses it, and keeps what that loses.
    3. All-gather the compressed means.
    4. Take what we sent off the memory, add what our second compression lost, decode the mean -
       or undo it all if any rank poisoned its payloads.
    """
    exchange, n = step.exchange, step.exchange.world_size
    shards = _by_shard(step, n)
    sizes = [sum(payload_sizes(units, step.dtype)) for units in shards]
    before = step.tally.copy()
    own = [step.compress(unit) for unit in step.units]
    kept = step.tally.since(before)
    wire = pack(step.units, own, step.dtype)
    rows = yield exchange.all_to_all(wire, sizes, f"bucket {step.index}")
    mine = shards[exchange.rank]
    received = [unpack(mine, row, step.dtype) for row in rows]
    shard = Shard(step, mine, shard_borders(step.bucket.work.numel(), n)[exchange.rank])
    second = shard.compress_mean(received)
    packed = pack(mine, second, step.dtype)
    wire = packed.new_zeros(max(sizes))  # the collective wants equal sizes
    wire[: packed.numel()] = packed
    shard.keep_remainder(second)
    step.tally.lose(kept, shard.lost_share(second))
    rows = yield exchange.all_gather(wire, f"bucket {step.index}, compressed means")
    means: list[Payload] = []
    for units, row, size in zip(shards, rows, sizes, strict=True):
        means += unpack(units, row[:size], step.dtype)
    if step.poisoned(means):
        step.undo()
        return
    step.settle(own)
    shard.fold()
    step.decode([means], 1.0)


class Shard:
    """The shard that this rank owns, from `start` on: its mean, then what compressing that lost."""

    def __init__(self, step: BucketStep, units: Sequence[Unit], start: int) -> None:
        self._step = step
        self._units = units
        self._start = start
        numel = sum(unit.numel for unit in units)
        # Of its own for every bucket: it is in use until the second round is over.
        self._space = step.scratch.take(("shard", step.index), numel, step.bucket.work)

    def compress_mean(self, received: Sequence[Sequence[Payload]]) -> list[Payload]:
        """A payload of the mean for each unit; all poisoned if any that was received is, or if
        the mean is not finite."""
        scale = 1 / self._step.exchange.world_size
        self._space.zero_()
        payloads = []
        for i, unit in enumerate(self._units):
            for row in received:
                if not unit.compressor.is_poisoned(row[i]):
                    unit.compressor.add_to(self._view(unit), row[i], scale)
            payloads.append(unit.compressor.compress(self._view(unit), unit.cf, unit.key))
        rows = ((unit, row[i]) for i, unit in enumerate(self._units) for row in received)
        poisoned = any(unit.compressor.is_poisoned(payload) for unit, payload in rows)
        if poisoned or not all(isfinite(payload.total) for payload in payloads):
            pairs = zip(self._units, payloads, strict=True)
            return [unit.compressor.poison(payload) for unit, payload in pairs]
        return payloads

    def keep_remainder(self, sent: Sequence[Payload]) -> None:
        """Take what is sent, once packed, off the mean."""
        for unit, payload in zip(self._units, sent, strict=True):
            unit.compressor.subtract_from(self._view(unit), payload)

    def lost_share(self, sent: Sequence[Payload]) -> float:
        """Of the mean's energy, what the second compression loses."""
        total = sum(payload.total for payload in sent)
        return sum(payload.error for payload in sent) / total if total > 0 else 0.0

    def fold(self) -> None:
        """Add N times the remainder to this rank's own memory."""
        for unit in self._units:
            for part, start, stop in unit.ranges:
                rest = self._step.memory.remainder(part.slot)
                if rest is not None:
                    lost = self._space[part.start + start - self._start :][: stop - start]
                    rest[start:stop].add_(lost, alpha=self._step.exchange.world_size)

    def _view(self, unit: Unit) -> Tensor:
        return self._space[unit.start - self._start : unit.stop - self._start]


def _by_shard(step: BucketStep, n: int) -> list[list[Unit]]:
    borders = shard_borders(step.bucket.work.numel(), n)
    return [
        [unit for unit in step.units if start <= unit.start and unit.stop <= stop]
        for start, stop in itertools.pairwise(borders)
    ]
