"""The contract of a user's memory, which says what becomes of what is not sent; and the memory that
it makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from adaptive.memory.error_feedback import Residual
from adaptive.model.parameters import ModelParameter
from compressors.kernels.blocks import Flag, fill_if
from policies import DENSE
from policies.checks import settings_of

Kept = Mapping[str, Tensor]
"""What is kept of some parameters, by name: "residual", and what `MemoryRule.keeps` names. Flat, as
long as their gradients, and in the same order; float64 of float64 parameters, else float32."""


class MemoryRule(ABC):
    """A memory rule says what a rank compresses in a step, and what the ranks make of the mean.

    Each step compresses the residual, after what `accumulate` returns was added to it. What was
    sent, c, is then taken off: residual = a - c. A step that is dense sends all of it. Tensors are
    those of one parameter or of several at once, so a rule goes element by element. It holds
    settings, alike on all ranks, and no state of its own: what is kept is in `kept`, is zero at
    first, and is saved with the run.

    name: for errors and saved states; that of the class, if it gives none. keeps: the names of
    tensors that are kept beside the residual. owed: what is in the residual has yet to be sent, so
    that the dense steps after `detach` begin with it. clip_norm: see `Residual`.
    """

    name: str = ""
    keeps: tuple[str, ...] = ()
    owed: bool = True
    clip_norm: float | None = None
    dtype: ClassVar[torch.dtype] = torch.float32

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__dict__.get("name") or cls.__name__
        taken = {"residual", "velocity", "momentum_share", "to_full_momentum", "stepped"} & {
            *cls.keeps
        }
        if taken or not all(isinstance(name, str) and name.isidentifier() for name in cls.keeps):
            raise TypeError(
                f"{cls.__name__}.keeps must be names other than those of ours (residual, velocity, "
                f"momentum_share, to_full_momentum, stepped), got {cls.keeps!r}"
            )

    @abstractmethod
    def accumulate(self, kept: Kept, grad: Tensor, cf: float) -> Tensor:
        """What is to be added to the residual before it is compressed (flat, like `grad`): `grad`
        itself, another tensor, or one of `kept`. It may change `kept`, in place, but not `grad`.

        grad: this rank's gradient, finite. cf: that of the step; 1 if it is dense. Read no value
        of a tensor (`if`, `float`): a device would have to wait for it."""

    def received(self, kept: Kept, mean: Tensor, cf: float) -> None:  # noqa: B027 - may do nothing
        """Change `mean`, the ranks' mean of what was sent (flat), in place, to what the optimizer
        gets. What is kept of means is the same on all ranks. Called for every parameter, also where
        this rank has had nothing to send, and not after a step that was not finite."""

    @property
    def kind(self) -> str:
        """The name."""
        return self.name

    def __repr__(self) -> str:
        """Its class and its settings: what must be alike on all ranks."""
        return settings_of(self)


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

    def flush_into(self, parameter: ModelParameter, grad: Tensor, nonfinite: Flag = False) -> None:
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

    def is_empty(self, parameter: ModelParameter) -> bool:
        turns_means = type(self.rule).received is not MemoryRule.received
        return not (parameter.has_residual or self.rule.keeps or turns_means)

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
