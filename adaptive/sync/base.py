"""The contract of a synchroniser: how the ranks of one model keep their parameters together.

It answers four questions: whether a backward exchanges anything, what is exchanged in the
gradient's place, what autograd gets back, and when parameters move. How flat tensors of the ranks
become their mean is the `Averager`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.memory.step_watch import Groups
from adaptive.model.state import SavedPart, check_like
from adaptive.step.averager import Averager


class Synchroniser:
    """One model's, at work. Every collective that it issues, all ranks issue in the same order."""

    def __init__(self, averager: Averager) -> None:
        self.averager = averager

    # -- a backward --

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """A future of what autograd gets back for one bucket."""
        raise NotImplementedError

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        """After the last `reduce` of a backward. last: gradients that it has returned. Returns a
        future of them, which must become nan where a script must see that some rank's are not
        finite."""
        raise NotImplementedError

    # -- a step --

    def forward_begins(self) -> None:
        """The next forward begins: a step that has not come until now was left out."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """`optimizer.step(closure)` was called; the closure has not run yet."""

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        """An optimizer of the model has its gradients, and is to step with these parameter groups.
        Returns other groups for this step, or None."""
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer of the model has stepped."""

    # -- between steps --

    @property
    def owes(self) -> bool:
        """The last backward's exchange is yet to come, and other ranks may wait for it."""
        return False

    def make_up(self) -> None:
        """Do what belongs to the last backward and has not been done, its step being left out.
        Other ranks may have made theirs, so it is a collective."""

    def wait(self) -> None:
        """Until all that is under way is there. Nothing moves."""

    def abandon(self) -> None:
        """Forget what is under way, also where it has failed: nothing moves by it any more. No
        collective. A state may be loaded next, or nothing comes any more."""

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        """What must be the same on all ranks between steps, by parameter name."""
        return ((p.name, p.local) for p in self.averager.parameters.values())

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model holds the mean of the ranks' parameters."""
        return nullcontext()

    def unite(self) -> Sequence[Optimizer] | None:
        """Parameters and what optimizers keep of them become the same on all ranks (a collective).
        Returns the optimizers; None where everything was the same."""
        return None

    def stop(self) -> None:
        """For good: all ranks go on from one model (a collective)."""

    def discard(self) -> None:
        """The gradients of the last backward are thrown away."""

    def start_over(self) -> bool:
        """Somebody else has moved the parameters far, on all ranks: what waits, or is under way,
        was of where they stood before, and is forgotten. No collective. Returns whether there was
        anything."""
        return False

    def describe(self) -> str:
        """A line for `explain()`; empty if there is nothing to say."""
        return ""

    # -- saved --

    def saved(self) -> SavedPart:
        """What is saved of it."""
        return SavedPart(dict, lambda state: check_like("sync", state, {}), lambda _: None)
