"""Which memory a model has, from attaching to detaching: what becomes of what is not sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import inf, log10
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

from adaptive.config import MEMORIES
from adaptive.exchange.collectives import Exchange
from adaptive.memory.error_feedback import NoMemory, Residual
from adaptive.memory.momentum import MomentumMemory, MomentumRule, SGDMomentum
from adaptive.memory.updates import OPTIMIZERS, UpdateMemory, steps_for
from adaptive.parameters import ModelParameters
from adaptive.step_watch import StepWatch
from adaptive.wrappers import advice
from compressors import Compressor
from compressors.kernels.blocks import is_host
from compressors.quantizers import Quantizer
from policies import DENSE, checks


class MemoryChoice:
    """What the user asked for, to be settled once the optimizer is known. ValueError, naming the
    argument, for settings that do not go together."""

    def __init__(
        self,
        base: Compressor,
        rungs: Collection[float],
        memory: Any,
        momentum: Any,
        momentum_lag: Any,
        masking: Any,
        clip_norm: float | None = None,
    ) -> None:
        """rungs: CFs below cf_range, of quantizers. clip_norm: checked already."""
        self.kind = checks.one_of("memory", memory, MEMORIES)
        self._base = base
        own = base.forms if isinstance(base, Quantizer) else ()
        self._keeps_most = {DENSE, *rungs, *(cf for cf in own if cf <= 4)}
        if momentum is not None and not 0 < checks.real("momentum", momentum) < 1:
            raise ValueError(f"momentum={momentum!r}: must be a number in (0, 1) or None")
        self._momentum: float | None = momentum
        self._lag = None if momentum_lag is None else checks.fraction("momentum_lag", momentum_lag)
        self._lag_of_base(2.0)  # a compressor of the user's own is found out here
        if isinstance(masking, bool):
            self._masking = 1.0 if masking else inf
        else:  # the smallest CF
            self._masking = (
                base.masking if masking is None else checks.real("masking", masking, least=1)
            )
        if self.kind in ("residual", "momentum", "updates") and not base.error_feedback:
            raise ValueError(
                f"memory must be 'none' or 'auto' for base {base.shown!r} as configured: it is "
                f"unbiased, and feeding its scaled-up error back diverges; got {self.kind!r}"
            )
        self._for_momentum = {
            "momentum_lag": momentum_lag,
            "masking": None if masking is False else masking,
        }
        if self.kind in ("residual", "none", "updates") or not base.error_feedback:
            unbiased = "" if base.error_feedback else f" with base={base.shown!r}"
            self.refuse_momentum_settings(f"memory={self.kind!r}{unbiased}")
        if masking and type(base).indices is Compressor.indices:
            raise ValueError(
                f"masking={masking!r}: needs a base that keeps some elements and not others, whose "
                f"velocities it clears; got base={base.shown!r}"
            )
        self._clip_norm = clip_norm
        if self.kind == "updates":
            self._refuse_clipping()
        if self._momentum is not None and self.kind != "momentum":
            raise ValueError(
                f"momentum is for memory='momentum', got momentum={self._momentum!r} with "
                f"memory={self.kind!r}"
            )

    def refuse_momentum_settings(self, got: str) -> None:
        """ValueError if something was set that only momentum correction looks at."""
        for name, value in self._for_momentum.items():
            if value is not None:
                raise ValueError(
                    f"{name}={value!r}: needs momentum correction, so memory 'momentum' or 'auto', "
                    f"and an SGD with momentum handed over (or momentum=); got {got}"
                )

    def _refuse_clipping(self) -> None:
        if self._clip_norm is not None:
            raise ValueError(
                f"clip_norm must be None (clip p.grad instead) where updates are compressed: with "
                f"memory 'updates', or 'auto' and an Adam or one like it handed over; got "
                f"{self._clip_norm!r}"
            )

    def make(
        self,
        optimizer: Optimizer | None,
        parameters: ModelParameters,
        ranks: int,
        clipped: Callable[[], Tensor | None],
    ) -> NoMemory:
        """The memory, which takes the optimizer's momentum over if it can. ValueError for one that
        does not go with what was asked for. ranks, clipped: see `UpdateMemory`."""
        made = self._make(optimizer, parameters, ranks, clipped)
        if not isinstance(made, MomentumMemory):
            by = type(optimizer).__name__ if optimizer is not None else None
            self.refuse_momentum_settings(f"memory {made.name!r} for optimizer {by}")
        if isinstance(made, UpdateMemory):
            self._refuse_clipping()
        return made

    def _make(
        self,
        optimizer: Optimizer | None,
        parameters: ModelParameters,
        ranks: int,
        clipped: Callable[[], Tensor | None],
    ) -> NoMemory:
        maybe_unused, momentum = parameters.maybe_unused, self._momentum
        if self.kind == "none" or not self._base.error_feedback:
            return NoMemory(maybe_unused)
        if self.kind == "residual":
            return Residual(maybe_unused)
        if self.kind in ("auto", "updates") and steps_for(optimizer):
            assert optimizer is not None
            return UpdateMemory(optimizer, parameters, ranks, self._update_lag_at, clipped)
        if self.kind == "updates":
            raise ValueError(
                f"memory='updates' needs an optimizer of torch's that makes the update of each "
                f"element by itself, attach(model, optimizer=...): "
                f"{', '.join(kind.__name__ for kind in OPTIMIZERS)}, not differentiable; got "
                f"{type(optimizer).__name__ if optimizer else None}"
            )
        if isinstance(optimizer, SGD) and any(g["momentum"] != 0 for g in optimizer.param_groups):
            if momentum is None:
                return SGDMomentum(optimizer, parameters, self._masking, self._lag_at)
            raise ValueError(
                f"momentum must be None when an optimizer with momentum is handed over: its own "
                f"setting is used; got momentum={momentum!r}"
            )
        if self.kind == "auto":
            return Residual(maybe_unused)
        if momentum is not None:
            rule = MomentumRule(momentum)
            return MomentumMemory(rule, self._masking, self._lag_at, maybe_unused)
        raise ValueError(
            "momentum must be given for memory='momentum' when no SGD optimizer with "
            "momentum is handed over: AdaptiveCompressor(memory='momentum', momentum=0.9) "
            "or attach(model, optimizer=optimizer)"
        )

    def _lag_at(self, cf: float) -> float:
        """Share of the momentum's lag in a step at `cf`: all of it where next to nothing waits."""
        return 1.0 if cf in self._keeps_most else self._lag_of_base(cf)

    def _lag_of_base(self, cf: float) -> float:
        if self._lag is not None:
            return self._lag
        return checks.fraction(
            f"the compressor's momentum_lag({cf:g})", self._base.momentum_lag(cf)
        )

    def _update_lag_at(self, cf: float) -> float:
        """The same in the stead of an optimizer that divides by a second moment: what waits makes
        momentum superfluous from CF 10 on (docs/defaults.md)."""
        if cf in self._keeps_most:
            return 1.0
        return max(0.0, 1 - log10(cf))

    def __str__(self) -> str:
        settings = f"momentum={self._momentum}, momentum_lag={self._lag}, masking={self._masking}"
        return f"memory={self.kind!r}, {settings}"


class ModelMemory:
    """The memory of one model. now: the one in use."""

    def __init__(
        self, choice: MemoryChoice, parameters: ModelParameters, ranks: int, watch: StepWatch
    ) -> None:
        self.now = NoMemory(parameters.maybe_unused)
        self._choice = choice
        self._parameters = parameters
        self._ranks = ranks
        self._watch = watch

    def choose(self, optimizer: Optimizer | None) -> None:
        """Now that the optimizer is known; its momentum is taken over. ValueError if it does not go
        with what was asked for."""
        watch = self._watch
        self.now = self._choice.make(
            optimizer, self._parameters, self._ranks, lambda: watch.clipped
        )
        for parameter in self._parameters.values():
            self.now.take_over(parameter)

    def warning(self, optimizer: Optimizer | None) -> str:
        """What whoever handed this optimizer over should know; nothing if that is as expected."""
        known = isinstance(optimizer, SGD) or isinstance(self.now, UpdateMemory)
        if optimizer is None or known or not self.now.keeps:
            return ""
        better = ", ".join(kind.__name__ for kind in (SGD, *OPTIMIZERS))
        return (
            f"optimizer {type(optimizer).__name__}, memory {self.now.name!r}: gradients get plain "
            f"error feedback. What is sent late comes in bursts, which an optimizer that divides "
            f"by the gradients' own size takes for noise: expect a loss of quality at every CF. "
            f"With memory='auto' this is not so for torch's {better}. {advice(optimizer)}".rstrip()
        )

    def adopt(self, other: ModelMemory) -> None:
        """Take over what another, detached compressor on the same model still holds."""
        for p, parameter in self._parameters.items():
            theirs = other._parameters.get(p)
            if theirs is not None and theirs.filled and theirs.residual is not None:
                parameter.open_residual().copy_(theirs.residual)
                theirs.residual, theirs.filled = None, False
                self.now.take_over(parameter)

    def release(self, exchange: Exchange | None = None) -> None:
        """Only the residual stays: the optimizer does all its work itself again. What velocities
        have yet to deliver goes to it (a collective with momentum), without `exchange` to the
        residual."""
        self.now.hand_back(exchange)
        for parameter in self._parameters.values():
            parameter.velocity, parameter.lag = None, 1.0
            parameter.started = parameter.stepped = False
        plain = Residual if self.now.keeps else NoMemory
        self.now = plain(self._parameters.maybe_unused)

    def emptied(self) -> None:
        """The ranks have agreed that a dense step has sent all that residuals held: news on a
        device only, and where no parameter may have kept its own to itself."""
        if is_host(self._parameters.device) or self._parameters.maybe_unused():
            return
        for parameter in self._parameters.values():
            parameter.filled = False

    def discard(self) -> None:
        self.now.discard()
        for parameter in self._parameters.values():
            parameter.filled = parameter.started = False
            parameter.velocity = None

    def holds_something(self) -> bool:
        return any(parameter.filled or parameter.started for parameter in self._parameters.values())

    def state_dict(self) -> dict[str, Any]:
        """By parameter name, of those that have something."""
        parameters = self._parameters.values()
        states = {parameter.name: self.now.state_dict(parameter) for parameter in parameters}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for parameter in self._parameters.values():
            self.now.load_state_dict(parameter, state.get(parameter.name, {}))
