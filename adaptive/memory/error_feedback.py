"""Error feedback: what was not sent in one step is added to the gradient of the next.

r' = a - c, where a = g + r, and c is what was *sent* (Karimireddy and others 2019). The hook adds
the gradient to the residual in a compressed step (`open`), and the residual to the gradient in a
dense step (`flush_into`). After the exchange the sent part is subtracted from the residual. If any
rank's gradient was not finite, nothing was sent: that rank's residual has not changed, and the
others send theirs in later steps. On a device a residual counts as filled until the ranks have
agreed that a dense step has emptied it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

from torch import Tensor

from adaptive.memory.handover import Handover
from adaptive.model.parameters import ModelParameter
from compressors.kernels.blocks import Flag, Scalar, add_if


class MomentumRule(NamedTuple):
    """How torch's SGD moves its velocity: u = momentum * u + (1 - dampening) * gain * g, with
    gain 1."""

    momentum: float
    dampening: float = 0.0
    nesterov: bool = False
    gain: float = 1.0

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> MomentumRule:
        """That of a parameter group of an SGD."""
        return cls(group["momentum"], group["dampening"], group["nesterov"])

    @lru_cache(maxsize=64)  # noqa: B019  # asked for every parameter in every step
    def with_lag(self, share: float) -> MomentumRule:
        """With this share of the lag m / (1 - m), the mean age in steps of what a velocity holds.
        Every gradient still adds up to the same."""
        m = self.momentum
        if share == 1 or not 0 < m < 1:
            return self
        lag = share * m / (1 - m)
        return self._replace(momentum=lag / (1 + lag), gain=1 / (1 + lag) / (1 - m))

    def change_of_lag(self, share: float, other: float) -> float:
        """What a velocity is multiplied by when it moves with the `other` share from now on: what
        it has yet to deliver, m / (1 - m) times itself (m times that with Nesterov), stays."""
        if share == other or not 0 < self.momentum < 1:
            return 1.0
        now, then = self.with_lag(share).momentum, self.with_lag(other).momentum
        return share / other * (now / then if self.nesterov else 1.0)

    def rate(self, first: bool) -> float:
        """What a gradient is multiplied by; SGD does not dampen the first one."""
        return self.gain * (1.0 if first else 1 - self.dampening)

    @property
    def sent_share(self) -> float:
        """Of the velocity; with Nesterov the direction is g + m u."""
        return self.momentum if self.nesterov else 1.0


class NoMemory:
    """The memory of unbiased compressors, and the contract of all memories. It remembers nothing:
    an unsent part is lost. A residual that another memory has left goes with the next dense step.

    A `parameter` may stand for several parameters: their flat tensors lie together and move alike.
    `nonfinite`: the gradient was not finite, or the parameter is skipped. Then the gradient is
    zeros, and nothing must move. On a device it is a tensor, which the host does not read.
    """

    name = "none"
    keeps: tuple[str, ...] = ()
    """The tensors of a parameter that it keeps: fields of `ModelParameter`."""
    masking = inf
    """Momentum factor masking: the velocity of what was sent is cleared from this CF on."""

    def __init__(self, maybe_unused: Callable[[], bool], handover: Handover | None = None) -> None:
        """maybe_unused: a step may leave a parameter unused on all ranks. handover: what is done in
        the optimizers' place; None: nothing."""
        self.maybe_unused = maybe_unused
        self.handover = Handover() if handover is None else handover

    def open(
        self, parameter: ModelParameter, grad: Tensor, cf: float, nonfinite: Flag = False
    ) -> Tensor | None:
        """Begin a step at `cf`, compressed. Returns what is yet to be added to the residual, to
        make it the error-fed gradient: whoever compresses does so."""
        return None

    def flush_into(self, parameter: ModelParameter, grad: Tensor, nonfinite: Flag = False) -> None:
        """Add to `grad`, in place, all that this memory holds: what a dense step sends."""
        if parameter.filled:
            assert parameter.residual is not None
            add_if(nonfinite ^ True, grad, parameter.residual)

    def received(
        self, parameter: ModelParameter, mean: Tensor, cf: float, nonfinite: Flag = False
    ) -> None:
        """Turn the ranks' mean of what was sent, in place, into what the optimizer gets."""

    def forget(self, parameters: Sequence[ModelParameter]) -> None:
        """Drop what is kept beside residual and velocity."""

    def is_empty(self, parameter: ModelParameter) -> bool:
        """A dense step adds nothing to the gradient of this parameter."""
        return not parameter.filled

    def skipped(
        self, parameters: Sequence[ModelParameter], grad_energies: Sequence[Scalar]
    ) -> Sequence[Flag]:
        """Which of these parameters send nothing this step and keep their memory to themselves:
        where some may be unused, those with a gradient of exactly zero. DDP throws away what
        arrives for a globally unused parameter, and such a one must not spend its residual.

        grad_energies: the squared norm of each gradient; none unless `maybe_unused`."""
        if not self.maybe_unused():
            return [False] * len(parameters)
        return [energy == 0.0 for energy in grad_energies]

    def update_key(self, parameter: ModelParameter) -> tuple[object, ...]:
        """All state that `open` depends on: parameters with equal keys are updated as one."""
        return (parameter.filled,)

    def momentum(self, parameter: ModelParameter, cf: float) -> tuple[MomentumRule, float] | None:
        """How the velocity moves in a compressed step at a CF, and what that step multiplies it by
        before. None without momentum."""
        return None

    def state_dict(self, parameter: ModelParameter) -> dict[str, Any]:
        return {}

    def load_state_dict(self, parameter: ModelParameter, state: Mapping[str, Any]) -> None:
        return


class Residual(NoMemory):
    """Plain error feedback: one residual a parameter."""

    name = "residual"
    keeps: tuple[str, ...] = ("residual",)

    def open(
        self, parameter: ModelParameter, grad: Tensor, cf: float, nonfinite: Flag = False
    ) -> Tensor | None:
        parameter.open_residual()
        return grad

    def state_dict(self, parameter: ModelParameter) -> dict[str, Any]:
        if not parameter.filled:
            return {}
        assert parameter.residual is not None
        return {"residual": parameter.residual.clone()}

    def load_state_dict(self, parameter: ModelParameter, state: Mapping[str, Any]) -> None:
        saved = state.get("residual")
        parameter.filled = saved is not None
        if saved is not None:
            parameter.open_residual().copy_(saved)
