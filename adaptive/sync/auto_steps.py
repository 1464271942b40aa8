"""Ranks that exchange in every step, or every few steps, as the policy chooses while they train.

They part and meet again. In both cases a rank holds something that the others have not got yet.
Ranks that exchange in every step keep it in the residual, as updates that are multiplied by the
learning rate when they move the parameters. Ranks that step by themselves have it in their own
parameters. So it is multiplied by the learning rate when they part, and divided by it when they
meet. A dense exchange before takes all but the last step, whose learning rate is this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.averager import Averager
from adaptive.memory.error_feedback import Residual
from adaptive.memory.updates import UpdateMemory, inverse
from adaptive.parameters import shaped
from adaptive.state import SavedPart
from adaptive.step_watch import Groups
from adaptive.sync.base import Synchroniser
from adaptive.sync.local_steps import LocalStepsSync, check_local_state
from adaptive.sync.options import LocalSteps
from adaptive.sync.own_step import OwnStepSync
from policies import state as saved


class _Together(OwnStepSync):
    """Ranks that exchange in every step. left: what they have stepped with until they met; they go
    back to its anchor with the next step, if that has not come yet."""

    left: LocalStepsSync | None = None

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        return super().alike() if self.left is None else self.left.alike()


class AutoStepsSync(Synchroniser):
    """One synchroniser or the other, both of one model. Begins with an exchange in every step."""

    def __init__(self, averager: Averager, choice: LocalSteps) -> None:
        super().__init__(averager)
        self._choice = choice
        self._now: _Together | LocalStepsSync = _Together(averager)
        self._updates: list[Any] = []  # parameters whose residuals move them with a step

    @property
    def apart(self) -> bool:  # type: ignore[override]
        return isinstance(self._now, LocalStepsSync)

    @property
    def _left(self) -> LocalStepsSync | None:
        return self._now.left if isinstance(self._now, _Together) else None

    # -- a backward --

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self._now.make_up()
            self._part_or_meet()
            if isinstance(self._now, LocalStepsSync) and self._now.due:
                self._stand()  # no step has come since the ranks parted
        return self._now.reduce(bucket)

    def _part_or_meet(self) -> None:
        """At the first bucket of a backward, as the ranks have agreed with the last exchange."""
        averager, controller = self.averager, self.averager.controller
        if controller.local_steps > 1:
            self._end_meeting()
        if controller.local_steps > 1 and not self.apart:
            self._part(averager.memory.now)
            averager.memory.release()
        elif controller.local_steps == 1 and isinstance(self._now, LocalStepsSync):
            averager.memory.choose(averager.optimizers, self._choice)
            self._meet(self._now, averager.memory.now)
            controller.meet()
        else:
            return
        averager.use_memory()

    @torch.no_grad()
    def _part(self, memory: object) -> None:
        """The ranks, which stand alike, part with the next step: what waits in residuals as updates
        becomes a rank's own."""
        assert isinstance(memory, UpdateMemory)
        self._now = LocalStepsSync(
            self.averager, self._choice, self.averager.controller.local_steps
        )
        memory.part()
        for p in self.averager.parameters.values():
            if p.filled and p.residual is not None:
                p.residual.mul_(memory.learning_rate(p))
                self._updates.append(p)

    @torch.no_grad()
    def _meet(self, local: LocalStepsSync, memory: object) -> None:
        """The ranks go back to the anchor with the next step: how far each has come from there
        waits in its residual, as updates. Where the learning rate is 0 these could move nothing,
        and that is forgotten."""
        assert isinstance(memory, UpdateMemory)
        memory.meet()
        self._conclude(local)
        for p in self.averager.parameters.values():
            residual, here = p.open_residual(), p.tensor.data
            shaped(residual, here).add_(local.anchors[p].view_as(here)).sub_(here)
            residual.mul_(inverse(memory.learning_rate(p)))
        self._now = _Together(self.averager)
        self._now.left = local

    @torch.no_grad()
    def _conclude(self, local: LocalStepsSync, due: int | None = None) -> None:
        """Do what moves the parameters before the next step."""
        if self._left is local:
            for p, anchor in local.anchors.items():
                p.tensor.data.copy_(anchor.view_as(p.tensor))
        updates, self._updates = self._updates, []
        for p in updates:
            p.tensor.data.sub_(shaped(p.residual, p.tensor.data))
            p.filled = False
        local.conclude(due)

    def _end_meeting(self) -> None:
        """The ranks stand alike now, if they were to with the next step."""
        if isinstance(self._now, _Together) and self._now.left is not None:
            self._conclude(self._now.left)
            self._now.left = None

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        return self._now.end_backward(last)

    # -- a step --

    def forward_begins(self) -> None:
        self._now.forward_begins()

    def step_begins(self, optimizer: Optimizer) -> None:
        if self._left is None:
            self._now.step_begins(optimizer)

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        self._end_meeting()
        if self._updates:
            assert isinstance(self._now, LocalStepsSync)
            self._conclude(self._now, 0)
        return self._now.before_step(optimizer, groups)

    def after_step(self, optimizer: Optimizer) -> None:
        self._now.after_step(optimizer)

    # -- between steps --

    def make_up(self) -> None:
        self._now.make_up()

    def wait(self) -> None:
        self._now.wait()

    def settle(self) -> None:
        self._now.settle()

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        return self._now.alike()

    def averaged(self) -> AbstractContextManager[None]:
        self._stand()
        return self._now.averaged()

    def _stand(self) -> None:
        """What parts the ranks moves the parameters now."""
        if self._updates and isinstance(self._now, LocalStepsSync):
            self._conclude(self._now, 0)

    def unite(self) -> Sequence[Optimizer] | None:
        self._now.make_up()
        self._end_meeting()
        self._stand()
        return self._now.unite()

    def stop(self) -> None:
        self._now.make_up()
        self._end_meeting()
        self._stand()
        self._now.stop()

    def discard(self) -> None:
        self._now.discard()

    # -- saved --

    def saved(self) -> SavedPart:
        def save() -> dict[str, Any]:
            self._stand()
            self._end_meeting()
            if isinstance(self._now, LocalStepsSync):
                return self._now.state_dict()
            return {"backwards": 0, "arrived": {}, "anchors": {}, "moving": {}}

        def check(state: Mapping[str, Any]) -> None:
            parameters = self.averager.parameters.values()
            check_local_state(state, parameters, apart=bool(state.get("anchors")))

        def load(state: Mapping[str, Any]) -> None:
            self._updates = []
            if isinstance(self._now, _Together):
                self._now.left = None
            else:
                self._now.load_state_dict(state)
                self._now.every = self.averager.controller.local_steps

        return SavedPart(save, check, load)

    def memory_kind_of(self, state: Mapping[str, Any]) -> str | None:
        apart = bool(saved.read(state, "sync", Mapping).get("anchors"))
        return Residual.name if apart else UpdateMemory.name

    def follow(self, state: Mapping[str, Any]) -> None:
        apart, averager = bool(state["sync"].get("anchors")), self.averager
        if apart == self.apart:
            return
        if apart:
            averager.memory.release()
            self._now = LocalStepsSync(averager, self._choice, averager.controller.local_steps)
        else:
            averager.memory.choose(averager.optimizers, self._choice)
            self._now = _Together(averager)
        averager.use_memory()
