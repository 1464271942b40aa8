"""Ranks whose parameters differ, brought to their mean: to evaluate, to save, and for good.

Scripts and frameworks save the model and the optimizer of one rank, as if all ranks had the same.
So before the states of all ranks are saved as one, the ranks agree on both. Accelerate and Hugging
Face's Trainer have written model and optimizer by then: what was agreed on is saved once more, with
the compressor's states, and taken up from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.model.parameters import ModelParameter, ModelParameters, like, local, parameters_of
from adaptive.model.state import check_like
from adaptive.network.collectives import Exchange
from policies.state import read, require


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
    """All ranks go on from the mean of their parameters, less residuals (a collective, dense). A
    rank with a parameter that is not finite gets the mean of the others."""
    for p in parameters:
        own = p.tensor.detach().reshape(-1).to(p.dtype, copy=True)
        if p.unsent is not None:
            own -= p.unsent
        counts = own.isfinite().all()
        sent = torch.cat([torch.where(counts, own, 0.0), counts.to(own.dtype).view(1)])
        exchange.total(sent).wait()
        p.tensor.copy_(sent[:-1].div_(sent[-1]).view_as(p.tensor))  # nan if no rank's is finite
    exchange.take_traffic()  # no step's


class Agreed:
    """What the ranks have agreed on outside the compressor, to be saved and taken up again: the
    parameters, and what optimizers keep of them."""

    def __init__(self, parameters: ModelParameters) -> None:
        self._parameters = parameters
        self._moments: dict[str, Any] = {}  # by parameter name, that no optimizer has taken up yet

    def state_dict(self, optimizers: Iterable[Optimizer]) -> dict[str, Any]:
        """By parameter name. Tensors are those in use, no copies; of DTensors what is here."""
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
        """ValueError unless it is a state of parameters like these, or empty."""
        if not state:
            return
        by_name = self._parameters.by_name()
        here = {name: each.local.detach() for name, each in by_name.items()}
        check_like("parameters", read(state, "parameters", Mapping), here)
        moments = read(state, "moments", Mapping)
        check_like("moments", moments, dict.fromkeys(by_name, Mapping))
        for name, kept in moments.items():
            for key, each in kept.items():
                bad = isinstance(each, Tensor) and not each.isfinite().all()
                require(not bad, f"moments: {name}: {key} is not finite")

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Iterable[Optimizer]) -> None:
        """Take up what `check` has found to be good. Other optimizers than these take up their part
        with their next step: see `before_step`."""
        self._moments = dict(state.get("moments", {}))
        by_name = self._parameters.by_name()
        with torch.no_grad():
            for name, values in state.get("parameters", {}).items():
                by_name[name].local.copy_(values)
        for optimizer in optimizers:
            self.before_step(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """Give the optimizer what was loaded of its parameters."""
        if not self._moments:
            return
        of = enumerate(parameters_of(optimizer))
        names = {i: self._parameters[p].name for i, p in of if p in self._parameters}
        by_name, found = self._parameters.by_name(), {}
        for i, name in names.items():
            if name in self._moments:
                found[i] = _like(self._moments.pop(name), by_name[name])
        if found:
            whole = optimizer.state_dict()
            optimizer.load_state_dict({**whole, "state": {**whole["state"], **found}})


def _like(kept: Mapping[str, Any], parameter: ModelParameter) -> dict[str, Any]:
    """A copy of an optimizer's state of a parameter, in shards if the parameter is in shards."""
    copied = {key: e.clone() if isinstance(e, Tensor) else e for key, e in kept.items()}
    sharded = {
        key: like(each, parameter.tensor)
        for key, each in copied.items()
        if isinstance(each, Tensor) and each.shape == parameter.local.shape and each.dim()
    }
    return {**copied, **sharded}
