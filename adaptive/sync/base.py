"""The contract of a synchroniser: how the ranks of one model keep their parameters together.

A synchroniser decides in which backwards the ranks exchange, which tensors they exchange, which
gradients autograd gets back, and when parameters move. The `Averager` turns the ranks' flat tensors
into their mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.memory.handover import Groups
from adaptive.model.state import check_like
from adaptive.step.averager import Averager


class Synchroniser:
    """The synchroniser of one model. All ranks call it in the same order, and so issue the same
    collectives in the same order."""

    def __init__(self, averager: Averager) -> None:
        self.averager = averager

    # -- a backward --

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """A future of the gradients that autograd gets back for one bucket."""
        raise NotImplementedError

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        """Called after the last `reduce` of a backward. last: a future of some gradients of this
        backward, as autograd gets them. Returns the future that takes the place of `last`. That
        future may make the gradients NaN on all ranks, to show that some rank's were not finite.
        """
        raise NotImplementedError

    # -- a step --

    def forward_begins(self) -> None:
        """Called before each forward with gradients. If no optimizer step has followed the last
        backward until now, the script has left the step out."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """Called when `optimizer.step(closure)` begins, before the closure runs."""

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        """Called before an optimizer of the model steps, when the gradients are there. Returns the
        parameter groups for this step; None: `groups`."""
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after an optimizer of the model has stepped."""

    # -- between steps --

    @property
    def owes(self) -> bool:
        """The exchange of the last backward has not begun on this rank, and other ranks may be
        waiting for it."""
        return False

    def make_up(self) -> None:
        """Do the exchange that this rank owes, if any (`owes`). A collective: other ranks may have
        issued their part of the exchange before."""

    def wait(self) -> None:
        """Wait for all exchanges under way. No parameter changes."""

    def abandon(self) -> None:
        """Drop the exchanges under way, also failed ones, so that they move no parameter. No
        collective. Afterwards a state may be loaded, or the session is closed."""

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        """The tensors, by parameter name, that must be the same on all ranks between steps."""
        return ((p.name, p.local) for p in self.averager.parameters.values())

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model holds the mean of the ranks' parameters."""
        return nullcontext()

    def unite(self) -> Sequence[Optimizer] | None:
        """Make parameters and optimizer states the same on all ranks (a collective). Returns the
        optimizers; None if parameters and states were the same before."""
        return None

    def stop(self) -> None:
        """End the synchronisation for good, before `detach`: all ranks go on from one model, and
        `p.grad` is the ranks' mean gradient, in case no optimizer step has followed the last
        backward (collectives)."""

    def discard(self) -> None:
        """The script throws the gradients of the last backward away."""

    def start_over(self) -> bool:
        """Drop all unsent updates and all exchanges under way, because the script has moved the
        parameters far (by loading a checkpoint, say). No collective: each rank notices the move by
        itself. If ranks have different parameters, a later exchange sets all to the ranks' mean.
        Returns whether there was anything to drop."""
        return False

    def describe(self) -> str:
        """A line for `explain()`; empty if there is nothing to say."""
        return ""

    # -- saved --

    def state_dict(self) -> dict[str, Any]:
        """The synchroniser's own state, between steps."""
        return {}

    def check(self, state: Mapping[str, Any]) -> None:
        """ValueError unless this is a `state_dict()` of a synchroniser like this one."""
        check_like("sync", state, {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `check` has accepted. Parameters are not part of it."""
