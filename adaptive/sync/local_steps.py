"""Local steps and delayed averaging: each rank makes local steps, and the ranks exchange the sum of
their updates.

After every H local steps a rank sends, with the next backward, the unsent part of its distance from
the anchor (`adaptive/sync/anchor.py`). This exchange, a flight, overlaps with that backward. The
flight lands before the next optimizer step, or before a later one. The step is fixed beforehand, so
that runs are reproducible. The other backwards send nothing. Autograd always gets the local
gradient.

With `LocalSteps(H)` a flight lands before the next flight begins. With `Delayed(D)` a flight begins
after every step, and D flights are under way. If a script gives several D, the policy plans a D for
each new flight. Flights under way keep the step before which they land.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.memory.error_feedback import Residual
from adaptive.memory.handover import Groups
from adaptive.memory.inspection import MovedBetweenSteps
from adaptive.memory.optimizer_sync import unite_moments
from adaptive.model.chunks import chunked
from adaptive.model.uniting import averaged, unite, unite_gradients
from adaptive.network.collectives import drain
from adaptive.network.link import done_with
from adaptive.step.averager import Averager
from adaptive.sync.anchor import Anchor, check_anchor
from adaptive.sync.base import Synchroniser
from policies.state import require

NO_STEP = (
    "local steps: no optimizer of the model's parameters has stepped yet. If the script steps "
    "copies of them, it overwrites what the ranks exchange"
)

BACKWARDS_WITHOUT_STEP = 50
"""Backwards without any optimizer step before `NO_STEP` is said. A `GradScaler` leaves out the
first steps of a run, and gradients may be accumulated."""


class LocalStepsSync(Synchroniser):
    """The synchroniser that begins a flight after every few local steps.

    every: local steps between two flights. delay: number of optimizer steps between the backward
    that begins a flight and the landing (the largest number, if the policy plans it). outer_lr,
    outer_momentum: see `Anchor`.
    """

    def __init__(
        self,
        averager: Averager,
        every: int,
        delay: int,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
    ) -> None:
        super().__init__(averager)
        # With a user's memory rule the unsent part stays in the residual: each landing sets the
        # parameters of all ranks to the anchor.
        feeds_back = averager.memory.now.name == Residual.name
        pieces = chunked(averager.parameters.values())
        self._most = 1 + delay // every
        self._anchor = Anchor(averager, pieces, feeds_back, outer_lr, outer_momentum, self._most)
        self._every, self._delay = every, delay
        self._count = 0  # number of backwards, the same on all ranks
        self._next = every  # the backward with which the next flight begins
        # Optimizers that have stepped, in the order of their last steps.
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        self._moved = MovedBetweenSteps(
            averager.parameters, averager.optimizers, averager.settings.sync
        )

    # -- a backward --

    @property
    def _due(self) -> bool:
        """Whether the backward under way, or the next one, begins a flight."""
        return self._count == self._next

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Send one chunk with each bucket, so that compression overlaps with backward."""
        if self._due:
            averager, stopwatch = self.averager, self.averager.controller.stopwatch
            if bucket.index() == 0:
                self._moved.look(averager.exchange)
                self._anchor.land(self._count)  # flights that `forward_begins` has not landed
                averager.begin(self.alike, of_gradients=False)
                planned = averager.controller.delay
                delay = planned - 1 if planned else self._delay
                averager.controller.lag = delay // self._every
                self._anchor.begin(self._count + 1 + delay, averager.reducer)
            entered = stopwatch.timestamps()
            if self._anchor.sending:
                self._anchor.send()
            stopwatch.hook_left(entered, drain(averager.pipeline.waits))
        return done_with(bucket.buffer())

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        averager, controller = self.averager, self.averager.controller
        if self._due:
            entered = controller.stopwatch.timestamps()
            while self._anchor.sending:
                self._anchor.send()
            averager.end()
            if controller.changed > 0:
                self._anchor.restart_from_mean()
            self._next = self._count + self._every
            controller.stopwatch.hook_left(entered, drain(averager.pipeline.waits))
        else:
            controller.skipped += 1
        self._count += 1
        return last

    def wait(self) -> None:
        self._anchor.wait()

    def abandon(self) -> None:
        self._anchor.flights = []

    def start_over(self) -> bool:
        self.averager.memory.discard()
        self._anchor.start_here()
        self._anchor.forget_momentum()
        self.averager.watch.note_change()  # see `Anchor.restart_from_mean`
        return True

    # -- a step --

    def forward_begins(self) -> None:
        """Before a flight begins, land the flights whose optimizer step was left out. They land
        before the forward, because a backward needs the parameters of its forward."""
        overdue = self._due and any(flight.due <= self._count for flight in self._anchor.flights)
        if overdue and self.averager.whole:
            if not self._optimizers and self._count > BACKWARDS_WITHOUT_STEP:
                self.averager.warn_once(NO_STEP)
            self._land_due()

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        """Land the flights that are due. With several optimizers, the first step moves the
        parameters of all of them."""
        self._optimizers.pop(optimizer, None)
        self._optimizers[optimizer] = None
        self._land_due()
        self._moved.before_step(optimizer)
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        self._moved.after_step(optimizer)

    def _land_due(self) -> None:
        with self.averager.noting_failure():
            self._anchor.land(self._count)

    # -- between steps --

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        return self._anchor.by_name().items()

    def averaged(self) -> AbstractContextManager[None]:
        """Lands all flights first, if landing changes the mean of the ranks' parameters; otherwise
        the flights that are due."""
        self._anchor.land(None if self._anchor.moves_mean else self._count)
        return averaged([*self.averager.parameters.values()], self.averager.exchange)

    def unite(self) -> Sequence[Optimizer]:
        return self._unite(of_means=False)

    def _unite(self, of_means: bool) -> Sequence[Optimizer]:
        """See `unite`. of_means: see `unite_moments`. Returns the optimizers that were handed over,
        and all others that have stepped. (Since a state was loaded, some of the former may not have
        stepped.) If several have stepped a parameter, the last one counts, on all ranks."""
        self._anchor.land()
        parameters, exchange = [*self.averager.parameters.values()], self.averager.exchange
        unite(parameters, exchange)
        handed_over = (of for of in self.averager.optimizers if of not in self._optimizers)
        optimizers = [*handed_over, *self._optimizers]
        unite_moments(parameters, optimizers, exchange, of_means)
        for p in parameters:
            p.has_residual = False
        self._anchor.start_here()
        return optimizers

    def stop(self) -> None:
        self._unite(of_means=True)
        unite_gradients([*self.averager.parameters.values()], self.averager.exchange)

    # -- saved --

    def state_dict(self) -> dict[str, Any]:
        """The synchroniser's own state, between steps. Flights that are due land first."""
        self._anchor.land(self._count)
        since = self._count - (self._next - self._every)
        return {"backwards": since, **self._anchor.state_dict(self._count)}

    def check(self, state: Mapping[str, Any]) -> None:
        rest = dict(state)
        since = rest.pop("backwards", None)
        moves = self._anchor.outer_momentum > 0
        check_anchor(rest, self.averager.parameters.values(), self._most, moves=moves)
        fits = isinstance(since, int) and 0 <= since <= self._every
        message = f"'sync: backwards' must be a whole number in [0, {self._every}], got {since!r}"
        require(fits, message)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count, self._next = state["backwards"], self._every
        self._anchor.load_state_dict(state, self._count)
