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

Momentum holds updates back, and so does a residual. With both they would be late twice, so in
compressed steps momentum keeps only a share of its lag, and what it gives up goes to the residual.
When the CF falls, momentum gets its lag back, and takes all that waits in the residual: it delivers
over some ten steps what would throw the model far back in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.chunks import Chunk, chunks
from adaptive.exchange.collectives import Exchange
from adaptive.memory.error_feedback import Residual
from adaptive.memory.flat_moments import FlatMoments
from adaptive.memory.handover import Group
from adaptive.memory.moments import (
    Run,
    deliver,
    enlarge,
    is_adaptive,
    is_decoupled,
    mean_share,
    noise_of,
    normalized,
    scale_second_moments,
    undelivered,
    with_lag,
)
from adaptive.memory.muon import enlargements, is_muon
from adaptive.memory.muon import normalized as as_muons_update
from adaptive.memory.owners import Owners
from adaptive.optimizer_states import agree_on_states
from adaptive.parameters import ModelParameter, ModelParameters, like, local, shaped
from compressors.kernels.blocks import Flag, Scalar
from policies import state as saved


@dataclass(eq=False)
class MomentState(saved.Stateful):
    """What has become of the optimizers' moments since the last dense step.

    differ: they are each rank's own, and residuals may hold something. share: of its lag that
    momentum had in the last step, in [0, 1]. muon_steps: that were seen of a Muon."""

    differ: bool = saved.saved(False)
    share: float = saved.saved(1.0)
    muon_steps: int = saved.saved(0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        saved.require(0 <= self.share <= 1, f"'share' must be in [0, 1], got {self.share!r}")
        steps = self.muon_steps
        saved.require(steps >= 0, f"'muon_steps' must be at least 0, got {steps!r}")


class UpdateMemory(Residual):
    """One residual of updates for each parameter, and what is done around an optimizer's step.

    ranks: world size. lag: the share of its lag that momentum keeps in a step at a CF, in [0, 1].
    pending: a backward has ended whose updates are yet to be exchanged.
    """

    name = "updates"
    sends_updates = True
    moments: MomentState

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: ModelParameters,
        ranks: int,
        lag: Callable[[float], float],
    ) -> None:
        super().__init__(parameters.maybe_unused)
        self.moments = MomentState()
        self.moments.differ = any(optimizer.state for optimizer in optimizers)
        self._own = False  # moments are of this rank's own gradients
        self.pending = False
        self._parameters = parameters
        self._ranks = ranks
        self._lag = cache(lag)
        self._of = Owners(parameters, optimizers)
        self._chunks: list[Chunk] = []
        self._share = 1.0  # of momentum's lag, in the step to come
        self._outer: Optimizer | None = None  # whose step is under way
        self._before: dict[Chunk, Tensor] = {}  # where the parameters stood
        self._rates: dict[int, tuple[Scalar, Scalar]] = {}  # by group: learning rate, decay
        self._stepped: set[Optimizer] = set()  # since the last backward
        self._enlargements: dict[Tensor, Tensor] = {}  # of Muon's steps since then
        self._moments: dict[Chunk, FlatMoments] = {}
        self._aside: dict[Chunk, Tensor] = {}  # first moments before a step without momentum
        self._late: dict[Tensor, Tensor] = {}  # updates that go with the next step, dense

    # -- what is exchanged --

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The parameters that some optimizer steps, as they are exchanged. Alike on all ranks."""
        ours = [parameter for p, parameter in self._parameters.items() if p in self._of]
        if sum(len(chunk.parameters) for chunk in self._chunks) != len(ours):
            self._chunks = [Chunk(each) for each in chunks(ours)]
            self._moments = {chunk: FlatMoments(chunk) for chunk in self._chunks}
        return self._chunks

    def apart(self, parameters: Iterable[Tensor]) -> list[int]:
        """Places of the parameters that no known optimizer steps."""
        if len(self._of) == len(self._parameters):
            return []
        return [i for i, p in enumerate(parameters) if p not in self._of]

    def backward_ends(self, cf: float) -> None:
        """The gradients of a step that is compressed at `cf` are there."""
        self._put_back()  # a step that raised never came to its end
        self.pending = True
        self._share = self._lag(cf)
        self._stepped.clear()
        self._enlargements.clear()
        if self._outer is None:
            self._before.clear()
        self._rates = {id(group): _rates(of, group) for of, group in self._of.distinct}
        self._begin_apart(self._share)

    @torch.no_grad()
    def outgoing(self, chunk: Chunk) -> Tensor:
        """What this rank's step has done to the parameters of a chunk, as updates (flat, in the
        chunk's scratch). Zeros for those that no optimizer has stepped since backward."""
        before, work = self._before.get(chunk), chunk.room("work")
        if before is None:
            return work.zero_()
        rates = [inverse(lr) for lr, _ in self._rates_of(chunk)]
        rate = _common(rates)
        runs = [(run, noise_of(run, self._share)) for run in self._runs(chunk)]
        for block in chunk.blocks():
            update = block.joined(work[block.start : block.stop])
            torch.sub(before[block.start : block.stop], update, out=update)
            if rate is not None:
                update.mul_(rate)
            for run, noise in runs:
                start, stop = max(run.start, block.start), min(run.stop, block.stop)
                if start < stop:
                    moments = run.between(start, stop)
                    part = work[start:stop]
                    enlarge(part, moments.mean, moments.square, noise, self._ranks)
        if rate is None:
            _multiply(work, chunk.split(work), rates)
        pairs = zip(chunk.parameters, chunk.split(work), strict=True) if self._enlargements else ()
        muons = [(piece, p.tensor) for p, piece in pairs if p.tensor in self._enlargements]
        if muons:
            factors = [self._enlargements[p] for _, p in muons]
            torch._foreach_mul_([piece for piece, _ in muons], factors)
        if not self.all_stepped:
            for (of, _), piece in zip(self._of.of_chunk(chunk), chunk.split(work), strict=True):
                if of not in self._stepped:
                    piece.zero_()
        return work

    @torch.no_grad()
    def apply(self, chunk: Chunk, mean: Tensor, any_stepped: Callable[[], Tensor]) -> None:
        """Move the parameters of a chunk by the ranks' mean update, which is overwritten.

        any_stepped: how many ranks have stepped (0-dim); called on a rank that has not."""
        rates = self._rates_of(chunk)
        rate = _common([lr for lr, _ in rates])
        if rate is None:
            _multiply(mean, chunk.split(mean), [lr for lr, _ in rates])
        before = self._before.get(chunk)
        if before is None or not self._stepped:
            before = chunk.here("unstepped")
            decays = [] if self._stepped else [decay for _, decay in rates]
            if any(_is_tensor(decay) or decay > 0 for decay in decays):
                some = (any_stepped() > 0).to(before.dtype)
                _multiply(before, chunk.split(before), [1 - decay * some for decay in decays])
        for block in chunk.blocks():
            moved = mean[block.start : block.stop]
            if rate is not None:
                moved.mul_(rate)
            block.go_to(torch.sub(before[block.start : block.stop], moved, out=moved))
        chunk.written()

    def exchanged(self) -> None:
        """All chunks have been."""
        self.pending = False
        if self._outer is None:
            self._before.clear()

    # -- around an optimizer's step --

    @property
    def all_stepped(self) -> bool:
        """No step of this backward's gradients is to come."""
        return self._outer is None and all(of in self._stepped for of, _ in self._of.distinct)

    def step_begins(self, optimizer: Optimizer) -> None:
        """`optimizer.step(closure)` has been called, and the closure has not run yet. One that is
        not torch's may move parameters before (SAM), and back again."""
        if self._outer is None and not is_adaptive(optimizer):
            self._outer = optimizer
            self._remember()

    def before_step(
        self, optimizer: Optimizer, groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """An optimizer has its gradients, perhaps within a step of another. Returns the parameter
        groups of its step, if these are to be others than `groups`."""
        self._put_back()  # a step that raised never came to its end
        self._of.learn(optimizer)
        if self._outer is None:
            self._outer = optimizer
        if not self.pending:
            if self._outer is optimizer:
                self._deliver_late()
            return None
        self._rates |= {id(group): _rates(optimizer, group) for group in optimizer.param_groups}
        if self._outer is optimizer and not self._before:
            self._remember()
        return self._with_share(optimizer, groups)

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """First moments that were put aside take in the gradients of the step."""
        self._put_back()
        if is_muon(optimizer):
            first = next((of for of, _ in self._of.distinct if is_muon(of)), None)
            self.moments.muon_steps += optimizer is first
            if self.pending:
                steps = max(self.moments.muon_steps, 1)
                self._enlargements |= enlargements(optimizer, steps, self._ranks)
        if self._outer is not optimizer:
            return
        self._outer = None
        if not self.pending:
            self._before.clear()
            return
        steppers = self._of.steppers(optimizer)
        self._stepped |= steppers
        taken = _taken(optimizer)
        for chunk, before in self._before.items():
            pairs = zip(self._of.of_chunk(chunk), self._rates_of(chunk), strict=True)
            decays = [decay if of in steppers else 0.0 for (of, _), (_, decay) in pairs]
            if any(_is_tensor(decay) or decay > 0 for decay in decays):
                _multiply(before, chunk.split(before), [1 - decay * taken for decay in decays])

    def _rates_of(self, chunk: Chunk) -> list[tuple[Scalar, Scalar]]:
        """Of each parameter the learning rate that its updates are told in, and its decay."""
        rates = [self._rates[id(group)] for _, group in self._of.of_chunk(chunk)]
        if not self._of.rate_scales:
            return rates
        scales = (self._of.rate_scales.get(p.tensor, 1.0) for p in chunk.parameters)
        return [(lr * s, decay) for (lr, decay), s in zip(rates, scales, strict=True)]

    def _remember(self) -> None:
        self._before = {chunk: chunk.here("before") for chunk in self.chunks}

    def _with_share(
        self, optimizer: Optimizer, groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """For this step, momentum of our parameters has its share of the lag. With none the first
        moment is put aside, since it still tells what is noise."""
        if self._share == 1 or not is_adaptive(optimizer):
            return None
        if any(self._moments[c].left_out(self._of.of_chunk(c)) for c in self.chunks):
            return None
        changed: list[dict[str, Any]] = []
        without = False
        for group in groups:
            beta1, *beta2 = group.get("betas", (0.0,))
            ours = [p for p in group["params"] if p in self._parameters]
            if not ours or not beta1:
                changed.append(group)
                continue
            betas = (with_lag(beta1, self._share), *beta2)
            changed.append({**group, "params": ours, "betas": betas})
            others = [p for p in group["params"] if p not in self._parameters]
            changed += [{**group, "params": others}] if others else []
            without = self._share == 0
        if without:
            self._put_aside(optimizer)
        return changed

    def _put_aside(self, optimizer: Optimizer) -> None:
        """Copy the first moments of chunks with some of an optimizer's parameters, in a room that
        is not needed until after the step."""
        for chunk in self.chunks:
            if all(of is not optimizer for of, _ in self._of.of_chunk(chunk)):
                continue
            mean = self._moments[chunk].tensors.get("exp_avg")
            work = chunk.room("work")
            self._aside[chunk] = work.zero_() if mean is None else work.copy_(mean)

    @torch.no_grad()
    def _put_back(self) -> None:
        """After a step without momentum first moments are its gradients: average them."""
        for chunk, aside in self._aside.items():
            for run in self._runs(chunk):
                before = aside[run.start : run.stop].to(run.mean.dtype)
                torch.lerp(before, run.mean, 1 - run.group["betas"][0], out=run.mean)
        self._aside = {}

    # -- dense steps, and ranks that part --

    def settle(self, exchange: Exchange, may_rest: bool = True) -> None:
        """Before a dense step: the ranks agree on what their optimizers keep (collectives). First
        moments take what waits in residuals; where an optimizer has none, it goes at once."""
        if not self.moments.differ:
            return
        if self._own:
            for run in self._all_runs():
                of_mean = mean_share(run, self._ranks, self.moments.share)
                scale_second_moments(run.tensors, of_mean)
            self._own = False
        self._change_share(1.0)
        ours = [(p, parameter) for p, parameter in self._parameters.items() if p in self._of]
        states = {parameter: self._state(p) for p, parameter in ours}
        agree_on_states(states, exchange)
        for parameter, state in states.items():
            self._keep(parameter.tensor, state)
        for chunk in self.chunks:
            waiting = chunk.room("work")
            for parameter, piece in zip(chunk.parameters, chunk.split(waiting), strict=True):
                if parameter.filled and parameter.residual is not None:
                    piece.copy_(parameter.residual)
                else:
                    piece.zero_()
                parameter.filled = False
            mean = exchange.total(waiting.div_(self._ranks)).wait().clone()
            pieces = zip(chunk.parameters, chunk.split(mean), strict=True)
            self._late |= {parameter.tensor: piece for parameter, piece in pieces}
        self.moments.differ = False

    def learning_rate(self, parameter: ModelParameter) -> Any:
        """That the parameter's updates are told in; an optimizer must step it."""
        p = parameter.tensor
        return self._of[p][1]["lr"] * self._of.rate_scales.get(p, 1.0)

    def part(self) -> None:
        """Before ranks step by themselves for longer: momentum has all of its lag, and what waits
        is in the residuals."""
        self._begin_apart(1.0)

    def agree(self, exchange: Exchange) -> bool:
        differed = self.moments.differ or bool(self._late)
        self.settle(exchange)
        exchange.take_traffic()  # no step's
        self._deliver_late()
        return differed

    def hand_back(self, exchange: Exchange | None) -> None:
        self._put_back()
        if exchange is not None:
            self.agree(exchange)

    def load_state_dict(self, parameter: ModelParameter, state: Mapping[str, Any]) -> None:
        super().load_state_dict(parameter, state)
        self._own = self.moments.differ
        self._late.pop(parameter.tensor, None)  # of a step before
        self.pending = False

    def conclude(self) -> None:
        """Before a state is saved: what was to go with a dense step waits again."""
        self._back_to_residuals()

    def preview(
        self, parameters: Sequence[ModelParameter], grads: Sequence[Tensor], strides: Sequence[int]
    ) -> Sequence[Tensor]:
        found = []
        for parameter, grad, stride in zip(parameters, grads, strides, strict=True):
            of = self._of.get(parameter.tensor)
            if of is not None and is_adaptive(of[0]):
                grad = normalized(grad, of[1], self._state(parameter.tensor), stride)
            elif of is not None and is_muon(of[0]):
                grad = as_muons_update(grad)
            found.append(grad)
        return found

    def skipped(
        self, parameters: Sequence[ModelParameter], grad_energies: Sequence[Scalar]
    ) -> Sequence[Flag]:
        """Those that have not been stepped."""
        if not self.pending or self.all_stepped:
            return [False] * len(parameters)
        owners = (self._of.get(parameter.tensor) for parameter in parameters)
        return [owner is None or owner[0] not in self._stepped for owner in owners]

    def skips_zeros(self) -> bool:
        return False

    def _begin_apart(self, share: float) -> None:
        """From here on moments are this rank's, and momentum has this share of its lag."""
        self.moments.differ = True
        if not self._own:
            self._own = True
            for run in self._all_runs():
                # A second moment of the mean has the signal's, and 1 / N of the noise's.
                part = mean_share(run, self._ranks, self.moments.share)
                scale = part.mul_(-self._ranks).add_(1 + self._ranks)
                scale_second_moments(run.tensors, scale)
            self._back_to_residuals()
        self._change_share(share)

    def _change_share(self, share: float) -> None:
        """What the steps so far have yet to deliver stays the same with another share of the lag.

        With a smaller one the residual takes what momentum no longer delivers. With a larger one
        momentum takes all, and delivers over steps what a residual would deliver at once."""
        before, self.moments.share = self.moments.share, share
        if before == share:
            return
        for chunk in self.chunks:
            for run in self._runs(chunk):
                beta1 = run.group["betas"][0]
                if not beta1:
                    continue
                of_mean = mean_share(run, self._ranks, before) if self._own else 1.0
                if share < before:
                    waiting = undelivered(run, before, of_mean).mul_(before - share)
                    for parameter, piece in chunk.within(waiting, run.start):
                        parameter.open_residual().add_(piece)
                    continue
                waiting = undelivered(run, before, of_mean).mul_(before)
                for parameter, piece in chunk.within(waiting, run.start):
                    if parameter.filled and parameter.residual is not None:
                        piece.add_(parameter.residual)
                    parameter.filled = False
                deliver(run, waiting, share, of_mean)

    def _runs(self, chunk: Chunk) -> list[Run]:
        """The moments of a chunk's parameters, as far as they have both."""
        return self._moments[chunk].runs(self._of.of_chunk(chunk))

    def _all_runs(self) -> Iterator[Run]:
        for chunk in self.chunks:
            yield from self._runs(chunk)

    def _state(self, p: Tensor) -> dict[str, Any]:
        """The optimizer's of a parameter; of a sharded one with the shards that are here."""
        of = self._of.get(p)
        state: dict[str, Any] = {} if of is None else dict(of[0].state.get(p, {}))
        if not hasattr(p, "to_local"):
            return state
        return {name: local(kept) for name, kept in state.items()}

    def _keep(self, p: Tensor, state: dict[str, Any]) -> None:
        """What another rank's optimizer had, and this rank's has not."""
        if not state:
            return
        own = self._of[p][0].state[p]
        for name in state.keys() - own.keys():
            kept = state[name]
            own[name] = like(kept, p) if isinstance(kept, Tensor) and kept.dim() else kept

    def _back_to_residuals(self) -> None:
        for parameter in self._parameters.values():
            late = self._late.pop(parameter.tensor, None)
            if late is not None:
                parameter.open_residual().add_(late)
                self.moments.differ = True

    @torch.no_grad()
    def _deliver_late(self) -> None:
        """What residuals held before dense steps began."""
        for p in list(self._late):
            late, here = self._late.pop(p), local(p)
            lr = self.learning_rate(self._parameters[p])
            here.sub_(shaped(late, here).to(here.dtype) * lr)


def _rates(optimizer: Optimizer, group: Group) -> tuple[Scalar, Scalar]:
    """The learning rate, and by which share of itself a parameter decays in a step."""
    lr, decay = group["lr"], group.get("weight_decay", 0.0)
    return lr, lr * decay if decay and is_decoupled(optimizer, group) else 0.0


def _taken(optimizer: Optimizer) -> Scalar:
    """1, or 0 if a `GradScaler` has told a fused optimizer to skip the step."""
    skips = getattr(optimizer, "found_inf", None)
    return 1.0 if skips is None else 1 - skips


def inverse(lr: Scalar) -> Scalar:
    """Nothing moves by a learning rate of 0."""
    if isinstance(lr, Tensor):
        return torch.where(lr > 0, 1 / lr, 0.0)
    return 1 / lr if lr > 0 else 0.0


def _multiply(whole: Tensor, pieces: Sequence[Tensor], factors: Sequence[Scalar]) -> None:
    """Each piece of `whole` by its factor, in place."""
    common = _common(factors)
    if common is not None:
        whole.mul_(common)
    elif any(map(_is_tensor, factors)):
        torch._foreach_mul_(
            list(pieces), [torch.as_tensor(f, device=whole.device) for f in factors]
        )
    else:
        torch._foreach_mul_(list(pieces), [float(factor) for factor in factors])


def _common(factors: Sequence[Scalar]) -> Scalar | None:
    """The factor, if all are the same."""
    first = factors[0]
    same = all(f is first or (not _is_tensor(f) and f == first) for f in factors)
    return first if same else None


def _is_tensor(x: Scalar) -> bool:
    return isinstance(x, Tensor)
