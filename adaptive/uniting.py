"""Ranks whose parameters differ, brought to their mean: to evaluate, to save, and for good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from adaptive.exchange.collectives import Exchange
from adaptive.memory.moments import part_of_mean, scale_second_moments
from adaptive.memory.updates import steps_for
from adaptive.parameters import ModelParameter


@contextmanager
def averaged(parameters: Sequence[ModelParameter], exchange: Exchange) -> Iterator[None]:
    """The model holds the mean of the ranks' parameters (a collective, dense), and afterwards this
    rank's own."""
    own = [p.tensor.detach().clone() for p in parameters]
    unite(parameters, exchange)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in zip(parameters, own, strict=True):
                p.tensor.copy_(before)


@torch.no_grad()
def unite(parameters: Sequence[ModelParameter], exchange: Exchange) -> None:
    """All ranks go on from the mean of their parameters, less residuals (a collective, dense)."""
    for p in parameters:
        own = p.tensor.detach().reshape(-1).to(p.dtype, copy=True)
        if p.filled and p.residual is not None:
            own -= p.residual
        own /= exchange.world_size
        p.tensor.copy_(exchange.all_reduce(own).wait().view_as(p.tensor))
    exchange.take_traffic()  # no step's


@torch.no_grad()
def unite_moments(
    parameters: Sequence[ModelParameter], optimizers: Iterable[Optimizer], exchange: Exchange
) -> None:
    """The same of what optimizers keep of them, or ranks whose parameters are the same would go
    apart with the next step. A rank that has not used a parameter yet gets what the others keep of
    it."""
    states: dict[str, dict[str, Any]] = {p.name: {} for p in parameters}
    names = {p.tensor: p.name for p in parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in names.keys() & set(group["params"]):
                state = states[names[tensor]] = optimizer.state[tensor]
                if steps_for(optimizer) and "exp_avg" in state:
                    # A rank's own second moment has noise that the mean gradient's has not.
                    part = part_of_mean(group, 1.0, state, exchange.world_size)
                    scale_second_moments(state, part)
    own = {
        (name, key): (kept.shape, kept.dtype)
        for name, state in states.items()
        for key, kept in state.items()
        if isinstance(kept, Tensor) and kept.is_floating_point()
    }
    everyone = [own] * exchange.world_size
    dist.all_gather_object(everyone, own, group=exchange.group)
    for p in parameters:
        state = states[p.name]
        for key in sorted({key for theirs in everyone for name, key in theirs if name == p.name}):
            found = [theirs[p.name, key] for theirs in everyone if (p.name, key) in theirs]
            shape, dtype = found[0]
            mine = state.setdefault(key, torch.zeros(shape, dtype=dtype, device=p.tensor.device))
            # Sums are made where gradients are, whatever may lie elsewhere.
            wide = mine.to(p.tensor.device, p.dtype, copy=True).flatten() / len(found)
            mine.copy_(exchange.all_reduce(wide).wait().view(shape))
    exchange.take_traffic()  # no step's
