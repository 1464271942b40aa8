"""Error feedback on updates: each rank's gradient becomes the update that the user's own optimizer
would make of it, and that is what is accumulated, compressed and averaged.

An optimizer that divides by the root of a second moment (Adam and its kin) must not be fed with
decoded gradients: an element that has waited T steps in the residual arrives T times as large, its
second moment grows with T^2, and the optimizer divides the burst away (measured: docs/defaults.md).
So the second moment is taken of what each rank sees in every step, before anything waits.

In a compressed step a copy of the optimizer steps a vector of zeros with this rank's gradient, no
weight decay and learning rate -1: what becomes of the zeros is the update. Moments stay where they
always are, in `optimizer.state`; meanwhile they are each rank's own. Afterwards `p.grad` holds the
decoded mean of the ranks' updates, and when the script calls `optimizer.step()`, that is subtracted
times the learning rate of the moment, and the optimizer itself passes over the parameter. In a
dense step it does all its work itself, as if nobody else was there.

A rank's own second moment also holds the noise that averaging over N ranks takes away, so that the
mean of the ranks' updates is too small, by a factor between 1 and sqrt(N). How large it is follows
from the energy of the ranks' updates and that of their sum (of sketches), and it is put right.

What momentum holds back and what a residual holds are the same: updates yet to be delivered. With
both they would be late twice, so in compressed steps momentum keeps only a share of its lag, and
what it gives up goes to the residual.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, lru_cache
from math import isfinite, nan, sqrt
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.optim import Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from adaptive.bucket import Bucket, StepCFs, strided_sample
from adaptive.memory.error_feedback import Residual
from adaptive.memory.handover import Group, Handover
from adaptive.parameters import ModelParameter, ModelParameters
from compressors.kernels import squared_norms
from compressors.kernels.blocks import fill_if, fill_up
from policies import state as saved

if TYPE_CHECKING:
    from adaptive.exchange.collectives import Exchange
    from adaptive.statistics.vector import Statistics, Tally

OPTIMIZERS = (Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad)
"""Those in whose stead it can step, and what inherits their `step`."""

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""In an optimizer's state of a parameter: they also hold the gradient's noise."""

SKETCH = 64
"""Numbers in the sketch of a rank's updates."""

NOISE_DECAY, NORM_DECAY = 0.98, 0.9
"""Of the averages over steps of what the ranks have agreed on."""

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

    own: the energy of the sketches of the ranks' updates. together: of the sum of these sketches.
    grad: of the mean gradient. given: of the mean update. clipped: what a script has multiplied the
    energy of `p.grad` by. Each is a sum over steps and the weight of it. differ: the moments in the
    optimizer may not be the same on all ranks.
    """

    own: tuple[float, float] = saved.saved((0.0, 0.0))
    together: tuple[float, float] = saved.saved((0.0, 0.0))
    grad: tuple[float, float] = saved.saved((0.0, 0.0))
    given: tuple[float, float] = saved.saved((0.0, 0.0))
    clipped: tuple[float, float] = saved.saved((0.0, 0.0))
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

    def noise(self, ranks: int) -> float:
        """How much larger, at the root, the ranks' own second moments are than that of the mean
        gradient: 1 if all ranks see the same, sqrt(ranks) if they see nothing but noise."""
        own, together = self.mean("own"), self.mean("together")
        return sqrt(min(max(ranks * own / together, 1.0), ranks)) if together > 0 else 1.0

    def gradient_per_update(self) -> float:
        """By which a mean update is as large as a mean gradient."""
        given = self.mean("given")
        return sqrt(self.mean("grad") / given) if given > 0 else TINY


class UpdateMemory(Residual):
    """One residual of updates for each parameter, beside the optimizer's own moments.

    ranks: world size. lag: share of the lag of the optimizer's momentum in a compressed step at a
    CF, in [0, 1]. changed: what the script has multiplied the energy of `p.grad` by since the last
    backward, None if it has not touched them or nobody knows.
    """

    name = "updates"
    sketches = SKETCH
    scales: UpdateScales

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: ModelParameters,
        ranks: int,
        lag: Callable[[float], float],
        changed: Callable[[], Tensor | None],
    ) -> None:
        super().__init__(parameters.maybe_unused)
        self.scales = UpdateScales()
        self.scales.differ = bool(optimizer.state)
        self._optimizer = optimizer
        self._parameters = parameters
        self._ranks = ranks
        self._lag = cache(lag)
        self._changed = changed
        self._handover = Handover(optimizer, {}, lambda group: True, self._step, self._show)
        self._twin = copy(optimizer)
        self._at = -1  # the step
        self._noise = self._scale = 1.0  # in this step: what updates, and p.grad, are multiplied by
        self._own: set[Tensor] = set()  # parameters whose second moments are this rank's
        self._holding: set[Tensor] = set()  # those whose p.grad holds an update
        self._given: dict[int, Tensor] = {}  # by bucket, the energy of the last step's mean updates
        self._late: dict[Tensor, Tensor] = {}  # updates that go with the next step, dense
        self._hidden: dict[Tensor, Tensor | None] = {}  # p.grad, while the optimizer steps

    def turn(self, bucket: Bucket, cfs: StepCFs, tally: Tally) -> None:
        """The bucket's gradients become updates, in place, but for those of parameters that are
        skipped or that the optimizer has not; a sketch of the bucket goes into the tally."""
        self._begin_step(bucket.key.step, tally)
        if bucket.poisoned is True:
            return
        parts = [part for part in bucket.parts if part.grad.numel() and part.skipped is not True]
        parts = [p for p in parts if self._handover.settings(p.parameter.tensor) is not None]
        gradients = bucket.room("gradients", bucket.work.numel()).copy_(bucket.work)
        alike = defaultdict(list)
        for part in parts:
            parameter, share = part.parameter, self._lag(cfs.sent(part.parameter.name))
            self._make_own(parameter, share)
            alike[share].append((parameter.tensor, gradients[part.start : part.stop], part.grad))
        for share, jobs in alike.items():
            states = [self._optimizer.state[p] for p, _, _ in jobs]
            self._update(jobs, states, share)
        fill_if(bucket.poisoned, bucket.work, 0.0)
        self._holding.update(part.parameter.tensor for part in parts)
        sketch = _sketch(bucket.work, bucket.key.step, bucket.parts[0].parameter.name)
        tally.at("sketch_of_updates").add_(sketch)
        tally.at("own_sketches").add_(sketch.square().sum())

    def hand_out(self, index: int, parameters: Sequence[ModelParameter], mean: Tensor) -> None:
        """Scale the decoded mean of bucket `index`, in place, so that `p.grad` is as large as a
        gradient: scripts clip its norm, and log it."""
        held = [parameter.tensor in self._holding for parameter in parameters]
        parts = mean.split([parameter.tensor.numel() for parameter in parameters])
        if all(held):
            self._given[index] = squared_norms([mean])[0]
            mean.mul_(self._scale)
            return
        for part, holding in zip(parts, held, strict=True):
            if holding:
                part.mul_(self._scale)

    def learn(self, agreed: Statistics) -> None:
        """Take in what the ranks have agreed on of a compressed step."""
        scales, n = self.scales, self._ranks
        if agreed.spoiled or not agreed.own_sketches > 0:
            return
        scales.add("own", agreed.own_sketches, NOISE_DECAY)
        scales.add("together", sum(x * x for x in agreed.sketch_of_updates), NOISE_DECAY)
        scales.add("grad", agreed.grad / n / scales.noise(n) ** 2, NORM_DECAY)
        scales.add("given", agreed.given, NORM_DECAY)
        scales.add("clipped", agreed.clipped, NORM_DECAY)

    def settle(self, exchange: Exchange) -> None:
        """Before a dense step: the ranks agree on the optimizer's moments (a collective), and all
        that waits, with the ranks' mean, for the optimizer's next step."""
        self._holding.clear()
        if self.scales.differ:
            for p, parameter in self._parameters.items():
                if self._handover.settings(p) is not None:
                    self._agree_on(parameter, exchange)
            self.scales.differ = False
            self._own.clear()

    def hand_back(self, exchange: Exchange | None) -> None:
        if exchange is not None:
            self.settle(exchange)
            exchange.take_traffic()  # no step's
            for group in self._optimizer.param_groups:
                self._deliver_late(group)
        self._handover.unhook()

    def moves(self, parameter: ModelParameter) -> tuple[object, ...]:
        return (parameter.filled, parameter.lag)

    def state_dict(self, parameter: ModelParameter) -> dict[str, Any]:
        return {**super().state_dict(parameter), "lag": parameter.lag}

    def load_state_dict(self, parameter: ModelParameter, state: Mapping[str, Any]) -> None:
        super().load_state_dict(parameter, state)
        parameter.lag = state.get("lag", 1.0)
        if self.scales.differ:
            self._own.add(parameter.tensor)

    def _begin_step(self, step: int, tally: Tally) -> None:
        """Once a step: what is known of the one before goes into the tally."""
        if step == self._at:
            return
        self._at, given, self._given = step, self._given, {}
        known = [given[index] for index in sorted(given)]
        tally.at("given").fill_(nan) if not known else tally.at("given").add_(sum(known))
        changed = self._changed()
        tally.at("clipped").fill_(1.0) if changed is None else tally.at("clipped").add_(changed)
        self._holding.clear()
        self._noise = self.scales.noise(self._ranks)
        self._scale = self.scales.gradient_per_update()
        self.scales.differ = True

    def _make_own(self, parameter: ModelParameter, share: float) -> None:
        """From here on the moments are this rank's, and momentum has this share of its lag."""
        state = self._optimizer.state[parameter.tensor]
        self._change_lag(parameter, share)
        if parameter.tensor not in self._own:
            self._own.add(parameter.tensor)
            for name in SECOND_MOMENTS:
                if name in state:
                    state[name].mul_(self._noise**2)

    def _change_lag(self, parameter: ModelParameter, share: float) -> None:
        """What momentum has yet to deliver with its share of the lag so far, and no longer has
        with the new one, goes to the residual, or comes from there."""
        before, parameter.lag = parameter.lag, share
        p, state = parameter.tensor, self._optimizer.state[parameter.tensor]
        group = self._handover.settings(p)
        if before == share or group is None or "betas" not in group or "exp_avg" not in state:
            return
        beta1, beta2 = group["betas"]
        more = beta1 / (1 - beta1) * (before - share)
        if p in self._own:
            more *= self._noise
        step = state["step"]
        mean = state["exp_avg"] / (1 - with_lag(beta1, before) ** step).clamp(min=1 - beta1)
        square = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
        root = (square / (1 - beta2**step).clamp(min=1 - beta2)).sqrt_().add_(group["eps"])
        parameter.open_residual().add_(_flat(mean.div_(root)), alpha=more)

    def _update(
        self,
        jobs: Sequence[tuple[Tensor, Tensor, Tensor]],
        states: Sequence[dict[str, Any]],
        share: float,
    ) -> None:
        """Write the optimizer's update over the last of each (parameter, its gradient, room for the
        update), the latter two flat, and step the states."""
        groups: dict[int, dict[str, Any]] = {}
        self._twin.state = defaultdict(dict)
        narrow = []
        for (p, gradient, update), state in zip(jobs, states, strict=True):
            group = self._handover.settings(p)
            assert group is not None
            zeros, grad = _shaped(update.zero_(), p), _shaped(gradient, p)
            if p.dtype != update.dtype:  # the optimizer works in the parameter's own precision
                zeros, grad = torch.zeros_like(p), grad.to(p.dtype)
                narrow.append((update, zeros))
            if group["weight_decay"] and not self._decoupled(group):
                grad.add_(p, alpha=group["weight_decay"] * (-1 if group["maximize"] else 1))
            zeros.grad = grad
            self._twin.state[zeros] = state
            as_one = groups.setdefault(id(group), self._settings(group, share))
            as_one["params"].append(zeros)
        self._twin.param_groups = list(groups.values())
        self._twin.step()
        for update, zeros in narrow:
            update.copy_(_flat(zeros))

    def _settings(self, group: Group, share: float) -> dict[str, Any]:
        """The user's for the twin: no weight decay, and momentum with a share of its lag."""
        own = {**group, "params": [], "weight_decay": 0.0, "lr": -self._noise}
        if "betas" in group:
            own["betas"] = (with_lag(group["betas"][0], share), group["betas"][1])
        return own

    def _decoupled(self, group: Group) -> bool:
        """Weight decay is taken off the parameter, not added to its gradient."""
        return bool(group.get("decoupled_weight_decay", isinstance(self._optimizer, AdamW)))

    @torch.no_grad()
    def _step(self, group: Group) -> None:
        """In the stead of the optimizer: parameters whose gradient is an update make that step, and
        are hidden from it."""
        self._deliver_late(group)
        held = [p for p in group["params"] if p in self._holding and p.grad is not None]
        if not held:
            return
        lr = group["lr"]
        if group["weight_decay"] and self._decoupled(group):
            torch._foreach_mul_(held, 1 - lr * group["weight_decay"])
        factor = lr / self._scale / sqrt(self.scales.mean("clipped") or 1.0)
        scale = getattr(self._optimizer, "grad_scale", None)
        skips = getattr(self._optimizer, "found_inf", None)
        if scale is not None:
            factor = factor / scale
        if skips is not None:
            factor = factor * (1 - skips)
        updates = [p.grad for p in held]
        if isinstance(factor, Tensor):
            torch._foreach_sub_(held, torch._foreach_mul(updates, factor))
        else:
            torch._foreach_sub_(held, updates, alpha=factor)
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
                p.sub_(_shaped(late, p).to(p.dtype) * group["lr"])

    def _agree_on(self, parameter: ModelParameter, exchange: Exchange) -> None:
        """The same moments on all ranks, and what waits of the parameter for the next step. A
        collective."""
        p, group = parameter.tensor, self._handover.settings(parameter.tensor)
        assert group is not None
        state = self._optimizer.state[p]
        self._change_lag(parameter, 0.0)
        names = [name for name, asked in _averaged(group).items() if asked]
        flat = torch.zeros((1 + len(names)) * p.numel() + 2, dtype=parameter.dtype, device=p.device)
        residual, *moments, there, step = flat.split([p.numel()] * (1 + len(names)) + [1, 1])
        if parameter.filled and parameter.residual is not None:
            residual.copy_(parameter.residual)
        if "step" in state:
            there.fill_(1.0)
            step.copy_(state["step"])
            for name, moment in zip(names, moments, strict=True):
                moment.copy_(_flat(state[name]))
                if name in SECOND_MOMENTS and p in self._own:
                    moment.div_(self._noise**2)
        exchange.all_reduce(flat).wait()
        if "step" not in state:  # of a parameter that this rank has not used
            self._update([(p, parameter.zeros(), parameter.zeros())], [state], 1.0)
        some = there.clamp(min=1.0)
        state["step"].copy_((step / some)[0])
        for name, moment in zip(names, moments, strict=True):
            state[name].copy_(_shaped(moment.div_(some), p))
        if "exp_avg" in state:
            state["exp_avg"].zero_()
        self._late[p] = residual.div_(exchange.world_size)
        parameter.filled, parameter.lag = False, 1.0


def with_lag(momentum: float, share: float) -> float:
    """The momentum with this share of the lag m / (1 - m)."""
    if share == 1 or not 0 < momentum < 1:
        return momentum
    lag = share * momentum / (1 - momentum)
    return lag / (1 + lag)


def _averaged(group: Group) -> dict[str, bool]:
    """What an optimizer keeps of a parameter that is an average over steps, momentum aside, and
    whether it does with the settings of this group."""
    if "betas" in group:
        return {"exp_avg_sq": True, "max_exp_avg_sq": bool(group.get("amsgrad"))}
    if "alpha" in group:  # RMSprop
        momentum = group["momentum"] > 0
        return {"square_avg": True, "grad_avg": group["centered"], "momentum_buffer": momentum}
    return {"sum": True}


def _shaped(flat: Tensor, p: Tensor) -> Tensor:
    """A view of a flat tensor like `p`, whose elements lie in the order of memory."""
    return flat.as_strided(p.size(), p.stride())


def _flat(tensor: Tensor) -> Tensor:
    """A view of a dense tensor with its elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _sketch(updates: Tensor, step: int, name: str) -> Tensor:
    """Of a sample of updates (flat), in double: elements times signs that are drawn alike on every
    rank and anew in every step, those SKETCH apart added up. The energy of a sum of sketches is in
    expectation that of the sum of the samples (Charikar and others, 2002)."""
    sample = strided_sample(updates)
    shift = (step * 389 + crc32(name.encode())) % 1009
    signs = _signs(sample.numel() + 1009, updates.device)[shift : shift + sample.numel()]
    signed = fill_up(sample * signs, -(-sample.numel() // SKETCH) * SKETCH)
    weight = sqrt(updates.numel() / sample.numel())
    return signed.view(-1, SKETCH).sum(0, dtype=torch.float64) * weight


@lru_cache(maxsize=64)
def _signs(numel: int, device: torch.device) -> Tensor:
    drawn = np.random.default_rng(0).integers(0, 2, numel, dtype=np.int8) * 2 - 1
    return torch.from_numpy(drawn.astype(np.float32)).to(device)
