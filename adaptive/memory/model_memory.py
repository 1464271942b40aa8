"""The memory of one model, from `attach` to `detach`, and its choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, log10
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from adaptive.memory.error_feedback import NoMemory, Residual
from adaptive.memory.handover import is_torchs_own, steps_as
from adaptive.memory.moments import is_adaptive
from adaptive.memory.momentum import (
    DenseSteps,
    MomentumMemory,
    MomentumShare,
    SGDHandover,
    ShorterMomentum,
)
from adaptive.memory.muon import is_muon
from adaptive.memory.options import Memory, Momentum
from adaptive.memory.own_moments import MomentState
from adaptive.memory.rule import MemoryRule, RuledMemory
from adaptive.memory.updates import UpdateHandover, UpdateMemory
from adaptive.model.parameters import ModelParameters
from adaptive.model.state import SavedPart, check_like, flat_tensors
from adaptive.model.wrappers import advice, steps_a_part
from adaptive.network.collectives import Exchange
from compressors import Compressor
from compressors.kernels.blocks import is_host
from policies.state import Stateful, require

KINDS = (NoMemory, Residual, MomentumMemory, UpdateMemory)

BESIDE_RESIDUAL = 0.5
"""Momentum share of an SGD beside plain error feedback / that of momentum correction."""


class MemoryChoice:
    """The user's choice of a memory, from which `make` builds the memory once the optimizer is
    known. ValueError, naming the argument, for settings that do not go together."""

    def __init__(self, base: Compressor, options: Memory) -> None:
        self.options, self.kind = options, options.kind  # kind: the memory's name, or "auto"
        self._base = base
        chosen = options if isinstance(options, Momentum) else Momentum()
        self._share = chosen.share
        if not base.at(inf).momentum_factor > 0:  # in a user's own compressor
            raise ValueError(
                f"the compressor's momentum_factor={base.at(inf).momentum_factor!r}: must be > 0"
            )
        self._masking = float(base.masking)  # the smallest CF
        if isinstance(chosen.masking, bool):
            self._masking = 1.0 if chosen.masking else inf
        elif chosen.masking is not None:
            self._masking = float(chosen.masking)
        if self.kind in ("residual", "momentum", "updates") and not base.feeds_back:
            raise ValueError(
                f"memory must be 'none' or 'auto' for base {base.name!r} as configured: it is "
                f"unbiased, and feeding its scaled-up error back diverges; got {self.kind!r}"
            )
        if chosen.masking and not base.at(inf).selects:
            raise ValueError(
                f"masking={chosen.masking!r}: needs a base that selects elements, because masking "
                f"clears the velocities of selected elements; got base={base.name!r}"
            )

    @property
    def tied_to_ranks(self) -> str:
        """Why a state cannot be loaded at another world size; "" if it can."""
        keeps = self.options.keeps if isinstance(self.options, MemoryRule) else ()
        return f"memory {self.kind!r} keeps {', '.join(keeps)} of each rank" if keeps else ""

    def make(
        self, optimizers: Sequence[Optimizer], parameters: ModelParameters, ranks: int
    ) -> NoMemory:
        """The memory, which takes the optimizer's momentum over if possible. ValueError for an
        optimizer that does not go with the user's choice. ranks: world size."""
        optimizer = next(iter(optimizers), None)
        maybe_unused = parameters.maybe_unused
        if isinstance(self.options, MemoryRule):
            return RuledMemory(self.options, maybe_unused)
        if self.kind == "none" or not self._base.feeds_back:
            return NoMemory(maybe_unused)
        if self.kind == "residual":
            return Residual(maybe_unused)
        plain = len(optimizers) == 1 and is_sgd(optimizer)
        if self.takes_updates(optimizers):
            by_updates = UpdateHandover(optimizers, parameters, ranks, self._update_share_at)
            return UpdateMemory(maybe_unused, by_updates)
        if self.kind == "updates":
            raise ValueError(
                f"memory='updates' needs an optimizer that steps by itself on each rank, "
                f"attach(model, optimizer=...): not LBFGS, ZeroRedundancyOptimizer or a "
                f"differentiable one; got {', '.join(type(o).__name__ for o in optimizers) or None}"
            )
        momenta = {group.get("momentum", 0) for o in optimizers for group in o.param_groups}
        if plain and momenta - {0} and isinstance(optimizer, SGD):
            handover = SGDHandover(optimizer, parameters)
            return MomentumMemory(handover, self._masking, self.share_at, maybe_unused)
        if self.kind == "auto":
            return Residual(maybe_unused)
        raise ValueError(
            f"memory='momentum' needs an SGD of torch's with momentum, attach(model, "
            f"optimizer=optimizer); got {type(optimizer).__name__ if optimizer else None}"
            f"{' without momentum' * plain}"
        )

    def takes_updates(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether ranks with these optimizers, and error feedback, exchange updates."""
        by_itself = bool(optimizers) and all(map(_steps_by_itself, optimizers))
        plain = len(optimizers) == 1 and is_sgd(next(iter(optimizers)))
        return by_itself and (self.kind == "updates" or (self.kind == "auto" and not plain))

    def share_at(self, cf: float) -> float:
        """The momentum share in a step at `cf`: 1 if next to nothing stays in the residual."""
        base = self._base.at(cf)
        if cf <= base.keeps_most_to:
            return 1.0
        if self._share is not None:
            return self._share
        return min(1.0, base.momentum_factor / cf ** (1 / 3))

    def share_beside_residual(self, cf: float) -> float:
        """The momentum share of an SGD that applies its momentum itself, beside plain error
        feedback: for scripts that clip `p.grad`. A shorter momentum makes single steps larger, and
        clipping bounds these (docs/research/defaults.md)."""
        share = self.share_at(cf)
        return share if share == 1 or self._share is not None else BESIDE_RESIDUAL * share

    def _update_share_at(self, cf: float) -> float:
        """The momentum share of an optimizer that divides by a second moment: 0 from CF 10 on,
        where the residual's delay replaces momentum (docs/research/defaults.md)."""
        return 1.0 if cf <= self._base.at(cf).keeps_most_to else max(0.0, 1 - log10(cf))

    def __str__(self) -> str:
        return f"memory={self.options!r}"


def is_sgd(optimizer: Optimizer | None) -> bool:
    """Whether this is torch's own SGD, or inherits its `step`."""
    return steps_as(optimizer, SGD)


def unmeasured(optimizers: Iterable[Optimizer]) -> str:
    """A warning about optimizers whose quality in parameter space was not measured; "" if none."""
    measured = (is_sgd, is_muon, is_adaptive)
    others = sorted(
        {type(each).__name__ for each in optimizers if not any(of(each) for of in measured)}
    )
    if not others:
        return ""
    return (
        f"optimizer {', '.join(others)}: each rank's steps are compressed with their momentum "
        f"and decay, uncorrected. The quality of such training was measured for torch's SGD, Muon, "
        f"Adam and others that divide by a second moment; compare with a dense run before a long "
        f"one"
    )


def _steps_by_itself(optimizer: Optimizer) -> bool:
    """Whether the optimizer can step with local gradients, and a step moves all its parameters."""
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    return not (differentiable or isinstance(optimizer, LBFGS) or steps_a_part(optimizer))


class ModelMemory:
    """The memory of one model, which may be replaced during training. now: the memory in use."""

    def __init__(self, choice: MemoryChoice, parameters: ModelParameters, ranks: int) -> None:
        self.now = NoMemory(parameters.maybe_unused)
        self._choice = choice
        self._parameters = parameters
        self._ranks = ranks
        self._gave_up = False  # momentum correction

    def choose(self, optimizers: Sequence[Optimizer], keeps_unsent: bool) -> None:
        """Make the memory, once the optimizers are known. ValueError if they do not go with the
        user's choice.

        optimizers: those whose work the memory may do a part of (an SGD's momentum, say).
        keeps_unsent: the unsent part stays in each rank's own parameters."""
        self.now = self._choice.make(optimizers, self._parameters, self._ranks)
        if keeps_unsent and self.now.keeps and not isinstance(self.now, RuledMemory):
            # The rank's own parameters hold the unsent part, so no residual is needed.
            self.now = NoMemory(self._parameters.maybe_unused)
            self.now.name = Residual.name

    def fall_back(self) -> None:
        """Use plain error feedback from the next step on, and let the optimizer step with a
        share of its own momentum."""
        self._gave_up = True
        before = self.now.handover
        self.release()
        if isinstance(before, SGDHandover) and not before.other_optimizer:
            share_at = self._choice.share_beside_residual
            by = ShorterMomentum(before.optimizer, share_at, self._parameters)
            self.now = Residual(self._parameters.maybe_unused, by)

    def falls_back_to(self, kind: Any) -> bool:
        """Whether `fall_back` would change the present memory into a memory of this kind."""
        return kind == Residual.name and isinstance(self.now, MomentumMemory)

    def kind_of(self, found: Any) -> str:
        """The memory's name that a state must have to be loaded. found: the name in the state.
        ValueError for a state with momentum correction if momentum correction was given up here."""
        if self.falls_back_to(found):
            return Residual.name
        if self._gave_up and found == MomentumMemory.name:
            raise ValueError(
                "state: it is of a run with momentum correction, which this compressor has given "
                "up, because p.grad was changed: attach a new AdaptiveCompressor, and load it there"
            )
        return self.now.name

    def warning(self, optimizers: Sequence[Optimizer]) -> str:
        """A warning about the optimizers that were handed over; "" if there is nothing to say."""
        if not optimizers or not self.now.keeps:
            return ""
        handover = self.now.handover
        if isinstance(handover, UpdateHandover):
            left = [p for p in self._parameters if handover.without_optimizer([p])]
            warnings = []
            if left:
                few = ", ".join(self._parameters[p].name for p in left[:3]) + ", ..." * (
                    len(left) > 3
                )
                warnings.append(
                    f"no optimizer that was handed over steps some of the parameters ({few}), so "
                    f"their gradients are exchanged uncompressed: hand all optimizers over, "
                    f"attach(model, optimizer=[a, b])"
                )
            if warning := unmeasured(filter(is_torchs_own, optimizers)):
                warnings.append(warning)
            return "; ".join(warnings)
        if len(optimizers) == 1 and is_sgd(optimizers[0]):
            return ""
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        if any(isinstance(each, LBFGS) for each in optimizers):
            return (
                f"optimizer {names}: LBFGS takes the differences of gradients for curvature, and "
                f"compression falsifies these: training may diverge. Take another optimizer"
            )
        return (
            f"optimizer {names}, memory {self.now.name!r}: gradients get plain error feedback. "
            f"Delayed elements arrive in bursts, and an optimizer that divides by a second moment "
            f"takes bursts for noise: expect a loss of quality at every CF. "
            f"{advice(optimizers[0])}"
        ).rstrip()

    def not_handed_over(self, optimizer: Optimizer) -> str:
        """A warning about an optimizer that steps the model and was not handed over; "" if there is
        nothing to say."""
        chosen = self._choice.kind != "auto" or not self.now.keeps
        if chosen or is_sgd(optimizer) or not _steps_by_itself(optimizer):
            return ""
        name = type(optimizer).__name__
        return (
            f"{name} steps the model and was not handed over: gradients get plain error feedback, "
            f"which costs {name} quality at every CF. Hand it over: compressor.attach(model, "
            f"optimizer=optimizer)"
        )

    def not_seen(self) -> str:
        """A warning that parameters move although no optimizer of the model has stepped; "" if
        there is nothing to say."""
        if self._choice.kind != "auto" or not self.now.keeps:
            return ""
        return (
            "the model's parameters move, and no optimizer that has them was seen to step (one "
            "that steps copies of them?): gradients get plain error feedback, which costs quality "
            "with every optimizer that divides by a second moment. Compare with a dense run"
        )

    def release(self, exchange: Exchange | None = None) -> None:
        """Keep only the residual, and return all work to the optimizer. Pending momentum goes to
        the optimizer (a collective, if there is momentum), or without `exchange` to the residual.
        """
        self.now.handover.hand_back(exchange)
        self.now.forget([*self._parameters.values()])
        owed = self.now.rule.owed if isinstance(self.now, RuledMemory) else True
        for parameter in self._parameters.values():
            parameter.velocity, parameter.momentum_share = None, 1.0
            parameter.started = parameter.stepped = False
            parameter.has_residual = parameter.has_residual and owed
        plain = Residual if self.now.keeps else NoMemory
        self.now = plain(self._parameters.maybe_unused)

    def clear(self) -> None:
        """Count the residuals of a device as empty, because the ranks have agreed that a dense step
        has sent all of them. On a CPU they are counted already. Does nothing if parameters may be
        unused: an unused parameter has kept its residual."""
        if is_host(self._parameters.device) or self._parameters.maybe_unused():
            return
        for parameter in self._parameters.values():
            parameter.has_residual = False

    def discard(self) -> None:
        self.now.forget([*self._parameters.values()])
        for parameter in self._parameters.values():
            parameter.has_residual = parameter.started = False
            parameter.velocity = None

    def state_dict(self) -> dict[str, Any]:
        """The states of parameters with a nonempty state, by name."""
        parameters = self._parameters.values()
        states = {parameter.name: self.now.state_dict(parameter) for parameter in parameters}
        return {name: state for name, state in states.items() if state}

    def parts(self, kind: str) -> dict[str, SavedPart]:
        """The saved parts of a memory of this kind. (They read `self.now` at each call, because
        memory and handover may be replaced between a check and the loading.)"""
        return {
            "moments": SavedPart(
                lambda: self.now.handover.state_dict(),
                lambda state: self._check_handover(state, kind),
                lambda state: self.now.handover.load_state_dict(state),
            ),
            "memory": SavedPart(
                self.state_dict, lambda state: self._check(state, kind), self.load_state_dict
            ),
        }

    def _check(self, state: Mapping[str, Any], kind: str) -> None:
        """ValueError unless this is a state of these parameters in the memory of this name."""
        flat = flat_tensors(self._parameters.values())
        keeps = {each.name: each.keeps for each in (self.now, *KINDS)}[kind]
        plain = {"momentum_share": float, "to_full_momentum": float, "stepped": bool}
        like = {name: {**dict.fromkeys(keeps, each), **plain} for name, each in flat.items()}
        for name, kept in state.items():
            residual = kept.get("residual") if isinstance(kept, Mapping) else None
            # A saved residual may be bfloat16, whatever the dtype is in this run.
            if isinstance(residual, Tensor) and residual.dtype == torch.bfloat16 and name in flat:
                like[name]["residual"] = flat[name].to(torch.bfloat16)
        check_like("memory", state, like)
        of_rule = self.now.rule.keeps if isinstance(self.now, RuledMemory) else ()
        for name, kept in state.items():
            lost = sorted({*of_rule} - kept.keys())
            require(not lost or len(lost) == len(of_rule), f"{name!r} has lost {', '.join(lost)}")
            whole = (
                ("velocity" in kept) == ("to_full_momentum" in kept) <= ("momentum_share" in kept)
            )
            require(bool(kept) and whole, f"the memory of {name!r} has lost something")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for parameter in self._parameters.values():
            self.now.load_state_dict(parameter, state.get(parameter.name, {}))

    def _check_handover(self, state: Mapping[str, Any], kind: str) -> None:
        of: type[Stateful] | None
        of = {UpdateMemory.name: MomentState, MomentumMemory.name: DenseSteps}.get(kind)
        shortened = isinstance(self.now.handover, ShorterMomentum) or self.falls_back_to(kind)
        if shortened and kind == Residual.name and state:
            of = MomentumShare
        if of is None:
            check_like("moments", state, {})
        else:
            of().load_state_dict(state)
