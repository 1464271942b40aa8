"""Compression in parameter space: each rank's optimizer steps by itself, and what its step has done
to the parameters is fed back, compressed, exchanged and averaged.

An optimizer that divides by the root of a second moment (Adam and those like it) must not be fed
with decoded gradients: an element that has waited T steps in the residual arrives T times as large,
its second moment grows with T^2, and the optimizer divides the burst away
(docs/research/defaults.md). So autograd gets this rank's own gradient back, whatever a script does
to it, and the user's own optimizer makes the step. In a compressed step, with `lr` the learning
rate of the moment:

1. before `optimizer.step()`: b = parameters * (1 - lr * decoupled weight decay), the same on all
   ranks; momentum gets a share of its lag, for this step only. (`lr` of Muon: see muon.py.)
2. after it: d = (b - parameters) / lr, enlarged by the noise in this rank's second moment
   (moments.py; of Muon in its momentum, muon.py); r += d; the largest elements c of r are sent,
   r -= c.
3. parameters = b - lr * mean of c over the ranks, the same on all ranks again.

A dense step is DDP's own: before the first one the ranks agree on what their optimizers keep.

At CFs where next to nothing waits (int8, int4) there are no bursts. There, beside Adam, the mean
gradient is exchanged, compressed with error feedback, and the optimizer steps as after a dense
backward: this trains as well as a dense step does (docs/research/defaults.md). What waits of
gradients goes with the rank's own gradient into the next step whose updates are exchanged.

Momentum holds updates back, and so does a residual. With both they would be late twice, so in
compressed steps momentum keeps only a share of its lag, and what it gives up goes to the residual.
When the CF falls, momentum gets its lag back, and takes all that waits in the residual: it delivers
over some ten steps what would throw the model far back in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.memory.error_feedback import Residual
from adaptive.memory.handover import Handover, is_torchs_own, rate_of
from adaptive.memory.inspection import Inspection, take_from_first, verdict
from adaptive.memory.moments import enlarge, is_adaptive, normalized, take_step
from adaptive.memory.muon import enlargements, is_muon
from adaptive.memory.muon import normalized as as_muons_update
from adaptive.memory.optimizer_steps import (
    OptimizerSteps,
    any_decay,
    is_tensor,
    multiply,
    parameters_of,
    same_number,
)
from adaptive.memory.optimizer_sync import OptimizerSync
from adaptive.memory.own_moments import OwnMoments, average
from adaptive.memory.owners import Owners
from adaptive.model.chunks import Chunk, Destination
from adaptive.model.parameters import ModelParameter, ModelParameters, local
from adaptive.network.collectives import Exchange
from compressors.kernels import squared_norm
from compressors.kernels.blocks import Flag, Scalar, fill_if


class UpdateMemory(Residual):
    """One residual of updates for each parameter."""

    name = "updates"

    def __init__(self, maybe_unused: Callable[[], bool], handover: UpdateHandover) -> None:
        self._steps = handover.steps
        super().__init__(lambda: not self._steps.pending and maybe_unused(), handover)

    def skipped(
        self, parameters: Sequence[ModelParameter], grad_energies: Sequence[Scalar]
    ) -> Sequence[Flag]:
        """Of updates: those that have not been stepped."""
        if self._steps.pending:
            return self._steps.unstepped(parameters)
        return super().skipped(parameters, grad_energies)


class UpdateHandover(Handover):
    """What is done around the steps of each rank's own optimizers.

    ranks: world size. lag: the share of its lag that momentum keeps in a step at a CF, in [0, 1].
    steps: of the optimizers. always: updates are exchanged in every compressed step. So it is where
    an optimizer that was handed over has no first moment, which would take what waits in updates
    once gradients are exchanged.
    """

    sends_updates = True

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: ModelParameters,
        ranks: int,
        lag: Callable[[float], float],
    ) -> None:
        self.always = not all(is_adaptive(of) and _averages(of) for of in optimizers)
        self._parameters = parameters
        self._ranks = ranks
        self._lag = cache(lag)
        self._of = Owners(parameters, optimizers)
        self.steps = OptimizerSteps(self._of)
        self._moments = OwnMoments(self._of, ranks)
        stepped = any(optimizer.state for optimizer in optimizers)
        self._moments.state.differ = self._moments.state.had_full_lag = stepped
        self._targets: dict[Chunk, Tensor] = {}  # where parameters go, as means are decoded
        self._read: list[Tensor | None] = []  # by the hook's stream, of which others may not know
        self._enlargements: dict[Tensor, Tensor] = {}  # of Muon's steps since the last backward
        self._sync = OptimizerSync(parameters, self._of)
        self._inspection = Inspection(parameters)
        known = [self._inspection.notice(optimizer) for optimizer in optimizers]
        self._moments.state.unknown = not all(known)
        self._unknown_stepped = False  # by itself, some optimizer that is not torch's

    @property
    def keeps_momentum(self) -> bool:
        """Muon does, and whatever else is not one of Adam's kind."""
        return not all(is_adaptive(of) for of, _ in self._of.distinct)

    # -- what is exchanged --

    def exchanges_updates(self, cf: float) -> bool:
        """Whether they are exchanged in a step that is compressed at `cf`, or gradients: where
        momentum keeps all of its lag, since next to nothing waits. Alike on all ranks."""
        return not self._moments.state.by_gradients and (self.always or self._lag(cf) < 1)

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The parameters that some optimizer steps, as they are exchanged. Alike on all ranks."""
        return self._of.chunks

    def without_optimizer(self, parameters: Iterable[Tensor]) -> list[int]:
        """Places of the parameters that no known optimizer steps."""
        if len(self._of) == len(self._parameters):
            return []
        return [i for i, p in enumerate(parameters) if p not in self._of]

    def backward_ends(self, cf: float) -> None:
        """The gradients of a step that is compressed at `cf` are there."""
        self._moments.put_back()
        self.steps.backward_ends()
        self._enlargements.clear()
        if self.gradients_wait:  # of parameters that this backward has not used
            for parameter in self._parameters.values():
                parameter.filled = False
        self._begin_own_steps(self._lag(cf))

    @torch.no_grad()
    def outgoing(self, chunk: Chunk) -> tuple[Tensor, Scalar | None]:
        """What this rank's step has done to the parameters of a chunk, as updates (flat, in the
        chunk's scratch), and the squared norm of that, if it is known. Zeros for those that no
        optimizer has stepped since backward.

        All is done to one block after the other, while that is in the cache."""
        before, work = self.steps.before.get(chunk), chunk.buffer("work")
        if before is None:
            return work.zero_(), None
        rates = self.steps.rates_of(chunk)
        rate = inverse(rates[0][0]) if len(rates) == 1 else None
        shrink = self.steps.take_shrink(chunk)
        energies: list[Scalar] = []
        runs, share = self._moments.runs(chunk), self._moments.state.share
        old_mean = self._moments.old_means.pop(chunk, None)
        self._read.append(old_mean)
        blocks = chunk.blocks()
        # On a device there is one block.
        of = before, work, blocks[0].joined, runs, old_mean, shrink, rate, share, self._ranks
        if (energy := take_step(*of)) is not None:
            energies, blocks = [energy], []
        for block in blocks:
            inside = [run.inside(block.start, block.stop) for run in runs]
            if old_mean is not None:
                for run, part in zip(runs, inside, strict=True):
                    average(run, old_mean, part)
            update, stood = work[block.start : block.stop], before[block.start : block.stop]
            if is_tensor(shrink) or shrink != 1:
                stood.mul_(shrink)
            torch.sub(stood, block.joined(update), out=update)
            if rate is not None:
                update.mul_(rate)
            for run, part in zip(runs, inside, strict=True):
                if part.start < part.stop:
                    enlarge(work[run.start : run.stop][part], run, part, share, self._ranks)
            energies.append(squared_norm(update))
        if rate is None:
            multiply(work, chunk, [inverse(lr) for lr, _ in rates])
        pairs = zip(chunk.parameters, chunk.split(work), strict=True) if self._enlargements else ()
        muons = [(piece, p.tensor) for p, piece in pairs if p.tensor in self._enlargements]
        if muons:
            factors = [self._enlargements[p] for _, p in muons]
            torch._foreach_mul_([piece for piece, _ in muons], factors)
        all_stepped = self.steps.all_stepped
        if not all_stepped:
            left_out = self.steps.unstepped(chunk.parameters)
            for without, piece in zip(left_out, chunk.split(work), strict=True):
                if without:
                    piece.zero_()
        known = rate is not None and all_stepped and not muons
        return work, sum(energies[1:], energies[0]) if known else None

    def destination(self, chunk: Chunk) -> Destination | None:
        """Where the ranks' mean update of a chunk moves the parameters as it is decoded. None where
        that is not one sum: then `apply` needs the mean itself."""
        rates = self.steps.rates_of(chunk)
        lr, decay = rates[0]
        if len(rates) > 1 or isinstance(lr, Tensor):
            return None
        stepped = self.steps.any_stepped
        if stepped and not self.steps.all_stepped:
            return None
        # A rank that leaves its step out rounds as the others do.
        to = self.steps.before[chunk] if stepped else chunk.here("unstepped").mul_(1 - decay)
        self._targets[chunk] = to
        return Destination(to, -lr)

    @torch.no_grad()
    def apply(self, chunk: Chunk, mean: Tensor | None, any_stepped: Callable[[], Tensor]) -> None:
        """Move the parameters of a chunk by the ranks' mean update, which is overwritten. None: it
        has gone to the chunk's `destination`.

        any_stepped: how many ranks have stepped (0-dim); called on a rank that has not."""
        if mean is None:
            if self.steps.any_stepped or bool(any_stepped() > 0):
                chunk.go_to(self._targets[chunk])
            return
        before, stepped = self.steps.before.get(chunk), self.steps.any_stepped
        rates = self.steps.rates_of(chunk)
        multiply(mean, chunk, [lr for lr, _ in rates])
        if before is None or not stepped:
            before = chunk.here("unstepped")
            decays = [] if stepped else [decay for _, decay in rates]
            if any_decay(decays):
                some = (any_stepped() > 0).to(before.dtype)
                multiply(before, chunk, [1 - decay * some for decay in decays])
        chunk.go_to(torch.sub(before, mean, out=mean))

    @torch.no_grad()
    def mark_nonfinite(self, flag: Flag) -> None:
        """Some rank's gradients are not finite: see to it that each optimizer has one that is not.
        A `GradScaler` looks at each optimizer by itself, and then skips all of them on all ranks.
        (Autograd's result tells the optimizer of the last bucket.)"""
        optimizers = {of for of, _ in self._of.distinct}
        for optimizer in optimizers if len(optimizers) > 1 and flag is not False else ():
            grads = (p.grad for p in parameters_of(optimizer) if p in self._of)
            if (grad := next((each for each in grads if each is not None), None)) is not None:
                fill_if(flag, local(grad), nan)

    def exchanged(self) -> None:
        """All chunks have been, and the stream of the optimizers' steps is behind the hook's."""
        self._moments.put_back()
        self._targets.clear()
        self._read.clear()
        self.steps.exchanged()

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

    def before_step(
        self, optimizer: Optimizer, groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """An optimizer has its gradients. Returns the parameter groups of its step, if these are to
        be others than `groups`. RuntimeError for a step within another's, and for one after the
        exchange of its backward."""
        self._moments.put_back()  # a step that raised never came to its end
        self._inspection.before_step(optimizer)
        rates = self._rates_before(optimizer)
        self.steps.begin(optimizer)
        self._change_rates(rates)
        if self.steps.pending:
            return self._moments.settings_with_share(optimizer, groups)
        self._sync.deliver(self.learning_rate)
        return None

    def replaced_by(self, optimizer: Optimizer) -> str:
        """The name of the optimizer in whose place this one is about to step for the first time, if
        its own kind would have been served otherwise; "" as a rule."""
        if optimizer in self._of.known or not is_torchs_own(optimizer):
            return ""
        if is_adaptive(optimizer) or is_muon(optimizer):
            return ""
        had = (self._of[p][0] for p in parameters_of(optimizer) if p in self._of)
        return next((type(of).__name__ for of in had if of.state), "")

    def _rates_before(self, optimizer: Optimizer) -> dict[ModelParameter, Scalar]:
        """Learning rates that updates of parameters were told in, which another optimizer is about
        to step for the first time."""
        if optimizer in self._of.known or self.gradients_wait:
            return {}
        taken = [self._parameters[p] for p in parameters_of(optimizer) if p in self._of]
        return {parameter: self.learning_rate(parameter) for parameter in taken}

    @torch.no_grad()
    def _change_rates(self, before: Mapping[ModelParameter, Scalar]) -> None:
        """What waits of another optimizer's updates would move the parameters by as much as before,
        whatever the learning rate of the one that has taken its place."""
        for parameter, old in before.items():
            new = self.learning_rate(parameter)
            if parameter.filled and parameter.residual is not None and not same_number(old, new):
                parameter.residual.mul_(old * inverse(new))

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> bool:
        """First moments that were kept take in the gradients of the step: here, or block by
        block in `outgoing`, if that comes next. Returns whether there is news of an optimizer that
        is not torch's, which the ranks have yet to agree on."""
        news = self._inspection.after_step(optimizer)
        self._unknown_stepped |= self.steps.pending and optimizer in self._inspection.seen
        if is_muon(optimizer):
            first = next((of for of, _ in self._of.distinct if is_muon(of)), None)
            self._moments.state.muon_steps += optimizer is first
            if self.steps.pending:
                steps = max(self._moments.state.muon_steps, 1)
                self._enlargements |= enlargements(optimizer, steps, self._ranks)
        self.steps.end(optimizer)
        if not (self.steps.pending and self.steps.all_stepped):
            self._moments.put_back()
            self.steps.shrink()
        return news and not (self.unknown or self._moments.state.by_gradients)

    # -- optimizers that are not torch's --

    @property
    def unknown(self) -> bool:
        """Some optimizer has yet to step, before it is known what it keeps. Alike on all ranks."""
        return self._moments.state.unknown

    @property
    def dense_because(self) -> str:  # type: ignore[override]
        return "an optimizer that is not torch's makes its first step" if self.unknown else ""

    def look(self, exchange: Exchange) -> str:
        """The ranks agree on what they have found out of optimizers that are not torch's (a
        collective). Returns why gradients are exchanged from now on, if that is news."""
        state, findings = self._moments.state, self._inspection.findings
        # One that has no parameters any more will not step: a wrapper, say, of one that does.
        owners = {of for of, _ in self._of.distinct}
        seen = [of for of in self._inspection.seen if of in findings or of in owners]
        own = [findings.get(of) for of in seen]
        everyone, stepped = zip(*exchange.gather_objects((own, self._unknown_stepped)), strict=True)
        found = [[each for each in theirs if each] for theirs in everyone]
        state.unknown = {*map(len, found)} != {max(map(len, everyone))}
        if state.unknown or state.by_gradients or not (why := verdict(found)):
            return ""
        state.by_gradients = True
        if any(stepped):
            self.begin_step(exchange, None)
            for of in seen:
                take_from_first(of, exchange)
        return why

    # -- dense steps, and ranks that part --

    def begin_step(self, exchange: Exchange, cf: float | None, may_rest: bool = True) -> None:
        """Before gradients are exchanged: the ranks agree on what their optimizers keep
        (collectives). First moments take what waits in residuals; where an optimizer has none, it
        goes at once."""
        if cf is not None and self.exchanges_updates(cf):
            return
        state = self._moments.state
        state.gradients, self.steps.over = True, False
        if state.differ:
            self._moments.before_sync()
            self._sync.agree(exchange)
        state.differ, state.had_full_lag = False, True

    def learning_rate(self, parameter: ModelParameter) -> Any:
        """That the parameter's updates are told in; an optimizer must step it."""
        p = parameter.tensor
        return rate_of(self._of[p][1]) * self._of.rate_scales.get(p, 1.0)

    def part(self) -> None:
        """Before ranks step by themselves for longer: momentum gets all of its lag, and takes what
        waits in residuals."""
        self.steps.over = False
        self._of.relearn()
        self._begin_own_steps(1.0)

    def agree(self, exchange: Exchange) -> bool:
        differed, over = self._moments.state.differ or bool(self._sync.undelivered), self.steps.over
        self.begin_step(exchange, None)
        self.steps.over = over
        exchange.take_traffic()  # no step's
        self._sync.deliver(self.learning_rate)
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

    def forget_moments(self) -> None:
        self._moments.old_means.clear()

    def abandon(self) -> None:
        """Forget the steps under way, and what was to go with the next one."""
        self.steps.reset()
        for under_way in (self._sync.undelivered, self._moments.old_means, self._targets):
            under_way.clear()
        self._enlargements.clear()

    def preview(
        self, parameters: Sequence[ModelParameter], grads: Sequence[Tensor], strides: Sequence[int]
    ) -> Sequence[Tensor]:
        found = []
        for parameter, grad, stride in zip(parameters, grads, strides, strict=True):
            of = self._of.get(parameter.tensor)
            if of is not None and is_adaptive(of[0]):
                grad = normalized(grad, of[1], self._sync.state(parameter.tensor), stride)
            elif of is not None and is_muon(of[0]):
                grad = as_muons_update(grad)
            found.append(grad)
        return found

    def _begin_own_steps(self, share: float) -> None:
        if not self._moments.state.own:
            self._back_to_residuals()
        self._moments.state.gradients = False
        self._moments.begin_own_steps(share)

    def _back_to_residuals(self) -> None:
        """Undelivered updates go back to the residuals. Gradients left there are dropped, because
        they are in other units and no step has used them."""
        if self._sync.undelivered and self.gradients_wait:
            for parameter in self._parameters.values():
                parameter.filled = False
        if self._sync.put_back():
            self._moments.state.differ, self._moments.state.gradients = True, False


def _averages(optimizer: Optimizer) -> bool:
    """Its gradients, in first moments."""
    return all(group.get("betas", (0.0,))[0] for group in optimizer.param_groups)


SMALLEST = torch.finfo(torch.float32).tiny
"""A learning rate of which float32 has the inverse."""


def inverse(lr: Scalar) -> Scalar:
    """0 of a smaller learning rate than `SMALLEST`, by which next to nothing moves."""
    if isinstance(lr, Tensor):
        return torch.where(lr >= SMALLEST, 1 / lr, 0.0)
    return 1 / lr if lr >= SMALLEST else 0.0
