"""The steps that this rank's optimizers make by its own gradients, from a backward to the exchange
of what they have done (see `adaptive/memory/updates.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.memory.handover import Group, rate_of
from adaptive.memory.moments import is_adaptive, is_decoupled
from adaptive.memory.owners import Owners
from adaptive.model.chunks import Chunk
from adaptive.model.parameters import ModelParameter
from compressors.kernels.blocks import Flag, Scalar

STEPPED_LATE = (
    "{} steps after the updates of this backward were exchanged, so the ranks would diverge: the "
    "exchange is over once every optimizer has stepped, or the next forward with gradients has "
    "begun. Step once between backward and such a forward, and evaluate under torch.no_grad()"
)

NESTED = (
    "{inner} steps within a step of {outer} (or after one that has raised), and where the ranks "
    "step by themselves it cannot be told what both do: use memory='residual', or hand no "
    "optimizer over, attach(model), so that gradients are averaged"
)

SURE = 100
"""Exchanges in a row before which all optimizers had stepped, after which they are expected to."""


class OptimizerSteps:
    """Which optimizers have stepped, by which learning rates, and where the parameters stood.

    owners: who steps each parameter. pending: a backward has ended whose updates are yet to be
    exchanged. over: that exchange is. before: where the parameters stood, less their decay, of each
    chunk (flat)."""

    def __init__(self, owners: Owners) -> None:
        self.pending = self.over = False
        self.before: dict[Chunk, Tensor] = {}
        self._of = owners
        self._stepping: Optimizer | None = None  # whose step is under way
        self._has_closure = False  # that step, so that a backward may run within it
        self._stepped: set[Optimizer] = set()  # since the last backward
        self._without_gradient: set[Tensor] = set()  # parameters left out of steps since then
        self._rates: dict[int, tuple[Scalar, Scalar]] = {}  # by group: learning rate, decay
        self._shrinks: dict[Chunk, Scalar] = {}  # by which `before` is yet to be multiplied
        self._stood: dict[Chunk, Tensor] = {}  # where the parameters stood, with decay and all
        self._held: dict[Chunk, Tensor] = {}  # where steps have brought them, until the others'
        self._by_all = 0  # exchanges in a row before which all optimizers had stepped

    # -- between backward and exchange --

    def backward_ends(self) -> None:
        """A compressed backward has: its steps are to come."""
        self.forget_raised()
        self.pending, self.over = True, False
        self._stepped.clear()
        self._without_gradient.clear()
        if self._stepping is None:
            self.before.clear()
        self._of.relearn()
        self._rates = {id(group): _rates(of, group) for of, group in self._of.distinct}

    def exchanged(self) -> None:
        """All chunks have been."""
        self._by_all = self._by_all + 1 if self.all_stepped else 0
        self.pending, self.over = False, True
        if self._stepping is None:
            self.before.clear()

    def forget_raised(self) -> None:
        """A step without a closure that has not ended by the next forward or backward has raised:
        the parameters go back to where it began."""
        if self._stepping is not None and not self._has_closure:
            for chunk, before in self.before.items():
                chunk.go_to(before)
            self._forget()

    def reset(self) -> None:
        """No step is under way, and none is to be exchanged."""
        self.pending = self.over = False
        self._forget()

    def _forget(self) -> None:
        self._stepping, self._has_closure = None, False
        for kept in (self.before, self._shrinks, self._stood, self._held):
            kept.clear()

    # -- around an optimizer's step --

    def begin_with_closure(self, optimizer: Optimizer) -> None:
        """`optimizer.step(closure)` has been called, and the closure has not run yet. One that is
        not torch's may move parameters before (SAM), and back again."""
        if self._stepping in (None, optimizer) and not is_adaptive(optimizer):
            self._stepping, self._has_closure = optimizer, True
            self._remember()

    def begin(self, optimizer: Optimizer) -> None:
        """An optimizer has its gradients. RuntimeError for a step within another's, and for one
        after the exchange of its backward."""
        outer, late = self._stepping, self.over and _moves(optimizer)
        told = ""
        if outer not in (None, optimizer):
            told = NESTED.format(inner=type(optimizer).__name__, outer=type(outer).__name__)
        elif late and self._has_gradients(optimizer):
            told = STEPPED_LATE.format(type(optimizer).__name__)
        if told:
            self._stepping, self._has_closure = None, False
            raise RuntimeError(told)
        self._of.learn(optimizer)
        self._stepping = optimizer
        if self.pending:
            self._rates |= {id(group): _rates(optimizer, group) for group in optimizer.param_groups}
            self._without_gradient |= {p for p in parameters_of(optimizer) if p.grad is None}
            self.release()
            if not self.before:
                self._remember()

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        """Of this rank's own: those of parameters without a known optimizer are the ranks' mean."""
        return any(p.grad is not None for p in parameters_of(optimizer) if p in self._of)

    def _remember(self) -> None:
        self.before = {chunk: chunk.here("before") for chunk in self._of.chunks}
        self._shrinks, self._stood = {}, {}

    def end(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        self._stepping, self._has_closure = None, False
        if self.pending:
            self._note(optimizer)
        else:
            self.before.clear()

    def _note(self, optimizer: Optimizer) -> None:
        self._stepped.add(optimizer)
        if self._by_all < SURE and not self.all_stepped:
            self._hold()
        taken = _taken(optimizer)
        for chunk, before in self.before.items():
            decays = [decay for _, decay in self.rates_of(chunk)]
            if not any_decay(decays):
                continue
            if len(self._of.distinct) > 1 or self._without_gradient:
                owners = zip(chunk.parameters, self._of.of_chunk(chunk), strict=True)
                without = self._without_gradient
                moved = [of is optimizer and p.tensor not in without for p, (of, _) in owners]
                each = zip(self.rates_of(chunk, each=True), moved, strict=True)
                decays = [decay if moves else 0.0 for (_, decay), moves in each]
            factors = [1 - decay * taken for decay in decays]
            if len(factors) == 1:
                self._shrinks[chunk] = factors[0]
            else:
                multiply(before, chunk, factors)

    def _hold(self) -> None:
        """Let the parameters stand where all ranks do: other optimizers may not step by this
        backward, and whoever reads the model before the exchange finds the same on all ranks."""
        for chunk, before in self.before.items():
            if chunk not in self._stood:
                self._stood[chunk] = chunk.buffer("stood").copy_(before)
            self._held[chunk] = chunk.here("held")
            chunk.go_to(self._stood[chunk])

    def release(self) -> None:
        """The parameters go where this rank's optimizers have brought them."""
        for chunk, here in self._held.items():
            chunk.go_to(here)
        self._held.clear()

    def take_shrink(self, chunk: Chunk) -> Scalar:
        """By which the caller is to multiply `before`."""
        return self._shrinks.pop(chunk, 1.0)

    def shrink(self) -> None:
        """Take the decay from where parameters stood, now."""
        for chunk, factor in self._shrinks.items():
            self.before[chunk].mul_(factor)
        self._shrinks = {}

    # -- what has stepped, and by how much --

    @property
    def any_stepped(self) -> bool:
        return bool(self._stepped)

    @property
    def all_stepped(self) -> bool:
        """No step of this backward's gradients is to come."""
        return self._stepping is None and all(of in self._stepped for of, _ in self._of.distinct)

    def unstepped(self, parameters: Sequence[ModelParameter]) -> Sequence[Flag]:
        """Which of these parameters no optimizer has stepped since the last backward."""
        if not self.pending or self.all_stepped:
            return [False] * len(parameters)
        owners = (self._of.get(parameter.tensor) for parameter in parameters)
        return [owner is None or owner[0] not in self._stepped for owner in owners]

    def rates_of(self, chunk: Chunk, each: bool = False) -> list[tuple[Scalar, Scalar]]:
        """The learning rate that updates are told in, and the decay: of each parameter, or those of
        all, if all have the same.

        A parameter of fewer bits than what is kept of it rounds most of its decay away. There decay
        is a part of what the step has done: taken apart, it would be undone by the update."""
        scales = self._of.rate_scales
        each = each or bool(scales)
        pairs = self._of.of_chunk(chunk)
        groups = [group for _, group in pairs] if each else self._of.groups_of(chunk)
        rates = [self._rates[id(group)] for group in groups]
        if chunk.narrow:
            rates = [(lr, 0.0) for lr, _ in rates]
        if not each:
            alike = all(_same(rates[0], other) for other in rates[1:])
            return rates[:1] if alike else self.rates_of(chunk, each=True)
        if not scales:
            return rates
        of = (scales.get(p.tensor, 1.0) for p in chunk.parameters)
        return [(lr * scale, decay) for (lr, decay), scale in zip(rates, of, strict=True)]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _moves(optimizer: Optimizer) -> bool:
    """It has a learning rate above 0, as far as the host knows."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return any(isinstance(lr, Tensor) or lr != 0 for lr in rates)


def multiply(whole: Tensor, chunk: Chunk, factors: Sequence[Scalar]) -> None:
    """The pieces of a chunk by these factors, in place: one for each parameter, or one for all."""
    first, *others = factors
    if all(same_number(first, other) for other in others):
        whole.mul_(first)
    elif any(map(is_tensor, factors)):
        of = [_on(factor, whole.device) for factor in factors]
        torch._foreach_mul_(chunk.split(whole), of)
    else:
        torch._foreach_mul_(chunk.split(whole), [float(factor) for factor in factors])


def _on(factor: Scalar, device: torch.device) -> Tensor:
    """A number on a device, filled in there: to copy it would wait."""
    if isinstance(factor, Tensor):
        return factor.to(device, non_blocking=True)
    return torch.full((), factor, device=device)


def any_decay(decays: Iterable[Scalar]) -> bool:
    """Whether some parameters may decay: what a device holds is not read."""
    return any(is_tensor(decay) or decay > 0 for decay in decays)


def is_tensor(x: Scalar) -> bool:
    return isinstance(x, Tensor)


def _rates(optimizer: Optimizer, group: Group) -> tuple[Scalar, Scalar]:
    """The learning rate, and by which share of itself a parameter decays in a step."""
    lr, decay = rate_of(group), group.get("weight_decay", 0.0)
    return lr, lr * decay if decay and is_decoupled(optimizer, group) else 0.0


def _taken(optimizer: Optimizer) -> Scalar:
    """1, or 0 if a `GradScaler` has told a fused optimizer to skip the step."""
    skips: Any = getattr(optimizer, "found_inf", None)
    return 1.0 if skips is None else 1 - skips


def _same(a: tuple[Scalar, Scalar], b: tuple[Scalar, Scalar]) -> bool:
    return all(map(same_number, a, b))


def same_number(a: Scalar, b: Scalar) -> bool:
    """As the host knows."""
    return a is b or not (is_tensor(a) or is_tensor(b) or a != b)
