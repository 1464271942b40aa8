"""Which memory to use: what becomes of what is not sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from torch.optim import SGD, Optimizer

from adaptive.handover import MomentumHandover, has_momentum
from adaptive.momentum import MomentumMemory, MomentumRule
from adaptive.options import MEMORIES, check_choice, check_masking, check_momentum, check_share
from adaptive.residual import NoMemory, Residual, Slot
from compressors import Compressor
from policies import DENSE


class MemoryChoice:
    """What the user asked for, to be settled once the optimizer is known.

    ValueError, naming the argument, for settings that do not go together.
    """

    def __init__(
        self, base: Compressor, memory: Any, momentum: Any, momentum_lag: Any, masking: Any
    ) -> None:
        self.kind = check_choice("memory", memory, MEMORIES)
        self._momentum = check_momentum(momentum)
        self._own_lag = base.momentum_lag
        self._lag = None if momentum_lag is None else check_share("momentum_lag", momentum_lag)
        self._lag_at(2.0)  # a compressor of the user's own is found out here
        self._masking = check_masking(masking, base.masking)
        self._feedback = base.error_feedback
        if self.kind in ("residual", "momentum") and not base.error_feedback:
            raise ValueError(
                f"memory must be 'none' or 'auto' for base {base.name!r} as configured: it is "
                f"unbiased, and feeding its scaled-up error back diverges; got {self.kind!r}"
            )
        if self._momentum is not None and self.kind != "momentum":
            raise ValueError(
                f"momentum is for memory='momentum', got momentum={self._momentum!r} with "
                f"memory={self.kind!r}"
            )

    def takes_over(self, optimizer: Optimizer | None) -> TypeGuard[SGD]:
        """True if this optimizer's momentum moves into the memory."""
        wanted = self.kind == "momentum" or (self.kind == "auto" and self._feedback)
        if not wanted or not has_momentum(optimizer):
            return False
        if self._momentum is not None:
            raise ValueError(
                f"momentum must be None when an optimizer with momentum is handed over: its own "
                f"setting is used; got momentum={self._momentum!r}"
            )
        return True

    def make(self, handover: MomentumHandover | None, maybe_unused: Callable[[], bool]) -> NoMemory:
        """The memory; ValueError for memory='momentum' when nothing tells the momentum."""
        if self.kind == "none" or not self._feedback:
            return NoMemory(maybe_unused)
        if handover is not None:
            return self._with_velocity(handover.rule, handover.has_buffer, maybe_unused)
        if self.kind != "momentum":
            return Residual(maybe_unused)
        if self._momentum is None:
            raise ValueError(
                "momentum must be given for memory='momentum' when no SGD optimizer with "
                "momentum is handed over: AdaptiveCompressor(memory='momentum', momentum=0.9) "
                "or attach(model, optimizer=optimizer)"
            )
        rule = MomentumRule(self._momentum)
        return self._with_velocity(lambda _: rule, lambda _: False, maybe_unused)

    def _with_velocity(
        self,
        rule: Callable[[Slot], MomentumRule],
        has_buffer: Callable[[Slot], bool],
        maybe_unused: Callable[[], bool],
    ) -> MomentumMemory:
        return MomentumMemory(rule, has_buffer, self._masking, self._lag_at, maybe_unused)

    def _lag_at(self, cf: float) -> float:
        """Nothing waits at CF 1."""
        if cf == DENSE:
            return 1.0
        if self._lag is not None:
            return self._lag
        return check_share(f"momentum_lag({cf:g}) of the compressor", self._own_lag(cf))

    def __str__(self) -> str:
        return (
            f"memory={self.kind!r}, momentum={self._momentum}, momentum_lag={self._lag}, "
            f"masking={self._masking}"
        )
