"""Which optimizer steps each parameter of a model (`Owners`), and the optimizer steps that this
rank makes with local gradients, from a backward to the exchange of the updates (`OptimizerSteps`;
see `adaptive/memory/updates.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.memory.handover import Group, rate_of
from adaptive.memory.moments import decay_of, is_adaptive, is_decoupled
from adaptive.memory.muon import is_muon, rate_scale
from adaptive.model.chunks import Chunk, chunked
from adaptive.model.parameters import ModelParameter, ModelParameters, parameters_of
from compressors.kernels.blocks import Scalar

Owner = tuple[Optimizer, dict[str, Any]]
"""An optimizer, and its parameter group."""


class Owners(dict[Tensor, Owner]):
    """The owner of each parameter: the optimizer that has stepped it last.

    The lookup is remembered until an optimizer's groups change. known: the optimizers that were
    learned. first: by the id of a group, its first parameter when it was learned. rate_scales: for
    parameters whose updates are in units of another learning rate than their group's, that rate as
    a multiple of the group's."""

    def __init__(self, parameters: ModelParameters, optimizers: Sequence[Optimizer]) -> None:
        super().__init__()
        self._parameters = parameters
        self.known: dict[Optimizer, list[tuple[int, ...]]] = {}  # and their groups, as learned
        self._of_chunk: dict[Chunk, list[Owner]] = {}
        self._groups_of: dict[Chunk, list[dict[str, Any]]] = {}
        self.first: dict[int, ModelParameter] = {}
        self.rate_scales: dict[Tensor, float] = {}
        self.distinct: list[Owner] = []
        self._chunks: list[Chunk] = []
        self._chunked = 0  # the number of their parameters
        for optimizer in optimizers:
            self.learn(optimizer)

    def learn(self, optimizer: Optimizer) -> None:
        """It is about to step its parameters."""
        if self.knows(optimizer):
            return
        for group in optimizer.param_groups:
            ours = [p for p in group["params"] if p in self._parameters]
            for p in ours:
                if p in self:
                    self.known.pop(self[p][0], None)
                self[p] = optimizer, group
                self.rate_scales.pop(p, None)
                if is_muon(optimizer):
                    self.rate_scales[p] = rate_scale(group, p.shape)
            if ours:
                self.first[id(group)] = self._parameters[ours[0]]
        self.known[optimizer] = _groups_of(optimizer)
        listed = {*parameters_of(optimizer)}
        for p in [p for p, (of, _) in self.items() if of is optimizer and p not in listed]:
            del self[p]  # the script has taken it out of the groups
            self._chunked = -1
            self.rate_scales.pop(p, None)
        self._of_chunk.clear()
        self._groups_of.clear()
        self.distinct = list({id(group): (of, group) for of, group in self.values()}.values())
        # Only of groups that are held here: the id of another may soon be that of a new one.
        self.first = {id(group): self.first[id(group)] for _, group in self.distinct}

    def knows(self, optimizer: Optimizer) -> bool:
        """It was learned, and its groups have the same parameters still."""
        return self.known.get(optimizer) == _groups_of(optimizer)

    def parameter(self, p: Tensor) -> ModelParameter:
        """The state that is kept of a parameter."""
        return self._parameters[p]

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The chunks of all parameters that some optimizer steps. The same on all ranks."""
        if self._chunked != len(self):
            self._chunked = len(self)
            ours = [parameter for p, parameter in self._parameters.items() if p in self]
            self._chunks = chunked(ours)
        return self._chunks

    def of_chunk(self, chunk: Chunk) -> list[Owner]:
        """Of each of its parameters."""
        found = self._of_chunk.get(chunk)
        if found is None:
            found = self._of_chunk[chunk] = [self[p.tensor] for p in chunk.parameters]
        return found

    def groups_of(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The parameter groups of a chunk's parameters, each once."""
        found = self._groups_of.get(chunk)
        if found is None:
            groups = {id(group): group for _, group in self.of_chunk(chunk)}
            found = self._groups_of[chunk] = list(groups.values())
        return found


def _groups_of(optimizer: Optimizer) -> list[tuple[int, ...]]:
    """What tells parameter groups from others: the ids of each group and of its parameters."""
    return [(id(group), *map(id, group["params"])) for group in optimizer.param_groups]


STEPPED_LATE = (
    "{inner} steps after the updates of this backward were exchanged, so the ranks would diverge: "
    "the exchange is over once every optimizer has stepped, a state has been saved, or the next "
    "forward with gradients has begun. Step once between backward and such a forward, and "
    "evaluate under torch.no_grad()"
)

SHARED = (
    "{inner} steps parameters that {outer} has stepped after the same backward, and where the "
    "ranks step by themselves only one optimizer may step a parameter: use memory='residual', "
    "or hand no optimizer over, attach(model), so that gradients are averaged"
)

IN_BACKWARD = (
    "{inner} steps within backward (an optimizer in backward: a step in a hook of "
    "register_post_accumulate_grad_hook), which does not go with compression, because the ranks "
    "exchange what the steps of a whole backward have done: step after backward"
)

NESTED = (
    "{inner} steps within a step of {outer} (or after one that has raised), and where the ranks "
    "step by themselves it cannot be told what both do: use memory='residual', or hand no "
    "optimizer over, attach(model), so that gradients are averaged"
)

FAR = 1e3
"""The largest factor between a learning rate and the unit of updates."""

ENLARGED = 4.0
"""The largest factor by which residuals are enlarged that momentum takes over. Momentum moves the
parameters by later learning rates. If these soon rise, as in a warm restart, it moves them too far,
by the same factor."""

SURE = 100
"""After this many exchanges in a row for which all optimizers had stepped, they are expected to."""


class OptimizerSteps:
    """Which optimizers have stepped since the last backward, with which learning rates, and the
    parameters' values before the steps.

    owners: the optimizer of each parameter. pending: a backward has ended, and its updates have not
    been exchanged. was_exchanged: its updates have been exchanged. before: for each chunk, the
    values of the parameters before the steps, with decoupled weight decay applied (flat). units: by
    the name of a group's first parameter, the unit of the group's updates (see `unit`)."""

    def __init__(self, owners: Owners) -> None:
        self.pending = self.was_exchanged = False
        self.before: dict[Chunk, Tensor] = {}
        self.units: dict[str, float] = {}
        self._of = owners
        self._stepping: Optimizer | None = None  # whose step is under way
        self._has_closure = False  # the step under way may run a backward
        self._stepped: set[Optimizer] = set()  # since the last backward
        self._without_gradient: set[Tensor] = set()  # parameters without one in these steps
        self._rates: dict[int, tuple[Scalar, Scalar]] = {}  # by group: unit, decay
        self._decay_factors: dict[Chunk, Scalar] = {}  # not applied to `before` yet
        self._start: dict[Chunk, Tensor] = {}  # as `before`, without decay
        self._stepped_to: dict[Chunk, Tensor] = {}  # values after a step, while `_start` is shown
        self._complete_exchanges = 0  # exchanges in a row for which all optimizers had stepped

    # -- between backward and exchange --

    def backward_ends(self) -> None:
        """A compressed backward has ended; the optimizers will step with its gradients."""
        self.forget_raised()
        self.pending, self.was_exchanged = True, False
        self._stepped.clear()
        self._without_gradient.clear()
        if self._stepping is None:
            self.before.clear()
        self._read_rates()

    def exchanged(self) -> None:
        """The updates of all chunks have been exchanged."""
        self._complete_exchanges = self._complete_exchanges + 1 if self.all_stepped else 0
        self.pending, self.was_exchanged = False, True
        if self._stepping is None:
            self.before.clear()

    def forget_raised(self) -> None:
        """Restore the parameters after a step that has raised. A step has raised if it had no
        closure, and has not ended by the next forward or backward."""
        if self._stepping is not None and not self._has_closure:
            for chunk, before in self.before.items():
                chunk.go_to(before)
            self._forget()

    def reset(self) -> None:
        """Forget the step under way, and updates that have not been exchanged."""
        self.pending = self.was_exchanged = False
        self._forget()

    def _forget(self) -> None:
        self._stepping, self._has_closure = None, False
        for kept in (self.before, self._decay_factors, self._start, self._stepped_to):
            kept.clear()

    # -- around an optimizer's step --

    def begin_with_closure(self, optimizer: Optimizer) -> None:
        """`optimizer.step(closure)` has been called, and the closure has not run yet. Another
        library's optimizer may move parameters before the closure, and back after it (SAM)."""
        if self._stepping in (None, optimizer) and not is_adaptive(optimizer):
            self._stepping, self._has_closure = optimizer, True
            self._remember()

    def begin(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step with its gradients. RuntimeError for a step inside another
        optimizer's step, and for a step after the exchange of its backward's updates."""
        outer, told = self._stepping, ""
        if outer not in (None, optimizer):
            told = NESTED
        elif self.was_exchanged and self._moves(optimizer):
            within = torch._C._current_graph_task_id() >= 0
            owners = (self._of[p][0] for p in parameters_of(optimizer) if p in self._of)
            outer = next((of for of in owners if of in self._stepped - {optimizer}), None)
            told = IN_BACKWARD if within else STEPPED_LATE if outer is None else SHARED
        if told:
            self._stepping, self._has_closure = None, False
            names = {"inner": type(optimizer).__name__, "outer": type(outer).__name__}
            raise RuntimeError(told.format(**names))
        self._of.learn(optimizer)
        self._stepping = optimizer
        if self.pending:
            groups = optimizer.param_groups
            self._rates |= {id(group): self._rates_of(optimizer, group) for group in groups}
            self._without_gradient |= {p for p in parameters_of(optimizer) if p.grad is None}
            self.release()
            if not self.before:
                self._remember()

    def _moves(self, optimizer: Optimizer) -> bool:
        """The optimizer moves a parameter by a local gradient: some learning rate is not 0 (or is
        on a device, where it is not read), and some parameter that it is known to step has a
        gradient. (Gradients of parameters without a known optimizer are the ranks' mean.)"""
        rates = [group.get("lr") for group in optimizer.param_groups]
        if not any(isinstance(lr, Tensor) or lr != 0 for lr in rates):
            return False
        return any(p.grad is not None for p in parameters_of(optimizer) if p in self._of)

    def _remember(self) -> None:
        self.before = {chunk: chunk.here("before") for chunk in self._of.chunks}
        self._decay_factors, self._start = {}, {}

    def end(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        self._stepping, self._has_closure = None, False
        if self.pending:
            self._record_step(optimizer)
        else:
            self.before.clear()

    def _record_step(self, optimizer: Optimizer) -> None:
        self._stepped.add(optimizer)
        if self._complete_exchanges < SURE and not self.all_stepped:
            self._hold()
        skips: Any = getattr(optimizer, "found_inf", None)  # a `GradScaler` tells a fused optimizer
        taken = 1.0 if skips is None else 1 - skips
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
                self._decay_factors[chunk] = factors[0]
            else:
                multiply(before, chunk, factors)

    def _hold(self) -> None:
        """Save the parameters' values after the step, and restore those before it until `release`.
        So the ranks' parameters are equal until the exchange: some optimizer may never step with
        this backward's gradients, and a script may read the model."""
        for chunk, before in self.before.items():
            if chunk not in self._start:
                self._start[chunk] = chunk.buffer("start").copy_(before)
            self._stepped_to[chunk] = chunk.here("stepped to")
            chunk.go_to(self._start[chunk])

    def release(self) -> None:
        """Give the parameters the values that this rank's steps have made (see `_hold`)."""
        for chunk, values in self._stepped_to.items():
            chunk.go_to(values)
        self._stepped_to.clear()

    def take_decay_factor(self, chunk: Chunk) -> Scalar:
        """1 - lr * weight decay, by which the caller must multiply `before`; 1 if that is done."""
        return self._decay_factors.pop(chunk, 1.0)

    def apply_decay(self) -> None:
        """Multiply `before` of all chunks by their decay factors."""
        for chunk, factor in self._decay_factors.items():
            self.before[chunk].mul_(factor)
        self._decay_factors = {}

    # -- which optimizers have stepped, and their learning rates --

    @property
    def any_stepped(self) -> bool:
        return bool(self._stepped)

    @property
    def all_stepped(self) -> bool:
        """All optimizers have stepped since the last backward."""
        return self._stepping is None and all(of in self._stepped for of, _ in self._of.distinct)

    def unstepped(self, parameters: Sequence[ModelParameter]) -> list[ModelParameter]:
        """The parameters among these that no optimizer has stepped since the last backward, because
        it made no step, or because they had no gradient (frozen for a time, say)."""
        without = self._without_gradient
        if not self.pending or (self.all_stepped and not without):
            return []
        owners = [self._of.get(p.tensor) if p.tensor not in without else None for p in parameters]
        pairs = zip(parameters, owners, strict=True)
        return [p for p, owner in pairs if owner is None or owner[0] not in self._stepped]

    def rates_of(self, chunk: Chunk, each: bool = False) -> list[tuple[Scalar, Scalar]]:
        """(unit, lr * weight decay) of each parameter; one pair if all are equal. For the unit of
        updates see `unit`.

        A half-precision parameter rounds most of its decay away. Its decay counts as part of the
        update, and is 0 here: applied separately, the decay would be undone by the update."""
        scales = self._of.rate_scales
        each = each or bool(scales)
        pairs = self._of.of_chunk(chunk)
        groups = [group for _, group in pairs] if each else self._of.groups_of(chunk)
        rates = [self._rates[id(group)] for group in groups]
        if chunk.narrow:
            rates = [(unit, 0.0) for unit, _ in rates]
        if not each:
            alike = all(all(map(same_number, rates[0], other)) for other in rates[1:])
            return rates[:1] if alike else self.rates_of(chunk, each=True)
        if not scales:
            return rates
        of = (scales.get(p.tensor, 1.0) for p in chunk.parameters)
        return [(unit * scale, decay) for (unit, decay), scale in zip(rates, of, strict=True)]

    # -- the unit of updates --

    def unit(self, group: Group, lasting: bool = False) -> Scalar:
        """The learning rate by which updates of a group's parameters are divided, and by which mean
        updates are multiplied.

        It stays the same while a schedule changes the learning rate, so that an update in the
        residual moves the parameters as far as the step that made it did. But a learning rate that
        is FAR below the unit must move next to nothing, not even by residuals: the present learning
        rate is the unit then. It is also the unit where the learning rate is a tensor, which is
        never read. lasting: return the unit that holds again once the learning rate has risen."""
        lr, first = rate_of(group), self._of.first.get(id(group))
        if is_tensor(lr) or first is None:
            return lr
        unit = self.units.setdefault(first.name, lr)
        return unit if lasting or unit <= FAR * lr else lr

    @torch.no_grad()
    def change_units(self, to_momentum: bool) -> None:
        """Set the unit of every group to its present learning rate, and rescale residuals.
        to_momentum: momentum, where there is any, is about to take over the residuals."""
        for of, group in self._of.distinct:
            taken = to_momentum and is_adaptive(of) and decay_of(group)
            self._change_unit(group, ENLARGED if taken else inf)
        self._read_rates()

    def _read_rates(self) -> None:
        self._rates = {id(group): self._rates_of(of, group) for of, group in self._of.distinct}

    def _rates_of(self, optimizer: Optimizer, group: Group) -> tuple[Scalar, Scalar]:
        """(unit, share by which decoupled weight decay shrinks a parameter in a step). The unit
        changes if the learning rate is FAR above it."""
        lr, decay = rate_of(group), group.get("weight_decay", 0.0)
        if not is_tensor(lr) and lr > FAR * self.unit(group):
            self._change_unit(group)
        # A copy, because a scheduler may change a tensor before a rank that has left its step out
        # exchanges.
        unit = lr.clone() if is_tensor(lr) else self.unit(group)
        return unit, lr * decay if decay and is_decoupled(optimizer, group) else 0.0

    @torch.no_grad()
    def _change_unit(self, group: Group, most: float = inf) -> None:
        """most: the largest factor of the residuals."""
        lr, unit, first = rate_of(group), self.unit(group), self._of.first.get(id(group))
        if is_tensor(lr) or first is None or lr == unit:
            return
        self.units[first.name] = lr
        for p in group["params"]:
            if p in self._of and (residual := self._of.parameter(p).unsent) is not None:
                residual.mul_(min(unit / lr, most))


def multiply(whole: Tensor, chunk: Chunk, factors: Sequence[Scalar]) -> None:
    """Multiply each parameter's slice of `whole` (flat) in place. factors: one for each parameter
    of the chunk, or one for all."""
    first, *others = factors
    if all(same_number(first, other) for other in others):
        whole.mul_(first)
    elif any(map(is_tensor, factors)):
        of = [_on(factor, whole.device) for factor in factors]
        torch._foreach_mul_(chunk.split(whole), of)
    else:
        torch._foreach_mul_(chunk.split(whole), [float(factor) for factor in factors])


def _on(factor: Scalar, device: torch.device) -> Tensor:
    """The factor as a tensor on a device. A number is filled in there: a copy would wait."""
    if isinstance(factor, Tensor):
        return factor.to(device, non_blocking=True)
    return torch.full((), factor, device=device)


def any_decay(decays: Iterable[Scalar]) -> bool:
    """Whether some parameters may decay. Numbers on a device are not read: they count as decay."""
    return any(is_tensor(decay) or decay > 0 for decay in decays)


def is_tensor(x: Scalar) -> bool:
    return isinstance(x, Tensor)


def same_number(a: Scalar, b: Scalar) -> bool:
    """Both are known to be equal. Two numbers on a device are not compared."""
    return a is b or not (is_tensor(a) or is_tensor(b) or a != b)
