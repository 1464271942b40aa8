"""The order in which DDP has the parameters in its buckets, saved, and made again when resuming.

DDP cuts its buckets anew after the first backward, by the order in which the gradients arrived in
that one. What is summed and compressed together follows from it. So a run that resumes would go
through a first backward with other buckets, and come to other rounding than the run that it
continues. A backward of zeros, in which gradients arrive in the order that was saved, gets that
over with before training goes on.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adaptive.parameters import ModelParameters, travel_as_they_are

SETTLED = 1
"""Backwards after which the buckets no longer change."""


class BucketOrder:
    """The order of a model's parameters in DDP's buckets, seen, and made again when resuming.

    names: of the parameters, in the order of the settled buckets; none before they have been
    seen. passing: the backward under way is the one of zeros, of which nothing is to be sent."""

    def __init__(self, model: DistributedDataParallel | None, parameters: ModelParameters) -> None:
        self.names: list[str] = []
        self.passing = False
        self._model = None if model is None else weakref.ref(model)
        self._parameters = parameters
        self._backwards = 0

    def see(self, bucket: dist.GradBucket) -> None:
        """Called with every bucket of every backward."""
        if self._backwards > SETTLED:
            return
        if self._backwards == SETTLED:
            if bucket.index() == 0:
                self.names = []
            of = bucket.parameters()
            if not travel_as_they_are(bucket.buffer(), of):
                self.names += [self._parameters.find(p).name for p in of]
        if bucket.is_last():
            self._backwards += 1

    @property
    def settled(self) -> bool:
        """A backward has come, or has been made, after which the buckets stay as they are."""
        return self._backwards >= SETTLED

    def repeat(self, names: Sequence[str]) -> None:
        """Let DDP cut its buckets as they were, if no backward has come yet and that can be done
        (see `settled`). On every rank."""
        model = None if self._model is None else self._model()
        by_name = self._parameters.by_name()
        if self.settled or model is None or sorted(names) != sorted(by_name):
            return
        if self._parameters.as_they_are:
            return  # they would have to take part
        if model.find_unused_parameters:  # they never change
            self._backwards, self.names = SETTLED, list(names)
        elif _are_cut_once(model):
            self._pass_zeros(model, names)

    def _pass_zeros(self, model: DistributedDataParallel, names: Sequence[str]) -> None:
        by_name = self._parameters.by_name()
        ordered = [by_name[name].tensor for name in names]
        if any(p._post_accumulate_grad_hooks for p in ordered):
            return  # the script steps within backward, and would step by zeros
        grads = [p.grad for p in ordered]
        module, synchronises = model.module, model.require_backward_grad_sync
        broadcasts = model.broadcast_buffers
        self.passing = True
        try:
            model.broadcast_buffers = False  # DDP would look for them in the module of zeros
            model.module, model.require_backward_grad_sync = _Zeros(ordered), True
            with torch.enable_grad():
                # Past forward hooks of the script's, and what others have put around `forward`.
                DistributedDataParallel.forward(model, torch.zeros(())).backward()
        finally:
            self.passing, model.broadcast_buffers = False, broadcasts
            model.module, model.require_backward_grad_sync = module, synchronises
            for p, grad in zip(ordered, grads, strict=True):
                p.grad = grad
        self._backwards, self.names = SETTLED, list(names)


class _Zeros(nn.Module):
    """Stands for a model: a loss whose gradients are zero, and arrive in the order given."""

    def __init__(self, ordered: Sequence[Tensor]) -> None:
        super().__init__()
        self._ordered = ordered  # not as its own parameters

    def forward(self, _: Tensor) -> Tensor:
        # Autograd begins with what was made last.
        loss = self._ordered[-1].sum() * 0
        for p in reversed(self._ordered[:-1]):
            loss = loss + (p.sum() * 0).to(loss)
        return loss


def _are_cut_once(model: DistributedDataParallel) -> bool:
    """Its buckets are cut anew after one backward. What a static graph learns in its first backward
    must not be learnt from zeros."""
    others = model.static_graph or model.mixed_precision is not None
    return not (others or model._use_python_reducer or model._delay_all_reduce_all_params)
