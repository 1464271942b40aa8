"""Multi-level compression (GraVAC section 3.2): several CFs for the price of one selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from adaptive.tally import Tally
from compressors import Compressor
from compressors.base import Key, Payload

Compress = Callable[[float], Payload]


def compress_levels(
    compressor: Compressor, first: Compress, again: Compress, cfs: Sequence[float]
) -> list[Payload]:
    """A payload for each of `cfs` (ascending): the smallest CF's by `first`, from the full tensor,
    each larger one's from the payload before it; by `again` from the full tensor if the compressor
    does not compress in levels."""
    payloads: list[Payload] = []
    for cf in cfs:
        if not payloads:
            payloads.append(first(cf))
        elif compressor.multilevel:
            payloads.append(compressor.recompress(payloads[-1], max(1.0, cf / payloads[-1].cf)))
        else:
            payloads.append(again(cf))
    return payloads


def measure_levels(
    compressor: Compressor,
    first: Compress,
    again: Compress,
    sample: Tensor,
    key: Key,
    tally: Tally,
) -> list[Payload]:
    """Compress at every CF of the tally, and add what is kept and lost to it: of the tensor that
    `first` compresses (and `again`, afterwards), and of `sample`, the gradient's own strided
    sample."""
    levels = compress_levels(compressor, first, again, tally.cfs)
    record_levels(compressor, levels, sample, key, tally)
    return levels


def record_levels(
    compressor: Compressor, levels: Sequence[Payload], sample: Tensor, key: Key, tally: Tally
) -> None:
    """Add what `levels`, a payload for each CF of the tally, keep and lose to the tally.

    Where a sample tells nothing of the whole, the numbers of the whole stand in for its own."""
    sampled = levels
    if compressor.sampled:
        own = key._replace(shape=())

        def direct(cf: float) -> Payload:
            return compressor.compress(sample, cf, own)

        sampled = compress_levels(compressor, direct, direct, tally.cfs)
    for i, (payload, of_sample) in enumerate(zip(levels, sampled, strict=True)):
        tally.kept[i] += payload.energy
        tally.error[i] += payload.error
        tally.sample_error[i] += of_sample.error
    tally.total += levels[0].total
    tally.sample_total += sampled[0].total
