"""Error feedback: what was not sent in one step is added to the gradient of the next.

r' = a - c with a = g + r and c what was *sent* (Karimireddy and others 2019).
There is one memory, keyed by parameter. It changes in two stages. While the hook runs, the gradient
is accumulated; once the payloads of all ranks are there and finite, what was sent is taken off
(`settle`). If any rank's gradient was not finite, the accumulation is undone instead, so that the
memory is as it was before the step.

On a device nobody waits to know whether a gradient was finite: what depends on it is a `Flag`, and
undoing is done, or not, by the device itself. There a residual counts as filled until the ranks
have agreed that a dense step has emptied it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from adaptive.parameters import ModelParameter
from compressors.kernels.blocks import Flag, Scalar, add_if

if TYPE_CHECKING:
    from adaptive.memory.momentum import MomentumRule


class Addition(NamedTuple):
    """The error-fed gradient a = target + addend; whoever compresses adds it in place.

    addend: None if `target` holds it all."""

    target: Tensor
    addend: Tensor | None


class NoMemory:
    """Nothing is remembered: what is not sent is lost (for unbiased compressors). A residual that
    another memory has left behind goes with the next dense step.

    maybe_unused: a parameter may be unused on all ranks in a step (find_unused_parameters).
    """

    name = "none"
    keeps_residual = False
    keeps_velocity = False

    def __init__(self, maybe_unused: Callable[[], bool]) -> None:
        self._maybe_unused = maybe_unused

    def holds(self, parameters: Iterable[ModelParameter]) -> bool:
        """Something is remembered of earlier steps."""
        return any(parameter.filled or parameter.velocity is not None for parameter in parameters)

    def open(
        self, parameter: ModelParameter, grad: Tensor, cf: float, poisoned: Flag = False
    ) -> Addition:
        """What a step at `cf`, compressed, has to compress. poisoned: the bucket is, and `grad`
        zero, which a device finds out as it goes: the memory must not move."""
        return Addition(grad, None)

    def undo_open(self, parameter: ModelParameter, grad: Tensor, flag: Flag) -> None:
        """Take back what `open` and the addition did to the memory (to rounding), if the flag is
        set."""

    def remainder(self, parameter: ModelParameter) -> Tensor | None:
        """Where the error-fed gradient is (flat), for what is sent to be taken off; None if what
        is not sent is lost."""
        return None

    def rules(self, parameter: ModelParameter, cfs: Sequence[float]) -> Sequence[MomentumRule]:
        """How the velocity moves in a compressed step at each of the CFs; none without one."""
        return ()

    def entering(self, parameter: ModelParameter, cfs: Sequence[float]) -> Sequence[float]:
        """What a compressed step at each of the CFs multiplies the velocity by before it moves."""
        return [1.0] * len(cfs)

    def masks(self, cf: float) -> bool:
        """The velocity of what is sent at this CF is cleared."""
        return False

    def settle(self, parameter: ModelParameter) -> None:
        """What was sent has been taken off the remainder."""

    def fold(self, parameter: ModelParameter, grad: Tensor, poisoned: Flag = False) -> None:
        """Turn `grad`, in place, into all that a dense step has to send. poisoned: see `open`;
        nothing of the memory is sent then."""
        if parameter.filled:
            assert parameter.residual is not None
            add_if(poisoned ^ True, grad, parameter.residual)

    def undo_fold(self, parameter: ModelParameter, flag: Flag) -> None:
        """Take back what `fold` did to the memory, if the flag is set."""

    def end_dense(self, parameter: ModelParameter, poisoned: Flag) -> None:
        """What `fold` made was sent, and nothing remains; unless some rank's was not finite."""
        if not isinstance(poisoned, Tensor):
            parameter.filled = parameter.filled and poisoned
        elif parameter.filled:
            assert parameter.residual is not None
            parameter.residual.masked_fill_(poisoned ^ True, 0.0)

    def alike(self, parameters: Sequence[ModelParameter]) -> bool:
        """`open` does the same for all of these, so that it can be asked once for all."""
        return self.keeps_residual

    def idle(self, parameter: ModelParameter) -> bool:
        """True if a dense step has nothing to fold in, now and for this parameter."""
        return not parameter.filled

    def skips(self, parameter: ModelParameter, grad_energy: Scalar) -> Flag:
        """Whether this parameter sends nothing this step and keeps its memory to itself.

        DDP throws away what arrives for a globally unused parameter, so where there may be such, a
        slice that is exactly zero must not spend its residual."""
        return grad_energy == 0.0 if self._maybe_unused() else False

    def state_dict(self, parameter: ModelParameter) -> dict[str, Any]:
        return {}

    def load_state_dict(self, parameter: ModelParameter, state: Mapping[str, Any]) -> None:
        return


class Residual(NoMemory):
    """Plain error feedback: one residual a parameter."""

    name = "residual"
    keeps_residual = True

    def open(
        self, parameter: ModelParameter, grad: Tensor, cf: float, poisoned: Flag = False
    ) -> Addition:
        return Addition(parameter.open_residual(), grad)

    def undo_open(self, parameter: ModelParameter, grad: Tensor, flag: Flag) -> None:
        assert parameter.residual is not None
        add_if(flag, parameter.residual, grad, -1.0)

    def remainder(self, parameter: ModelParameter) -> Tensor | None:
        return parameter.open_residual()

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
