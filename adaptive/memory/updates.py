"""Compression in parameter space: each rank's optimizer steps by itself, and what its step has done
to the parameters is fed back, compressed, exchanged and averaged.

An optimizer that divides by the root of a second moment (Adam and those like it) must not be fed
with decoded gradients: an element that has waited T steps in the residual arrives T times as large,
its second moment grows with T^2, and the optimizer divides the burst away (docs/defaults.md).
So autograd gets this rank's own gradient back, whatever a script does to it, and the user's own
optimizer makes the step. In a compressed step, with `lr` the learning rate of the moment:

1. before `optimizer.step()`: b = parameters * (1 - lr * decoupled weight decay), the same on all
   ranks; momentum gets a share of its lag, for this step only. (`lr` of Muon: see muon.py.)
2. after it: d = (b - parameters) / lr, enlarged by the noise in this rank's second moment
   (moments.py; of Muon in its momentum, muon.py); r += d; the largest elements c of r are sent,
   r -= c.
3. parameters = b - lr * mean of c over the ranks, the same on all ranks again.

A dense step is DDP's own: before the first one the ranks agree on what their optimizers keep.

At CFs where next to nothing waits (int8, int4) there are no bursts. There, beside Adam, the mean
gradient is exchanged, compressed with error feedback, and the optimizer steps as after a dense
backward: this trains as well as a dense step does (docs/defaults.md). What waits of gradients goes
with the rank's own gradient into the next step whose updates are exchanged.

Momentum holds updates back, and so does a residual. With both they would be late twice, so in
compressed steps momentum keeps only a share of its lag, and what it gives up goes to the residual.
When the CF falls, momentum gets its lag back, and takes all that waits in the residual: it delivers
over some ten steps what would throw the model far back in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.bucket import Destination
from adaptive.chunks import Chunk
from adaptive.exchange.collectives import Exchange
from adaptive.memory.error_feedback import Residual
from adaptive.memory.handover import Group, Handover
from adaptive.memory.meeting import Meeting
from adaptive.memory.moments import (
    enlarge,
    is_adaptive,
    is_decoupled,
    noise_of,
    normalized,
)
from adaptive.memory.muon import enlargements, is_muon
from adaptive.memory.muon import normalized as as_muons_update
from adaptive.memory.own_moments import OwnMoments, average
from adaptive.memory.owners import Owners
from adaptive.parameters import ModelParameter, ModelParameters, local
from compressors.kernels import kernels_for, squared_norm
from compressors.kernels.blocks import Flag, Scalar, fill_if

STEPPED_LATE = (
    "{} steps after the updates of this backward were exchanged, so the ranks would diverge: the "
    "exchange is over once every optimizer has stepped, or the next forward with gradients has "
    "begun. Step once between backward and such a forward, and evaluate under torch.no_grad()"
)


class UpdateMemory(Residual):
    """One residual of updates for each parameter."""

    name = "updates"

    def __init__(self, maybe_unused: Callable[[], bool], handover: UpdateHandover) -> None:
        super().__init__(lambda: not handover.pending and maybe_unused(), handover)
        self._of = handover

    def skipped(
        self, parameters: Sequence[ModelParameter], grad_energies: Sequence[Scalar]
    ) -> Sequence[Flag]:
        """Of updates: those that have not been stepped."""
        if self._of.pending:
            return self._of.unstepped(parameters)
        return super().skipped(parameters, grad_energies)


class UpdateHandover(Handover):
    """What is done around the steps of each rank's own optimizers.

    ranks: world size. lag: the share of its lag that momentum keeps in a step at a CF, in [0, 1].
    pending: a backward has ended whose updates are yet to be exchanged. always: updates are
    exchanged in every compressed step. So it is where an optimizer that was handed over has no
    first moment, which would take what waits in updates once gradients are exchanged.
    """

    sends_updates = True

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: ModelParameters,
        ranks: int,
        lag: Callable[[float], float],
    ) -> None:
        self.pending = False
        self._over = False  # the exchange of the last backward's updates is
        self.always = not all(is_adaptive(of) and _averages(of) for of in optimizers)
        self._parameters = parameters
        self._ranks = ranks
        self._lag = cache(lag)
        self._of = Owners(parameters, optimizers)
        self._moments = OwnMoments(self._of, ranks)
        stepped = any(optimizer.state for optimizer in optimizers)
        self._moments.state.differ = self._moments.state.begun = stepped
        self._outer: Optimizer | None = None  # whose step is under way
        self._before: dict[Chunk, Tensor] = {}  # where the parameters stood
        self._targets: dict[Chunk, Tensor] = {}  # where they go, as means are decoded
        self._shrinks: dict[Chunk, Scalar] = {}  # by which that is yet to be multiplied
        self._rates: dict[int, tuple[Scalar, Scalar]] = {}  # by group: learning rate, decay
        self._has_closure = False  # that step, so that a backward may run within it
        self._stepped: set[Optimizer] = set()  # since the last backward
        self._without_gradient: set[Tensor] = set()  # parameters left out of steps since then
        self._enlargements: dict[Tensor, Tensor] = {}  # of Muon's steps since then
        self._meeting = Meeting(parameters, self._of)

    @property
    def keeps_momentum(self) -> bool:
        """Muon does, and whatever else is not one of Adam's kind."""
        return not all(is_adaptive(of) for of, _ in self._of.distinct)

    # -- what is exchanged --

    def exchanges_updates(self, cf: float) -> bool:
        """Whether they are exchanged in a step that is compressed at `cf`, or gradients: where
        momentum keeps all of its lag, since next to nothing waits. Alike on all ranks."""
        return self.always or self._lag(cf) < 1

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The parameters that some optimizer steps, as they are exchanged. Alike on all ranks."""
        return self._of.chunks

    def apart(self, parameters: Iterable[Tensor]) -> list[int]:
        """Places of the parameters that no known optimizer steps."""
        if len(self._of) == len(self._parameters):
            return []
        return [i for i, p in enumerate(parameters) if p not in self._of]

    def backward_ends(self, cf: float) -> None:
        """The gradients of a step that is compressed at `cf` are there."""
        self.forget_raised()
        self._moments.put_back()
        self.pending, self._over = True, False
        self._stepped.clear()
        self._without_gradient.clear()
        self._enlargements.clear()
        if self._outer is None:
            self._before.clear()
        self._of.relearn()
        self._rates = {id(group): _rates(of, group) for of, group in self._of.distinct}
        if self.gradients_wait:  # of parameters that this backward has not used
            for parameter in self._parameters.values():
                parameter.filled = False
        self._begin_apart(self._lag(cf))

    @torch.no_grad()
    def outgoing(self, chunk: Chunk) -> tuple[Tensor, Scalar | None]:
        """What this rank's step has done to the parameters of a chunk, as updates (flat, in the
        chunk's scratch), and the squared norm of that, if it is known. Zeros for those that no
        optimizer has stepped since backward.

        All is done to one block after the other, while that is in the cache."""
        before, work = self._before.get(chunk), chunk.room("work")
        if before is None:
            return work.zero_(), None
        rates = self._rates_of(chunk)
        rate = inverse(rates[0][0]) if len(rates) == 1 else None
        shrink = self._shrinks.pop(chunk, 1.0)
        energies: list[Scalar] = []
        runs = [(run, run.mean, run.square) for run in self._moments.runs(chunk)]
        noises = [noise_of(run, self._moments.state.share) for run, *_ in runs]
        aside = self._moments.aside.pop(chunk, None)
        for block in chunk.blocks():
            inside = [run.inside(block.start, block.stop) for run, *_ in runs]
            if aside is not None:
                for (run, *_), part in zip(runs, inside, strict=True):
                    average(run, aside, part)
            update, stood = work[block.start : block.stop], before[block.start : block.stop]
            if _is_tensor(shrink) or shrink != 1:
                stood.mul_(shrink)
            torch.sub(stood, block.joined(update), out=update)
            if rate is not None:
                update.mul_(rate)
            for (run, mean, square), noise, part in zip(runs, noises, inside, strict=True):
                if part.start < part.stop:
                    own = work[run.start : run.stop][part]
                    enlarge(own, mean[part], square[part], noise, self._ranks)
            energies.append(squared_norm(update))
        if rate is None:
            _multiply(work, chunk, [inverse(lr) for lr, _ in rates])
        pairs = zip(chunk.parameters, chunk.split(work), strict=True) if self._enlargements else ()
        muons = [(piece, p.tensor) for p, piece in pairs if p.tensor in self._enlargements]
        if muons:
            factors = [self._enlargements[p] for _, p in muons]
            torch._foreach_mul_([piece for piece, _ in muons], factors)
        if not self.all_stepped:
            for (of, _), piece in zip(self._of.of_chunk(chunk), chunk.split(work), strict=True):
                if of not in self._stepped:
                    piece.zero_()
        known = rate is not None and self.all_stepped and not muons
        return work, sum(energies[1:], energies[0]) if known else None

    def destination(self, chunk: Chunk) -> Destination | None:
        """Where the ranks' mean update of a chunk moves the parameters as it is decoded. None where
        that is not one sum: then `apply` needs the mean itself."""
        rates = self._rates_of(chunk)
        lr, decay = rates[0]
        if len(rates) > 1 or isinstance(lr, Tensor):
            return None
        work = chunk.room("work")
        if kernels_for(work).fused(work):  # then all ranks' payloads are decoded by one kernel
            return None
        if self._stepped and not self.all_stepped:
            return None
        # A rank that leaves its step out rounds as the others do.
        to = self._before[chunk] if self._stepped else chunk.here("unstepped").mul_(1 - decay)
        self._targets[chunk] = to
        return Destination(to, -lr)

    @torch.no_grad()
    def apply(self, chunk: Chunk, mean: Tensor | None, any_stepped: Callable[[], Tensor]) -> None:
        """Move the parameters of a chunk by the ranks' mean update, which is overwritten. None: it
        has gone to the chunk's `destination`.

        any_stepped: how many ranks have stepped (0-dim); called on a rank that has not."""
        if mean is None:
            if self._stepped or bool(any_stepped() > 0):
                chunk.go_to(self._targets[chunk])
            return
        before = self._before.get(chunk)
        rates = self._rates_of(chunk)
        _multiply(mean, chunk, [lr for lr, _ in rates])
        if before is None or not self._stepped:
            before = chunk.here("unstepped")
            decays = [] if self._stepped else [decay for _, decay in rates]
            if any(_is_tensor(decay) or decay > 0 for decay in decays):
                some = (any_stepped() > 0).to(before.dtype)
                _multiply(before, chunk, [1 - decay * some for decay in decays])
        chunk.go_to(torch.sub(before, mean, out=mean))

    def forget_raised(self) -> None:
        """A step without a closure that has not ended by the next forward or backward has raised:
        the parameters go back to where it began."""
        if self._outer is not None and not self._has_closure:
            self._outer = None
            for chunk, before in self._before.items():
                chunk.go_to(before)
            self._before.clear()
            self._shrinks.clear()

    @torch.no_grad()
    def mark_nonfinite(self, flag: Flag) -> None:
        """Some rank's gradients are not finite: see to it that each optimizer has one that is not.
        A `GradScaler` looks at each optimizer by itself, and then skips all of them on all ranks.
        (Autograd's result tells the optimizer of the last bucket.)"""
        optimizers = {of for of, _ in self._of.distinct}
        for optimizer in optimizers if len(optimizers) > 1 and flag is not False else ():
            grads = (p.grad for p in _parameters_of(optimizer) if p in self._of)
            if (grad := next((each for each in grads if each is not None), None)) is not None:
                fill_if(flag, local(grad), nan)

    def exchanged(self) -> None:
        """All chunks have been."""
        self._moments.put_back()
        self._targets.clear()
        self.pending, self._over = False, True
        if self._outer is None:
            self._before.clear()

    @property
    def gradients_wait(self) -> bool:
        """Residuals hold gradients, if anything."""
        return self._moments.state.gradients

    @torch.no_grad()
    def add_waiting(
        self, parameters: Sequence[ModelParameter], grads: Sequence[Tensor], scale: Tensor | None
    ) -> None:
        """Add what waits of gradients to this rank's own, which are in units of the loss times
        `scale` (None: 1). If the script throws these away, it is lost with them."""
        for parameter, grad in zip(parameters, grads, strict=True):
            if parameter.filled and parameter.residual is not None:
                grad.add_(parameter.residual if scale is None else parameter.residual * scale)
            parameter.filled = False

    # -- around an optimizer's step --

    @property
    def all_stepped(self) -> bool:
        """No step of this backward's gradients is to come."""
        return self._outer is None and all(of in self._stepped for of, _ in self._of.distinct)

    def step_begins(self, optimizer: Optimizer) -> None:
        """`optimizer.step(closure)` has been called, and the closure has not run yet. One that is
        not torch's may move parameters before (SAM), and back again."""
        if self._outer in (None, optimizer) and not is_adaptive(optimizer):
            self._outer, self._has_closure = optimizer, True
            self._remember()

    def before_step(
        self, optimizer: Optimizer, groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """An optimizer has its gradients, perhaps within a step of another. Returns the parameter
        groups of its step, if these are to be others than `groups`. RuntimeError for a step after
        the exchange of its backward."""
        if self._over and self._outer in (None, optimizer) and self._has_gradients(optimizer):
            self._outer, self._has_closure = None, False
            raise RuntimeError(STEPPED_LATE.format(type(optimizer).__name__))
        self._moments.put_back()  # a step that raised never came to its end
        self._of.learn(optimizer)
        if self._outer is None:
            self._outer = optimizer
        if not self.pending:
            if self._outer is optimizer:
                self._meeting.deliver(self.learning_rate)
            return None
        self._rates |= {id(group): _rates(optimizer, group) for group in optimizer.param_groups}
        self._without_gradient |= {p for p in _parameters_of(optimizer) if p.grad is None}
        if self._outer is optimizer and not self._before:
            self._remember()
        return self._moments.settings_with_share(optimizer, groups)

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        """Of this rank's own: those of parameters without a known optimizer are the ranks' mean."""
        return any(p.grad is not None for p in _parameters_of(optimizer) if p in self._of)

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """First moments that were put aside take in the gradients of the step: here, or block by
        block in `outgoing`, if that comes next."""
        if is_muon(optimizer):
            first = next((of for of, _ in self._of.distinct if is_muon(of)), None)
            self._moments.state.muon_steps += optimizer is first
            if self.pending:
                steps = max(self._moments.state.muon_steps, 1)
                self._enlargements |= enlargements(optimizer, steps, self._ranks)
        if self._outer is optimizer:
            self._outer, self._has_closure = None, False
            if self.pending:
                self._note_step(optimizer)
            else:
                self._before.clear()
        if not (self.pending and self.all_stepped):
            self._moments.put_back()
            self._shrink()

    def _note_step(self, optimizer: Optimizer) -> None:
        steppers = self._of.steppers(optimizer)
        self._stepped |= steppers
        taken = _taken(optimizer)
        for chunk, before in self._before.items():
            decays = [decay for _, decay in self._rates_of(chunk)]
            if not any(_is_tensor(decay) or decay > 0 for decay in decays):
                continue
            if len(self._of.distinct) > 1 or self._without_gradient:
                owners = zip(chunk.parameters, self._of.of_chunk(chunk), strict=True)
                moved = [of in steppers and self._had_gradient(p) for p, (of, _) in owners]
                each = zip(self._rates_of(chunk, each=True), moved, strict=True)
                decays = [decay if moves else 0.0 for (_, decay), moves in each]
            factors = [1 - decay * taken for decay in decays]
            if len(factors) == 1:
                self._shrinks[chunk] = factors[0]
            else:
                _multiply(before, chunk, factors)

    def _had_gradient(self, parameter: ModelParameter) -> bool:
        """In the steps since the last backward."""
        return parameter.tensor not in self._without_gradient

    def _shrink(self) -> None:
        """Where parameters stood before the step, less their decay."""
        for chunk, factor in self._shrinks.items():
            self._before[chunk].mul_(factor)
        self._shrinks = {}

    def _rates_of(self, chunk: Chunk, each: bool = False) -> list[tuple[Scalar, Scalar]]:
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
            return rates[:1] if alike else self._rates_of(chunk, each=True)
        if not scales:
            return rates
        of = (scales.get(p.tensor, 1.0) for p in chunk.parameters)
        return [(lr * scale, decay) for (lr, decay), scale in zip(rates, of, strict=True)]

    def _remember(self) -> None:
        self._before = {chunk: chunk.here("before") for chunk in self.chunks}
        self._shrinks = {}

    # -- dense steps, and ranks that part --

    def begin_step(self, exchange: Exchange, cf: float | None, may_rest: bool = True) -> None:
        """Before gradients are exchanged: the ranks agree on what their optimizers keep
        (collectives). First moments take what waits in residuals; where an optimizer has none, it
        goes at once."""
        if cf is not None and self.exchanges_updates(cf):
            return
        state = self._moments.state
        state.gradients, self._over = True, False
        if state.differ:
            self._moments.meet()
            self._meeting.meet(exchange)
        state.differ, state.begun = False, True

    def learning_rate(self, parameter: ModelParameter) -> Any:
        """That the parameter's updates are told in; an optimizer must step it."""
        p = parameter.tensor
        return self._of[p][1]["lr"] * self._of.rate_scales.get(p, 1.0)

    def part(self) -> None:
        """Before ranks step by themselves for longer: momentum gets all of its lag, and takes what
        waits in residuals."""
        self._over = False
        self._of.relearn()
        self._begin_apart(1.0)

    def agree(self, exchange: Exchange) -> bool:
        differed, over = self._moments.state.differ or bool(self._meeting.late), self._over
        self.begin_step(exchange, None)
        self._over = over
        exchange.take_traffic()  # no step's
        self._meeting.deliver(self.learning_rate)
        return differed

    def hand_back(self, exchange: Exchange | None) -> None:
        self._moments.put_back()
        if exchange is not None:
            self.agree(exchange)

    def state_dict(self) -> dict[str, Any]:
        """What was to go with a dense step waits in residuals again."""
        self._back_to_residuals()
        return self._moments.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._moments.state.load_state_dict(state)
        self._meeting.late.clear()  # of a step before
        self.pending = self._over = self._has_closure = False
        self._outer = None  # a step that raised
        self._before.clear()
        self._shrinks.clear()
        self._moments.aside.clear()

    def preview(
        self, parameters: Sequence[ModelParameter], grads: Sequence[Tensor], strides: Sequence[int]
    ) -> Sequence[Tensor]:
        found = []
        for parameter, grad, stride in zip(parameters, grads, strides, strict=True):
            of = self._of.get(parameter.tensor)
            if of is not None and is_adaptive(of[0]):
                grad = normalized(grad, of[1], self._meeting.state(parameter.tensor), stride)
            elif of is not None and is_muon(of[0]):
                grad = as_muons_update(grad)
            found.append(grad)
        return found

    def unstepped(self, parameters: Sequence[ModelParameter]) -> Sequence[Flag]:
        """Which of these parameters no optimizer has stepped since the last backward."""
        if not self.pending or self.all_stepped:
            return [False] * len(parameters)
        owners = (self._of.get(parameter.tensor) for parameter in parameters)
        return [owner is None or owner[0] not in self._stepped for owner in owners]

    def _begin_apart(self, share: float) -> None:
        if not self._moments.state.own:
            self._back_to_residuals()
        self._moments.state.gradients = False
        self._moments.begin_apart(share)

    def _back_to_residuals(self) -> None:
        """What is late waits in residuals again. What waits there of gradients, which no step has
        followed then, is dropped: it is in other units."""
        if self._meeting.late and self.gradients_wait:
            for parameter in self._parameters.values():
                parameter.filled = False
        if self._meeting.put_back():
            self._moments.state.differ, self._moments.state.gradients = True, False


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _rates(optimizer: Optimizer, group: Group) -> tuple[Scalar, Scalar]:
    """The learning rate, and by which share of itself a parameter decays in a step."""
    lr, decay = group["lr"], group.get("weight_decay", 0.0)
    return lr, lr * decay if decay and is_decoupled(optimizer, group) else 0.0


def _averages(optimizer: Optimizer) -> bool:
    """Its gradients, in first moments."""
    return all(group.get("betas", (0.0,))[0] for group in optimizer.param_groups)


def _taken(optimizer: Optimizer) -> Scalar:
    """1, or 0 if a `GradScaler` has told a fused optimizer to skip the step."""
    skips = getattr(optimizer, "found_inf", None)
    return 1.0 if skips is None else 1 - skips


def inverse(lr: Scalar) -> Scalar:
    """Nothing moves by a learning rate of 0."""
    if isinstance(lr, Tensor):
        return torch.where(lr > 0, 1 / lr, 0.0)
    return 1 / lr if lr > 0 else 0.0


def _multiply(whole: Tensor, chunk: Chunk, factors: Sequence[Scalar]) -> None:
    """The pieces of a chunk by these factors, in place: one for each parameter, or one for all."""
    first, *others = factors
    if all(_same_number(first, other) for other in others):
        whole.mul_(first)
    elif any(map(_is_tensor, factors)):
        of = [torch.as_tensor(factor, device=whole.device) for factor in factors]
        torch._foreach_mul_(chunk.split(whole), of)
    else:
        torch._foreach_mul_(chunk.split(whole), [float(factor) for factor in factors])


def _same(a: tuple[Scalar, Scalar], b: tuple[Scalar, Scalar]) -> bool:
    return all(map(_same_number, a, b))


def _same_number(a: Scalar, b: Scalar) -> bool:
    """As the host knows."""
    return a is b or not (_is_tensor(a) or _is_tensor(b) or a != b)


def _is_tensor(x: Scalar) -> bool:
    return isinstance(x, Tensor)
