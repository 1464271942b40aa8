"""Error feedback on updates: each rank's gradient becomes the update that the user's own optimizer
would make of it, and that is what is accumulated, compressed and averaged.

An optimizer that divides by the root of a second moment (Adam and those like it) must not be fed
with decoded gradients: an element that has waited T steps in the residual arrives T times as large,
its second moment grows with T^2, and the optimizer divides the burst away (docs/defaults.md).
So the second moment is taken of what each rank sees in every step, before anything waits.

In a compressed step a copy of the optimizer makes the update of this rank's gradient (moments.py).
Moments stay where they always are, in `optimizer.state`; meanwhile they are each rank's own.
Afterwards `p.grad` holds the
decoded mean of the ranks' updates, and when the script calls `optimizer.step()`, that is subtracted
times the learning rate of the moment, and the optimizer itself passes over the parameter. In a
dense step it does all its work itself, as if nobody else was there.

A rank's own second moment also holds the noise that averaging over N ranks takes away, so that the
mean of the ranks' updates is too small, by a factor between 1 and sqrt(N). How much of an element's
second moment is noise, its first moment tells. So the update is enlarged element by element, and
nobody has to send anything for it.

What momentum holds back and what a residual holds are the same: updates yet to be delivered. With
both they would be late twice, so in compressed steps momentum keeps only a share of its lag, and
what it gives up goes to the residual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite, nan, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from adaptive.bucket import Bucket, StepCFs
from adaptive.exchange.collectives import Exchange
from adaptive.memory.error_feedback import Residual
from adaptive.memory.handover import Group, Handover
from adaptive.memory.moments import (
    KEPT,
    LEAST,
    Twin,
    UpdateJob,
    decay_of_squares,
    enlarge,
    flat,
    is_decoupled,
    part_of_mean,
    scale_second_moments,
    shaped,
    typical_energy,
    undelivered,
)
from adaptive.parameters import ModelParameter, ModelParameters, like, local
from adaptive.statistics.vector import Statistics, Tally
from compressors.kernels import squared_norms
from compressors.kernels.blocks import Scalar, fill_if, is_host, scratch_like
from policies import state as saved

OPTIMIZERS = (Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad)
"""Those in whose stead it can step, and what inherits their `step`."""

TINY = 1e-6
"""What updates are multiplied by in `p.grad` until their norm is known: no script clips that."""


def steps_for(optimizer: Optimizer | None) -> bool:
    """Whether the optimizer makes the update of each element by itself, as torch's own do."""
    if optimizer is None:
        return False
    step = inspect.unwrap(type(optimizer).step)
    known = any(isinstance(optimizer, o) and step is inspect.unwrap(o.step) for o in OPTIMIZERS)
    return known and not any(group.get("differentiable") for group in optimizer.param_groups)


@dataclass(eq=False)
class UpdateScales(saved.Stateful):
    """What the ranks have agreed on of gradients and updates as a whole, averaged over the steps.

    grad: the energy of the mean gradient, as the ranks estimate it. clipped: the same of gradients
    that were clipped before they became updates. given: the energy of the mean update. Each is a
    sum over steps and the weight of it. max_norm: that a script has last clipped the norm of
    `p.grad` to, if it has. last: what of the last step is yet to be agreed on, from `state_dict` to
    the next step; negative if it is not known. differ: the moments in the optimizer may not be the
    same on all ranks.
    """

    grad: tuple[float, float] = saved.saved((0.0, 0.0))
    clipped: tuple[float, float] = saved.saved((0.0, 0.0))
    given: tuple[float, float] = saved.saved((0.0, 0.0))
    max_norm: float | None = saved.saved(None)
    last: tuple[float, float] | None = saved.saved(None)
    differ: bool = saved.saved(False)

    def add(self, name: str, value: float, decay: float) -> None:
        """Take in a step's number, unless it is not finite."""
        if isfinite(value):
            total, weight = getattr(self, name)
            setattr(self, name, (decay * total + (1 - decay) * value, decay * weight + 1 - decay))

    def mean(self, name: str) -> float:
        """Over the steps so far, the last ones most; 0 if there were none."""
        total, weight = getattr(self, name)
        return float(total / weight) if weight else 0.0

    def gradient_per_update(self) -> float:
        """By which a mean update is as large as a mean gradient."""
        given = self.mean("given")
        return sqrt(self.mean("grad") / given) if given > 0 else TINY


class UpdateMemory(Residual):
    """One residual of updates for each parameter, beside the optimizer's own moments.

    ranks: world size. lag: share of the lag of the optimizer's momentum in a compressed step at a
    CF, in [0, 1]. clipped: by which factor the script has clipped `p.grad` since the last backward,
    if that is known.
    """

    name = "updates"
    scales: UpdateScales

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: ModelParameters,
        ranks: int,
        lag: Callable[[float], float],
        clipped: Callable[[], Tensor | None],
    ) -> None:
        super().__init__(parameters.maybe_unused)
        self.scales = UpdateScales()
        self.scales.differ = bool(optimizer.state)
        self._optimizer = optimizer
        self._parameters = parameters
        self._ranks = ranks
        self._lag = cache(lag)
        self._clipped = clipped
        self._handover = Handover(optimizer, {}, lambda group: True, self._step, self._show)
        self._twin = Twin(optimizer)
        self._at = -1  # the step
        self._memory_of_norms = decay_of_squares(optimizer.param_groups[0])
        self._scale = 1.0  # what p.grad is multiplied by in this step
        self._clips = False  # in this step gradients are clipped, not updates
        self._own: set[Tensor] = set()  # parameters whose second moments are this rank's
        self._holding: set[Tensor] = set()  # those whose p.grad holds an update
        self._given: dict[int, Tensor] = {}  # by bucket, the energy of the last step's mean updates
        self._known: tuple[Any, Any] | None = None  # what `_last` was when dense steps began
        self._late: dict[Tensor, Tensor] = {}  # updates that go with the next step, dense
        self._hidden: dict[Tensor, Tensor | None] = {}  # p.grad, while the optimizer steps

    def turn(self, bucket: Bucket, cfs: StepCFs, tally: Tally) -> None:
        """The bucket's gradients become updates, in place, but for those of parameters that are
        skipped or that the optimizer has not."""
        self._begin_step(bucket.key.step, tally)
        # On all ranks alike: what one skips, or is not finite there, another may send.
        of = [(part, self._handover.settings(part.parameter.tensor)) for part in bucket.parts]
        self._holding |= {part.parameter.tensor for part, group in of if group is not None}
        if bucket.poisoned is True:
            return
        gradients = scratch_like("gradients", bucket.work).copy_(bucket.work)
        jobs, stepped = [], []
        for part, group in of:
            p = part.parameter.tensor
            if group is None or part.skipped is True or not part.grad.numel():
                continue
            share = self._lag(cfs.sent(part.parameter.name))
            self._make_own(part.parameter, share)
            here, state = part.parameter.local, self._state(p)
            grad = shaped(gradients[part.start : part.stop], here)
            update = shaped(part.grad, here)
            jobs.append(UpdateJob(group, share, here, grad, update, state))
            stepped.append(p)
        if jobs:
            torch._foreach_zero_([job.update for job in jobs])
            factor = self._clip(jobs, gradients)
            self._twin.update(jobs)
            for p, job in zip(stepped, jobs, strict=True):
                self._keep(p, job.state)
            energy = enlarge(jobs, self._ranks)
            tally.at("clipped_mean").add_(energy)
            tally.at("grad_of_mean").add_(energy / factor**2)
        fill_if(bucket.poisoned, bucket.work, 0.0)

    def preview(
        self, parameters: Sequence[ModelParameter], grads: Sequence[Tensor], strides: Sequence[int]
    ) -> Sequence[Tensor]:
        jobs, previews = [], []
        for parameter, grad, stride in zip(parameters, grads, strides, strict=True):
            p, group = parameter.tensor, self._handover.settings(parameter.tensor)
            previews.append(torch.zeros_like(grad) if group else grad)
            if group is not None:
                known = self._state(p) if p in self._optimizer.state else {}
                state = {
                    name: (flat(kept)[::stride] if kept.dim() else kept).clone()
                    for name, kept in known.items()
                }
                weights = flat(parameter.local.detach())[::stride]
                jobs.append(UpdateJob(group, 0.0, weights, grad.clone(), previews[-1], state))
        self._twin.update(jobs)  # with second moments that are already those of the mean gradient
        return previews

    def hand_out(self, index: int, parameters: Sequence[ModelParameter], mean: Tensor) -> None:
        """Scale the decoded mean of bucket `index`, in place, so that `p.grad` is as large as a
        gradient: scripts clip its norm, and log it."""
        parts = mean.split([parameter.local.numel() for parameter in parameters])
        of = zip(parameters, parts, strict=True)
        updates = [part for parameter, part in of if parameter.tensor in self._holding]
        if updates:
            self._given[index] = squared_norms(updates).sum()
            torch._foreach_mul_(updates, self._scale)

    def learn(self, agreed: Statistics) -> None:
        """Take in what the ranks have agreed on of a compressed step."""
        if agreed.spoiled or not agreed.grad_of_mean > 0:
            return
        self.scales.add("grad", agreed.grad_of_mean, self._memory_of_norms)
        self.scales.add("clipped", agreed.clipped_mean, self._memory_of_norms)
        self.scales.add("given", agreed.given, self._memory_of_norms)
        if isfinite(agreed.clipped_to):
            self.scales.max_norm = sqrt(agreed.clipped_to)

    def settle(self, exchange: Exchange) -> None:
        """Before a dense step: the ranks agree on the optimizer's moments (a collective), and all
        that waits, with the ranks' mean, for the optimizer's next step."""
        self._holding.clear()
        if self._given and self._known is None:
            self._known = self._last()  # before a dense step's gradients are clipped
        if self.scales.differ:
            for p, parameter in self._parameters.items():
                if self._handover.settings(p) is not None:
                    self._agree_on(parameter, exchange)
            self.scales.differ = False
            self._own.clear()

    def agree(self, exchange: Exchange) -> bool:
        differed = self.scales.differ or bool(self._late)
        self.settle(exchange)
        exchange.take_traffic()  # no step's
        for group in self._optimizer.param_groups:
            self._deliver_late(group)
        return differed

    @property
    def may_part(self) -> bool:
        # No parameter that DDP reduces is another optimizer's.
        return all(self._handover.settings(p) is not None for p in self._parameters)

    def learning_rate(self, parameter: ModelParameter) -> Any:
        """By which the optimizer multiplies updates of the parameter, which must be its own."""
        group = self._handover.settings(parameter.tensor)
        assert group is not None
        return group["lr"]

    def part(self) -> None:
        """Before ranks step by themselves: the moments are each rank's own, momentum has all of its
        lag, and what waits is in the residuals."""
        for p, parameter in self._parameters.items():
            self._make_own(parameter, 1.0)
            late = self._late.pop(p, None)
            if late is not None:
                parameter.open_residual().add_(late)

    def meet(self) -> None:
        """After ranks have stepped by themselves: the moments are each rank's own."""
        self.scales.differ = True
        self._own.update(self._parameters)

    def discard(self) -> None:
        """Moments have taken in what is thrown away, so they begin anew; those that the ranks have
        agreed on have not."""
        for p in self._own:
            for name, kept in self._state(p).items():
                kept.fill_(1.0 if name == "mu_product" else 0.0)

    def join(self, optimizer: Optimizer) -> None:
        if optimizer is self._optimizer:
            self._handover.begin()

    def hand_back(self, exchange: Exchange | None) -> None:
        if exchange is not None:
            self.agree(exchange)
        self._handover.unhook()

    def moves(self, parameter: ModelParameter) -> tuple[object, ...]:
        return (parameter.filled, parameter.lag)

    def state_dict(self, parameter: ModelParameter) -> dict[str, Any]:
        state = super().state_dict(parameter)
        return state if parameter.lag == 1 else {**state, "lag": parameter.lag}

    def load_state_dict(self, parameter: ModelParameter, state: Mapping[str, Any]) -> None:
        super().load_state_dict(parameter, state)
        parameter.lag = state.get("lag", 1.0)
        p = parameter.tensor
        (self._own.add if self.scales.differ else self._own.discard)(p)
        # Of a step before, which the state is not of.
        self._holding.discard(p)
        self._late.pop(p, None)
        self._given.clear()
        self._known = None

    def _begin_step(self, step: int, tally: Tally) -> None:
        """Once a step: what is known of the one before goes into the tally."""
        if step == self._at:
            return
        self._at = step
        given, clipped_to = self._last()
        if self.scales.last is not None:
            given, clipped_to = (nan if number < 0 else number for number in self.scales.last)
        self._given, self._known, self.scales.last = {}, None, None
        tally.at("given").add_(given)
        tally.at("clipped_to").add_(clipped_to)
        self._holding.clear()
        self._scale = self.scales.gradient_per_update()
        self._clips = self.scales.max_norm is not None and not isinstance(self._optimizer, Adagrad)
        self.scales.differ = True

    def _last(self) -> tuple[Any, Any]:
        """||mean update||^2 of the last compressed step, nan if there was none, and the energy of
        `p.grad` once the script had clipped it, nan if it has not."""
        if self._known is not None:
            return self._known
        given = sum([self._given[index] for index in sorted(self._given)]) if self._given else nan
        factor = self._clipped()
        if factor is None:
            return given, nan
        return given, torch.where(factor < 1, given * (self._scale * factor) ** 2, nan)

    def conclude(self) -> None:
        if self._given:
            given, clipped_to = (float(number) for number in self._last())
            self.scales.last = (
                given if isfinite(given) else -1.0,
                clipped_to if isfinite(clipped_to) else -1.0,
            )

    def _state(self, p: Tensor) -> dict[str, Any]:
        """The optimizer's of a parameter; of a sharded one with the shards that are here."""
        state: dict[str, Any] = self._optimizer.state[p]
        if not hasattr(p, "to_local"):
            return state
        return {name: local(kept) for name, kept in state.items()}

    def _keep(self, p: Tensor, state: Mapping[str, Any]) -> None:
        """What the twin has begun in a `_state` is the optimizer's from now on."""
        own = self._optimizer.state[p]
        for name in state.keys() - own.keys():
            own[name] = like(state[name], p) if state[name].dim() else state[name]

    def _make_own(self, parameter: ModelParameter, share: float) -> None:
        """From here on the moments are this rank's, and momentum has this share of its lag."""
        p, state = parameter.tensor, self._state(parameter.tensor)
        if p not in self._own:
            parameter.filled = False  # gradients, from before the optimizer had it, are no updates
            group = self._handover.settings(p)
            if group is not None and "exp_avg" in state:
                # A second moment of the mean has the signal's, and 1 / N of the noise's.
                part = part_of_mean(group, parameter.lag, state, self._ranks)
                scale_second_moments(state, part.mul_(-self._ranks).add_(1 + self._ranks))
            self._own.add(p)
        self._change_lag(parameter, share)

    def _change_lag(self, parameter: ModelParameter, share: float) -> None:
        """What momentum had yet to deliver with its share of the lag so far, and with the new one
        has no longer, goes to the residual, or comes from there."""
        before, parameter.lag = parameter.lag, share
        p, state = parameter.tensor, self._state(parameter.tensor)
        group = self._handover.settings(p)
        if before == share or group is None or "exp_avg" not in state:
            return
        part: Any = 1.0
        if p in self._own:
            part = part_of_mean(group, before, state, self._ranks)
            part = shaped(part, parameter.local)
        late, beta1 = undelivered(group, before, state, part), group["betas"][0]
        parameter.open_residual().add_(flat(late), alpha=beta1 / (1 - beta1) * (before - share))

    def _clip(self, jobs: Sequence[UpdateJob], gradients: Tensor) -> Scalar:
        """Clip a bucket's gradients as the script would clip the mean gradient, had it that.
        Returns the factor.

        A clip has to come before the second moment, and the norm of the whole gradient is not known
        yet: it is as much larger than usual as the bucket's own is, by its second moments."""
        energies = [typical_energy(job) for job in jobs] if self._clips else []
        known = [energy for energy in energies if energy is not None]
        if len(known) < len(jobs):
            return 1.0
        assert self.scales.max_norm is not None
        now = squared_norms([flat(job.grad) for job in jobs]).sum()
        norm = (self.scales.mean("clipped") * now / (sum(known) + LEAST)).sqrt()
        factor = (self.scales.max_norm / norm).clamp(max=1.0)
        gradients.mul_(factor.to(gradients.dtype))
        return factor

    @torch.no_grad()
    def _step(self, group: Group) -> None:
        """In the stead of the optimizer: parameters whose gradient is an update make that step, and
        are hidden from it."""
        self._deliver_late(group)
        held = [p for p in group["params"] if p in self._holding and p.grad is not None]
        if not held:
            return
        lr, updates = group["lr"], [local(p.grad) for p in held if p.grad is not None]
        weights = [local(p) for p in held]
        skips = getattr(self._optimizer, "found_inf", None)  # of a fused one, told by a GradScaler
        if skips is not None:
            lr = lr * (1 - skips)
            updates = [update.masked_fill(skips > 0, 0.0) for update in updates]
        if group["weight_decay"] and is_decoupled(self._optimizer, group):
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        factor = lr / self._scale
        clipped = self._clipped() if self._clips else None
        if clipped is not None:  # `_clip` has done better
            factor = factor / (float(clipped) if is_host(clipped.device) else clipped)
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:
            factor = factor / scale
        if isinstance(factor, Tensor):
            torch._foreach_sub_(weights, torch._foreach_mul(updates, factor))
        else:
            torch._foreach_sub_(weights, updates, alpha=factor)
        for p in held:
            self._hidden[p], p.grad = p.grad, None

    def _show(self) -> None:
        """After the optimizer's step."""
        for p, grad in self._hidden.items():
            p.grad = grad
        self._hidden.clear()

    @torch.no_grad()
    def _deliver_late(self, group: Group) -> None:
        """What residuals held before dense steps began."""
        for p in group["params"] if self._late else ():
            late = self._late.pop(p, None)
            if late is not None:
                here = local(p)
                here.sub_(shaped(late, here).to(p.dtype) * group["lr"])

    def _agree_on(self, parameter: ModelParameter, exchange: Exchange) -> None:
        """The same moments on all ranks, and what waits of the parameter for the next step. A
        collective."""
        p, group = parameter.tensor, self._handover.settings(parameter.tensor)
        assert group is not None
        state, own, here = self._state(p), p in self._own, parameter.local.detach()
        if own and "exp_avg" in state:
            part = part_of_mean(group, parameter.lag, state, self._ranks)
            self._change_lag(parameter, 1.0)
            scale_second_moments(state, part)
        parameter.lag = 1.0
        stepped = "step" in state
        if not stepped:  # this rank has not used the parameter: moments to be filled
            grad, update = (shaped(parameter.zeros(), here) for _ in range(2))
            self._twin.update([UpdateJob(group, 1.0, here, grad, update, state)])
            self._keep(p, state)
        names = sorted(KEPT & state.keys())
        sizes = [here.numel(), 1, *(state[name].numel() for name in names)]
        sent = torch.zeros(sum(sizes), dtype=parameter.dtype, device=p.device)
        residual, there, *moments = sent.split(sizes)
        # A residual that is not its own is one of gradients, which another memory has left.
        if own and parameter.filled and parameter.residual is not None:
            residual.copy_(parameter.residual)
            parameter.filled = False
        if stepped:
            there.fill_(1.0)
            for name, moment in zip(names, moments, strict=True):
                moment.copy_(flat(state[name]))
        exchange.all_reduce(sent).wait()
        some = there.clamp(min=1.0)
        for name, moment in zip(names, moments, strict=True):
            state[name].copy_(shaped(moment.div_(some), state[name]))
        self._late[p] = residual.div_(exchange.world_size)
