"""The anchor: parameter values that are the same on all ranks, while each rank makes local steps.

    here     this rank's parameters
    anchor   the parameters that all ranks would have without their unsent updates
    flights  exchanges under way, the oldest first
    unsent   anchor - here - (sum of c that this rank has sent with these flights)

    begin, send   c = C(unsent), which the ranks exchange
    land          anchor -= outer(mean of c);  here += c - outer(mean of c)

The synchroniser that owns the anchor decides how many local steps a rank makes between two flights,
and after how many steps a flight lands:

    sync                       steps between flights   steps until one lands
    LocalSteps(H, overlap=V)   H                       1 + V
    LocalSteps("auto")         as planned              likewise
    Delayed(D)                 1                       D

`LocalSteps(H)` is DiLoCo (Douillard and others 2023, algorithm 1), with an overlap Streaming DiLoCo
(2025). `Delayed(D)` is delayed gradient averaging (Zhu and others 2021, algorithm 1).

The part of an update that compression does not send stays in the rank's parameters ("error reset",
CSER: Xie and others 2020, algorithm 2). So no residual is needed, and nothing is lost, not even by
rounding. With the identity as outer step a landing keeps the mean of the ranks' parameters.

If some rank sent a value that is not finite, the flight is nonfinite, and moves nothing. That rank
goes on from the anchor. The other ranks send their updates again with the next flight, from their
parameters or, with a user's memory rule, from their residuals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.exchange.bucket import LARGEST, Unit
from adaptive.exchange.strategies import Outgoing, Received, Rounds, Strategy, Wrapped
from adaptive.model.chunks import Chunk
from adaptive.model.parameters import ModelParameter, local
from adaptive.model.state import check_like, flat_tensors
from adaptive.network.collectives import Exchange, drain
from adaptive.network.link import done_with
from adaptive.step.averager import Averager
from adaptive.step.reducer import Reducer, Step
from compressors.base import Payload
from compressors.kernels import all_finite, kernels_for, squared_norms
from compressors.kernels.blocks import Flag, either, fill_if
from policies.state import require


@dataclass(eq=False)
class Flight:
    """One exchange under way.

    due: the flight lands once the synchroniser has counted this number of backwards. compressed:
    not all elements were exchanged. summed: the policy's plan asks for the sum of means. sent:
    for each chunk, the c that this rank has sent (numel,). means: for each chunk, a future of the
    ranks' mean of c."""

    due: int
    compressed: bool
    summed: bool
    sent: list[Tensor] = field(default_factory=list)
    means: list[Future[Tensor]] = field(default_factory=list)


@dataclass(eq=False)
class Anchor:
    """The anchor of one model, and its flights.

    chunks: all parameters, in the order in which they are sent. feeds_back: compression errors stay
    in the rank's parameters; False: they are lost, or a memory keeps them. outer_lr,
    outer_momentum: of the outer step by the mean d, SGD with Nesterov momentum, for the elements
    that were exchanged: m = outer_momentum m + d, anchor -= outer_lr (d + outer_momentum m).
    most: the largest number of flights under way.
    """

    averager: Averager
    chunks: Sequence[Chunk]
    feeds_back: bool = True
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    most: int = 1
    flights: list[Flight] = field(default_factory=list)
    _begun: int = 0  # number of flights begun so far: a flight's buffers follow from its number

    def __post_init__(self) -> None:
        self._at = {chunk: chunk.here("anchor") for chunk in self.chunks}
        self._velocity: dict[Chunk, Tensor] = {}  # of the outer momentum
        if self.outer_momentum:
            self._velocity = {chunk: torch.zeros_like(at) for chunk, at in self._at.items()}

    @property
    def moves_mean(self) -> bool:
        """Whether a landing changes the mean of the ranks' parameters: the outer step is not the
        identity."""
        return (self.outer_lr, self.outer_momentum) != (1.0, 0.0)

    def start_here(self) -> None:
        """Set the anchor to this rank's parameters, which are the same on all ranks, and drop all
        flights. Waits for their means first, because later flights use the same buffers."""
        if self.averager.whole:
            self.wait()
        self.flights = []
        for chunk in self.chunks:
            self._at[chunk] = chunk.here("anchor")

    def forget_momentum(self) -> None:
        """Set the momentum of the outer steps to zero."""
        for velocity in self._velocity.values():
            velocity.zero_()

    @torch.no_grad()
    def restart_from_mean(self) -> None:
        """Land all flights, and set the parameters of all ranks and the anchor to the ranks' mean
        (collectives). Called if some rank has started over, since other ranks may not have. The
        anchor's values replace values that are not finite, as in a landing."""
        self.land()
        exchange = self.averager.exchange
        for chunk in self.chunks:
            here = chunk.here("here")
            total = exchange.total(torch.where(here.isfinite(), here, self._at[chunk])).wait()
            chunk.go_to(total.div_(exchange.world_size))
        exchange.take_traffic()  # these bytes belong to no step
        self.start_here()
        self.forget_momentum()

    def by_name(self) -> dict[str, Tensor]:
        """The anchor's values by parameter name (flat copies)."""
        return _by_name(self._at)

    # -- a flight --

    def begin(self, due: int, reducer: Reducer, updates: bool = False) -> None:
        """Begin a flight at the CF of this step. `send` then sends the flight, chunk by chunk. due:
        see `Flight`. Flights land in order, so a smaller `due` than that of the flight before is
        raised to it. reducer: exchanges the chunks. updates: see `Step`."""
        averager, controller = self.averager, self.averager.controller
        on_mean, on_local = averager.listeners()
        step = controller.step, controller.cfs, controller.tally
        self._reducer = reducer
        self._step = Step(*step, None, on_local, updates)
        self._strategy = averager.strategy
        self._begun += 1
        due = max(due, self.flights[-1].due) if self.flights else due
        self.flights.append(Flight(due, averager.compresses, on_mean is not None))

    @property
    def sending(self) -> bool:
        """Some chunks of the last flight have not been sent yet."""
        return bool(self.flights) and len(self.flights[-1].sent) < len(self.chunks)

    @torch.no_grad()
    def send(self) -> None:
        """Send the next chunk of the last flight."""
        averager, flight = self.averager, self.flights[-1]
        i, slot = len(flight.sent), self._begun % self.most
        chunk = self.chunks[i]
        unsent = self._unsent(chunk, f"mean {slot}", self.flights[:-1])
        # Some element is not finite, or so large that the sum of squares overflows.
        (energy,) = squared_norms([unsent])
        too_large = kernels_for(unsent).flag(~(energy <= torch.finfo(unsent.dtype).max))
        sent = chunk.buffer(f"sent {slot}").copy_(unsent)
        fill_if(too_large, unsent, nan)
        fill_if(too_large, sent, 0.0)
        if averager.compresses:
            strategy = _Remembering(self._strategy, sent) if self.feeds_back else self._strategy
            mean = self._reducer.compressed(self._step, unsent, chunk.parameters, strategy, i)
        else:
            mean = self._reducer.dense(self._step, unsent, chunk.parameters, narrow=averager.narrow)
        now, stopwatch = averager.exchange_now, averager.controller.stopwatch

        def arrived(future: Future[Tensor]) -> Tensor:
            with averager.noting_failure(now):
                found = future.value()
                if self.most == 1:
                    stopwatch.bucket_done(drain(averager.pipeline.decoded))
                averager.pipeline.stream.keep(found, sent)
                return found

        flight.sent.append(sent)
        flight.means.append(mean.then(arrived))

    def _unsent(self, chunk: Chunk, use: str, flights: Sequence[Flight]) -> Tensor:
        """anchor - here - (what this rank has sent with these flights), (numel,), in the chunk's
        buffer for this use."""
        unsent = chunk.here(use)
        torch.sub(self._at[chunk], unsent, out=unsent)
        for flight in flights:
            unsent.sub_(flight.sent[self.chunks.index(chunk)])
        return unsent

    def wait(self) -> None:
        """Wait for all flights. No parameter changes."""
        for flight in self.flights:
            for mean in flight.means:
                mean.wait()

    @torch.no_grad()
    def land(self, until: int | None = None) -> None:
        """Land all flights with `due` up to `until` (None: all). The anchor moves, in the same way
        on all ranks, and this rank's parameters move with it."""
        any_nonfinite: Flag = False
        while self.flights and (until is None or self.flights[0].due <= until):
            self._wait_for(self.flights[0])
            any_nonfinite = either(any_nonfinite, self._land(self.flights.pop(0)))
        if any_nonfinite is not False:
            self._clear_gradients(any_nonfinite)

    def _wait_for(self, flight: Flight) -> None:
        """Wait for a flight and record the wait as network time, if several flights may be under
        way. With one flight at a time the arrivals of its means are recorded instead (`send`)."""
        averager, stopwatch = self.averager, self.averager.controller.stopwatch
        if self.most == 1:
            return
        with stopwatch.held_up():
            began = stopwatch.timestamps()
            for mean in flight.means:
                mean.wait()
            arrived = stopwatch.timestamps()
        stopwatch.decoded(drain(averager.pipeline.decoded))
        stopwatch.hook_left(began, (), [(began, arrived)])

    def _land(self, flight: Flight) -> Flag:
        """Land one flight. Returns whether some mean was not finite."""
        any_nonfinite: Flag = False
        for chunk, future, sent in zip(self.chunks, flight.means, flight.sent, strict=True):
            mean = future.wait()
            nonfinite = all_finite(mean) ^ True
            any_nonfinite = either(any_nonfinite, nonfinite)
            # A nonfinite flight leaves `sent` in the residuals of a user's memory rule.
            in_residual = not self.feeds_back and any(p.has_residual for p in chunk.parameters)
            for each in (mean,) if in_residual else (mean, sent):
                fill_if(nonfinite, each, 0.0)
            if flight.summed:
                for p, piece in chunk.pieces(mean):
                    self.averager.requested.sums.add(p, piece, nonfinite)
            # `rest` is exactly 0 where all was sent: there all ranks get the same bits.
            rest = self._unsent(chunk, "here", ()).sub_(sent)
            if nonfinite is not False:
                rest.masked_fill_(~(rest.abs() < LARGEST[rest.dtype]) & nonfinite, 0.0)
            self._move(chunk, mean, flight.compressed, nonfinite)
            self.set_parameters(chunk, rest)
        return any_nonfinite

    def _move(self, chunk: Chunk, mean: Tensor, compressed: bool, nonfinite: Flag) -> None:
        """The outer step of one chunk. mean: zeros if it was not finite.

        In a compressed flight, elements with mean 0 were not exchanged. They do not move, and their
        momentum does not change: momentum would move them again and again by updates that were
        applied already (docs/research/defaults.md)."""
        if self._velocity:
            velocity, finite = self._velocity[chunk], nonfinite ^ True
            exchanged = mean != 0 if compressed else torch.as_tensor(finite, device=mean.device)
            new = torch.add(mean, velocity, alpha=self.outer_momentum)
            velocity.copy_(torch.where(exchanged, new, velocity))
            nesterov = torch.add(mean, velocity, alpha=self.outer_momentum)
            mean = torch.where(exchanged, nesterov, 0.0)
        self._at[chunk].add_(mean, alpha=-self.outer_lr)

    @torch.no_grad()
    def set_parameters(self, chunk: Chunk, rest: Tensor) -> None:
        """Set the chunk's parameters to anchor - rest. rest: (numel,), overwritten."""
        chunk.go_to(torch.sub(self._at[chunk], rest, out=rest))

    @torch.no_grad()
    def reset_to_anchor(self, chunk: Chunk) -> Tensor:
        """Set the chunk's parameters to the anchor, while no flight is under way. Returns what this
        rank has not sent (numel,)."""
        rest = self._unsent(chunk, "here", ())
        chunk.go_to(self._at[chunk])
        return rest

    def _clear_gradients(self, nonfinite: Flag) -> None:
        """Set gradients that are not finite to zero: they belong to parameters that a nonfinite
        landing has set back to the anchor."""
        for p in self.averager.parameters:
            if p.grad is not None:
                grad = local(p.grad)
                grad.masked_fill_(~grad.isfinite() & nonfinite, 0.0)

    # -- saved --

    def state_dict(self, now: int) -> dict[str, Any]:
        """The anchor's state by parameter name, between steps. Waits for the means under way. now:
        the number of the last backward, in the count of `Flight.due`."""
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
        return {"anchors": self.by_name(), "moving": _by_name(self._velocity), "flights": flights}

    def _named(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        return _by_name(dict(zip(self.chunks, flat, strict=True)))

    def load_state_dict(self, state: Mapping[str, Any], now: int) -> None:
        """Load a `state_dict()`. It does not contain this rank's parameters themselves."""
        self.flights = []
        for saved in state["flights"].values():
            self._begun += 1
            slot = self._begun % self.most
            flight = Flight(saved["due"] + now, saved["compressed"], saved["summed"])
            for chunk in self.chunks:
                sent, mean = chunk.buffer(f"sent {slot}"), chunk.buffer(f"mean {slot}")
                flight.sent.append(chunk.fill(sent, saved["sent"]))
                flight.means.append(done_with(chunk.fill(mean, saved["mean"])))
            self.flights.append(flight)
        for chunk in self.chunks:
            self._at[chunk] = chunk.fill(chunk.buffer("anchor"), state["anchors"])
        for chunk, velocity in self._velocity.items():
            chunk.fill(velocity, state["moving"])


def check_anchor(
    state: Mapping[str, Any],
    parameters: Collection[ModelParameter],
    most: int,
    empty: bool = False,
    moves: bool = False,
) -> None:
    """ValueError unless `state` is an `Anchor.state_dict()` of these parameters with at most `most`
    flights. empty: it may have no anchor. moves: it has the momentum of outer steps."""
    flat = flat_tensors(parameters)
    kept = {"anchors": flat, "moving": flat}
    check_like("sync", state, {**kept, "flights": Mapping}, complete=True)
    like = {"due": int, "compressed": bool, "summed": bool, "mean": flat, "sent": flat}
    for saved in state["flights"].values():  # the mean of a nonfinite flight is not finite
        check_like("sync: flights", saved, like, finite=False, complete=True)
        whole = saved["mean"].keys() == saved["sent"].keys() == state["anchors"].keys()
        require(whole, "'sync: flights' has lost parameters")
    named = {p.name for p in parameters if p.numel}
    whole = state["anchors"].keys() in ((set(), named) if empty else (named,))
    require(whole, "'sync' has lost parameters")
    moving = named if moves else set()
    fits = state["moving"].keys() == moving
    told = f"(the outer momentum) must have {len(moving)} parameters, got {len(state['moving'])}"
    require(fits, f"'sync: moving' {told}")
    require(len(state["flights"]) <= most, f"'sync: flights' must be {most} at most")


def _by_name(flat: Mapping[Chunk, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for chunk, x in flat.items():
        found |= chunk.by_name(x)
    return found


class _Remembering(Wrapped):
    """A strategy that decodes this rank's own payloads of a bucket into `sent` (numel,)."""

    def __init__(self, inner: Strategy, sent: Tensor) -> None:
        super().__init__(inner)
        self._sent = sent

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        units, sent = outgoing.units, self._sent.zero_()
        # Payloads that are known already are decoded at once: the next flight, which may begin
        # before the mean arrives, must not send them again.
        known = not (self.takes_error_fed or self.sharded or self.votes or self.node_shards > 1)
        if known:
            for unit, payload in zip(units, outgoing.payloads, strict=True):
                self._add(unit, payload.as_zeros(outgoing.bucket.nonfinite))
        inner = self.inner.rounds(exchange, outgoing)  # a local variable, for `_locals_of`
        received = yield from inner
        if known:
            return received
        # N times the compression error of a mean counts as not sent (see `_decode`).
        for unit, lost in received.lost:
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
