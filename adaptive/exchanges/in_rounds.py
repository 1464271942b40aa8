"""Compressors that need what the others sent before they can finish: their own rounds of sums."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from adaptive.bucket import Unit
from adaptive.bucket_step import BucketStep
from adaptive.exchanges import pipeline
from adaptive.multilevel import levels_beside
from compressors.base import Payload
from compressors.rounds import Rounds, RoundsCompressor


def in_rounds(step: BucketStep, compressor: RoundsCompressor) -> pipeline.Rounds:
    """As many all-reduces a bucket as the compressor has rounds.

    1. Accumulate. What is sent uncompressed (`dense_below`, a layer at CF 1) travels with the
       first round.
    2. All-reduce what the compressor hands out, give it the sum, and so on. A rank whose gradients
       are not finite sends NaN.
    3. Take what of our own is in the mean off the memory, and decode the mean - or undo it all.
    """
    exchange, finite = step.exchange, step.bucket.finite
    units = [unit for unit in step.units if unit.compressor is compressor]
    plain = [unit for unit in step.units if unit.compressor is not compressor]
    if not units:  # all of the bucket travels uncompressed
        yield from _uncompressed(step, compressor.rounds_count)
        return
    sums = [step.accumulate(unit) for unit in units]
    own: dict[Unit, Payload] = {unit: step.compress(unit) for unit in plain}

    def report(payloads: Sequence[Payload]) -> None:
        own.update(zip(units, payloads, strict=True))
        if finite:
            _record(step, units, sums, payloads)

    rounds = compressor.rounds(
        sums,
        [unit.cf for unit in units],
        [unit.key for unit in units],
        exchange.world_size,
        report,
        held=[i for i, unit in enumerate(units) if unit.held],
    )
    share = next(rounds)
    first = torch.cat([share, *(own[unit].parts[0] for unit in plain)]) if plain else share
    total = yield exchange.all_reduce(first if finite else first.fill_(nan))
    sums_of_plain = total[share.numel() :].clone()
    total = total[: share.numel()]
    for _ in range(compressor.rounds_count - 1):
        total = yield exchange.all_reduce(rounds.send(total))
    means = _returned(rounds, total)
    if any(compressor.is_poisoned(mean) for mean in means) or not _finite(sums_of_plain):
        step.undo()
        return
    step.settle([own[unit] for unit in step.units])
    for unit, mean in zip(units, means, strict=True):
        compressor.write_to(step.view(unit), mean)
    rest = sums_of_plain.split([unit.numel for unit in plain])
    for unit, summed in zip(plain, rest, strict=True):
        step.view(unit).copy_(summed).div_(exchange.world_size)
    step.announce()


def _uncompressed(step: BucketStep, collectives: int) -> pipeline.Rounds:
    """One round of sums does; the others have nothing to send."""
    own = [step.compress(unit) for unit in step.units]
    empty = step.bucket.work.new_empty(0)
    flat = torch.cat([empty, *(payload.parts[0] for payload in own)])
    flat = yield step.exchange.all_reduce(flat)
    for _ in range(collectives - 1):
        yield step.exchange.all_reduce(empty)
    sums = flat.split([unit.numel for unit in step.units])
    received = [payload.with_parts(each) for payload, each in zip(own, sums, strict=True)]
    if step.poisoned(received):
        step.undo()
        return
    step.settle(own)
    step.decode([received], 1 / step.exchange.world_size)


def _record(
    step: BucketStep, units: Sequence[Unit], sums: Sequence[Tensor], payloads: Sequence[Payload]
) -> None:
    for unit, a, payload in zip(units, sums, payloads, strict=True):
        if not unit.held:
            step.record(unit, levels_beside(unit, a, payload))


def _returned(rounds: Rounds, total: Tensor) -> list[Payload]:
    try:
        rounds.send(total)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("the compressor has more rounds than it announced")


def _finite(summed: Tensor) -> bool:
    return bool(torch.isfinite(summed).all())
