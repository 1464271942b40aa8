"""The contract of compressors that need sums over all ranks before they can finish."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from math import nan

import torch
from torch import Tensor

from compressors.base import Compressor, Payload, Spec, check_flat
from compressors.kernels import all_finite
from compressors.kernels.blocks import Flag, fill_if

Rounds = Generator[Tensor, Tensor, list[Payload]]
"""A generator that yields tensors to be summed over the ranks, is sent the sums, and returns the
payloads to be decoded."""

Report = Callable[[list[Payload]], None]


class RoundsCompressor(Compressor):
    """A rounds compressor compresses the tensors of one bucket together, in rounds of all-reduces.

    `compress` does the same in a world of one rank: it measures the energy that a CF would keep,
    changes no state and issues no collective.

    rounds_count: number of all-reduces for a bucket.
    """

    rounds_count: int = 2
    sampled = False

    @abstractmethod
    def rounds(
        self,
        tensors: Sequence[Tensor],
        specs: Sequence[Spec],
        world_size: int,
        report: Report,
    ) -> Rounds:
        """Compress and average one bucket.

        tensors: this rank's error-fed gradients a, flat, all of one dtype (float32 or float64) and
            device. Neither the generator nor the caller changes them until the last round is over.
        specs: one for each tensor. Names and shapes are the same, in the same order, on every rank.

        Each of the `rounds_count` yields hands out one flat tensor (perhaps empty) to be summed
        over all ranks, and is sent the sum, which it may overwrite. The sizes depend on `specs`
        alone. `report` is called once, between the first sum and the second yield, with one payload
        for each tensor: the part c of *this rank's* a. The residual is a - c, and the mean of c
        over the ranks is the decoded mean. These payloads are valid until the generator ends, and
        their energies are known.

        Returns one payload for each tensor: the mean that every rank decodes. If some rank's
        tensors are not finite, all payloads of the bucket are NaN (`any_nonfinite`) on every rank,
        reported payloads decode to finite numbers (energy and error NaN), and no state has changed.
        """

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        check_flat(x, spec, add)
        x = x.detach()
        if add is not None:
            x.add_(add.detach())
        reported: list[Payload] = []
        rounds = self.rounds([x], [spec], 1, reported.extend)
        with suppress(StopIteration):
            rounds.send(next(rounds).clone())
        return reported[0]

    def nbytes(self, spec: Spec) -> int:
        """Bytes that a rank hands to the all-reduces. (A `Payload` is not sent.)"""
        return torch.float32.itemsize * int(self.floats(spec))

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        raise NotImplementedError(f"compressor {self.name!r} exchanges sums, not payloads")


def not_finite(x: Tensor) -> Flag:
    """Whether some element of `x` is not finite."""
    return all_finite(x) ^ True


def projection_energies(
    totals: Tensor, kept: Tensor, whole: Sequence[bool], bad: Flag
) -> tuple[Tensor, ...]:
    """`Payload.energies` of several projections, from ||a||^2 (totals) and ||c||^2 (kept).

    whole: for each tensor, whether it is uncompressed, so that ||c||^2 is ||a||^2. bad: some rank's
        tensors are not finite; then ||c||^2 is NaN."""
    each = zip(whole, totals.unbind(), kept.unbind(), strict=True)
    energy = torch.stack([total if all_kept else part for all_kept, total, part in each])
    fill_if(bad, energy, nan)
    return torch.stack([totals, energy, (totals - energy).clamp(min=0.0)], 1).unbind()
