"""What happens to one DDP bucket: compress, exchange, decode, and keep the memory right.

1. Look at the local gradients: a bucket with a non-finite gradient is poisoned, so that it ends
   non-finite on every rank, as in dense DDP, and no memory is touched by it.
2. Accumulate each gradient into the memory and compress the sum: at the smallest CF wanted from
   the full tensor, at larger ones from that payload (multi-level compression).
3. Exchange all payloads of the bucket in one collective.
4. When it is there (on a thread of the process group): decode the mean into the bucket's buffer,
   and take what was sent off the memory - or undo step 2 if any rank poisoned the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, nan, sqrt

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.exchange import Exchange
from adaptive.multilevel import measure_levels
from adaptive.residual import NoMemory, Slot
from adaptive.sample import strided_sample
from adaptive.tally import Tally
from adaptive.wire import pack, unpack
from compressors import Compressor
from compressors.base import Key, Payload
from compressors.norms import squared_norm

OnMean = Callable[[Slot, Tensor], None]


@dataclass(frozen=True)
class Part:
    """One parameter's piece of a bucket. view: its flat slice of the bucket's buffer.

    grad: the same values in the memory's precision (the view itself, unless it is half precision).
    energy: ||g||^2. held: sends nothing this step, and keeps its memory to itself.
    """

    slot: Slot
    view: Tensor
    grad: Tensor
    key: Key
    energy: float
    held: bool

    def write_back(self) -> None:
        """Bring the bucket up to date with `grad`."""
        if self.grad is not self.view:
            self.view.copy_(self.grad)


class BucketReducer:
    """Reduces buckets with one compressor, one memory and one exchange.

    clip_norm: largest norm of a parameter's local gradient, already scaled by 1/sqrt(N); or None.
    """

    def __init__(
        self,
        compressor: Compressor,
        memory: NoMemory,
        exchange: Exchange,
        clip_norm: float | None = None,
    ) -> None:
        self._compressor = compressor
        self._memory = memory
        self._exchange = exchange
        self._clip_norm = clip_norm

    def plain(
        self, buffer: Tensor, slots: Sequence[Slot], on_mean: OnMean | None
    ) -> Future[Tensor]:
        """All-reduce the gradients as they are. on_mean: told every slot and its mean (flat)."""

        def finish(future: Future[Tensor]) -> Tensor:
            mean = future.value()
            if on_mean and _all_finite(mean):
                for slot, view in zip(slots, _views(mean, slots), strict=True):
                    on_mean(slot, view)
            return mean

        return self._exchange.all_reduce(buffer.div_(self._exchange.world_size)).then(finish)

    def dense(
        self, buffer: Tensor, slots: Sequence[Slot], step: int, tally: Tally, on_mean: OnMean | None
    ) -> Future[Tensor]:
        """All-reduce the gradients and all that the memory holds, uncompressed; the CFs in
        `tally.cfs` are measured on what is sent."""
        untouched = not tally.cfs and self._clip_norm is None
        if untouched and all(self._memory.idle(slot) for slot in slots):
            tally.grad = nan  # not measured
            return self.plain(buffer, slots, on_mean)
        parts = self._parts(buffer, slots, step, tally)
        finite = _finite(parts)
        sending = [part for part in parts if finite and not part.held]
        for part in sending:
            sample = strided_sample(part.grad).clone() if tally.cfs else part.grad
            self._memory.fold(part.slot, part.grad)
            if tally.cfs:
                first = partial(self._compressor.compress, part.grad, key=part.key)
                measure_levels(self._compressor, first, sample, part.key, tally)
            part.write_back()

        def finish(future: Future[Tensor]) -> Tensor:
            mean = future.value()
            arrived = _all_finite(mean)
            for part in sending:
                if arrived:
                    self._memory.commit_dense(part.slot)
                else:
                    self._memory.undo_fold(part.slot)
            if on_mean and arrived:
                for part in parts:
                    on_mean(part.slot, part.view)
            return mean

        return self._exchange.all_reduce(buffer.div_(self._exchange.world_size)).then(finish)

    def compressed(
        self,
        buffer: Tensor,
        slots: Sequence[Slot],
        cf: float,
        step: int,
        tally: Tally,
        on_mean: OnMean | None,
    ) -> Future[Tensor]:
        """Exchange the gradients compressed at `cf`, one of `tally.cfs`."""
        compressor = self._compressor
        parts = self._parts(buffer, slots, step, tally)
        finite = _finite(parts)
        payloads = [self._payload(part, cf, finite, tally) for part in parts]
        dtype = parts[0].grad.dtype
        wire = pack(compressor, payloads, cf, dtype)
        size = wire.numel()
        numels, keys = [part.grad.numel() for part in parts], [part.key for part in parts]
        senders = 1 if compressor.linear else self._exchange.world_size
        # What was gathered holds our own payloads too, so they need not be kept meanwhile.
        summed = payloads if compressor.linear else None
        del payloads

        def finish(future: Future[Tensor]) -> Tensor:
            rows = future.value().view(torch.uint8).view(senders, size)
            received = [unpack(compressor, row, numels, cf, dtype, keys) for row in rows]
            poisoned = any(compressor.is_poisoned(p) for payloads in received for p in payloads)
            own = received[self._exchange.rank] if summed is None else summed
            for part, payload in zip(parts, own, strict=True):
                if not finite or part.held:
                    continue  # its memory was not touched
                if poisoned:
                    self._memory.undo_compress(part.slot, part.grad)
                else:
                    self._memory.commit(part.slot, payload, compressor)
            if poisoned:
                return buffer.fill_(nan)
            self._decode(parts, received)
            if on_mean:
                for part in parts:
                    on_mean(part.slot, part.grad)
            return buffer

        if compressor.linear:  # the sum of the payloads is the payload of the sum
            return self._exchange.all_reduce(wire.view(dtype)).then(finish)
        return self._exchange.all_gather(wire).then(finish)

    def _parts(self, buffer: Tensor, slots: Sequence[Slot], step: int, tally: Tally) -> list[Part]:
        parts = []
        for slot, view in zip(slots, _views(buffer, slots), strict=True):
            grad = view if view.dtype == slot.dtype else view.to(slot.dtype)
            energy = squared_norm(grad)
            if self._clip_norm is not None and isfinite(energy) and energy > self._clip_norm**2:
                grad.mul_(self._clip_norm / sqrt(energy))
                energy = self._clip_norm**2
            tally.grad += energy
            held = self._memory.holds_back(slot, energy)
            parts.append(Part(slot, view, grad, Key(slot.name, step), energy, held))
        if not isfinite(tally.grad):  # this step's statistics are to be skipped, by all ranks
            tally.total = tally.sample_total = nan
        return parts

    def _payload(self, part: Part, cf: float, finite: bool, tally: Tally) -> Payload:
        """What this rank sends for one part; the memory is accumulated, not yet committed."""
        compressor = self._compressor
        if not finite:
            return compressor.poison(compressor.compress(torch.zeros_like(part.grad), cf, part.key))
        if part.held:
            return compressor.silence(compressor.compress(part.grad, cf, part.key))
        levels = measure_levels(
            compressor,
            lambda lowest: self._memory.compress(
                part.slot, part.grad, compressor, lowest, part.key
            ),
            strided_sample(part.grad),
            part.key,
            tally,
        )
        return replace(levels[tally.cfs.index(cf)], cf=cf)

    def _decode(self, parts: Sequence[Part], received: Sequence[Sequence[Payload]]) -> None:
        """The mean of all ranks' payloads into each part's slice of the bucket."""
        for i, part in enumerate(parts):
            part.grad.zero_()
            for payloads in received:
                self._compressor.add_to(part.grad, payloads[i], 1 / self._exchange.world_size)
            part.write_back()


def _views(buffer: Tensor, slots: Sequence[Slot]) -> list[Tensor]:
    return list(buffer.split([slot.param.numel() for slot in slots]))


def _finite(parts: Sequence[Part]) -> bool:
    return all(isfinite(part.energy) for part in parts)


def _all_finite(tensor: Tensor) -> bool:
    return isfinite(float(tensor.sum(dtype=torch.float64))) or bool(torch.isfinite(tensor).all())
