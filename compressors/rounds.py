"""Compressors that need what the other ranks sent before they can finish."""

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
"""Yields tensors to be summed over the ranks, is sent the sums, returns the decoded payloads."""

Report = Callable[[list[Payload]], None]


class RoundsCompressor(Compressor):
    """A rounds compressor compresses the tensors of one bucket together, in rounds of all-reduces.

    `compress` does the same in a world of one rank: it measures what a CF would keep, changes no
    state and takes no part in any exchange.

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
            device; neither this nor the caller changes them until the last round is over.
        specs: one a tensor; names and shapes are the same, in the same order, on every rank.

        Each of the `rounds_count` yields hands out one flat tensor to be summed over all ranks
        (perhaps empty) and is sent the sum, which it may overwrite; their sizes are a function of
        `specs` alone. `report` is called once, between the first sum and the second yield,
        with one payload for each tensor: what is kept of *this rank's* a. Subtracted from a it
        leaves this rank's residual, and its mean over the ranks is what every rank decodes. The
        payloads are valid until the generator ends, and their energies are known.

        Returns one payload a tensor: the mean that every rank decodes. If any rank's tensors are
        not finite, all the payloads of the bucket are NaN (`any_nonfinite`) on every rank, what is
        reported decodes to finite numbers (its energy and error are NaN), and no state has changed.
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
        """Bytes that a rank hands to the all-reduces: not those of a `Payload`, which stays."""
        return torch.float32.itemsize * int(self.floats(spec))

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        raise NotImplementedError(f"compressor {self.name!r} exchanges sums, not payloads")


def not_finite(x: Tensor) -> Flag:
    """Whether anything in `x` is not finite."""
    return all_finite(x) ^ True


def projection_energies(
    totals: Tensor, kept: Tensor, whole: Sequence[bool], bad: Flag
) -> tuple[Tensor, ...]:
    """`Payload.energies` of several projections, of which ||a||^2 and ||c||^2 are given.

    whole: which are not compressed, so that `totals` says what is kept. bad: some rank's tensors
        are not finite; what is kept is set to NaN."""
    each = zip(whole, totals.unbind(), kept.unbind(), strict=True)
    energy = torch.stack([total if all_kept else part for all_kept, total, part in each])
    fill_if(bad, energy, nan)
    return torch.stack([totals, energy, (totals - energy).clamp(min=0.0)], 1).unbind()
