"""Optimizer-state sync: makes optimizer states the same on all ranks.

Ranks whose optimizers step with local gradients have moments of local gradients. Their states are
averaged before mean gradients are exchanged, and before one rank's state is saved for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isnan
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.memory.moments import (
    Run,
    assumed_share,
    have_noise,
    is_adaptive,
    keeps_no_mean,
    mean_share,
    scale_second_moments,
    scale_without_mean,
)
from adaptive.memory.optimizer_steps import Owners
from adaptive.model.chunks import CHUNK
from adaptive.model.parameters import ModelParameter, ModelParameters, like, local, shaped
from adaptive.network.collectives import Exchange
from compressors.kernels.blocks import Scalar, is_host


class OptimizerSync:
    """The optimizer-state sync of one model, before a mean gradient moves its parameters.

    Before the sync, momentum takes over the residuals of updates (own_moments.py). Where it cannot
    (Adagrad, Muon, RMSprop without momentum) the residuals become *undelivered* updates: the dense
    mean of the ranks' residuals, which moves the parameters in the next step of their optimizer.

    owners: the optimizer of each parameter. undelivered: updates by parameter, the same on all
    ranks."""

    def __init__(self, parameters: ModelParameters, owners: Owners) -> None:
        self._parameters, self._of = parameters, owners
        self.undelivered: dict[Tensor, Tensor] = {}

    def agree(self, exchange: Exchange) -> None:
        """Make the optimizers' states the same on all ranks (collectives)."""
        owned = [(p, parameter) for p, parameter in self._parameters.items() if p in self._of]
        states = {parameter: self.state(p) for p, parameter in owned}
        agree_on_states(states, exchange)
        for parameter, state in states.items():
            self._keep(parameter.tensor, state)
        if any(exchange.gather_objects(any(parameter.has_residual for _, parameter in owned))):
            for chunk in self._of.chunks:
                residuals = chunk.take_residuals(chunk.buffer("work"))
                mean = exchange.total(residuals.div_(exchange.world_size)).wait().clone()
                self.undelivered |= {p.tensor: piece for p, piece in chunk.pieces(mean)}

    def state(self, p: Tensor) -> dict[str, Any]:
        """The optimizer's state of a parameter; of a sharded parameter, with this rank's shards."""
        of = self._of.get(p)
        state: dict[str, Any] = {} if of is None else dict(of[0].state.get(p, {}))
        if not hasattr(p, "to_local"):
            return state
        return {name: local(kept) for name, kept in state.items()}

    @torch.no_grad()
    def deliver(self, learning_rate: Callable[[ModelParameter], Scalar]) -> None:
        """Move the parameters by the undelivered updates times their learning rates."""
        for p in list(self.undelivered):
            update, here = self.undelivered.pop(p), local(p)
            here.sub_(shaped(update, here).to(here.dtype) * learning_rate(self._parameters[p]))

    def put_back(self) -> bool:
        """Undelivered updates go back to the residuals. Returns whether there were any."""
        undelivered, self.undelivered = self.undelivered, {}
        for p, piece in undelivered.items():
            self._parameters[p].open_residual().add_(piece)
        return bool(undelivered)

    def _keep(self, p: Tensor, state: dict[str, Any]) -> None:
        """Write to an optimizer the entries that only other ranks had, and agreed floats. (Its own
        tensors were changed in place.)"""
        if not state:
            return
        own = self._of[p][0].state[p]
        for name, kept in state.items():
            if name in own and not isinstance(kept, float):
                continue
            own[name] = like(kept, p) if isinstance(kept, Tensor) and kept.dim() else kept


@torch.no_grad()
def unite_moments(
    parameters: Sequence[ModelParameter],
    optimizers: Iterable[Optimizer],
    exchange: Exchange,
    of_means: bool,
) -> None:
    """Replace the states of parameters, in optimizers of any kind, by the ranks' mean. If several
    optimizers have a parameter, the last one counts; it may keep the same tensors as the others.

    of_means: the optimizers go on with mean gradients, not with local ones."""
    states: dict[ModelParameter, dict[str, Any]] = {p: {} for p in parameters}
    of = {p.tensor: p for p in parameters}
    groups = ((optimizer, group) for optimizer in optimizers for group in optimizer.param_groups)
    owners = {p: each for each in groups for p in each[1]["params"] if p in of}
    for p, (optimizer, group) in owners.items():
        state = states[of[p]] = optimizer.state[p]
        # A rank's second moment holds noise that averaging gradients would remove.
        if of_means and keeps_no_mean(optimizer):
            scale_without_mean(state, assumed_share(exchange.world_size))
        elif of_means and is_adaptive(optimizer) and have_noise(state):
            own = Run(group, state["step"], state)
            scale_second_moments(state, mean_share(own, exchange.world_size))
    agree_on_states(states, exchange)
    for optimizer in optimizers:  # `state` is a defaultdict: the lookup above has made empty ones
        for tensor in [p for p, kept in optimizer.state.items() if not kept]:
            del optimizer.state[tensor]
    exchange.take_traffic()  # these bytes belong to no step


@torch.no_grad()
def agree_on_states(states: Mapping[ModelParameter, dict[str, Any]], exchange: Exchange) -> None:
    """Make the optimizers' states of parameters the same on all ranks, in place (collectives).

    Floats and floating-point tensors become the mean over the ranks that have them. Codes of a
    quantized state (integers, float8) have no mean. So codes, and the whole state of a parameter
    with tensors of codes, are copied from the first rank that has them. A rank that has not used a
    parameter yet gets its state from the others. nan counts as 0, infinity as the largest number.

    There is one all-reduce for many tensors of one precision, and one for each tensor of integers.
    A number on the host whose parameter is on a device is gathered as an object instead: copying
    each parameter's step count to the device and back would wait for the device each time."""
    described: dict[tuple[str, str], Any] = {}
    for p, state in states.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                described[p.name, key] = value.shape, value.dtype, _number(value, p)
            elif isinstance(value, float):
                described[p.name, key] = value
    everyone = exchange.gather_objects(described)
    _agree_on_numbers({p.name: state for p, state in states.items()}, everyone)
    steps = (state["step"] for state in states.values() if isinstance(state.get("step"), Tensor))
    steps_at = next((step.device for step in steps), torch.device("cpu"))
    ranks_of: dict[str, dict[str, list[int]]] = {p.name: {} for p in states}  # those that have it
    for rank, theirs in enumerate(everyone):
        for name, key in theirs:
            ranks_of[name].setdefault(key, []).append(rank)
    # (addend of this rank, divisor of the sum, tensor that gets the quotient)
    sums: list[tuple[Tensor, int, Tensor]] = []
    nbytes = 0  # of the addends
    for p, state in states.items():
        kept = ranks_of[p.name]
        kinds = [everyone[ranks[-1]][p.name, key] for key, ranks in kept.items()]
        coded = any(len(shape) and _is_code(dtype) for shape, dtype, _ in kinds)
        for key, ranks in sorted(kept.items()):
            shape, dtype, _ = everyone[ranks[0]][p.name, key]
            numbers = [everyone[rank][p.name, key][2] for rank in ranks]
            entry = state.get(key)
            if entry is None:
                device = steps_at if key == "step" else p.tensor.device
                entry = state[key] = torch.zeros(shape, dtype=dtype, device=device)
            if None not in numbers:
                every = [_finite(number) for number in (numbers[:1] if coded else numbers)]
                entry.fill_(sum(every) / len(every))
                continue
            if not dtype.is_floating_point:
                first = entry.to(p.tensor.device, torch.int64, copy=True)
                first = first if exchange.rank == ranks[0] else torch.zeros_like(first)
                entry.copy_(exchange.total(first.reshape(-1)).wait().view(shape))
                continue
            exact = p.dtype if _is_code(dtype) else torch.promote_types(dtype, p.dtype)
            addend = entry.to(p.tensor.device, exact).reshape(-1).nan_to_num()
            divisor = 1
            if coded:
                addend = addend * (exchange.rank == ranks[0])
            elif shape:
                addend = addend / len(ranks)
            else:  # a count of steps: 7 * (11 / 7) is not 11
                divisor, most = len(ranks), torch.finfo(exact).max / len(ranks)
                addend = addend.clamp(-most, most)
            if sums and (sums[0][0].dtype, sums[0][0].device) != (addend.dtype, addend.device):
                _sum_up(sums, exchange)
            nbytes = (nbytes if sums else 0) + addend.nbytes
            sums.append((addend, divisor, entry))
            if nbytes > CHUNK:
                _sum_up(sums, exchange)
    _sum_up(sums, exchange)


def _is_code(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype have no mean: integers, and float8, which has scales beside."""
    return not dtype.is_floating_point or dtype.itemsize == 1


def _number(value: Tensor, of: ModelParameter) -> float | None:
    """A floating-point number on the host whose parameter is on a device; else None."""
    there = value.device.type == "cpu" and not is_host(of.tensor.device)
    return float(value) if there and value.dim() == 0 and value.dtype.is_floating_point else None


def _finite(number: float) -> float:
    most = torch.finfo(torch.float32).max
    return 0.0 if isnan(number) else min(max(number, -most), most)


def _agree_on_numbers(
    states: Mapping[str, dict[str, Any]], everyone: Sequence[dict[tuple[str, str], Any]]
) -> None:
    """Replace the floats in states by the ranks' mean. everyone: the description that each rank has
    sent; floats are removed from it. states: by the parameters' names."""
    numbers: dict[tuple[str, str], list[float]] = {}
    for theirs in everyone:
        for place in [place for place, kept in theirs.items() if isinstance(kept, float)]:
            numbers.setdefault(place, []).append(theirs.pop(place))
    for (name, key), each in numbers.items():
        equal = all(number == each[0] for number in each)
        states[name][key] = each[0] if equal else sum(each) / len(each)


def _sum_up(sums: list[tuple[Tensor, int, Tensor]], exchange: Exchange) -> None:
    """Sum the addends over the ranks, in one collective for all, and copy each sum, divided by its
    divisor, to its tensor. The list is empty afterwards."""
    if sums:
        total = exchange.total(torch.cat([addend for addend, _, _ in sums])).wait()
        sizes = [addend.numel() for addend, _, _ in sums]
        for (_, divisor, entry), part in zip(sums, total.split(sizes), strict=True):
            entry.copy_((part if divisor == 1 else part / divisor).view(entry.shape))
    sums.clear()
