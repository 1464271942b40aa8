"""The contract of a user's memory, which says what becomes of what is not sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

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
        taken = {"residual", "velocity", "lag", "to_full_lag", "stepped"} & {*cls.keeps}
        if taken or not all(isinstance(name, str) and name.isidentifier() for name in cls.keeps):
            raise TypeError(
                f"{cls.__name__}.keeps must be names other than those of ours (residual, velocity, "
                f"lag, to_full_lag, stepped), got {cls.keeps!r}"
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
        known = sorted(vars(self).items())
        settings = ", ".join(f"{name}={value!r}" for name, value in known if name[:1] != "_")
        return f"{type(self).__name__}({settings})"
