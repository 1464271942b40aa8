"""The memory that a user's rule makes (`adaptive.memory.rule`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adaptive.memory.error_feedback import Residual
from adaptive.memory.rule import Kept, MemoryRule
from adaptive.parameters import ModelParameter
from compressors.kernels.blocks import Flag, fill_if
from policies import DENSE


class RuledMemory(Residual):
    """A residual, and what the rule keeps beside it, of each parameter.

    On a device nobody knows whether a gradient is finite: what the rule changes is copied before,
    and put back where it is not."""

    def __init__(self, rule: MemoryRule, maybe_unused: Callable[[], bool]) -> None:
        super().__init__(maybe_unused)
        self.rule, self.name = rule, rule.name
        self.keeps = ("residual", *rule.keeps)

    def open(
        self, parameter: ModelParameter, grad: Tensor, cf: float, nonfinite: Flag = False
    ) -> Tensor | None:
        return self._accumulate(self._kept(parameter), grad, cf, nonfinite)

    def fold(self, parameter: ModelParameter, grad: Tensor, nonfinite: Flag = False) -> None:
        if nonfinite is True:
            return
        kept = self._kept(parameter)
        # A step that is thrown away leaves what was to be sent in the residual.
        all_of_it = kept["residual"].add_(self._accumulate(kept, grad, DENSE, nonfinite))
        grad.copy_(all_of_it)
        fill_if(nonfinite, grad, 0.0)

    def received(
        self, parameter: ModelParameter, mean: Tensor, cf: float, nonfinite: Flag = False
    ) -> None:
        kept = self._kept(parameter)
        before = _copies(kept, nonfinite)
        wide = mean.to(parameter.dtype)
        self.rule.received(kept, wide, cf)
        _put_back(kept, before, nonfinite)
        if wide is not mean:
            mean.copy_(wide)

    def idle(self, parameter: ModelParameter) -> bool:
        turns_means = type(self.rule).received is not MemoryRule.received
        return not (parameter.filled or self.rule.keeps or turns_means)

    def state_dict(self, parameter: ModelParameter) -> dict[str, Any]:
        kept = {name: getattr(parameter, name, None) for name in self.rule.keeps}
        more = {name: tensor.clone() for name, tensor in kept.items() if tensor is not None}
        return {**super().state_dict(parameter), **more}

    def load_state_dict(self, parameter: ModelParameter, state: Mapping[str, Any]) -> None:
        super().load_state_dict(parameter, state)
        self.forget([parameter])
        for name in self.rule.keeps:
            if name in state:
                setattr(parameter, name, parameter.zeros().copy_(state[name]))

    def forget(self, parameters: Sequence[ModelParameter]) -> None:
        for parameter in parameters:
            for name in self.rule.keeps:
                setattr(parameter, name, None)

    def _accumulate(self, kept: Kept, grad: Tensor, cf: float, nonfinite: Flag) -> Tensor:
        before = _copies(kept, nonfinite)
        addend = self.rule.accumulate(kept, grad, cf)
        if before:
            _put_back(kept, before, nonfinite)
            addend = addend.clone()
            fill_if(nonfinite, addend, 0.0)
        return addend

    def _kept(self, parameter: ModelParameter) -> Kept:
        """What is kept, zero where it is new. A parameter may stand for several, whose tensors are
        there already."""
        for name in self.rule.keeps:
            if getattr(parameter, name, None) is None:
                setattr(parameter, name, parameter.zeros())
        kept = {name: getattr(parameter, name) for name in self.rule.keeps}
        return {"residual": parameter.open_residual(), **kept}


def _copies(kept: Kept, nonfinite: Flag) -> dict[str, Tensor]:
    """What is kept, to be put back if the flag, which nobody can read, is set."""
    if not isinstance(nonfinite, Tensor):
        return {}
    return {name: tensor.clone() for name, tensor in kept.items()}


def _put_back(kept: Kept, before: Mapping[str, Tensor], nonfinite: Flag) -> None:
    for name, tensor in before.items():
        torch.where(torch.as_tensor(nonfinite), tensor, kept[name], out=kept[name])
