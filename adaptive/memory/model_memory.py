"""Which memory a model has, from attaching to detaching: what becomes of what is not sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from torch.optim import SGD, Optimizer

from adaptive.config import MEMORIES, masking_cf, momentum_or_none
from adaptive.exchange.collectives import Exchange
from adaptive.memory.error_feedback import NoMemory, Residual
from adaptive.memory.handover import MomentumHandover, has_momentum
from adaptive.memory.momentum import MomentumMemory, MomentumRule
from adaptive.parameters import ModelParameter, ModelParameters
from compressors import Compressor
from compressors.kernels import is_host
from policies import DENSE, checks


class MemoryChoice:
    """What the user asked for, to be settled once the optimizer is known.

    ValueError, naming the argument, for settings that do not go together.
    """

    def __init__(
        self, base: Compressor, memory: Any, momentum: Any, momentum_lag: Any, masking: Any
    ) -> None:
        self.kind = checks.one_of("memory", memory, MEMORIES)
        self._momentum = momentum_or_none(momentum)
        self._own_lag = base.momentum_lag
        self._lag = None if momentum_lag is None else checks.fraction("momentum_lag", momentum_lag)
        self._lag_at(2.0)  # a compressor of the user's own is found out here
        self._masking = masking_cf(masking, base.masking)
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
        rule: Callable[[ModelParameter], MomentumRule],
        has_buffer: Callable[[ModelParameter], bool],
        maybe_unused: Callable[[], bool],
    ) -> MomentumMemory:
        return MomentumMemory(rule, has_buffer, self._masking, self._lag_at, maybe_unused)

    def _lag_at(self, cf: float) -> float:
        """Nothing waits at CF 1."""
        if cf == DENSE:
            return 1.0
        if self._lag is not None:
            return self._lag
        return checks.fraction(f"the compressor's momentum_lag({cf:g})", self._own_lag(cf))

    def __str__(self) -> str:
        return (
            f"memory={self.kind!r}, momentum={self._momentum}, momentum_lag={self._lag}, "
            f"masking={self._masking}"
        )


class ModelMemory:
    """The memory of one model, and the optimizer whose momentum it has taken over.

    now: the memory in use.
    """

    def __init__(self, choice: MemoryChoice, parameters: ModelParameters) -> None:
        self.now = NoMemory(parameters.maybe_unused)
        self._choice = choice
        self._parameters = parameters
        self._handover: MomentumHandover | None = None

    def choose(self, optimizer: Optimizer | None) -> None:
        """Now that the optimizer is known; its momentum is taken over. ValueError if it does not go
        with what was asked for."""
        if self._choice.takes_over(optimizer):
            self._handover = MomentumHandover(optimizer, self._parameters, self._parameters.own())
            for parameter in self._parameters.values():
                self._handover.to_velocity(parameter)
        self.now = self._choice.make(self._handover, self._parameters.maybe_unused)

    def warning(self, optimizer: Optimizer | None) -> str:
        """What whoever handed this optimizer over should know; nothing if that is as expected."""
        if optimizer is None or isinstance(optimizer, SGD) or not self.now.keeps_residual:
            return ""
        return (
            f"optimizer {type(optimizer).__name__} is not torch's SGD: gradients are compressed "
            f"with plain error feedback. What is sent late comes in bursts, and an optimizer that "
            f"divides by the gradients' own size (Adam, AdamW) takes them for noise: expect a loss "
            f"of quality at every CF (on a small GPT 18% of perplexity at CF 10)"
        )

    def adopt(self, other: ModelMemory) -> None:
        """Take over what another, detached compressor on the same model still holds."""
        for p, parameter in self._parameters.items():
            theirs = other._parameters.get(p)
            if theirs is not None and theirs.filled:
                parameter.residual, parameter.filled = theirs.residual, True
                theirs.residual, theirs.filled = None, False
                theirs.places.clear()
                if self._handover is not None:
                    self._handover.to_velocity(parameter)

    def release(self, exchange: Exchange) -> None:
        """Velocities go back to the optimizer, which is let go (a collective with momentum); the
        residual stays."""
        if self._handover is not None:
            self._handover.give_back(exchange)
            self.unhook()
        self._let_go()

    @property
    def may_fall_back(self) -> bool:
        """An optimizer is there whose momentum was taken over."""
        return self._handover is not None

    def fall_back(self) -> None:
        """Plain error feedback from now on: the optimizer applies its momentum itself, and what
        velocities have yet to deliver waits in the residual."""
        assert self._handover is not None
        for parameter in self._parameters.values():
            self._handover.to_gradient(parameter)
        self.unhook()
        self._forget_velocities()
        self.now = Residual(self._parameters.maybe_unused)

    def unchoose(self) -> None:
        """As before `choose`, since when nothing was compressed; to be called after its error,
        too."""
        if self.may_fall_back:
            self.fall_back()
        self._let_go()

    def _let_go(self) -> None:
        """Only the residual stays."""
        self._forget_velocities()
        keeps = Residual if self.now.keeps_residual else NoMemory
        self.now = keeps(self._parameters.maybe_unused)

    def emptied(self) -> None:
        """The ranks have agreed that a dense step has sent all that residuals held: news on a
        device only, and where no parameter may have kept its own to itself."""
        if is_host(self._parameters.device) or self._parameters.maybe_unused():
            return
        for parameter in self._parameters.values():
            parameter.filled = False

    def discard(self) -> None:
        """Nothing is held any more."""
        for parameter in self._parameters.values():
            parameter.filled = False
            parameter.velocity, parameter.started, parameter.fresh = None, False, False

    def _forget_velocities(self) -> None:
        for parameter in self._parameters.values():
            parameter.velocity, parameter.lag = None, 1.0
            parameter.started = parameter.fresh = parameter.stepped = False
            parameter.places.pop("velocity", None)

    def unhook(self) -> None:
        """The optimizer applies its own momentum again."""
        if self._handover is not None:
            self._handover.unhook()
            self._handover = None

    def state_dict(self) -> dict[str, Any]:
        """By parameter name, of those that have something."""
        states = {
            parameter.name: self.now.state_dict(parameter)
            for parameter in self._parameters.values()
        }
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for parameter in self._parameters.values():
            self.now.load_state_dict(parameter, state.get(parameter.name, {}))
