"""What a rank keeps to itself outside the compressor: the optimizer's moments where updates are
compressed, with local steps the parameters as well.

Scripts and frameworks save the model and the optimizer of one rank, as if all ranks had the same.
To resume to the bit, what differs is saved with the compressor's own state, and put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.memory.moments import SECOND_MOMENTS
from adaptive.parameters import ModelParameter, ModelParameters, like, local
from policies.state import read, together

KEPT = {*SECOND_MOMENTS, "exp_avg", "grad_avg", "momentum_buffer", "mu_product", "step"}


class KeptApart:
    """What this rank keeps to itself outside the compressor, as it is now.

    optimizer: whose state of the parameters is this rank's own; None if it is that of all.
    parameters_too: they are this rank's own."""

    def __init__(
        self, parameters: ModelParameters, optimizer: Optimizer | None, parameters_too: bool
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._parameters_too = parameters_too

    def state_dict(self) -> dict[str, Any]:
        """By parameter name. Tensors are those in use, no copies; of DTensors what is here."""
        state: dict[str, Any] = {"optimizer": {}, "parameters": {}}
        if self._optimizer is not None:
            of = self._optimizer.state_dict()["state"]
            state["optimizer"] = {n: _local(of[i]) for i, n in self._places() if of.get(i)}
        if self._parameters_too:
            own = self._parameters.values()
            state["parameters"] = {each.name: each.local.detach() for each in own}
        return state

    def check(self, state: Mapping[str, Any]) -> None:
        """ValueError unless it is a state of parameters like these."""
        by_name = self._parameters.by_name()
        weights, moments = (read(state, what, Mapping) for what in ("parameters", "optimizer"))
        for name in (*weights, *moments):
            together(name in by_name, f"the model has no parameter {name!r}")
        of_optimizer = [(n, *item) for n in moments for item in read(moments, n, Mapping).items()]
        for name, what, kept in [*((n, "", w) for n, w in weights.items()), *of_optimizer]:
            if what and what not in KEPT and not isinstance(kept, Tensor):
                continue  # some optimizers of torch's keep lists
            shape = by_name[name].local.shape
            shapes = (shape, *([()] if what else []))
            fits = isinstance(kept, Tensor) and (kept.shape in shapes or what not in ("", *KEPT))
            plain = bool(what) and isinstance(kept, int | float)
            told = f"{what or 'values'} of {name!r} do not fit it, got {kept!r:.80}"
            together(plain or (fits and bool(kept.isfinite().all())), told)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `check` has found to be good."""
        if self._optimizer is not None and state["optimizer"]:
            whole = self._optimizer.state_dict()
            by_name = self._parameters.by_name()
            own = {
                i: _like(state["optimizer"].get(name, {}), by_name[name])
                for i, name in self._places()
            }
            moments = {i: kept for i, kept in {**whole["state"], **own}.items() if kept}
            self._optimizer.load_state_dict({**whole, "state": moments})
        by_name = self._parameters.by_name()
        with torch.no_grad():
            for name, weights in state["parameters"].items():
                by_name[name].local.copy_(weights)

    def put_back_after_loading(self, state: Mapping[str, Any]) -> Any:
        """Put the optimizer's part back once more whenever its state is loaded, for scripts that do
        so after the compressor's. Returns the handle of the hook."""
        loading = False

        def loaded(_: Optimizer) -> None:
            nonlocal loading
            if not loading:
                loading = True
                try:
                    self.load_state_dict({**state, "parameters": {}})
                finally:
                    loading = False

        if self._optimizer is None or not state["optimizer"]:
            return None
        return self._optimizer.register_load_state_dict_post_hook(loaded)

    def _places(self) -> Iterator[tuple[int, str]]:
        """Where the parameters are in the optimizer's `state_dict`, and their names."""
        assert self._optimizer is not None
        groups = self._optimizer.param_groups
        for i, p in enumerate(p for group in groups for p in group["params"]):
            if p in self._parameters:
                yield i, self._parameters[p].name


def _local(kept: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state of a parameter, with what of its tensors is here."""
    return {what: local(each) if isinstance(each, Tensor) else each for what, each in kept.items()}


def _like(kept: Mapping[str, Any], parameter: ModelParameter) -> dict[str, Any]:
    """The inverse."""
    sharded = {
        what: like(each, parameter.tensor)
        for what, each in kept.items()
        if isinstance(each, Tensor) and each.shape == parameter.local.shape and each.dim()
    }
    return {**kept, **sharded}
