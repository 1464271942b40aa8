"""The moments of an adaptive optimizer (averages of gradients and of their squares), and the share
of the second moment that is noise.

A rank that steps with local gradients has second moments of local gradients. These hold noise that
averaging over N ranks would remove. So the rank's updates are too small, by a factor between 1 and
sqrt(N). The first moment m tells the share of noise in the second moment v, since an average of
noise over steps is small. With b the decay of m: the expectation of m^2 / v is (1 - b) / (1 + b)
for mere noise, and 1 without noise. Of a single element m^2 / v is a poor estimate, so `CELL`
neighbouring elements share the ratio of their sums (docs/research/defaults.md). Where an optimizer
keeps no first moment, the signal's share is assumed (`SIGNAL`).

The user's own optimizer makes every update. This module uses only what all adaptive optimizers
share (exponential averages that start from zero), and two formulas of single optimizers: RAdam's
rectification, and the weight of NAdam's first moment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import repeat
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from adaptive.memory.error_feedback import MomentumRule
from adaptive.memory.handover import Group, steps_as
from adaptive.memory.muon import is_muon
from adaptive.model.parameters import local
from compressors.kernels import kernels_for
from compressors.kernels.blocks import CELL, rows

ADAPTIVE = (Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad)
"""torch's own optimizers that divide by the root of a second moment, element by element."""

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""Names of second moments in an optimizer's state of a parameter."""

WITHOUT_MEAN = ("square_avg", "sum")
"""Names of the second moments of optimizers that keep no first moment (RMSprop, Adagrad)."""

SIGNAL = 0.05
"""The signal's share of a second moment, where no first moment tells it. Adam's first moments show
0.003 to 0.03 with 8 to 16 items a rank, and larger batches have a larger share
(docs/research/defaults.md)."""

LEAST = 1e-30
"""Added to second moments, so that none is zero."""

TERMS = 256
"""Steps whose weights `weight_of_mean` adds one by one. An integral stands for all later steps."""

LEAST_LENGTH = 5.0
"""The length of the average in a second moment from which on RAdam divides by its root."""

Noise = tuple[Any, float]
"""(scale, constant): see `noise_of`."""


def is_adaptive(optimizer: Optimizer | None) -> bool:
    """Whether this is one of `ADAPTIVE`, or inherits the `step` of one."""
    kind: Any = type(optimizer)
    return optimizer is not None and _is_adaptive(kind)


@cache
def _is_adaptive(kind: Any) -> bool:
    step = inspect.unwrap(kind.step)
    return any(issubclass(kind, each) and step is inspect.unwrap(each.step) for each in ADAPTIVE)


def keeps_no_mean(optimizer: Optimizer) -> bool:
    """Whether this is an adaptive optimizer that keeps no first moment."""
    return is_adaptive(optimizer) and isinstance(optimizer, RMSprop | Adagrad)


def decay_of(group: Group) -> float:
    """The decay of the momentum of an adaptive optimizer's parameter group: of Adam's first moment,
    or of the sum of RMSprop's updates. 0: it has none, or one that does not decay, which torch
    allows with RMSprop and which stays in the optimizer."""
    decay: float = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
    return decay if decay < 1 else 0.0


def assumed_share(ranks: int) -> float:
    """`mean_share` of an optimizer that keeps no first moment."""
    return SIGNAL + (1 - SIGNAL) / ranks


class Run(NamedTuple):
    """The moments of neighbouring parameters with equal decays: elements [start, stop) of a chunk.

    group: the user's parameter group, with the decays (betas). step: number of gradients in the
    averages: 0-dim; or flat, one for each parameter, where the optimizer counts on a device.
    ends: where each parameter ends in the run, on that device (int64). sizes: elements of each
    parameter. tensors: the moments by their names in the optimizer's state, flat or in the shape of
    their parameter. rectified: RAdam steps the parameters. nesterov: NAdam does."""

    group: Group
    step: Tensor
    tensors: Mapping[str, Tensor]
    start: int = 0
    stop: int = 0
    sizes: Sequence[int] = ()
    ends: Tensor | None = None
    rectified: bool = False
    nesterov: bool = False

    def by_element(self, numbers: Any) -> Any:
        """Repeat a number for each parameter to a number for each element (flat). A single number
        for all parameters is returned as it is."""
        if not isinstance(numbers, Tensor) or not numbers.dim():
            return numbers
        pairs = zip(numbers.split(1), self.sizes, strict=True)
        return torch.cat([number.expand(size) for number, size in pairs])

    def inside(self, start: int, stop: int) -> slice:
        """The elements of the run that are in [start, stop) of the chunk."""
        return slice(max(start - self.start, 0), max(min(stop, self.stop) - self.start, 0))

    @property
    def mean(self) -> Tensor:
        return flat(self.tensors["exp_avg"])

    @property
    def square(self) -> Tensor:
        return flat(self.tensors["exp_avg_sq"])


def have_noise(state: Mapping[str, Any]) -> bool:
    """Both moments are in the state, which the estimate of noise needs."""
    return "exp_avg" in state and "exp_avg_sq" in state


def enlarge(update: Tensor, run: Run, elements: slice, share: float, ranks: int) -> None:
    """Enlarge an update (flat, in place) to what the second moment of the mean gradient would make:
    divide each cell by sqrt(v of the mean gradient / v of this rank).

    elements: the elements of the run that belong to the update; on a device all. share: see
    `noise_of`."""
    mean, square = run.mean[elements], run.square[elements]
    noise = noise_of(run, share)
    factor, constant = _weights(noise, ranks)
    tensors = [x for x in (update, mean, square, factor) if isinstance(x, Tensor)]
    fused = kernels_for(update).fused(*tensors)
    if fused is not None:
        fused.enlarge(update, mean, square, factor, constant, 1 / ranks, LEAST, run.ends)
        return
    noise = run.by_element(noise[0]), noise[1]
    shares = _mean_shares(mean, square, noise, ranks)
    for cells, of_mean in zip(rows(update, CELL), shares, strict=True):
        cells.mul_(of_mean.rsqrt_())


def fused_updates(
    before: Tensor,
    update: Tensor,
    read: Callable[[Tensor], Tensor],
    runs: Sequence[Run],
    old_mean: Tensor | None,
    decay_factor: Any,
    rate: Any,
    share: float,
    ranks: int,
) -> Tensor | None:
    """The updates of a step by one kernel, in one pass over the tensors of a chunk on a device:
    before *= decay_factor; each first moment becomes the average of `old_mean` and the gradient
    that it holds; update = rate * (before - parameters), enlarged. Returns update's squared norm.
    None, and nothing is done, without Triton, or if some parameters have no moments.

    before, update: flat, of a chunk whose moments are `runs`. read: writes the chunk's parameters
    to a flat tensor."""
    tensors = [x for run in runs for x in (run.mean, run.square)]
    fused = kernels_for(update).fused(before, update, old_mean, *tensors)
    numbers = isinstance(rate, float) and isinstance(decay_factor, (int, float))
    if fused is None or not numbers or sum(run.stop - run.start for run in runs) != update.numel():
        return None
    read(update)
    squares = []
    for run in runs:
        elements = slice(run.start, run.stop)
        old, weight = None if old_mean is None else old_mean[elements], 1 - run.group["betas"][0]
        limits = *_weights(noise_of(run, share), ranks), 1 / ranks, LEAST, run.ends
        flats = update[elements], run.mean, run.square
        step = before[elements], old, decay_factor, rate, weight
        squares.append(fused.enlarge(*flats, *limits, *step))
    return torch.cat(squares).sum() if len(squares) > 1 else squares[0].sum()


def mean_share(run: Run, ranks: int, share: float = 1.0) -> Tensor:
    """v of the mean gradient / v of this rank, for each element (flat). share: see `noise_of`."""
    scale, constant = noise_of(run, share)
    found = torch.empty_like(run.square)
    shares = _mean_shares(run.mean, run.square, (run.by_element(scale), constant), ranks)
    for cells, of_mean in zip(rows(found, CELL), shares, strict=True):
        cells.copy_(of_mean)
    return found


def pending(run: Run, weight: Any, share_of_square: Any) -> Tensor:
    """The pending momentum of a run (the updates that later steps would still make from its first
    moment): weight * m / (sqrt(v) + eps), with v's bias correction (flat), and with RAdam's
    `_rectification`.

    weight: see `weight_of_mean`. share_of_square: v is multiplied by this number (flat, or 1)."""
    ahead = run.by_element(weight * _rectification(run))
    return run.mean.div(_divisor(run, share_of_square)).mul_(ahead)


def deliver(run: Run, waiting: Tensor, weight: Any, share_of_square: Any) -> None:
    """Set the first moment so that its pending momentum is `waiting` (flat, overwritten): the
    inverse of `pending`."""
    scale = run.by_element(1 / (weight * _rectification(run)))
    run.mean.copy_(waiting.mul_(_divisor(run, share_of_square)).mul_(scale))


def weight_of_mean(run: Run, share: float) -> Any:
    """The sum of the weights of the first moment, as it is kept now, in all later updates, with
    this momentum share: a number, or one for each parameter (flat) if a device counts steps.

    With the decay b, after t steps, step t + k takes b^k m / (1 - b^(t + k)). The sum over k is
    b / (1 - b) for a large t, and 1 / (1 - b^t) times at most that for a small t. A sum of terms
    alone would need 10,000 of them for a decay of 0.999."""
    beta1 = run.group["betas"][0]
    decay = decay_with_share(beta1, share)
    if not decay:
        return 0.0
    if run.nesterov:
        # A step of NAdam multiplies the first moment by mu (Dozat 2016, algorithm 2), which grows
        # slowly, and is taken where `_rectification` is. Its bias correction is next to 1.
        step = run.step + 1 + 1 / (1 - decay)
        mu = decay * (1 - 0.5 * 0.96 ** (step * run.group["momentum_decay"]))
        return decay / (1 - decay) * mu
    k = torch.arange(1, TERMS + 1, dtype=torch.float64, device=run.step.device)
    step = run.step.to(k.dtype)
    terms = decay**k / (1 - decay ** (step[..., None] + k))
    last = TERMS + 0.5  # from here on the integral of the terms
    x = (decay ** (step + last)).clamp(min=torch.finfo(k.dtype).tiny)  # divides below
    later = decay**last * torch.log1p(-x) / (x * log(decay))
    return (terms.sum(-1) + later).to(run.step.dtype)


def _divisor(run: Run, share_of_square: Any) -> Tensor:
    """sqrt(v) + eps with bias correction, flat."""
    square = flat(run.tensors["max_exp_avg_sq" if run.group.get("amsgrad") else "exp_avg_sq"])
    square = square / run.by_element(_bias(run.group["betas"][1], run.step))
    return square.mul_(share_of_square).sqrt_().add_(run.group["eps"])


def _rectification(run: Run) -> Any:
    """The factor by which RAdam makes its steps smaller than Adam's (Liu and others 2020, section
    4.2), as long as few gradients are in the second moment; 1 for other optimizers. It grows from
    step to step, so it is taken where the steps that use up a first moment are on average: after
    1 / (1 - beta1) steps. The first steps of RAdam, which do not divide by a second moment, count
    as its smallest ones that do."""
    beta1, beta2 = run.group["betas"]
    most = 2 / (1 - beta2) - 1
    if not run.rectified or most <= LEAST_LENGTH:
        return 1.0
    step = run.step.to(torch.float64) + 1 / (1 - beta1)
    decayed = beta2**step
    length = (most - 2 * step * decayed / (1 - decayed)).clamp(min=LEAST_LENGTH)
    factor = (length - 4) * (length - 2) / length * (most / (most - 4) / (most - 2))
    return factor.sqrt_().to(run.step.dtype)


def normalized(grad: Tensor, group: Group, state: Mapping[str, Any]) -> Tensor:
    """grad / (sqrt(v) + eps) with the present v: the update from a gradient without momentum and
    weight decay; `grad` itself if there is no second moment yet. grad: of a parameter, flat."""
    name = next((name for name in SECOND_MOMENTS if name in state), None)
    if name is None:
        return grad
    square = flat(state[name])
    if name != "sum":  # an average
        beta2 = group["betas"][1] if "betas" in group else group.get("alpha", 0.9)
        square = square / _bias(beta2, state["step"])
    return grad / square.sqrt().add_(group["eps"])


def scale_second_moments(tensors: Mapping[str, Any], factor: Tensor) -> None:
    """Multiply the second moments in place. factor: for each element, flat."""
    for name in SECOND_MOMENTS:
        if name in tensors:
            tensors[name].mul_(factor.view(tensors[name].shape))


def scale_without_mean(state: Mapping[str, Any], factor: float) -> None:
    """Multiply the second moments of a parameter whose optimizer keeps no first moment, in place.

    RMSprop with `centered` divides by the root of the variance, square_avg - grad_avg^2. There only
    the variance is multiplied: a smaller second moment alone could make it negative."""
    for square in (local(state[name]) for name in WITHOUT_MEAN if name in state):
        if "grad_avg" in state:
            mean = local(state["grad_avg"])
            variance = square.addcmul(mean, mean, value=-1).clamp_(min=0)
            square.add_(variance, alpha=factor - 1)
        else:
            square.mul_(factor)


def is_decoupled(optimizer: Optimizer, group: Group) -> bool:
    """Weight decay shrinks the parameter itself, and is not added to the gradient."""
    if is_muon(optimizer) or steps_as(optimizer, AdamW) or steps_as(optimizer, Adafactor):
        return True
    return is_adaptive(optimizer) and bool(group.get("decoupled_weight_decay"))


@lru_cache(maxsize=64)
def decay_with_share(beta1: float, share: float) -> float:
    """The decay b of a first moment with a momentum share: b / (1 - b) is `share` times
    beta1 / (1 - beta1)."""
    return MomentumRule(beta1).with_share(share).momentum if share else 0.0


def flat(tensor: Tensor) -> Tensor:
    """The elements row by row: a view of a contiguous tensor, else a copy."""
    return tensor if tensor.dim() == 1 else tensor.detach().reshape(-1)


def noise_of(run: Run, share: float) -> Noise:
    """(scale, constant): scale * m^2 / v - constant is an unbiased estimate of the signal's share
    of a second moment. With beta1 = 0 the first moment is the last gradient, which tells nothing
    about noise: then the share is assumed (`SIGNAL`).

    scale: a number, or one for each parameter (flat) if a device counts steps. share: the share of
    the steps, in [0, 1]."""
    beta1, beta2 = _decay_of_mean(run.group["betas"][0], share), run.group["betas"][1]
    if beta1 == 0:
        return 0.0, -SIGNAL
    if run.step.dim() or run.step.device.type != "cpu":
        return _noise(beta1, beta2, run.step)
    return _noise_at(beta1, beta2, float(run.step))


@lru_cache(maxsize=64)
def _noise_at(beta1: float, beta2: float, step: float) -> Noise:
    """`_noise` as numbers, for parameters with a step count on the host."""
    scale, constant = _noise(beta1, beta2, torch.tensor(step, device="cpu"))
    return float(scale), constant


def _noise(beta1: float, beta2: float, step: Tensor) -> Noise:
    of_noise = (1 - beta1) / (1 + beta1)
    bias1, bias2 = _bias(beta1, step), _bias(beta2, step)
    return bias2 / bias1**2 / (1 - of_noise), of_noise / (1 - of_noise)


def _decay_of_mean(beta1: float, share: float) -> float:
    """The decay of the first moment with a momentum share. With share 0 it is
    beta1, by which `own_moments.average` updates the first moment after such a step."""
    return decay_with_share(beta1, share) if share else beta1


def _bias(beta: float, step: Tensor) -> Tensor:
    """1 - beta^step: the sum of the weights in an average that started from zero."""
    return (1 - beta**step).clamp(min=1 - beta)


def _mean_shares(mean: Tensor, square: Tensor, noise: Noise, ranks: int) -> list[Tensor]:
    """v of the mean gradient / v of this rank, in [1 / N, 1]: the signal's share, plus 1 / N of the
    noise's share. For each cell (cells, 1), in the order of `rows`. Where v has overflown it is
    1 / N. noise: for each element, or numbers; a cell takes that of its first element."""
    factor, constant = _weights(noise, ranks)
    each = isinstance(factor, Tensor) and factor.dim() > 0
    factors = (of[:, :1] for of in rows(factor, CELL)) if each else repeat(factor)
    found = []
    for m, v, scale in zip(rows(mean, CELL), rows(square, CELL), factors, strict=False):
        share = torch.linalg.vector_norm(m, dim=1, keepdim=True).square_()
        share.div_(v.sum(1, keepdim=True).add_(LEAST))
        share.mul_(scale).add_(constant).nan_to_num_(0.0)  # both sums have overflown
        found.append(share.clamp_(1 / ranks, 1.0))
    return found


def _weights(noise: Noise, ranks: int) -> Noise:
    """(factor, constant): factor * m^2 / v + constant is the share in `_mean_shares`."""
    (scale, constant), shared = noise, 1 - 1 / ranks
    return scale * shared, 1 / ranks - constant * shared
