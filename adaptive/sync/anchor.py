"""The anchor: where all ranks of a model would stand alike, while each rank steps by itself.

    here     where this rank's parameters stand
    anchor   where all ranks would stand alike
    flights  exchanges that are under way, the oldest first
    unsent   anchor - here - (what this rank has sent, of all flights)

    begin, send   c = C(unsent), which the ranks exchange
    land          anchor -= outer(mean of c);  here += c - outer(mean of c)

How many steps a rank takes between two flights, and after how many of them a flight lands, is the
business of who has the anchor:

    sync                       steps between flights   steps until one lands
    LocalSteps(H, overlap=V)   H                       1 + V
    LocalSteps("auto")         as planned              likewise
    Delayed(D)                 1                       D

The first is DiLoCo (Douillard and others 2023, algorithm 1), with an overlap Streaming DiLoCo
(2025). The last is delayed gradient averaging (Zhu and others 2021, algorithm 1).

What compression does not send stays in the rank's own parameters ("error reset", CSER: Xie and
others 2020, algorithm 2). So no residual is kept, and nothing is lost, not even by rounding. With a
plain outer step a landing does not move the mean of the ranks' parameters.

A flight for which some rank had sent what is not finite moves nothing. The other ranks send their
parts again with the next flight. That rank goes on from the anchor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.bucket.bucket import LARGEST, Unit
from adaptive.exchange.strategies import Outgoing, Received, Rounds, Strategy, Wrapped
from adaptive.model.chunks import Chunk
from adaptive.model.parameters import ModelParameter, local
from adaptive.model.state import check_like, flat_tensors
from adaptive.network.collectives import Exchange, drain
from adaptive.network.pipeline import done_with
from adaptive.step.averager import Averager
from adaptive.step.reducer import Reducer, Step
from compressors.base import Payload
from compressors.kernels import all_finite, kernels_for, squared_norms
from compressors.kernels.blocks import Flag, either, fill_if
from policies.state import require


@dataclass(eq=False)
class Flight:
    """One exchange that is under way.

    due: the backward after which it lands, by the count of who has the anchor. compressed: not all
    elements were exchanged. summed: the plan asks for the sum of means. sent: what this rank has
    sent of each chunk (numel,). means: of each chunk."""

    due: int
    compressed: bool
    summed: bool
    sent: list[Tensor] = field(default_factory=list)
    means: list[Future[Tensor]] = field(default_factory=list)


class Anchor:
    """The anchor of one model, and what is under way.

    pieces: all of its parameters, in the order in which they are sent. feeds_back: what compression
    loses stays in the rank's own parameters. False: it is lost, or a memory keeps it. outer_lr,
    outer_momentum: of the outer step by the mean d, SGD with Nesterov momentum, in the elements
    that were exchanged: m = outer_momentum m + d, anchor -= outer_lr (d + outer_momentum m).
    most: flights under way at a time.
    """

    def __init__(
        self,
        averager: Averager,
        pieces: Sequence[Chunk],
        feeds_back: bool = True,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        most: int = 1,
    ) -> None:
        self._averager, self.chunks = averager, pieces
        self._feeds_back, self._most = feeds_back, most
        self._lr, self._momentum = outer_lr, outer_momentum
        self.flights: list[Flight] = []
        self._begun = 0
        self._at = {chunk: chunk.here("anchor") for chunk in self.chunks}
        self._moving: dict[Chunk, Tensor] = {}
        if outer_momentum:
            self._moving = {chunk: torch.zeros_like(at) for chunk, at in self._at.items()}

    @property
    def moves_mean(self) -> bool:
        """A landing moves the mean of the ranks' parameters."""
        return (self._lr, self._momentum) != (1.0, 0.0)

    def start_here(self) -> None:
        """All ranks stand alike: the anchor is here, and nothing is under way."""
        self.flights = []
        for chunk in self.chunks:
            self._at[chunk] = chunk.here("anchor")

    def forget_momentum(self) -> None:
        """Of the outer steps."""
        for moving in self._moving.values():
            moving.zero_()

    def by_name(self) -> dict[str, Tensor]:
        """Where the anchor is, by parameter (flat copies)."""
        return _by_name(self._at)

    # -- a flight --

    def begin(self, due: int, reducer: Reducer, updates: bool = False) -> None:
        """A flight begins, as the plan of this step says. `send` sends it, chunk by chunk. due: not
        before those that are under way. reducer: exchanges it. updates: see `Step`."""
        averager, controller = self._averager, self._averager.controller
        on_mean, on_local = averager.listeners()
        step = controller.step, controller.cfs, controller.tally
        self._reducer = reducer
        self._step = Step(*step, None, on_local, updates)
        self._strategy = averager.strategy
        self._begun += 1
        due = max(due, self.flights[-1].due) if self.flights else due
        self.flights.append(Flight(due, averager.compresses, on_mean is not None))

    @property
    def boarding(self) -> bool:
        """The last flight has chunks that are not sent yet."""
        return bool(self.flights) and len(self.flights[-1].sent) < len(self.chunks)

    @torch.no_grad()
    def send(self) -> None:
        """Send the next chunk of the last flight."""
        averager, flight = self._averager, self.flights[-1]
        i, slot = len(flight.sent), self._begun % self._most
        chunk = self.chunks[i]
        unsent = self._unsent(chunk, f"mean {slot}", self.flights[:-1])
        too_large = _too_large(unsent)
        sent = chunk.buffer(f"sent {slot}").copy_(unsent)
        fill_if(too_large, unsent, nan)
        fill_if(too_large, sent, 0.0)
        if averager.compresses:
            strategy = _Remembering(self._strategy, sent) if self._feeds_back else self._strategy
            mean = self._reducer.compressed(self._step, unsent, chunk.parameters, strategy, i)
        else:
            mean = self._reducer.dense(self._step, unsent, chunk.parameters, narrow=averager.narrow)
        now, stopwatch = averager.exchange_now, averager.controller.stopwatch

        def arrived(future: Future[Tensor]) -> Tensor:
            with averager.noting_failure(now):
                found = future.value()
                if self._most == 1:
                    stopwatch.bucket_done(drain(averager.pipeline.decoded))
                averager.pipeline.stream.keep(found, sent)
                return found

        flight.sent.append(sent)
        flight.means.append(mean.then(arrived))

    def _unsent(self, chunk: Chunk, use: str, flights: Sequence[Flight]) -> Tensor:
        """What this rank has not sent with these flights (numel,), in the buffer for this use."""
        unsent = chunk.here(use)
        torch.sub(self._at[chunk], unsent, out=unsent)
        for flight in flights:
            unsent.sub_(flight.sent[self.chunks.index(chunk)])
        return unsent

    def wait(self) -> None:
        """For all that is under way. Nothing moves."""
        for flight in self.flights:
            for mean in flight.means:
                mean.wait()

    @torch.no_grad()
    def land(self, until: int | None = None) -> None:
        """All flights that are due by then; None: all. The anchor moves, alike on all ranks, and
        this rank's parameters with it."""
        any_nonfinite: Flag = False
        while self.flights and (until is None or self.flights[0].due <= until):
            self._wait_for(self.flights[0])
            any_nonfinite = either(any_nonfinite, self._land(self.flights.pop(0)))
        if any_nonfinite is not False:
            self._clear_gradients(any_nonfinite)

    def _wait_for(self, flight: Flight) -> None:
        """Where flights are of several steps, only this tells what the network has cost a step. Of
        one flight at a time its arrival does, hidden or not, as `StepTime` reckons with it."""
        averager, stopwatch = self._averager, self._averager.controller.stopwatch
        if self._most == 1:
            return
        with stopwatch.held_up():
            began = stopwatch.timestamps()
            for mean in flight.means:
                mean.wait()
            arrived = stopwatch.timestamps()
        stopwatch.decoded(drain(averager.pipeline.decoded))
        stopwatch.hook_left(began, (), [(began, arrived)])

    def _land(self, flight: Flight) -> Flag:
        """Returns whether some mean was not finite."""
        any_nonfinite: Flag = False
        for chunk, future, sent in zip(self.chunks, flight.means, flight.sent, strict=True):
            mean = future.wait()
            nonfinite = all_finite(mean) ^ True
            any_nonfinite = either(any_nonfinite, nonfinite)
            for each in (mean, sent):
                fill_if(nonfinite, each, 0.0)
            if flight.summed:
                for p, piece in zip(chunk.parameters, chunk.split(mean), strict=True):
                    self._averager.requested.sums.add(p, piece, nonfinite)
            # Where all was sent this is 0 exactly, so that ranks stand at the same bits.
            rest = self._unsent(chunk, "here", ()).sub_(sent)
            if nonfinite is not False:
                rest.masked_fill_(~(rest.abs() < LARGEST[rest.dtype]) & nonfinite, 0.0)
            self._move(chunk, mean, flight.compressed, nonfinite)
            self.stand(chunk, rest)
        return any_nonfinite

    def _move(self, chunk: Chunk, mean: Tensor, compressed: bool, nonfinite: Flag) -> None:
        """The outer step of one chunk. mean: zeros if it was not finite.

        Of a compressed flight elements whose mean is 0 were not exchanged. Their momentum waits for
        the flight that brings them: it would carry them on, again and again, by what was applied
        already (docs/research/defaults.md)."""
        if self._moving:
            moving, all_there = self._moving[chunk], nonfinite ^ True
            there = mean != 0 if compressed else torch.as_tensor(all_there, device=mean.device)
            moved = torch.add(mean, moving, alpha=self._momentum)
            moving.copy_(torch.where(there, moved, moving))
            mean = torch.where(there, torch.add(mean, moving, alpha=self._momentum), 0.0)
        self._at[chunk].add_(mean, alpha=-self._lr)

    @torch.no_grad()
    def stand(self, chunk: Chunk, rest: Tensor) -> None:
        """The chunk's parameters become the anchor less `rest` (numel,), which is overwritten."""
        chunk.go_to(torch.sub(self._at[chunk], rest, out=rest))

    @torch.no_grad()
    def leave_rest(self, chunk: Chunk) -> Tensor:
        """The chunk's parameters become the anchor. Returns what this rank has not sent (numel,),
        while nothing is under way."""
        rest = self._unsent(chunk, "here", ())
        chunk.go_to(self._at[chunk])
        return rest

    def _clear_gradients(self, nonfinite: Flag) -> None:
        """Those that are of where a rank stood that has gone back to the anchor."""
        for p in self._averager.parameters:
            if p.grad is not None:
                grad = local(p.grad)
                grad.masked_fill_(~grad.isfinite() & nonfinite, 0.0)

    # -- saved --

    def state_dict(self, now: int) -> dict[str, Any]:
        """By parameter name, between steps; means that are under way are waited for. now: the count
        of who has the anchor."""
        self.wait()
        flights = {
            str(i): {
                "due": flight.due - now,
                "compressed": flight.compressed,
                "summed": flight.summed,
                "mean": self._named([each.wait() for each in flight.means]),
                "sent": self._named(flight.sent),
            }
            for i, flight in enumerate(self.flights)
        }
        return {"anchors": self.by_name(), "moving": _by_name(self._moving), "flights": flights}

    def _named(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        return _by_name(dict(zip(self.chunks, flat, strict=True)))

    def load_state_dict(self, state: Mapping[str, Any], now: int) -> None:
        """The parameters themselves, which are this rank's own, are not part of it."""
        self.flights = []
        for saved in state["flights"].values():
            self._begun += 1
            slot = self._begun % self._most
            flight = Flight(saved["due"] + now, saved["compressed"], saved["summed"])
            for chunk in self.chunks:
                flight.sent.append(_joined(chunk, saved["sent"], f"sent {slot}"))
                flight.means.append(done_with(_joined(chunk, saved["mean"], f"mean {slot}")))
            self.flights.append(flight)
        for chunk in self.chunks:
            self._at[chunk] = _joined(chunk, state["anchors"], "anchor")
        self.forget_momentum()  # also of a run without
        if state["moving"]:
            for chunk, moving in self._moving.items():
                moving.copy_(_joined(chunk, state["moving"], "here"))


def check_anchor(
    state: Mapping[str, Any], parameters: Collection[ModelParameter], most: int, empty: bool
) -> None:
    """ValueError unless it is an `Anchor.state_dict()` of these parameters, with so many flights at
    most. empty: there may be no anchor."""
    flat = flat_tensors(parameters)
    kept = {"anchors": flat, "moving": flat}
    check_like("sync", state, {**kept, "flights": Mapping}, complete=True)
    like = {"due": int, "compressed": bool, "summed": bool, "mean": flat, "sent": flat}
    for saved in state["flights"].values():  # of a bad round not finite
        check_like("sync: flights", saved, like, finite=False, complete=True)
        whole = saved["mean"].keys() == saved["sent"].keys() == state["anchors"].keys()
        require(whole, "what is under way has lost something")
    named = {p.name for p in parameters if p.numel}
    whole = state["anchors"].keys() in ((set(), named) if empty else (named,))
    whole = whole and state["moving"].keys() in (set(), named)
    require(whole, "'sync' has lost something")
    require(len(state["flights"]) <= most, f"'sync: flights' must be {most} at most")


def _by_name(flat: Mapping[Chunk, Tensor]) -> dict[str, Tensor]:
    pairs = ((c, zip(c.parameters, c.split(x), strict=True)) for c, x in flat.items())
    return {p.name: piece.clone() for _, pieces in pairs for p, piece in pieces}


def _joined(chunk: Chunk, by_name: Mapping[str, Tensor], use: str) -> Tensor:
    flat = chunk.buffer(use)
    for p, piece in zip(chunk.parameters, chunk.split(flat), strict=True):
        piece.copy_(by_name[p.name])
    return flat


def _too_large(x: Tensor) -> Flag:
    """It has elements that are not finite, or so large that their squares overflow."""
    (energy,) = squared_norms([x])
    return kernels_for(x).flag(~(energy <= torch.finfo(x.dtype).max))


class _Remembering(Wrapped):
    """A strategy that writes to `sent` what this rank has sent of the bucket (numel,)."""

    def __init__(self, inner: Strategy, sent: Tensor) -> None:
        super().__init__(inner)
        self._sent = sent

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        units, sent = outgoing.units, self._sent.zero_()
        # What is known now the next flight can leave out, while this one is under way.
        known = not (self.takes_error_fed or self.sharded or self.votes or self.node_shards > 1)
        if known:
            for unit, payload in zip(units, outgoing.payloads, strict=True):
                self._add(unit, payload.as_zeros(outgoing.bucket.nonfinite))
        inner = self.inner.rounds(exchange, outgoing)  # a local variable, which is kept alive
        received = yield from inner
        if known:
            return received
        for unit, lost in received.lost:  # of a mean, whose share of the next one is 1/N
            sent[unit.start : unit.stop].sub_(lost, alpha=exchange.world_size)
        return replace(received, payloads=self._watched(received, units, exchange.rank))

    def _watched(
        self, received: Received, units: Iterable[Unit], rank: int
    ) -> Iterator[Sequence[Payload]]:
        for i, (unit, payloads) in enumerate(zip(units, received.payloads, strict=True)):
            own = payloads[rank] if received.own is None else received.own[i]
            self._add(unit, own.as_zeros(received.nonfinite))
            yield payloads

    def _add(self, unit: Unit, payload: Payload) -> None:
        unit.compressor.add_to(self._sent[unit.start : unit.stop], payload)
