"""A rehearsal of a user's strategy: the exchange of one bucket, simulated without a network, among
ranks that all send the same payloads.

The result of each collective is then known, and the mean must be this rank's payload. So `attach`
refuses a strategy that would hang, give ranks different means, or lose values in training.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from math import isfinite

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.exchange.bucket import Bucket, Unit
from adaptive.exchange.strategies import Outgoing, Piece, Received, Strategy
from adaptive.network.collectives import Exchange, Traffic, gather_wire_bytes, reduce_wire_bytes
from adaptive.network.link import done_with
from compressors import Compressor
from compressors.base import Key, Payload

NUMEL = 1 << 14
"""The smallest number of elements of the bucket."""

RANK_NUMEL = 256
"""The smallest number of elements of the bucket for each rank."""

NBYTES_TOLERANCE = 0.1
"""The largest accepted difference between the bytes sent and `nbytes`, relative to `nbytes`."""

MEAN_TOLERANCE = 1e-2
"""The largest accepted relative error of the mean of equal payloads (a sum in bf16 has 0.2%)."""


class _Alike(Exchange):
    """The collectives among ranks that all send the same payloads. They complete at once."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._traffic = Traffic()

    def all_reduce(self, tensor: Tensor) -> Future[Tensor]:
        self._traffic.wire += reduce_wire_bytes(tensor.nbytes, self.world_size)
        return done_with(tensor.mul_(self.world_size))

    def all_gather(self, payload: Tensor, means: bool = False) -> Future[Tensor]:
        self._traffic.wire += gather_wire_bytes(payload.nbytes, self.world_size)
        return done_with(payload.expand(self.world_size, -1).clone())

    def all_to_all(self, payload: Tensor, sizes: Sequence[int]) -> Future[Tensor]:
        self._traffic.wire += payload.nbytes * (self.world_size - 1) / self.world_size
        own = payload.split(list(sizes))[self.rank]
        return done_with(own.expand(self.world_size, -1).clone())

    def pass_on(self, payload: Tensor, to: int, source: int) -> Future[Tensor]:
        ranks = range(self.world_size)
        if to not in ranks or source not in ranks:
            raise ValueError(f"pass_on: to and source must be ranks, got {to!r} and {source!r}")
        self._traffic.wire += payload.nbytes
        return done_with(payload.clone())


def rehearse(strategy: Strategy, base: Compressor, cf: float, rank: int, ranks: int) -> None:
    """ValueError or TypeError, naming the strategy, unless it keeps its contract for payloads of
    `base` at `cf`: the values that it yields and returns, the bytes that it sends, and the mean.
    rank, ranks: this rank, and the world size. All ranks get the same result."""
    argument = f"exchange={strategy!r}"
    try:
        _rehearse(strategy, base, cf, _Alike(rank, ranks))
    except TypeError as error:
        raise TypeError(f"{argument}: {error}") from error
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{argument}: {kind}{error}") from error


def _rehearse(strategy: Strategy, base: Compressor, cf: float, exchange: _Alike) -> None:
    n = exchange.world_size
    outgoing = _outgoing(strategy, base, cf, n)
    units, payloads = list(outgoing.units), list(outgoing.payloads)
    received = _run(strategy, exchange, outgoing)
    if not strategy.takes_error_fed and not received.lost:
        _check_mean(units, received, exchange.rank)
    sent = exchange.take_traffic().wire
    said = strategy.nbytes([Piece(u.compressor, (u.numel,), cf, u.segments) for u in units], n)
    number = isinstance(said, (int, float)) and isfinite(said)
    if not number or abs(said - sent) > NBYTES_TOLERANCE * abs(said):
        raise ValueError(
            f"nbytes must say what rounds put on the wire, {sent:.0f} bytes among {n} ranks for "
            f"{len(units)} payloads of {sum(p.nbytes for p in payloads)} bytes together; got "
            f"{said!r}"
        )
    bad = _outgoing(strategy, base, cf, n)
    bad.bucket.nonfinite = True
    bad.payloads = [payload.as_nonfinite() for payload in bad.payloads]
    if not bool(_run(strategy, exchange, bad).nonfinite):
        raise ValueError(
            "rounds must return a Received whose nonfinite says that some rank's payloads are not "
            "finite (outgoing.received(rows) and any_nonfinite(payloads) find out)"
        )
    bucket = Bucket(torch.zeros(0, device="cpu"), Key("rehearsal"), True)
    empty = Outgoing(0, bucket, [], [], _pass, _pass)
    _run(strategy, exchange, empty)


def _outgoing(strategy: Strategy, base: Compressor, cf: float, ranks: int) -> Outgoing:
    """A bucket to send, with one unit for each rank."""
    numel = max(NUMEL, RANK_NUMEL * ranks)
    gradients = torch.randn(numel, generator=torch.Generator().manual_seed(0), device="cpu")
    bucket = Bucket(gradients, Key("rehearsal"), True)
    units, payloads = [], []
    for start, stop in pairwise(numel * i // ranks for i in range(ranks + 1)):
        key = Key(f"rehearsal[{start}:{stop}]")
        unit = Unit(start, stop, key, base.at(cf), base, cf, (), ())
        payloads.append(unit.compressor.compress(bucket.slice_of(unit).clone(), unit.spec))
        if strategy.takes_error_fed:
            payloads[-1] = Payload((bucket.slice_of(unit).clone(),), unit.spec.at(1.0))
        units.append(unit)
    return Outgoing(0, bucket, units, payloads, _pass, _pass)


def _pass(_: object) -> None:
    """A callback that does nothing."""


def _run(strategy: Strategy, exchange: _Alike, outgoing: Outgoing) -> Received:
    n, value, issued = exchange.world_size, None, 0
    announced = strategy.collectives(n)
    if isinstance(announced, bool) or not isinstance(announced, int) or announced < 1:
        raise ValueError(f"collectives({n}) must be a whole number >= 1, got {announced!r}")
    rounds = strategy.rounds(exchange, outgoing)
    if not isinstance(rounds, Generator):
        raise TypeError(f"rounds must be a generator, a method with `yield`; got {rounds!r}")
    while True:
        try:
            future = rounds.send(value)
        except StopIteration as stop:
            received = stop.value
            break
        issued += 1
        if not isinstance(future, Future):
            raise TypeError(f"rounds must yield futures of exchange's collectives, got {future!r}")
        if issued > announced:
            break
        value = future.wait()
    if issued != announced:
        yields = "more" if issued > announced else f"{issued}"
        raise ValueError(f"collectives({n}) says {announced}, and rounds yields {yields}")
    if not isinstance(received, Received):
        raise TypeError(
            f"rounds must return a Received, as outgoing.received(rows) makes one; got {received!r}"
        )
    return received


def _check_mean(units: Sequence[Unit], received: Received, rank: int) -> None:
    """ValueError unless the mean is this rank's payload, which is that of all ranks."""
    by_unit = [list(payloads) for payloads in received.payloads]
    if len(by_unit) != len(units):
        raise ValueError(
            f"Received must have payloads for each of the {len(units)} units, got {len(by_unit)}"
        )
    for i, (unit, payloads) in enumerate(zip(units, by_unit, strict=True)):
        if received.own is None and rank >= len(payloads):
            raise ValueError(
                f"Received must have `own`, or this rank's payload at place {rank} of each unit's, "
                f"got {len(payloads)}"
            )
        own = payloads[rank] if received.own is None else received.own[i]
        by = unit.compressor if received.compressors is None else received.compressors[i]
        mean, sent = torch.zeros(2, unit.numel, device="cpu")
        by.mean_of(mean, payloads, received.scale)
        unit.compressor.add_to(sent, own)
        off, norm = float((mean - sent).norm()), float(sent.norm())
        if not off <= MEAN_TOLERANCE * norm:  # both are 0 if all elements are below a threshold
            raise ValueError(
                f"the mean of equal payloads must be that payload; it is {off / (norm or 1):.2g} "
                f"of its norm off (Received.scale, {received.scale:g}, times the sum of the "
                f"payloads)"
            )
