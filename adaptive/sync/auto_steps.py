"""Rounds of local steps: the policy plans the number of steps between two exchanges, one or more.

After a round of one step the ranks exchange the update of this step (own_step.py). After a round of
several steps they exchange the sum of the round's updates (anchor.py). In both kinds of round the
residual is the part that was not sent. The place of the residual differs:

- In a round of one step it is a tensor, in units of updates. All ranks have the same parameters.
- In a round of several steps it is in the rank's own parameters, as their distance from the anchor.
  (A tensor would delay the residual by the whole round; docs/research/defaults.md has the
  measurements.)

The number of steps may change at any round, because the residual is moved to its place between the
two kinds of round.

The exchange of a round of several steps, a flight, begins after the last of them, while the ranks
train on. The flight lands before a step that is fixed beforehand: the next one, or with an
*overlap* a later one (Streaming DiLoCo: Douillard and others 2025, section 2.2). If the next round
has one step, the flight lands at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.memory.error_feedback import NoMemory
from adaptive.memory.handover import Groups
from adaptive.memory.updates import inverse
from adaptive.model.chunks import chunked
from adaptive.model.uniting import averaged, unite
from adaptive.network.collectives import drain
from adaptive.network.link import done_with
from adaptive.step.averager import Averager
from adaptive.step.synchronisation import LocalSteps
from adaptive.sync.anchor import Anchor, check_anchor
from adaptive.sync.own_step import OwnStepSync
from policies.state import require
from policies.step_time import overlapped


class AutoStepsSync(OwnStepSync):
    """The synchroniser of rounds whose number of local steps the policy plans.

    _steps: number of steps of this round. _backwards: number of backwards so far in this round;
    0 in a round of one step. _ended: the last backward of a round of several steps has ended, and
    the round's exchange has not begun. _anchor: made in the first step of a round of several steps,
    and kept until a round of one step.
    """

    def __init__(self, averager: Averager, choice: LocalSteps) -> None:
        super().__init__(averager)
        self.handover.always_updates = True  # a residual of gradients cannot move parameters
        self._overlap = choice.overlap
        self._steps, self._backwards = 1, 0
        self._ended = False
        self._to_step: set[Optimizer] = set()  # optimizers that must step before the exchange
        self._chunks = chunked(averager.parameters.values())
        self._anchor: Anchor | None = None

    # -- a backward --

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self.make_up()
            self._steps = self.averager.controller.local_steps
            if 1 < self._steps == self._backwards + 1:
                self.averager.begin(self.alike, of_gradients=False)  # this plans the next round
                if self.averager.controller.changed < 0:
                    self._agree_on_inspection()
        return super().reduce(bucket) if self._steps == 1 else done_with(bucket.buffer())

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        controller = self.averager.controller
        if self._steps == 1:
            last = super().end_backward(last)
        else:
            self._backwards += 1
            self._ended = self._backwards == self._steps
            self._to_step = set(self.handover.optimizers)
            controller.skipped += not self._ended
        if controller.changed > 0 and (self._steps == 1 or self._ended):
            anchor = (
                Anchor(self.averager, self._chunks) if self._steps == 1 else self._open_anchor()
            )
            anchor.restart_from_mean()
        return last

    def _switch_to_gradients(self, why: str) -> None:
        raise RuntimeError(f"sync=LocalSteps('auto') does not go with this optimizer: {why}")

    # -- a step --

    def forward_begins(self) -> None:
        """Before the last backward of a round, land the flights whose optimizer step was left out.
        (`debug` compares the ranks' anchors in this backward.)"""
        super().forward_begins()
        steps = self.averager.controller.local_steps  # saved, unlike `_steps`
        if self._anchor is not None and 0 < self._backwards == steps - 1:
            with self.averager.noting_failure():
                self._anchor.land(self._backwards)

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        if self._steps > 1:
            with self.averager.noting_failure():
                self._open_anchor().land(self._backwards)
        return super().before_step(optimizer, groups)

    def after_step(self, optimizer: Optimizer) -> None:
        super().after_step(optimizer)
        self._to_step.discard(optimizer)
        if self._ended and not self._to_step:
            self.make_up()

    def make_up(self) -> None:
        if not self._ended:
            super().make_up()
            return
        averager, controller = self.averager, self.averager.controller
        averager.check_whole()
        with averager.noting_failure():
            self._ended, self._backwards = False, 0
            anchor = self._open_anchor()
            anchor.land()
        entered = controller.stopwatch.timestamps()
        with averager.replica_calls(waits=True):
            self._send(anchor)
            averager.pipeline.finish()
            controller.end_step(averager.watch.take_found())
        controller.stopwatch.hook_left(entered, drain(averager.pipeline.waits))
        if controller.local_steps == 1:
            with averager.noting_failure():
                self._close_anchor(anchor)

    def _send(self, anchor: Anchor) -> None:
        """Begin a flight: each rank sends the unsent part of its distance from the anchor."""
        memory = NoMemory(self.averager.parameters.maybe_unused)  # the residual is in parameters
        reducer = replace(self.averager.reducer, memory=memory)
        due = max(1, overlapped(self._overlap, self.averager.controller.local_steps))
        anchor.begin(due, reducer, updates=True)
        while anchor.sending:
            anchor.send()

    # -- rounds of several steps --

    @torch.no_grad()
    def _open_anchor(self) -> Anchor:
        """The anchor, made in the first step of a round of several steps: all ranks' parameters
        become the anchor, then the residual moves this rank's own parameters."""
        self.handover.begin_local_steps()
        if self._anchor is not None:
            return self._anchor
        self._anchor = anchor = Anchor(self.averager, self._chunks)
        for chunk in anchor.chunks:
            rest = chunk.take_residuals(chunk.buffer("here"))
            for p, piece in chunk.pieces(rest):
                piece.mul_(self.handover.learning_rate(p))
            anchor.set_parameters(chunk, rest)
        return anchor

    @torch.no_grad()
    def _close_anchor(self, anchor: Anchor) -> None:
        """Called before a round of one step: set the parameters of all ranks to the anchor, and
        put the unsent part into the residuals, in units of updates."""
        anchor.land()
        for chunk in anchor.chunks:
            rest = anchor.reset_to_anchor(chunk)
            for p, piece in chunk.pieces(rest):
                p.open_residual().copy_(piece).mul_(
                    inverse(self.handover.learning_rate(p, lasting=True))
                )
        self._anchor = None

    # -- between steps --

    def discard(self) -> None:
        if self._anchor is None:  # with an anchor, only the parameters hold unsent updates
            super().discard()

    @property
    def owes(self) -> bool:
        return self._ended or super().owes

    def start_over(self) -> bool:
        waits = super().start_over()
        self.averager.watch.note_change()  # see `Anchor.restart_from_mean`
        if self._anchor is not None:
            self._anchor.start_here()
        return waits or self._anchor is not None

    def wait(self) -> None:
        if self._anchor is not None:
            self._anchor.wait()

    def abandon(self) -> None:
        super().abandon()
        self._ended = False
        if self._anchor is not None:
            self._anchor.flights = []

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        if self._steps == 1:
            return super().alike()
        return (self._anchor or Anchor(self.averager, self._chunks)).by_name().items()

    def _catch_up(self) -> Anchor | None:
        """Do the exchange that this rank owes, and land all flights. Afterwards all ranks have an
        anchor, or none has. Returns the anchor."""
        self.make_up()
        if self._backwards:
            self._open_anchor()
        if self._anchor is not None:
            self._anchor.land()
        return self._anchor

    def averaged(self) -> AbstractContextManager[None]:
        if self._catch_up() is None:
            return super().averaged()
        return averaged(list(self.averager.parameters.values()), self.averager.exchange)

    def unite(self) -> Sequence[Optimizer] | None:
        anchor = self._catch_up()
        if anchor is None:
            return super().unite()
        unite(list(self.averager.parameters.values()), self.averager.exchange)
        self.handover.agree(self.averager.exchange)
        anchor.start_here()
        return self.handover.optimizers

    def stop(self) -> None:
        if self._catch_up() is not None:
            self.unite()
        super().stop()

    # -- saved --

    def state_dict(self) -> dict[str, Any]:
        kept: dict[str, Any] = {"anchors": {}, "moving": {}, "flights": {}}
        if self._anchor is not None:
            kept = self._anchor.state_dict(self._backwards)
        return {"backwards": self._backwards, **kept}

    def check(self, state: Mapping[str, Any]) -> None:
        rest = dict(state)
        backwards = rest.pop("backwards", None)
        check_anchor(rest, self.averager.parameters.values(), 1, empty=True)
        fits = isinstance(backwards, int) and backwards >= 0
        require(fits, f"'sync: backwards' must be a whole number >= 0, got {backwards!r}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ended, self._backwards, self._anchor = False, state["backwards"], None
        if state["anchors"]:
            self._anchor = Anchor(self.averager, self._chunks)
            self._anchor.load_state_dict(state, self._backwards)
