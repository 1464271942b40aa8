"""Compression in parameter space: each rank's optimizer steps with local gradients, and the ranks
compress, exchange and average the resulting updates of the parameters, with error feedback.

An optimizer that divides by the root of a second moment (Adam and the like) must not step with
decoded sparse gradients: an element that was in the residual for T steps arrives T times as large,
its second moment grows with T^2, and the optimizer divides the burst away
(docs/research/defaults.md). So autograd returns the local gradient, a script may change it, and the
user's own optimizer steps with it. A compressed step, with `lr` the present learning rate, and
`unit` an earlier one, which stays while a schedule runs (`OptimizerSteps.unit`; of Muon: muon.py):

1. Before `optimizer.step()`: b = parameters * (1 - lr * decoupled weight decay), the same on all
   ranks. The optimizer then steps with a smaller momentum.
2. After `optimizer.step()`: the update is d = (b - parameters) / unit. Noise in this rank's second
   moment has made d too small, so d is enlarged (moments.py; noise in Muon's momentum: muon.py).
   The residual r += d; the largest elements c of r are sent; r -= c.
3. parameters = b - unit * mean of c over the ranks, the same on all ranks again.

So an update that waits in the residual while a schedule lowers the learning rate moves the
parameters as far as the step that made it. Divided by the present rate it would move them less:
by an eighth of a run's whole way at CF 20, in 300 steps with a linear schedule
(docs/research/defaults.md).

A dense step is DDP's own. Before the first dense step the ranks average their optimizers' states.

A CF that loses little (int8, int4) makes no bursts. There Adam steps with the mean gradient,
compressed with error feedback, which trains as well as a dense step (docs/research/defaults.md).
The residual then holds gradients. The next step that exchanges updates adds this residual to its
local gradient.

Momentum delays updates, and so does a residual. To avoid delaying them twice, the momentum share
(`MomentumRule.with_share`) is below 1 in compressed steps, and the residual takes the part of the
pending momentum that is lost. When the CF falls, the share rises, and momentum takes over the whole
residual: momentum applies it over some ten steps. Applied in one step, it would disturb the model.
Momentum moves the parameters by the learning rates of these steps, so a residual that was made at
much larger rates is not taken over in full (`ENLARGED`): a warm restart may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.memory.error_feedback import Residual
from adaptive.memory.handover import FEW_RANKS, TRIED, Groups, Handover, is_torchs_own
from adaptive.memory.inspection import Inspection, take_from_first, verdict
from adaptive.memory.moments import (
    decay_of,
    enlarge,
    fused_updates,
    is_adaptive,
    keeps_no_mean,
    normalized,
)
from adaptive.memory.muon import enlargements, is_muon
from adaptive.memory.muon import normalized as as_muons_update
from adaptive.memory.optimizer_steps import (
    OptimizerSteps,
    Owners,
    any_decay,
    is_tensor,
    multiply,
    same_number,
)
from adaptive.memory.optimizer_sync import OptimizerSync
from adaptive.memory.own_moments import OwnMoments, average
from adaptive.model.chunks import Chunk, Destination
from adaptive.model.parameters import ModelParameter, ModelParameters, local, parameters_of
from adaptive.network.collectives import Exchange
from compressors.kernels import kernels_for, squared_norm
from compressors.kernels.blocks import Flag, Scalar, fill_if
from policies import DENSE

LOST = (
    "{} has no gradient, and moves within optimizer.step() all the same (by a hook, or by a "
    "step of a script's own): where the ranks step by themselves, this move is lost. Move it after "
    "optimizer.step(), or use memory='residual'"
)


class UpdateMemory(Residual):
    """One residual of updates for each parameter."""

    name = "updates"

    def __init__(self, maybe_unused: Callable[[], bool], handover: UpdateHandover) -> None:
        self._steps = handover.steps
        super().__init__(lambda: not self._steps.pending and maybe_unused(), handover)

    def skipped(
        self, parameters: Sequence[ModelParameter], grad_energies: Sequence[Scalar]
    ) -> Mapping[ModelParameter, Flag]:
        """While updates are exchanged, the skipped parameters are those that no optimizer has
        stepped."""
        if self._steps.pending:
            return dict.fromkeys(self._steps.unstepped(parameters), True)
        return super().skipped(parameters, grad_energies)


class UpdateHandover(Handover):
    """Makes updates of the local optimizer steps, and applies the ranks' mean update.

    ranks: world size. share_at: (CF) -> the momentum share, in [0, 1]. steps: the optimizer steps
    of this rank. state: of the optimizers' moments. always_updates: every compressed step exchanges
    updates. (Before gradients are exchanged, momentum takes over the updates in residuals. So a
    step may exchange gradients only if every optimizer is adaptive and has momentum.)
    lost: a warning that some move of this rank was lost, or "" (never found on a device)."""

    sends_updates = True
    lost = ""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: ModelParameters,
        ranks: int,
        share_at: Callable[[float], float],
    ) -> None:
        groups = [group for of in optimizers for group in of.param_groups]
        adaptive = all(map(is_adaptive, optimizers))
        self.always_updates = not (adaptive and all(map(decay_of, groups)))
        # All optimizers are of Adam's kind.
        self._have_means = not (self.always_updates or any(map(keeps_no_mean, optimizers)))
        self._parameters = parameters
        self._ranks = ranks
        self._share_at = cache(share_at)
        self._of = Owners(parameters, optimizers)
        self.steps = OptimizerSteps(self._of)
        self._moments = OwnMoments(self._of, ranks)
        self.state = self._moments.state
        self.steps.units = self.state.units
        stepped = any(optimizer.state for optimizer in optimizers)
        self.state.ranks_differ = self.state.had_full_momentum = stepped
        self._targets: dict[Chunk, Tensor] = {}  # the new parameters, once means are decoded
        self._read: list[Tensor | None] = []  # kept alive while the hook's stream reads them
        # Factors of Muon's updates since the last backward, by parameter.
        self._enlargements: dict[Tensor, Tensor] = {}
        self._sync = OptimizerSync(parameters, self._of)
        self._inspection = Inspection(parameters)
        known = [self._inspection.notice(optimizer) for optimizer in optimizers]
        self.state.uninspected = not all(known)
        # An optimizer that is not torch's has stepped with local gradients.
        self._inspected_stepped = False

    @property
    def power(self) -> float:  # type: ignore[override]
        """The `power` of `Context`, smaller where larger CFs do less harm: 0.2 on two ranks, 0.5 on
        more (as for gradients). 1 if some optimizer is not adaptive (Muon): it keeps its momentum,
        which delays updates a second time, after the residual (docs/research/defaults.md)."""
        if not all(is_adaptive(of) for of, _ in self._of.distinct):
            return 1.0
        return 0.2 if self._ranks == 2 else 0.5

    def early(self, ranks: int) -> float:
        """CF 40 beside Adam: its updates are as large as the learning rate from the first step on,
        so no large ones wait. Among three to `FEW_RANKS` ranks, which may vote on indices, CF 40
        cost quality in the first steps (docs/research/defaults.md)."""
        return 40.0 if self._have_means and not 2 < ranks <= FEW_RANKS else DENSE

    def proven(self, ranks: int) -> float:
        """Up to CF 80 Adam's updates kept dense's quality among 16 ranks
        (docs/research/defaults.md). Optimizers without a first moment were not tried there."""
        return 80.0 if ranks <= TRIED and self._have_means else DENSE

    # -- what is exchanged --

    def exchanges_updates(self, cf: float) -> bool:
        """Whether a step compressed at `cf` exchanges updates; False: gradients. A CF that loses so
        little that its momentum share is 1 allows gradients. The same on all ranks."""
        updates = self.always_updates or self._share_at(cf) < 1
        return updates and not self.state.gradients_only

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The chunks of all parameters that some optimizer steps. The same on all ranks."""
        return self._of.chunks

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that have stepped the parameters last, each once."""
        return list(dict.fromkeys(of for of, _ in self._of.distinct))

    def without_optimizer(self, parameters: Iterable[Tensor]) -> list[int]:
        """Indices of the parameters that no known optimizer steps."""
        if len(self._of) == len(self._parameters):
            return []
        return [i for i, p in enumerate(parameters) if p not in self._of]

    def backward_ends(self, cf: float) -> None:
        """The backward of a step that exchanges updates at `cf` has ended."""
        self._moments.put_back()
        self._enlargements.clear()
        # Residuals of gradients: this backward has used those of all parameters with a gradient.
        # The others are dropped.
        if self.state.residuals_hold_gradients:
            for parameter in self._parameters.values():
                parameter.has_residual = False
        self._begin_own_steps(self._share_at(cf))
        self.steps.backward_ends()

    @torch.no_grad()
    def outgoing(self, chunk: Chunk) -> tuple[Tensor, Scalar | None]:
        """(updates, squared norm) of a chunk in this rank's step. The updates are flat, in the
        chunk's scratch, and zero for parameters that no optimizer has stepped since backward. The
        squared norm is None if it is not known.

        The work is done block by block, so that all operations on a block find it in the cache."""
        before, work = self.steps.before.get(chunk), chunk.buffer("work")
        if before is None:
            self._moments.put_back()  # if the step has raised: old moments are in this buffer
            return work.zero_(), None
        rates = self.steps.rates_of(chunk)
        rate = inverse(rates[0][0]) if len(rates) == 1 else None
        decay_factor = self.steps.take_decay_factor(chunk)
        energies: list[Scalar] = []
        runs, share = self._moments.runs(chunk), self.state.share
        old_mean = self._moments.old_means.pop(chunk, None)
        self._read.append(old_mean)
        blocks = chunk.blocks()
        # On a device there is one block.
        args = before, work, blocks[0].joined, runs, old_mean, decay_factor, rate
        if (energy := fused_updates(*args, share, self._ranks)) is not None:
            energies, blocks = [energy], []
        for block in blocks:
            inside = [run.inside(block.start, block.stop) for run in runs]
            if old_mean is not None:
                for run, elements in zip(runs, inside, strict=True):
                    average(run, old_mean, elements)
            update, start = work[block.start : block.stop], before[block.start : block.stop]
            if is_tensor(decay_factor) or decay_factor != 1:
                start.mul_(decay_factor)
            block.subtract(start, update)
            if rate is not None:
                update.mul_(rate)
            for run, elements in zip(runs, inside, strict=True):
                if elements.start < elements.stop:
                    within = work[run.start + elements.start : run.start + elements.stop]
                    enlarge(within, run, elements, share, self._ranks)
            energies.append(squared_norm(update))
        if rate is None:
            multiply(work, chunk, [inverse(lr) for lr, _ in rates])
        pairs = chunk.pieces(work) if self._enlargements else ()
        muons = [(piece, p.tensor) for p, piece in pairs if p.tensor in self._enlargements]
        if muons:
            factors = [self._enlargements[p] for _, p in muons]
            torch._foreach_mul_([piece for piece, _ in muons], factors)
        scales = self._scales_of(chunk)
        if scales:
            multiply(work, chunk, scales)
        unstepped = {*self.steps.unstepped(chunk.parameters)}
        for parameter, piece in chunk.pieces(work) if unstepped else ():
            if parameter in unstepped:
                if not self.lost and kernels_for(piece).look(partial(_any, piece), False):
                    self.lost = LOST.format(parameter.name)
                piece.zero_()
        known = rate is not None and not (unstepped or muons or scales)
        return work, sum(energies[1:], energies[0]) if known else None

    def _scales_of(self, chunk: Chunk) -> list[float]:
        """`OwnMoments.update_scale` of each parameter; empty if no optimizer needs it."""
        if not any(keeps_no_mean(of) for of, _ in self._of.distinct):
            return []
        return [self._moments.update_scale(*owner) for owner in self._of.of_chunk(chunk)]

    def destination(self, chunk: Chunk) -> Destination | None:
        """The tensor to which decoding adds -lr * (mean update of a chunk): the values before the
        step. None if parameters have several learning rates or one on a device, or if only some
        optimizers have stepped: `apply` then gets the mean itself."""
        rates = self.steps.rates_of(chunk)
        lr, decay = rates[0]
        if len(rates) > 1 or isinstance(lr, Tensor):
            return None
        stepped = self.steps.any_stepped
        if stepped and not self.steps.all_stepped:
            return None
        # A rank that has not stepped computes 1 - decay as the others do, to round as they do.
        to = self.steps.before[chunk] if stepped else chunk.here("unstepped").mul_(1 - decay)
        self._targets[chunk] = to
        return Destination(to, -lr)

    @torch.no_grad()
    def apply(self, chunk: Chunk, mean: Tensor | None, any_stepped: Callable[[], Tensor]) -> None:
        """Move the parameters of a chunk by the ranks' mean update.

        mean: the mean update, overwritten; None: decoding has added it to the `destination`.
        any_stepped: returns the number of ranks that have stepped (0-dim); called only on a rank
        that has not stepped."""
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
                some = any_stepped() > 0
                # In the precision in which a rank that has stepped computes these factors.
                wide = torch.float64
                factors = [
                    1 - decay * some.to(decay.dtype if isinstance(decay, Tensor) else wide)
                    for decay in decays
                ]
                multiply(before, chunk, factors)
        chunk.go_to(torch.sub(before, mean, out=mean))

    @torch.no_grad()
    def mark_nonfinite(self, flag: Flag) -> None:
        """If some rank's gradient was not finite (flag), set one gradient of each optimizer to NaN.
        A `GradScaler` checks each optimizer's gradients separately, and so skips every optimizer on
        every rank. With a single optimizer the result of backward is NaN, which is enough."""
        optimizers = {of for of, _ in self._of.distinct}
        for optimizer in optimizers if len(optimizers) > 1 and flag is not False else ():
            grads = (p.grad for p in parameters_of(optimizer) if p in self._of)
            if (grad := next((each for each in grads if each is not None), None)) is not None:
                fill_if(flag, local(grad), nan)

    def exchanged(self) -> None:
        """All chunks have been exchanged, and the optimizers' stream has waited for the hook's."""
        self._moments.put_back()
        self._targets.clear()
        self._read.clear()
        self.steps.exchanged()

    @torch.no_grad()
    def add_residuals(
        self, parameters: Sequence[ModelParameter], grads: Sequence[Tensor], scale: Tensor | None
    ) -> None:
        """Add residuals of gradients to the local gradients, and empty them. scale: the loss scale
        of the local gradients (None: 1). If a script drops these gradients, the residuals are lost.
        """
        for parameter, grad in zip(parameters, grads, strict=True):
            if parameter.unsent is not None:
                grad.add_(parameter.unsent if scale is None else parameter.unsent * scale)
            parameter.has_residual = False

    # -- around an optimizer's step --

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's step with a closure begins."""
        if optimizer in self._of.known:  # one that is not is learned in `before_step`
            self._learn(optimizer)  # a group that is new has a place in `steps.before`, too
        self.steps.begin_with_closure(optimizer)

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        """An optimizer is about to step. Returns the parameter groups to step with; None: `groups`.
        RuntimeError for a step inside another optimizer's step, and for a step after the exchange
        of its backward's updates."""
        self._moments.put_back()  # in case the step before has raised
        self._inspection.before_step(optimizer)
        rates = self._rates_before(optimizer)
        self.steps.begin(optimizer)
        self._change_rates(rates)
        if self.steps.pending:
            return self._moments.settings_with_share(optimizer, groups)
        self._sync.deliver(self.learning_rate)
        return None

    def replaced_by(self, optimizer: Optimizer) -> str:
        """The name of the optimizer whose place this new optimizer of torch's takes in its first
        step, if the new one needs another memory (SGD does); else ""."""
        if optimizer in self._of.known or not is_torchs_own(optimizer):
            return ""
        if is_adaptive(optimizer) or is_muon(optimizer):
            return ""
        had = (self._of[p][0] for p in parameters_of(optimizer) if p in self._of)
        return next((type(of).__name__ for of in had if of.state), "")

    def _relearn(self) -> None:
        """Optimizers may have other parameter groups now, as after `load_state_dict`."""
        for optimizer in self.optimizers:
            self._learn(optimizer)

    def _learn(self, optimizer: Optimizer) -> None:
        rates = self._rates_before(optimizer)
        self._of.learn(optimizer)
        self._change_rates(rates)

    def _rates_before(self, optimizer: Optimizer) -> dict[ModelParameter, Scalar]:
        """The old learning rates of the parameters of an optimizer that is new, or whose groups
        have changed. The updates in these parameters' residuals are in units of the old rates."""
        if self._of.knows(optimizer) or self.state.residuals_hold_gradients:
            return {}
        taken = [self._parameters[p] for p in parameters_of(optimizer) if p in self._of]
        return {parameter: self.learning_rate(parameter) for parameter in taken}

    @torch.no_grad()
    def _change_rates(self, before: Mapping[ModelParameter, Scalar]) -> None:
        """Rescale residuals to the unit of a new optimizer's or group's updates if it is larger
        than the old unit, so that residuals move the parameters as far as before. A smaller unit
        leaves residuals as they are: it may be that of a warm-up, and residuals enlarged for the
        beginning of a warm-up would be far too large at its end."""
        for parameter, old in before.items():
            new = self.learning_rate(parameter)
            if parameter.unsent is not None and not same_number(old, new):
                factor = old * inverse(new)
                parameter.unsent.mul_(
                    factor.clamp(max=1) if isinstance(factor, Tensor) else min(factor, 1)
                )

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> bool:
        """An optimizer has stepped. Returns whether the inspection of an optimizer that is not
        torch's has found something, on which the ranks must agree (`agree_on_inspection`).

        A step with momentum share 0 overwrites first moments with gradients. Old and new ones are
        averaged here, or in `outgoing` if all optimizers have stepped, so that it comes next."""
        news = self._inspection.after_step(optimizer)
        self._inspected_stepped |= self.steps.pending and optimizer in self._inspection.seen
        if is_muon(optimizer):
            first = next((of for of, _ in self._of.distinct if is_muon(of)), None)
            self.state.muon_steps += optimizer is first
            if self.steps.pending:
                steps = max(self.state.muon_steps, 1)
                self._enlargements |= enlargements(optimizer, steps, self._ranks)
        self.steps.end(optimizer)
        if not (self.steps.pending and self.steps.all_stepped):
            self._moments.put_back()
            self.steps.apply_decay()
        return news and not (self.state.uninspected or self.state.gradients_only)

    # -- optimizers that are not torch's --

    @property
    def dense_because(self) -> str:  # type: ignore[override]
        return (
            "an optimizer that is not torch's makes its first step"
            if self.state.uninspected
            else ""
        )

    def agree_on_inspection(self, exchange: Exchange) -> str:
        """The ranks exchange what they found in optimizers that are not torch's (a collective).
        Returns why gradients must be exchanged from now on; "" if they need not."""
        state, findings = self.state, self._inspection.findings
        # An optimizer without parameters never steps (a wrapper of another optimizer, say).
        owners = {of for of, _ in self._of.distinct}
        seen = [of for of in self._inspection.seen if of in findings or of in owners]
        own = [findings.get(of) for of in seen]
        # Shards of one optimizer's state may show different things.
        gathered = exchange.gather_from_everyone((own, self._inspected_stepped))
        everyone, stepped = zip(*gathered, strict=True)
        found = [[each for each in theirs if each] for theirs in everyone]
        state.uninspected = {*map(len, found)} != {max(map(len, everyone))}
        if state.uninspected or state.gradients_only or not (why := verdict(found)):
            return ""
        state.gradients_only = True
        if any(stepped):
            self.begin_step(exchange, None)
            for of in seen:
                take_from_first(of, exchange)
        return why

    # -- optimizer-state sync, before dense steps --

    def begin_step(
        self, exchange: Exchange, cf: float | None, may_leave_momentum: bool = True
    ) -> None:
        """Before a step that exchanges gradients: optimizer-state sync (collectives), if the ranks'
        states differ. First moments take over the updates in residuals. If an optimizer has no
        first moment, the updates in its residuals move the parameters in the next step."""
        self._relearn()  # a group may be new: its gradients stay local from this backward on
        if cf is not None and self.exchanges_updates(cf):
            return
        state = self.state
        state.residuals_hold_gradients, self.steps.was_exchanged = True, False
        if state.ranks_differ:
            self.steps.change_units(to_momentum=True)
            self._moments.before_sync()
            self._sync.agree(exchange)
        state.ranks_differ, state.had_full_momentum = False, True

    def learning_rate(self, parameter: ModelParameter, lasting: bool = False) -> Any:
        """The unit of a parameter's updates (`OptimizerSteps.unit`). Some optimizer must step the
        parameter."""
        p = parameter.tensor
        return self.steps.unit(self._of[p][1], lasting) * self._of.rate_scales.get(p, 1.0)

    def begin_local_steps(self) -> None:
        """Called before several local steps: sets the momentum share to 1, so that momentum takes
        over the residuals."""
        self.steps.was_exchanged = False
        self._relearn()
        self._begin_own_steps(1.0)

    def agree(self, exchange: Exchange) -> bool:
        # Saving is no dense step. So a run that began without momentum does not get the momentum
        # now that its first dense step gives it (`OwnMoments._change_share`).
        had, self.state.had_full_momentum = self.state.had_full_momentum, True
        differed = self._agree(exchange)
        self.state.had_full_momentum = had
        return differed

    def _agree(self, exchange: Exchange) -> bool:
        differed = self.state.ranks_differ or bool(self._sync.undelivered)
        was_exchanged = self.steps.was_exchanged
        self.begin_step(exchange, None)
        self.steps.was_exchanged = was_exchanged
        exchange.take_traffic()  # these bytes belong to no step
        self._sync.deliver(self.learning_rate)
        return differed

    def hand_back(self, exchange: Exchange | None) -> None:
        self._moments.put_back()
        if exchange is not None:
            self._agree(exchange)

    def state_dict(self) -> dict[str, Any]:
        """Undelivered updates go back to the residuals first."""
        self._back_to_residuals()
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for optimizer in self.optimizers:  # what is loaded is in the units of the present groups
            self._of.learn(optimizer)
        self.state.load_state_dict(state)
        self.steps.units = self.state.units

    def forget_moments(self) -> None:
        self._moments.old_means.clear()

    def abandon(self) -> None:
        """Forget the steps under way and undelivered updates."""
        self.steps.reset()
        for under_way in (self._sync.undelivered, self._moments.old_means, self._targets):
            under_way.clear()
        self._enlargements.clear()

    def preview(
        self, parameters: Sequence[ModelParameter], grads: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        found = []
        for parameter, grad in zip(parameters, grads, strict=True):
            of = self._of.get(parameter.tensor)
            if of is not None and is_adaptive(of[0]):
                grad = normalized(grad, of[1], self._sync.state(parameter.tensor))
            elif of is not None and is_muon(of[0]):
                grad = as_muons_update(grad)
            found.append(grad)
        return found

    def _begin_own_steps(self, share: float) -> None:
        if not self.state.local_squares:
            self._back_to_residuals()
        self.state.residuals_hold_gradients = False
        if share != self.state.share or not self.state.local_squares:
            self.steps.change_units(to_momentum=share > self.state.share)
        self._moments.begin_own_steps(share)

    def _back_to_residuals(self) -> None:
        """Undelivered updates go back to the residuals. Gradients in the residuals are dropped if
        there are such updates: gradients are in other units, and no step has used them."""
        if self._sync.undelivered and self.state.residuals_hold_gradients:
            for parameter in self._parameters.values():
                parameter.has_residual = False
        if self._sync.put_back():
            state = self.state
            state.ranks_differ, state.residuals_hold_gradients = True, False


def _any(x: Tensor) -> bool:
    return bool(x.any())


SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest learning rate whose inverse float32 can hold."""


def inverse(lr: Scalar) -> Scalar:
    """1 / lr; 0 for a learning rate below `SMALLEST`, which moves next to nothing."""
    if isinstance(lr, Tensor):
        return torch.where(lr >= SMALLEST, 1 / lr, 0.0)
    return 1 / lr if lr >= SMALLEST else 0.0
