"""The contract of a user's memory rule (`MemoryRule`), and the memory that follows such a rule."""

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
"""The tensors kept of one or more parameters, by name: "residual", and those in `MemoryRule.keeps`.
Each is flat, as long as the gradients and in their order; float64 for float64 parameters, else
float32."""


class MemoryRule(ABC):
    """A memory rule: what a rank compresses in a step, and how the ranks' mean becomes a gradient.

    Each step adds the result of `accumulate` to the residual, and compresses the sum a. The sent
    part c is then subtracted: residual = a - c. A dense step sends all of a. A call may get the
    tensors of one parameter or of several at once, so a rule works element by element. The rule
    object holds settings, the same on all ranks, and no state. State belongs in the tensors of
    `kept`, which start from zero and are saved with the run.

    name: for errors and saved states; default: the name of the class. keeps: names of the tensors
    that are kept beside the residual. owed: whether the residual must still be sent after `detach`,
    with the first dense steps. clip_norm: see `Residual`.
    """

    name: str = ""
    keeps: tuple[str, ...] = ()
    owed: bool = True
    clip_norm: float | None = None
    dtype: ClassVar[torch.dtype] = torch.float32

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__dict__.get("name") or cls.__name__
        # What is kept becomes attributes of a `ModelParameter`: "local" would be the weights.
        ours = {"to_full_momentum", *dir(ModelParameter), *ModelParameter.__annotations__}
        fits = not isinstance(cls.keeps, str) and ours.isdisjoint(cls.keeps)
        if not fits or not all(isinstance(name, str) and name.isidentifier() for name in cls.keeps):
            taken = ", ".join(sorted(ours.intersection(cls.keeps))) or "residual, velocity, ..."
            raise TypeError(
                f"{cls.__name__}.keeps must be a tuple of names other than those of ours ({taken}),"
                f" got {cls.keeps!r}"
            )

    @abstractmethod
    def accumulate(self, kept: Kept, grad: Tensor, cf: float) -> Tensor:
        """Returns the tensor to add to the residual before compression (flat, like `grad`): `grad`
        itself, another tensor, or one of `kept`. May change `kept`, in place, but not `grad`.

        grad: this rank's gradient, finite. cf: the CF of the step; 1 if it is dense. Must not read
        a value of a tensor (`if`, `float`): the host would wait for the device."""

    def received(self, kept: Kept, mean: Tensor, cf: float) -> None:  # noqa: B027 - may do nothing
        """Turn `mean`, the ranks' mean of the sent parts (flat), in place, into the gradient that
        the optimizer gets. State computed only from means is the same on all ranks. Called for
        every parameter, even if this rank has sent nothing of it, but not after a nonfinite step.
        """

    @property
    def kind(self) -> str:
        """The name."""
        return self.name

    def __repr__(self) -> str:
        """The class and its settings, which must be the same on all ranks."""
        return settings_of(self)


class RuledMemory(Residual):
    """For each parameter a residual, and the tensors that the rule keeps beside it.

    On a device the host does not know whether a gradient is finite. So tensors are copied before
    the rule changes them, and restored if the gradient is not finite."""

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
        # If the step is dropped, the residual still holds all that was to be sent.
        all_of_it = kept["residual"].add_(self._accumulate(kept, grad, DENSE, nonfinite))
        grad.copy_(all_of_it)
        fill_if(nonfinite, grad, 0.0)

    def received(
        self, parameter: ModelParameter, mean: Tensor, cf: float, nonfinite: Flag = False
    ) -> None:
        kept = self._kept(parameter)
        before = _copies(kept, nonfinite)
        wide = mean.to(parameter.dtype)
        self.rule.received(handed := {**kept}, wide, cf)
        self._check_in_place(handed, kept)
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
        addend = self.rule.accumulate(handed := {**kept}, grad, cf)
        self._check_in_place(handed, kept)
        shape, dtype = kept["residual"].shape, kept["residual"].dtype
        if not isinstance(addend, Tensor) or (addend.shape, addend.dtype) != (shape, dtype):
            raise TypeError(
                f"memory {self.name!r}: accumulate must return a tensor as the residual is, "
                f"{tuple(shape)} of {dtype}; got {_kind_of(addend)}"
            )
        if before:
            _put_back(kept, before, nonfinite)
            addend = addend.clone()
            fill_if(nonfinite, addend, 0.0)
        return addend

    def _check_in_place(self, handed: Kept, kept: Kept) -> None:
        """TypeError if the rule has put other tensors into the mapping that it was handed: what it
        keeps would stay as it was."""
        replaced = [name for name in handed if handed[name] is not kept.get(name)]
        if replaced:
            raise TypeError(
                f"memory {self.name!r} must change what is kept in place, as in "
                f"kept[{replaced[0]!r}].copy_(x), and has replaced {', '.join(replaced)}"
            )

    def _kept(self, parameter: ModelParameter) -> Kept:
        """The kept tensors of a parameter; missing ones are made, filled with zeros. (The joint
        parameter of a run has all of them already.)"""
        for name in self.rule.keeps:
            if getattr(parameter, name, None) is None:
                setattr(parameter, name, parameter.zeros())
        kept = {name: getattr(parameter, name) for name in self.rule.keeps}
        return {"residual": parameter.open_residual(), **kept}


def _kind_of(value: object) -> str:
    """The shape and dtype of a tensor, the type of anything else, for an error."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {value.dtype}"
    return type(value).__name__


def _copies(kept: Kept, nonfinite: Flag) -> dict[str, Tensor]:
    """Copies of the kept tensors, if the flag is on a device; else none are needed."""
    if not isinstance(nonfinite, Tensor):
        return {}
    return {name: tensor.clone() for name, tensor in kept.items()}


def _put_back(kept: Kept, before: Mapping[str, Tensor], nonfinite: Flag) -> None:
    for name, tensor in before.items():
        torch.where(
            torch.as_tensor(nonfinite, device=tensor.device), tensor, kept[name], out=kept[name]
        )
