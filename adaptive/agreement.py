"""Checks, before training starts, that all ranks were set up alike and that sizes are as said.

A difference would make ranks issue different collectives: a hang. Every rank learns of every
problem, so all of them raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from compressors import Compressor
from compressors.base import Key

_TRIAL = 4096
"""Largest tensor that is compressed on trial."""


def check_agreement(
    settings: str,
    compressor: Compressor,
    cfs: Sequence[float],
    sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> None:
    """Compare this rank's settings and payload sizes with everyone's. A collective.

    settings: what must be the same on every rank, readable. cfs: CFs that may be sent. sizes:
    elements of each parameter. RuntimeError on every rank, saying which rank said what.
    """
    problem = "".join(_size_problems(compressor, cfs, sizes))
    announced = [[compressor.payload_nbytes(n, cf) for n in sizes] for cf in cfs]
    mine = (problem, settings, tuple(map(tuple, announced)))
    everyone: list[tuple[str, str, tuple[tuple[int, ...], ...]]] = [mine] * dist.get_world_size(
        group
    )
    dist.all_gather_object(everyone, mine, group=group)
    for rank, (theirs, _, _) in enumerate(everyone):
        if theirs:
            raise RuntimeError(f"rank {rank}: {theirs}")
    for rank, (_, theirs, _) in enumerate(everyone):
        if theirs != everyone[0][1]:
            raise RuntimeError(
                f"AdaptiveCompressor was set up differently on rank {rank} than on rank 0, and "
                f"must be alike on all ranks:\n  rank 0: {everyone[0][1]}\n  rank {rank}: {theirs}"
            )
    for rank, (_, _, sent) in enumerate(everyone):
        for cf, ours, others in zip(cfs, everyone[0][2], sent, strict=True):
            for size, a, b in zip(sizes, ours, others, strict=True):
                if a != b:
                    raise RuntimeError(
                        f"compressor {compressor.name!r} has payloads of different size on "
                        f"different ranks: for {size} elements at CF {cf:g}, {a} bytes on rank 0 "
                        f"and {b} on rank {rank}; payload_nbytes must depend on its arguments only"
                    )


def _size_problems(
    compressor: Compressor, cfs: Sequence[float], sizes: Sequence[int]
) -> Iterable[str]:
    """Compress small tensors for real: does each payload have the size announced for it?"""
    generator = torch.Generator().manual_seed(0)
    for numel in {min(size, _TRIAL) for size in sizes}:
        tensor = torch.randn(numel, generator=generator)
        for cf in cfs:
            made = compressor.compress(tensor, cf, Key("trial")).nbytes
            announced = compressor.payload_nbytes(numel, cf)
            if made != announced:
                yield (
                    f"compressor {compressor.name!r} announced {announced} bytes for {numel} "
                    f"elements at CF {cf:g} and made {made}"
                )
                return
