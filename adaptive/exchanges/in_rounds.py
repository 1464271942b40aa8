"""Compressors that need what the others sent before they can finish: their own rounds of sums."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from adaptive.bucket import Unit
from adaptive.bucket_step import BucketStep
from adaptive.exchanges import pipeline
from adaptive.multilevel import record_levels
from adaptive.sample import strided_sample
from compressors.base import Payload
from compressors.rounds import Rounds, RoundsCompressor


def in_rounds(step: BucketStep, compressor: RoundsCompressor) -> pipeline.Rounds:
    """As many all-reduces a bucket as the compressor has rounds.

    1. Accumulate. What is sent uncompressed (`dense_below`) travels with the first round.
    2. All-reduce what the compressor hands out, give it the sum, and so on. A rank whose gradients
       are not finite sends NaN.
    3. Take what of our own is in the mean off the memory, and decode the mean - or undo it all.
    """
    exchange, finite = step.exchange, step.bucket.finite
    units = [unit for unit in step.units if unit.compressor is compressor]
    plain = [unit for unit in step.units if unit.compressor is not compressor]
    sums = [_accumulated(step, unit) for unit in units]
    own: dict[Unit, Payload] = {unit: step.compress(unit) for unit in plain}

    def report(payloads: Sequence[Payload]) -> None:
        own.update(zip(units, payloads, strict=True))
        if finite:
            _record(step, units, sums, payloads)

    rounds = compressor.rounds(
        sums,
        step.cf,
        [unit.key for unit in units],
        exchange.world_size,
        report,
        held=[i for i, unit in enumerate(units) if _held(unit)],
    )
    share = next(rounds)
    first = torch.cat([share, *(own[unit].parts[0] for unit in plain)]) if plain else share
    total = yield exchange.all_reduce(first if finite else first.fill_(nan))
    sums_of_plain = total[share.numel() :].clone()
    total = total[: share.numel()]
    for _ in range(compressor.rounds_count - 1):
        total = yield exchange.all_reduce(rounds.send(total))
    means = dict(zip(units, _returned(rounds, total), strict=True))
    offsets = sums_of_plain.split([unit.numel for unit in plain])
    for unit, summed in zip(plain, offsets, strict=True):
        means[unit] = own[unit].with_parts(summed / exchange.world_size)
    received = [means[unit] for unit in step.units]
    if step.poisoned(received):
        step.undo()
        return
    step.settle([own[unit] for unit in step.units])
    step.decode([received], 1.0)


def _held(unit: Unit) -> bool:
    return all(piece.part.held for piece in unit.ranges)


def _accumulated(step: BucketStep, unit: Unit) -> Tensor:
    return step.accumulate(unit) if step.bucket.finite else torch.zeros_like(step.view(unit))


def _record(
    step: BucketStep, units: Sequence[Unit], sums: Sequence[Tensor], payloads: Sequence[Payload]
) -> None:
    """Measure every CF of the tally: those above the one sent on what is sent, the others anew."""
    for unit, a, payload in zip(units, sums, payloads, strict=True):
        if _held(unit):
            continue
        compressor, levels = unit.compressor, []
        for cf in step.tally.cfs:
            if cf < step.cf:
                levels.append(compressor.compress(a, cf, unit.key))
            elif cf == step.cf:
                levels.append(payload)
            else:
                levels.append(compressor.recompress(payload, cf / step.cf))
        sample = strided_sample(step.view(unit))
        record_levels(compressor, levels, sample, unit.key, step.tally)


def _returned(rounds: Rounds, total: Tensor) -> list[Payload]:
    try:
        rounds.send(total)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("the compressor has more rounds than it announced")
