"""Multi-level compression (GraVAC section 3.2): several CFs for the price of one selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from adaptive.tally import Tally
from compressors import Compressor
from compressors.base import Key, Payload


def compress_levels(
    compressor: Compressor, first: Callable[[float], Payload], cfs: Sequence[float]
) -> list[Payload]:
    """A payload for each of `cfs` (ascending): the smallest CF's by `first`, from the full tensor,
    each larger one's from the payload before it."""
    payloads: list[Payload] = []
    for cf in cfs:
        if payloads:
            payloads.append(compressor.recompress(payloads[-1], cf / payloads[-1].cf))
        else:
            payloads.append(first(cf))
    return payloads


def measure_levels(
    compressor: Compressor,
    first: Callable[[float], Payload],
    sample: Tensor,
    key: Key,
    tally: Tally,
) -> list[Payload]:
    """Compress at every CF of the tally, and add what is kept and lost to it: of the tensor that
    `first` compresses, and of `sample`, the gradient's own strided sample."""
    levels = compress_levels(compressor, first, tally.cfs)
    sampled = compress_levels(
        compressor, lambda cf: compressor.compress(sample, cf, key), tally.cfs
    )
    for i, (payload, of_sample) in enumerate(zip(levels, sampled, strict=True)):
        tally.kept[i] += payload.energy
        tally.error[i] += payload.error
        tally.sample_error[i] += of_sample.error
    tally.total += levels[0].total
    tally.sample_total += sampled[0].total
    return levels
