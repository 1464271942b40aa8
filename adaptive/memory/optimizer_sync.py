"""What optimizers keep of parameters, made the same on all ranks.

Ranks whose optimizers step by themselves have moments of their own gradients. They agree on them
before mean gradients are exchanged, and before the state of one rank is saved for all.
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
    have_noise,
    is_adaptive,
    mean_share,
    scale_second_moments,
)
from adaptive.memory.optimizer_steps import Owners
from adaptive.model.chunks import CHUNK
from adaptive.model.parameters import ModelParameter, ModelParameters, like, local, shaped
from adaptive.network.collectives import Exchange
from compressors.kernels.blocks import Scalar, is_host


class OptimizerSync:
    """The optimizer-state sync of one model, before a mean gradient moves its parameters.

    First moments have taken what they can of residuals of updates (own_moments.py). What no first
    moment can take (of RMSprop, Adagrad, Muon) is *undelivered*: the mean of the ranks' residuals
    moves the parameters, dense, in the next step of their optimizer.

    owners: who steps a parameter. undelivered: updates by parameter, the same on all ranks."""

    def __init__(self, parameters: ModelParameters, owners: Owners) -> None:
        self._parameters, self._of = parameters, owners
        self.undelivered: dict[Tensor, Tensor] = {}

    def agree(self, exchange: Exchange) -> None:
        """What optimizers keep becomes the same on all ranks (collectives)."""
        ours = [(p, parameter) for p, parameter in self._parameters.items() if p in self._of]
        states = {parameter: self.state(p) for p, parameter in ours}
        agree_on_states(states, exchange)
        for parameter, state in states.items():
            self._keep(parameter.tensor, state)
        if any(exchange.gather_objects(any(parameter.has_residual for _, parameter in ours))):
            for chunk in self._of.chunks:
                residuals = chunk.take_residuals(chunk.buffer("work"))
                mean = exchange.total(residuals.div_(exchange.world_size)).wait().clone()
                self.undelivered |= {p.tensor: piece for p, piece in chunk.pieces(mean)}

    def state(self, p: Tensor) -> dict[str, Any]:
        """The optimizer's of a parameter; of a sharded one with the shards that are here."""
        of = self._of.get(p)
        state: dict[str, Any] = {} if of is None else dict(of[0].state.get(p, {}))
        if not hasattr(p, "to_local"):
            return state
        return {name: local(kept) for name, kept in state.items()}

    @torch.no_grad()
    def deliver(self, learning_rate: Callable[[ModelParameter], Scalar]) -> None:
        """Move the parameters by undelivered updates, which learning_rate turns into moves."""
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
        """What another rank's optimizer had, and this rank's has not; numbers."""
        if not state:
            return
        own = self._of[p][0].state[p]
        for name, kept in state.items():
            if name in own and not isinstance(kept, float):
                continue
            own[name] = like(kept, p) if isinstance(kept, Tensor) and kept.dim() else kept


@torch.no_grad()
def unite_moments(
    parameters: Sequence[ModelParameter], optimizers: Iterable[Optimizer], exchange: Exchange
) -> None:
    """Of any optimizers, what they keep of the parameters becomes the ranks' mean. Of several that
    have a parameter the last counts (which may keep the same tensors as those before)."""
    states: dict[ModelParameter, dict[str, Any]] = {p: {} for p in parameters}
    of = {p.tensor: p for p in parameters}
    groups = ((optimizer, group) for optimizer in optimizers for group in optimizer.param_groups)
    owners = {p: each for each in groups for p in each[1]["params"] if p in of}
    for p, (optimizer, group) in owners.items():
        state = states[of[p]] = optimizer.state[p]
        if is_adaptive(optimizer) and have_noise(state):
            # A rank's own second moment has noise that the mean gradient's has not.
            own = Run(group, state["step"], state)
            scale_second_moments(state, mean_share(own, exchange.world_size))
    agree_on_states(states, exchange)
    for optimizer in optimizers:  # which one has made empty by asking for it
        for tensor in [p for p, kept in optimizer.state.items() if not kept]:
            del optimizer.state[tensor]
    exchange.take_traffic()  # no step's


@torch.no_grad()
def agree_on_states(states: Mapping[ModelParameter, dict[str, Any]], exchange: Exchange) -> None:
    """What optimizers keep of parameters (their `state` of each) becomes the same on all ranks, in
    place (collectives): of floats and floating-point tensors the mean over the ranks that have
    them. Codes of a quantized state are integers, which have no mean: of a parameter with such a
    state, and of other integers, all ranks take what the first rank has that has any. A rank that
    has not used a parameter yet gets what the others keep of it. nan counts as 0, infinity as the
    largest number.

    One all-reduce for many tensors of one precision, and one for each tensor of integers. Numbers
    that lie on the host, beside a device's parameters, are told instead: to copy the step count of
    each parameter to the device and back would wait for it each time."""
    told: dict[tuple[str, str], Any] = {}
    for p, state in states.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                told[p.name, key] = value.shape, value.dtype, _number(value, p)
            elif isinstance(value, float):
                told[p.name, key] = value
    everyone = exchange.gather_objects(told)
    _agree_on_numbers({p.name: state for p, state in states.items()}, everyone)
    steps = (state["step"] for state in states.values() if isinstance(state.get("step"), Tensor))
    steps_at = next((step.device for step in steps), torch.device("cpu"))
    having_of: dict[str, dict[str, list[int]]] = {p.name: {} for p in states}  # ranks that have it
    for rank, theirs in enumerate(everyone):
        for name, key in theirs:
            having_of[name].setdefault(key, []).append(rank)
    sums: list[tuple[Tensor, Tensor]] = []  # what is summed, and where it belongs
    nbytes = 0  # of what is summed
    for p, state in states.items():
        kept = having_of[p.name]
        kinds = [everyone[having[-1]][p.name, key] for key, having in kept.items()]
        coded = any(len(shape) and not dtype.is_floating_point for shape, dtype, _ in kinds)
        for key, having in sorted(kept.items()):
            shape, dtype, _ = everyone[having[0]][p.name, key]
            numbers = [everyone[rank][p.name, key][2] for rank in having]
            mine = state.get(key)
            if mine is None:
                device = steps_at if key == "step" else p.tensor.device
                mine = state[key] = torch.zeros(shape, dtype=dtype, device=device)
            if None not in numbers:
                every = [_finite(number) for number in (numbers[:1] if coded else numbers)]
                mine.fill_(sum(every) / len(every))
                continue
            if not dtype.is_floating_point:
                first = mine.to(p.tensor.device, torch.int64, copy=True)
                first = first if exchange.rank == having[0] else torch.zeros_like(first)
                mine.copy_(exchange.total(first.reshape(-1)).wait().view(shape))
                continue
            exact = torch.promote_types(dtype, p.dtype)
            own = mine.to(p.tensor.device, exact).reshape(-1).nan_to_num()
            own = own * (exchange.rank == having[0]) if coded else own / len(having)
            if sums and (sums[0][0].dtype, sums[0][0].device) != (own.dtype, own.device):
                _sum_up(sums, exchange)
            nbytes = (nbytes if sums else 0) + own.nbytes
            sums.append((own, mine))
            if nbytes > CHUNK:
                _sum_up(sums, exchange)
    _sum_up(sums, exchange)


def _number(value: Tensor, of: ModelParameter) -> float | None:
    """A floating-point number that lies on the host, beside a device's parameter; else None."""
    there = value.device.type == "cpu" and not is_host(of.tensor.device)
    return float(value) if there and value.dim() == 0 and value.dtype.is_floating_point else None


def _finite(number: float) -> float:
    most = torch.finfo(torch.float32).max
    return 0.0 if isnan(number) else min(max(number, -most), most)


def _agree_on_numbers(
    states: Mapping[str, dict[str, Any]], everyone: Sequence[dict[tuple[str, str], Any]]
) -> None:
    """Floats of the ranks' states become their mean. everyone: what each rank has told, of which
    floats are removed. states: by the parameters' names."""
    numbers: dict[tuple[str, str], list[float]] = {}
    for theirs in everyone:
        for place in [place for place, kept in theirs.items() if isinstance(kept, float)]:
            numbers.setdefault(place, []).append(theirs.pop(place))
    for (name, key), each in numbers.items():
        alike = all(number == each[0] for number in each)
        states[name][key] = each[0] if alike else sum(each) / len(each)


def _sum_up(sums: list[tuple[Tensor, Tensor]], exchange: Exchange) -> None:
    """Sum the first tensors of the pairs over the ranks, in one collective; the sums go to the
    second ones. The list is empty afterwards."""
    if sums:
        total = exchange.total(torch.cat([own for own, _ in sums])).wait()
        sizes = [own.numel() for own, _ in sums]
        for (_, mine), part in zip(sums, total.split(sizes), strict=True):
            mine.copy_(part.view(mine.shape))
    sums.clear()
