"""Ranks whose parameters differ, brought to their mean: to evaluate, to save, and for good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.chunks import CHUNK
from adaptive.exchange.collectives import Exchange
from adaptive.memory.moments import Moments, is_adaptive, mean_share, scale_second_moments
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
    apart with the next step."""
    states: dict[ModelParameter, dict[str, Any]] = {p: {} for p in parameters}
    of = {p.tensor: p for p in parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in of.keys() & set(group["params"]):
                state = states[of[tensor]] = optimizer.state[tensor]
                moments = Moments(group, 1.0, state)
                if is_adaptive(optimizer) and moments.have_noise:
                    # A rank's own second moment has noise that the mean gradient's has not.
                    scale_second_moments(state, mean_share(moments, exchange.world_size))
    agree_on_states(states, exchange)
    exchange.take_traffic()  # no step's


@torch.no_grad()
def agree_on_states(states: Mapping[ModelParameter, dict[str, Any]], exchange: Exchange) -> None:
    """What optimizers keep of parameters (their `state` of each) becomes the same on all ranks, in
    place (collectives): of floating-point tensors the mean over the ranks that have them, of others
    that of the first rank that has them. A rank that has not used a parameter yet gets what the
    others keep of it.

    One all-reduce for many tensors of one precision, and one for each tensor of integers."""
    kept = {
        (p.name, key): value
        for p, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    told = {where: (value.shape, value.dtype) for where, value in kept.items()}
    everyone = exchange.gather_objects(told)
    steps = (state["step"].device for state in states.values() if "step" in state)
    steps_at = next(steps, torch.device("cpu"))
    sums: list[tuple[Tensor, Tensor]] = []  # what is summed, and where it belongs
    for p, state in states.items():
        for key in sorted({key for theirs in everyone for name, key in theirs if name == p.name}):
            having = [rank for rank, theirs in enumerate(everyone) if (p.name, key) in theirs]
            shape, dtype = everyone[having[0]][p.name, key]
            mine = state.get(key)
            if mine is None:
                device = steps_at if key == "step" else p.tensor.device
                mine = state[key] = torch.zeros(shape, dtype=dtype, device=device)
            if dtype.is_floating_point:
                own = mine.to(p.tensor.device, p.dtype).reshape(-1) / len(having)
                if sums and (sums[0][0].dtype, sums[0][0].device) != (own.dtype, own.device):
                    _sum_up(sums, exchange)
                sums.append((own, mine))
                if sum(own.nbytes for own, _ in sums) > CHUNK:
                    _sum_up(sums, exchange)
            else:
                first = mine.to(p.tensor.device, torch.int64, copy=True)
                first = first if exchange.rank == having[0] else torch.zeros_like(first)
                mine.copy_(exchange.all_reduce(first.reshape(-1)).wait().view(shape))
    _sum_up(sums, exchange)


def _sum_up(sums: list[tuple[Tensor, Tensor]], exchange: Exchange) -> None:
    """Sum the first tensors of the pairs over the ranks, in one collective; the sums go to the
    second ones. The list is empty afterwards."""
    if sums:
        total = exchange.all_reduce(torch.cat([own for own, _ in sums])).wait()
        sizes = [own.numel() for own, _ in sums]
        for (_, mine), part in zip(sums, total.split(sizes), strict=True):
            mine.copy_(part.view(mine.shape))
    sums.clear()
