"""Error feedback: the residual, the part that was not sent, is added to the next gradient.

With residual r and gradient g, the error-fed gradient is a = g + r. A payload c of a is sent, and
the new residual is r' = a - c (Karimireddy and others 2019). In a compressed step the gradient is
added to the residual (`open`). In a dense step the residual is added to the gradient, and the sum
is sent (`flush_into`). If some rank's gradient is not finite, nothing is sent: the residual of that
rank does not change, and those of the other ranks hold r + g. On a device the host counts a
residual as not empty until the ranks have agreed that a dense step has sent it.
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
    """The rule by which a velocity u moves: u = momentum * u + (1 - dampening) * gain * g. torch's
    SGD has gain 1."""

    momentum: float
    dampening: float = 0.0
    nesterov: bool = False
    gain: float = 1.0

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> MomentumRule:
        """The rule of a parameter group of an SGD, in Python's own numbers (as `rate_of`)."""
        return cls(float(group["momentum"]), float(group["dampening"]), group["nesterov"])

    @lru_cache(maxsize=64)  # noqa: B019  # asked for every parameter in every step
    def with_share(self, share: float) -> MomentumRule:
        """The rule with this momentum share: the mean delay of a gradient in the velocity is this
        share of m / (1 - m) steps. The sum of a gradient's contributions stays the same."""
        m = self.momentum
        if share == 1 or not 0 < m < 1:
            return self
        delay = share * m / (1 - m)
        return self._replace(momentum=delay / (1 + delay), gain=1 / (1 + delay) / (1 - m))

    def velocity_scale(self, share: float, other: float) -> float:
        """The factor for a velocity whose momentum share changes from `share` to `other`. It keeps
        the pending momentum, which is m / (1 - m) times the velocity (with Nesterov m times that).
        """
        if share == other or not 0 < self.momentum < 1:
            return 1.0
        now, then = self.with_share(share).momentum, self.with_share(other).momentum
        return share / other * (now / then if self.nesterov else 1.0)

    def rate(self, first: bool) -> float:
        """The factor of a gradient in the velocity. first: the first gradient, which SGD does not
        dampen."""
        return self.gain * (1.0 if first else 1 - self.dampening)

    @property
    def sent_share(self) -> float:
        """The factor of the velocity u in SGD's step: 1; with Nesterov m, because Nesterov's step
        is g + m u."""
        return self.momentum if self.nesterov else 1.0


class NoMemory:
    """The memory of unbiased compressors, and the contract of all memories. This one keeps nothing:
    compression errors are lost. The next dense step sends a residual that another memory has left.

    A `parameter` may be the joint parameter of a run of parameters (bucket_memory.py).
    `nonfinite`: the gradient was not finite, or the parameter is skipped. Then `grad` is zero, and
    no state may change. On a device the flag is a tensor, which the host does not read.
    """

    name = "none"
    keeps: tuple[str, ...] = ()
    """Names of the tensors that the memory keeps of a parameter: fields of `ModelParameter`."""
    masking = inf
    """Momentum factor masking: the smallest CF at which velocities of sent elements are cleared."""

    def __init__(self, maybe_unused: Callable[[], bool], handover: Handover | None = None) -> None:
        """maybe_unused: returns whether a step may leave a parameter unused on all ranks. handover:
        does a part of the optimizers' work; None: it does nothing."""
        self.maybe_unused = maybe_unused
        self.handover = Handover() if handover is None else handover

    def open(
        self, parameter: ModelParameter, grad: Tensor, cf: float, nonfinite: Flag = False
    ) -> Tensor | None:
        """Begin a compressed step at `cf`. Returns the tensor that the caller must add to the
        residual to get the error-fed gradient; None: the residual holds the error-fed gradient."""
        return None

    def flush_into(self, parameter: ModelParameter, grad: Tensor, nonfinite: Flag = False) -> None:
        """Begin a dense step: add the whole memory to `grad`, in place."""
        if parameter.unsent is not None:
            add_if(nonfinite ^ True, grad, parameter.unsent)

    def received(
        self, parameter: ModelParameter, mean: Tensor, cf: float, nonfinite: Flag = False
    ) -> None:
        """Turn the ranks' mean, in place, into the gradient that the optimizer gets."""

    def forget(self, parameters: Sequence[ModelParameter]) -> None:
        """Drop all state of these parameters except residual and velocity."""

    def is_empty(self, parameter: ModelParameter) -> bool:
        """Whether a dense step changes neither the gradient of this parameter nor its mean."""
        return not parameter.has_residual

    def skipped(
        self, parameters: Sequence[ModelParameter], grad_energies: Sequence[Scalar]
    ) -> Mapping[ModelParameter, Flag]:
        """Which of these parameters are skipped: they send nothing in this step, and their memory
        does not change. If some parameters may be unused, these are the parameters whose gradient
        is exactly zero: DDP drops the mean of a globally unused parameter, and with it a residual
        that was sent. A parameter that is not in the mapping is not skipped.

        grad_energies: the squared norm of each gradient; empty unless `maybe_unused`."""
        if not self.maybe_unused():
            return {}
        flags = zip(parameters, (energy == 0.0 for energy in grad_energies), strict=True)
        return {parameter: flag for parameter, flag in flags if flag is not False}

    def update_keys(self, parameters: Sequence[ModelParameter]) -> list[Any]:
        """For each parameter, all state that `open` depends on. Neighbouring parameters with equal
        keys form one run."""
        return [parameter.has_residual for parameter in parameters]

    def momentum(self, parameter: ModelParameter, cf: float) -> tuple[MomentumRule, float] | None:
        """(rule, scale): in a compressed step at `cf` the velocity is multiplied by `scale`, and
        then moves by the rule. None without momentum."""
        return None

    def state_dict(self, parameter: ModelParameter) -> dict[str, Any]:
        return {}

    def load_state_dict(self, parameter: ModelParameter, state: Mapping[str, Any]) -> None:
        return


class Residual(NoMemory):
    """Plain error feedback: one residual for each parameter."""

    name = "residual"
    keeps: tuple[str, ...] = ("residual",)

    def open(
        self, parameter: ModelParameter, grad: Tensor, cf: float, nonfinite: Flag = False
    ) -> Tensor | None:
        parameter.open_residual()
        return grad

    def state_dict(self, parameter: ModelParameter) -> dict[str, Any]:
        return {} if parameter.unsent is None else {"residual": parameter.unsent.clone()}

    def load_state_dict(self, parameter: ModelParameter, state: Mapping[str, Any]) -> None:
        parameter.has_residual = "residual" in state
        if parameter.has_residual:
            parameter.open_residual().copy_(state["residual"])
