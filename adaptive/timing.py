"""Where a rank's time went in one step, from its first hook call to that of the next step.

compute: forward and backward, from the first forward after the exchange (so with all micro-batches
of an accumulation) to the last hook call. compress: in hook calls. Then backward waits: for the
network (exchange, exposed), and for what was received to be decoded on the process group's threads
(decode). The rest is the optimizer, and waiting for input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import nan
from typing import Any, NamedTuple

import torch

Span = tuple[float, float]
"""From when to when, by the clock in use."""


class Parts(NamedTuple):
    """Seconds of one step; what they leave of `seconds` is the rest."""

    seconds: float
    compute: float
    compress: float
    decode: float
    exchange: float


@dataclass
class StepTiming:
    """began: the first hook call. cf, wire, statistics: what was sent. compress: seconds in hook
    calls but for those that they waited. backward_left: when the last hook call was over.
    exchanged: when the last mean was there. decoded: when a thread of the process group was
    decoding."""

    began: float
    cf: float
    backward_left: float
    exchanged: float
    wire: float = 0.0
    statistics: float = 0.0
    compress: float = 0.0
    waited: float = 0.0
    decoded: list[Span] = field(default_factory=list)

    def split(self, now: float, forward: float | None) -> Parts:
        """now: the next step's first hook call. forward: when its forward began, if known."""
        waiting = max(0.0, self.exchanged - self.backward_left)
        decode = covered(self.decoded, self.backward_left, self.exchanged)
        backward = self.backward_left - self.began - self.compress - self.waited
        return Parts(
            seconds=now - self.began,
            compute=nan if forward is None else max(0.0, backward) + now - forward,
            compress=self.compress,
            decode=decode,
            exchange=self.waited + waiting - decode,
        )


def covered(spans: Iterable[Span], start: float, stop: float) -> float:
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
    cannot be seen. clock: None for the copy that a copied or pickled model takes along.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._began: float | None = None

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        seen = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if seen and self._clock is not None and self._began is None:
            self._began = self._clock()

    def take(self) -> float | None:
        """When the first forward since the last call began; None if there was none to see."""
        began, self._began = self._began, None
        return began

    def __reduce__(self) -> tuple[type[ForwardMark], tuple[()]]:
        return ForwardMark, ()
