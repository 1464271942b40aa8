"""Where a rank's time went in one step, from its first hook call to that of the next step.

compute: forward and backward, from the first forward after the exchange (so with all micro-batches
of an accumulation) to the last hook call. compress: in hook calls. Then backward waits: for the
network (exchange, exposed), and for what was received to be decoded on the process group's threads
(decode). The rest is the optimizer, and waiting for input. On a device all this is what its stream
did (adaptive/instants.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, NamedTuple

import torch

from adaptive.instants import Instant, Span
from policies import state as saved

Since = Callable[[Instant, Instant], float]
"""Seconds from one instant to another."""


class Parts(NamedTuple):
    """Seconds of one step; what they leave of `seconds` is the rest."""

    seconds: float
    compute: float
    compress: float
    decode: float
    exchange: float


@dataclass
class StepTiming:
    """began: the first hook call. cf, wire, statistics: what was sent. calls: of the hook. waits:
    for the network, within these. exchanged: when the last mean was there. decoded: when a thread
    of the process group was decoding. ended: the next step's first hook call. forward: when its
    forward began, if known."""

    began: Instant
    cf: float
    wire: float = 0.0
    statistics: float = 0.0
    calls: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    exchanged: Instant = None
    decoded: list[Span] = field(default_factory=list)
    ended: Instant = None
    forward: Instant = None

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> StepTiming:
        """Go on from the attributes of one on the host, whose instants are numbers."""
        return cls(
            began=saved.number(state, "began"),
            cf=saved.number(state, "cf", least=1),
            wire=saved.number(state, "wire", least=0),
            statistics=saved.number(state, "statistics", least=0),
            calls=_spans(state, "calls"),
            waits=_spans(state, "waits"),
            exchanged=saved.maybe_number(state, "exchanged"),
            decoded=_spans(state, "decoded"),
            ended=saved.maybe_number(state, "ended"),
            forward=saved.maybe_number(state, "forward"),
        )

    def split(self, since: Since) -> Parts:
        """Once it has ended. since: seconds between two instants."""

        def at(instant: Instant) -> float:
            return since(self.began, instant)

        def seconds(spans: Iterable[Span]) -> float:
            return sum(since(start, stop) for start, stop in spans)

        left = at(self.calls[-1][1]) if self.calls else 0.0
        exchanged = 0.0 if self.exchanged is None else at(self.exchanged)
        waited = seconds(self.waits)
        compress = seconds(self.calls) - waited
        decode = covered([(at(start), at(stop)) for start, stop in self.decoded], left, exchanged)
        backward = max(0.0, left - compress - waited)
        next_forward = nan if self.forward is None else since(self.forward, self.ended)
        return Parts(
            seconds=at(self.ended),
            compute=backward + next_forward,
            compress=compress,
            decode=decode,
            exchange=waited + max(0.0, exchanged - left - decode),
        )


def _spans(state: Mapping[str, Any], name: str) -> list[Span]:
    """From when to when, by the host's clock."""
    spans = [saved.numbers({name: each}, name) for each in saved.entries(state, name, 2)]
    return [(start, stop) for start, stop in spans]


def covered(spans: Iterable[tuple[float, float]], start: float, stop: float) -> float:
    """Seconds of [start, stop] in which at least one span lies."""
    total, reached = 0.0, start
    for began, ended in sorted(spans):
        began, ended = max(began, reached), min(ended, stop)
        if ended > began:
            total += ended - began
            reached = ended
    return total


class ForwardMark:
    """A forward pre-hook: notes when a step's forward began.

    Forwards without gradients (an evaluation between two steps) do not count, and a compiled one
    cannot be seen. instants: None for the copy that a copied or pickled model takes along.
    """

    def __init__(self, instants: Callable[[], Instant] | None = None) -> None:
        self._instants = instants
        self._began: Instant = None

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        seen = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if seen and self._instants is not None and self._began is None:
            self._began = self._instants()

    def take(self) -> Instant:
        """When the first forward since the last call began; None if there was none to see."""
        began, self._began = self._began, None
        return began

    def __reduce__(self) -> tuple[type[ForwardMark], tuple[()]]:
        return ForwardMark, ()
