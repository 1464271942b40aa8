"""Uniting: ranks with different parameters set them to the ranks' mean, to evaluate or to save.

Scripts and frameworks save the model and the optimizer of one rank, as if those of all ranks were
equal. So the ranks unite model and optimizer before all their states are saved in one file.
Accelerate and Hugging Face's Trainer have written model and optimizer by then. So the united model
and optimizer are saved a second time, with the compressor's states, and loaded from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.model.chunks import chunks
from adaptive.model.parameters import (
    ModelParameter,
    ModelParameters,
    like,
    local,
    parameters_of,
    shaped,
)
from adaptive.model.state import check_like
from adaptive.network.collectives import Exchange
from policies.state import read, require


@contextmanager
def averaged(parameters: Sequence[ModelParameter], exchange: Exchange) -> Iterator[None]:
    """A context in which the model holds the mean of the ranks' parameters (a dense collective).
    Afterwards the model holds this rank's own parameters again."""
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
    """Set the parameters of all ranks to the mean of (parameters - residuals): one dense collective
    for each chunk. A parameter that is not finite on some ranks gets the mean of the other ranks.
    """
    for chunk in chunks(parameters):
        own = [_without_residual(p) for p in chunk]
        finite = torch.stack([each.isfinite().all() for each in own])
        sent = torch.cat(
            [torch.where(ok, each, 0.0).reshape(-1) for ok, each in zip(finite, own, strict=True)]
            + [finite.to(own[0].dtype)]
        )
        exchange.total(sent).wait()
        *sums, counts = sent.split([*(each.numel() for each in own), len(own)])
        for p, total, count in zip(chunk, sums, counts.unbind(), strict=True):
            # nan if the parameter is finite on no rank
            p.tensor.copy_(total.div_(count).view(p.tensor.shape))
    exchange.take_traffic()  # these bytes belong to no step


@torch.no_grad()
def unite_gradients(parameters: Sequence[ModelParameter], exchange: Exchange) -> None:
    """Set `p.grad` of all ranks to the ranks' mean: one dense collective for each chunk. A rank
    without a gradient counts as zeros. A parameter without a gradient on all ranks keeps none.
    Gradients that DDP itself averages (sparse and complex ones) stay as they are."""
    for chunk in chunks(p for p in parameters if not p.tensor.is_complex()):
        own = [None if p.tensor.grad is None else local(p.tensor.grad) for p in chunk]
        own = [None if each is None or each.is_sparse else each for each in own]
        has = torch.tensor([float(each is not None) for each in own], device="cpu")
        addends = [
            torch.zeros_like(p.local, dtype=p.dtype).reshape(-1)
            if each is None
            else each.to(p.dtype).reshape(-1) / exchange.world_size
            for p, each in zip(chunk, own, strict=True)
        ]
        total = exchange.total(torch.cat([*addends, has.to(addends[0])])).wait()
        *means, counts = total.split([*(p.numel for p in chunk), len(chunk)])
        for p, grad, mean, count in zip(chunk, own, means, counts.tolist(), strict=True):
            if grad is None and count:
                grad = torch.empty_like(p.local)
                p.tensor.grad = like(grad, p.tensor)
            if grad is not None:
                grad.copy_(mean.view(grad.shape))
    exchange.take_traffic()  # these bytes belong to no step


def _without_residual(p: ModelParameter) -> Tensor:
    """A copy of (parameter - residual) in the precision of the residual."""
    own = p.tensor.detach().to(p.dtype, copy=True)
    if p.unsent is not None:
        own -= shaped(p.unsent, p.tensor)
    return own


class UnitedState:
    """The state that `unite` makes the same on all ranks, to be saved and loaded: the parameters,
    and the optimizers' states of them."""

    def __init__(self, parameters: ModelParameters) -> None:
        self._parameters = parameters
        self._moments: dict[str, Any] = {}  # loaded, by parameter name, not yet in an optimizer

    def state_dict(self, optimizers: Iterable[Optimizer]) -> dict[str, Any]:
        """The united state by parameter name. Its tensors are those in use, not copies. A DTensor
        is represented by the shard on this rank."""
        moments = dict(self._moments)
        for optimizer in optimizers:
            for p, kept in optimizer.state.items():
                if p in self._parameters and kept:
                    moments[self._parameters[p].name] = {
                        key: local(each) if isinstance(each, Tensor) else each
                        for key, each in kept.items()
                    }
        values = {each.name: each.local.detach() for each in self._parameters.values()}
        return {"parameters": values, "moments": moments}

    def check(self, state: Mapping[str, Any]) -> None:
        """ValueError unless this is a state of parameters like these, or empty."""
        if not state:
            return
        by_name = self._parameters.by_name()
        here = {name: each.local.detach() for name, each in by_name.items()}
        check_like("parameters", read(state, "parameters", Mapping), here, complete=True)
        moments = read(state, "moments", Mapping)
        check_like("moments", moments, dict.fromkeys(by_name, Mapping))
        for name, kept in moments.items():
            for key, each in kept.items():
                bad = isinstance(each, Tensor) and not each.isfinite().all()
                require(not bad, f"moments: {name}: {key} is not finite")

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Iterable[Optimizer]) -> None:
        """Load a state that `check` has accepted. An optimizer that is not given here gets its
        state before its next step (`before_step`)."""
        self._moments = dict(state.get("moments", {}))
        by_name = self._parameters.by_name()
        with torch.no_grad():
            for name, values in state.get("parameters", {}).items():
                by_name[name].local.copy_(values)
        for optimizer in optimizers:
            self.before_step(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """Put loaded states, which no optimizer has got yet, into the optimizer that steps their
        parameters."""
        if not self._moments:
            return
        of = enumerate(parameters_of(optimizer))
        names = {i: self._parameters[p].name for i, p in of if p in self._parameters}
        by_name, found = self._parameters.by_name(), {}
        for i, name in names.items():
            if name in self._moments:
                found[i] = _like(self._moments.pop(name), by_name[name])
        if found:
            whole, kept = optimizer.state_dict(), optimizer.state
            optimizer.load_state_dict({**whole, "state": {**whole["state"], **found}})
            # A stand-in may take the step that begins: it shares `state`, which has been replaced.
            kept.update(optimizer.state)
            optimizer.state = kept


def _like(kept: Mapping[str, Any], parameter: ModelParameter) -> dict[str, Any]:
    """A copy of an optimizer's state of a parameter. In the state of a sharded parameter, tensors
    of the parameter's shape become DTensors."""
    copied = {key: e.clone() if isinstance(e, Tensor) else e for key, e in kept.items()}
    sharded = {
        key: like(each, parameter.tensor)
        for key, each in copied.items()
        if isinstance(each, Tensor) and each.shape == parameter.local.shape and each.dim()
    }
    return {**copied, **sharded}
