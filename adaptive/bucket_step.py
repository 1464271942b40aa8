"""The work on one bucket in one step that every exchange needs: compress, settle, decode, undo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import nan

import torch
from torch import Tensor

from adaptive.bucket import Bucket, Unit
from adaptive.bucket_memory import BucketMemory
from adaptive.exchange import Exchange
from adaptive.multilevel import measure_levels, record_levels, strided_sample
from adaptive.residual import NoMemory, Slot
from adaptive.scratch import Scratch
from adaptive.statistics.vector import Tally
from compressors import Compressor
from compressors.base import Payload

OnMean = Callable[[Slot, Tensor], None]


@dataclass
class BucketStep:
    """index: of the bucket. collectives: that its exchange has. sent: position in `tally.cfs` of
    the CF to send. leader: the rank that chooses for all, if one does.

    units: what is compressed as one, in order. on_mean: told every slot and its mean (flat).
    """

    index: int
    collectives: int
    leader: int
    bucket: Bucket
    units: Sequence[Unit]
    sent: int
    tally: Tally
    memory: NoMemory
    exchange: Exchange
    scratch: Scratch
    on_mean: OnMean | None

    def __post_init__(self) -> None:
        # With several rounds it is read again when the next bucket has come by.
        room = ("joined", self.index if self.collectives > 1 else 0)
        self._kept = BucketMemory(self.memory, self.bucket, self.units, self.scratch, room)

    @property
    def dtype(self) -> torch.dtype:
        return self.bucket.work.dtype

    def view(self, unit: Unit) -> Tensor:
        """The unit's slice of the bucket: the gradient, in the end the mean."""
        return self.bucket.work[unit.start : unit.stop]

    def accumulate(self, unit: Unit) -> Tensor:
        """The unit's error-fed gradient, added up (flat); zeros if the bucket is not finite."""
        if not self.bucket.finite:
            return torch.zeros_like(self.view(unit))
        target, addend = self._kept.open(unit)
        return target if addend is None else target.add_(addend)

    def compress(self, unit: Unit) -> Payload:
        """What this rank sends for a unit. The memory is accumulated, not settled.

        A rank whose gradients are not finite sends a poisoned payload, so that all ranks end the
        step with a non-finite bucket, as in dense DDP."""
        compressor = unit.compressor
        if not self.bucket.finite:
            zeros = torch.zeros_like(self.view(unit))
            return compressor.poison(compressor.compress(zeros, unit.cf, unit.key))
        target, addend = self._kept.open(unit)
        if unit.held:
            return compressor.compress(target, unit.cf, unit.key)

        def again(compressor: Compressor, cf: float) -> Payload:
            return compressor.compress(target, cf, unit.key)

        def first(compressor: Compressor, cf: float) -> Payload:
            if addend is None:
                return again(compressor, cf)
            return compressor.compress_sum(target, addend, cf, unit.key)

        sample = strided_sample(self.view(unit))
        levels = measure_levels(unit, first, again, sample, self.tally)
        return replace(levels[self.sent], cf=unit.cf)

    def record(self, unit: Unit, levels: Sequence[Payload]) -> None:
        """Add what `levels`, a payload for each of the unit's, keep of it to the tally."""
        record_levels(unit, levels, strided_sample(self.view(unit)), self.tally)

    def settle(self, own: Sequence[Payload]) -> None:
        """Take what this rank has sent, a payload for each unit, off the memory."""
        for unit, payload in zip(self.units, own, strict=True):
            self._kept.take_off(unit, payload)
        self._kept.settle(own)

    def settle_and_decode(
        self, received: Iterable[Sequence[Payload]], rank: int, scale: float
    ) -> None:
        """`settle` and `decode`, one unit after the other, so that the decoded payloads of no more
        than one are in memory. received: for each unit, all ranks' payloads."""
        own = []
        for unit, payloads in zip(self.units, received, strict=True):
            self._kept.take_off(unit, payloads[rank])
            if self._kept.masks:
                own.append(payloads[rank])
            mean = self.view(unit).zero_()
            for payload in payloads:
                unit.compressor.add_to(mean, payload, scale)
        self._kept.settle(own)
        self.announce()

    def undo(self) -> None:
        """The gradients of some rank are not finite: the memory as it was, the mean NaN."""
        self._kept.undo()
        self.bucket.work.fill_(nan)

    def decode(self, received: Sequence[Sequence[Payload]], scale: float) -> None:
        """The mean, `scale` times the sum of all ranks' payloads, into the bucket."""
        self.bucket.work.zero_()
        for payloads in received:
            for unit, payload in zip(self.units, payloads, strict=True):
                unit.compressor.add_to(self.view(unit), payload, scale)
        self.announce()

    def announce(self) -> None:
        """The mean is in the bucket."""
        if self.on_mean:
            for part in self.bucket.parts:
                self.on_mean(part.slot, part.grad)

    def poisoned(self, payloads: Sequence[Payload]) -> bool:
        """Some rank has poisoned what it sent."""
        pairs = zip(self.units, payloads, strict=True)
        return any(unit.compressor.is_poisoned(payload) for unit, payload in pairs)
