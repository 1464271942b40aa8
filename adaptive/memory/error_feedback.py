"""Error feedback: what was not sent in one step is added to the gradient of the next.

r' = a - c, where a = g + r, and c is what was *sent* (Karimireddy and others 2019). The hook
accumulates the gradient: `open` in a compressed step, `fold` in a dense one. After the exchange the
sent part is taken off. If any rank's gradient was not finite, nothing was sent: that rank has
accumulated nothing, and the others' residuals go with later steps. On a device a residual counts
as filled until the ranks have agreed that a dense step has emptied it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from adaptive.exchange.collectives import Exchange
from adaptive.memory.momentum_rule import MomentumRule
from adaptive.parameters import ModelParameter
from compressors.kernels.blocks import Flag, Scalar, add_if
from policies.state import Stateful


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
    sends_updates = False
    """What is accumulated are updates, not gradients."""
    moments: Stateful | None = None
    """State of a memory that does a part of the optimizers' work; saved with a checkpoint."""
    rests = False
    """The optimizers do all their work themselves. A dense step adds nothing to the gradients."""

    def __init__(self, maybe_unused: Callable[[], bool]) -> None:
        """maybe_unused: a step may leave a parameter unused on all ranks."""
        self.maybe_unused = maybe_unused

    def open(
        self, parameter: ModelParameter, grad: Tensor, cf: float, nonfinite: Flag = False
    ) -> Tensor | None:
        """Begin a step at `cf`, compressed. Returns what is yet to be added to the residual, to
        make it the error-fed gradient: whoever compresses does so."""
        return None

    def fold(self, parameter: ModelParameter, grad: Tensor, nonfinite: Flag = False) -> None:
        """Turn `grad`, in place, into all that a dense step has to send."""
        if parameter.filled:
            assert parameter.residual is not None
            add_if(nonfinite ^ True, grad, parameter.residual)

    def end_dense(self, parameter: ModelParameter, nonfinite: Flag) -> None:
        """What `fold` made was sent, and nothing remains, unless some rank's was nonfinite."""
        if not isinstance(nonfinite, Tensor):
            parameter.filled = parameter.filled and nonfinite
        elif parameter.filled:
            assert parameter.residual is not None
            parameter.residual.masked_fill_(nonfinite ^ True, 0.0)

    def preview(
        self, parameters: Sequence[ModelParameter], grads: Sequence[Tensor], strides: Sequence[int]
    ) -> Sequence[Tensor]:
        """The updates that would be made of samples of gradients, every stride-th element of each
        (flat), if updates are what is sent."""
        return grads

    def begin_step(self, exchange: Exchange, compressed: bool, may_rest: bool = True) -> None:
        """Called on all ranks before the first bucket of a step. Before a dense one the ranks agree
        on what it needs (a collective).

        may_rest: no foreign hook sends the step, it measures no CF, and no rank had a bad gradient
        in the step before."""

    def agree(self, exchange: Exchange) -> bool:
        """Between steps (a collective): what the ranks' optimizers keep becomes the same on all of
        them, and what waits for the optimizer's next step moves the parameters now. Returns whether
        there may have been something of either."""
        return False

    def before_step(
        self, optimizer: Optimizer, groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """An optimizer is to step by gradients that this memory has made, with these parameter
        groups. Returns groups to step with instead, or None."""
        return None

    def conclude(self) -> None:
        """Before a state is saved: what was to go with a dense step waits in the residuals."""

    def idle(self, parameter: ModelParameter) -> bool:
        """A dense step has nothing to fold in, now and for this parameter."""
        return not parameter.filled

    def skips_zeros(self) -> bool:
        """A parameter whose gradient is exactly zero sends nothing this step, and keeps its memory
        to itself. DDP throws away what arrives for a globally unused parameter, and such a one must
        not spend its residual."""
        return self.maybe_unused()

    def skipped(
        self, parameters: Sequence[ModelParameter], grad_energies: Sequence[Scalar]
    ) -> Sequence[Flag]:
        """Which of these parameters send nothing this step and keep their memory to themselves.

        grad_energies: the squared norm of each gradient; none unless `skips_zeros`."""
        if not self.skips_zeros():
            return [False] * len(parameters)
        return [energy == 0.0 for energy in grad_energies]

    def moves(self, parameter: ModelParameter) -> tuple[object, ...]:
        """What the next step depends on: parameters for which it is equal move alike."""
        return (parameter.filled,)

    def momentum(self, parameter: ModelParameter, cf: float) -> tuple[MomentumRule, float] | None:
        """How the velocity moves in a compressed step at a CF, and what that step multiplies it by
        before. None without momentum."""
        return None

    def masks(self, cf: float) -> bool:
        """The velocity of what is sent at this CF is cleared."""
        return False

    def hand_back(self, exchange: Exchange | None) -> None:
        """Make residuals ones of gradients, and let the optimizer do all its work itself again.
        What velocities have yet to deliver goes to it (a collective), or to the residuals."""

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
