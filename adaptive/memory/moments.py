"""The moments that an adaptive optimizer keeps of gradients, and how much of the second is noise.

A rank that steps by itself has second moments of its own gradients. They also hold the noise that
averaging over N ranks removes, so its updates are too small, by a factor between 1 and sqrt(N).
The first moment tells how much is noise: the average over steps of mere noise is small. With b the
decay of the first moment, its square is in the mean (1 - b) / (1 + b) of the second moment where
all is noise, and as large as the second moment where nothing is.

No optimizer's formula is repeated here: the user's own optimizer makes every update. Only what all
of these have in common is used: averages over steps that began with zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from adaptive.memory.error_feedback import MomentumRule
from adaptive.memory.handover import Group, steps_as
from adaptive.memory.muon import is_muon
from compressors.kernels import kernels_for

ADAPTIVE = (Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad)
"""torch's own optimizers that divide by the root of a second moment, element by element."""

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""In an optimizer's state of a parameter: they also hold the gradient's noise."""

LEAST = 1e-30
"""Added to second moments, so that none is zero."""

Noise = tuple[Any, float]
"""See `noise_of`."""


def is_adaptive(optimizer: Optimizer | None) -> bool:
    """Whether this is one of `ADAPTIVE`, or inherits the `step` of one."""
    kind: Any = type(optimizer)
    return optimizer is not None and _is_adaptive(kind)


@cache
def _is_adaptive(kind: Any) -> bool:
    step = inspect.unwrap(kind.step)
    return any(issubclass(kind, each) and step is inspect.unwrap(each.step) for each in ADAPTIVE)


class Run(NamedTuple):
    """Both moments of parameters that move alike: elements [start, stop) of a flat tensor.

    group: the user's parameter group, with the decays of all. step: how many gradients are in the
    averages: 0-dim; or flat, one for each parameter, on a device that counts them.
    ends: where each of these parameters ends in the run, on that device (int64). tensors: by their
    names in the optimizer's state, flat or in the shape of their parameter."""

    group: Group
    step: Tensor
    tensors: Mapping[str, Tensor]
    start: int = 0
    stop: int = 0
    sizes: Sequence[int] = ()
    ends: Tensor | None = None

    def by_element(self, numbers: Any) -> Any:
        """A number for each parameter becomes one for each element (flat); a number for all
        parameters stays what it is."""
        if not isinstance(numbers, Tensor) or not numbers.dim():
            return numbers
        pairs = zip(numbers.split(1), self.sizes, strict=True)
        return torch.cat([number.expand(size) for number, size in pairs])

    def inside(self, start: int, stop: int) -> slice:
        """Which of its elements are in [start, stop) of the flat tensor."""
        return slice(max(start - self.start, 0), max(min(stop, self.stop) - self.start, 0))

    @property
    def mean(self) -> Tensor:
        return flat(self.tensors["exp_avg"])

    @property
    def square(self) -> Tensor:
        return flat(self.tensors["exp_avg_sq"])


def have_noise(state: Mapping[str, Any]) -> bool:
    """Both moments are there, so that noise can be told."""
    return "exp_avg" in state and "exp_avg_sq" in state


def enlarge(update: Tensor, run: Run, part: slice, share: float, ranks: int) -> None:
    """Make an update (flat, in place) as large as the mean gradient's second moment would: divide
    each element by the root of that moment's share of this rank's own.

    part: the elements of the run that the update is of; on a device all. share: see `noise_of`."""
    mean, square = run.mean[part], run.square[part]
    noise = noise_of(run, share)
    factor, constant = _weights(noise, ranks)
    tensors = [x for x in (update, mean, square, factor) if isinstance(x, Tensor)]
    fused = kernels_for(update).fused(*tensors)
    if fused is not None:
        fused.enlarge(update, mean, square, factor, constant, 1 / ranks, LEAST, run.ends)
        return
    noise = run.by_element(noise[0]), noise[1]
    update.mul_(_mean_share(mean, square, noise, ranks).rsqrt_())


def take_step(
    before: Tensor,
    now: Tensor,
    read: Callable[[Tensor], Tensor],
    runs: Sequence[Run],
    old_mean: Tensor | None,
    shrink: Any,
    rate: Any,
    share: float,
    ranks: int,
) -> Tensor | None:
    """On a device, a whole step's updates in one pass over the tensors: before *= shrink; first
    moments take in their gradients (they are `old_mean` until then); now = rate * (before -
    parameters), enlarged. Returns the squared norm of `now`.

    before, now: flat, of a chunk whose moments are `runs`. read: writes the chunk's parameters to a
    flat tensor. None, and nothing is done, where one pass is not enough: without Triton, or where
    some parameters have no moments."""
    tensors = [x for run in runs for x in (run.mean, run.square)]
    fused = kernels_for(now).fused(before, now, old_mean, *tensors)
    numbers = isinstance(rate, float) and isinstance(shrink, (int, float))
    if fused is None or not numbers or sum(run.stop - run.start for run in runs) != now.numel():
        return None
    read(now)
    squares = []
    for run in runs:
        part = slice(run.start, run.stop)
        old, weight = None if old_mean is None else old_mean[part], 1 - run.group["betas"][0]
        limits = *_weights(noise_of(run, share), ranks), 1 / ranks, LEAST, run.ends
        of = before[part], now[part], run.mean, run.square, old
        squares.append(fused.take_step(*of, shrink, rate, weight, *limits))
    return torch.cat(squares).sum() if len(squares) > 1 else squares[0].sum()


def mean_share(run: Run, ranks: int, share: float = 1.0) -> Tensor:
    """The share of each element's second moment that the mean gradient has as well, flat."""
    scale, constant = noise_of(run, share)
    return _mean_share(run.mean, run.square, (run.by_element(scale), constant), ranks)


def undelivered(run: Run, share: float, share_of_square: Any) -> Tensor:
    """What a first moment has yet to deliver with all of its lag: beta1 / (1 - beta1) *
    m / (sqrt(v) + eps), without bias (flat). share: see `noise_of`. share_of_square: of the second
    moment that counts, flat, or 1."""
    beta1 = run.group["betas"][0]
    mean = run.mean / run.by_element(_bias(_decay_of_mean(beta1, share), run.step))
    return mean.div_(_divisor(run, share_of_square)).mul_(beta1 / (1 - beta1))


def deliver(run: Run, waiting: Tensor, share: float, share_of_square: Any) -> None:
    """Set the first moment so that with this share of its lag, above 0, it delivers all that waits
    (flat, overwritten). The rest: see `undelivered`."""
    beta1 = run.group["betas"][0]
    scale = _bias(_decay_of_mean(beta1, share), run.step) * (1 - beta1) / beta1 / share
    run.mean.copy_(waiting.mul_(_divisor(run, share_of_square)).mul_(run.by_element(scale)))


def _divisor(run: Run, share_of_square: Any) -> Tensor:
    """sqrt(v) + eps without bias, flat."""
    square = flat(run.tensors["max_exp_avg_sq" if run.group.get("amsgrad") else "exp_avg_sq"])
    square = square / run.by_element(_bias(run.group["betas"][1], run.step))
    return square.mul_(share_of_square).sqrt_().add_(run.group["eps"])


def normalized(grad: Tensor, group: Group, state: Mapping[str, Any], stride: int) -> Tensor:
    """A sample of a gradient (flat, every stride-th element) divided by the root of the second
    moment as it is: the update that comes of it without momentum and decay; `grad` itself where
    there is no second moment yet."""
    name = next((name for name in SECOND_MOMENTS if name in state), None)
    if name is None:
        return grad
    square = flat(state[name])[::stride]
    if name != "sum":  # an average
        square = square / _bias(decay_of_square(group), state["step"])
    return grad / square.sqrt().add_(group["eps"])


def scale_second_moments(tensors: Mapping[str, Any], factor: Tensor) -> None:
    """factor: of each element, flat."""
    for name in SECOND_MOMENTS:
        if name in tensors:
            tensors[name].mul_(factor.view(tensors[name].shape))


def is_decoupled(optimizer: Optimizer, group: Group) -> bool:
    """Weight decay is taken off the parameter, not added to its gradient."""
    if is_muon(optimizer) or steps_as(optimizer, AdamW) or steps_as(optimizer, Adafactor):
        return True
    return is_adaptive(optimizer) and bool(group.get("decoupled_weight_decay"))


def decay_of_square(group: Group) -> float:
    """Of the second moment, or of one that is not an average what comes near."""
    beta2: float = group["betas"][1] if "betas" in group else group.get("alpha", 0.9)
    return beta2


@lru_cache(maxsize=64)
def with_lag(beta1: float, share: float) -> float:
    """The decay of a first moment whose lag beta1 / (1 - beta1) is this share of what it was."""
    return MomentumRule(beta1).with_lag(share).momentum if share else 0.0


def flat(tensor: Tensor) -> Tensor:
    """The elements in the order of the indices: a view of a tensor that lies so, else a copy."""
    return tensor.detach().reshape(-1)


def noise_of(run: Run, share: float) -> Noise:
    """(scale, constant): an unbiased estimate of the signal's share of a second moment is
    scale * m^2 / v - constant. A first moment that does not decay is the last gradient, and tells
    nothing: then all counts as signal.

    scale: a number, or one for each parameter (flat) where a device counts steps. share: of the
    momentum's lag that the steps had, in [0, 1]."""
    beta1, beta2 = _decay_of_mean(run.group["betas"][0], share), run.group["betas"][1]
    if beta1 == 0:
        return 0.0, -1.0
    if run.step.dim() or run.step.device.type != "cpu":
        return _noise(beta1, beta2, run.step)
    return _noise_at(beta1, beta2, float(run.step))


@lru_cache(maxsize=64)
def _noise_at(beta1: float, beta2: float, step: float) -> Noise:
    """The same for all parameters that were stepped together."""
    scale, constant = _noise(beta1, beta2, torch.tensor(step))
    return float(scale), constant


def _noise(beta1: float, beta2: float, step: Tensor) -> Noise:
    of_noise = (1 - beta1) / (1 + beta1)
    bias1, bias2 = _bias(beta1, step), _bias(beta2, step)
    return bias2 / bias1**2 / (1 - of_noise), of_noise / (1 - of_noise)


def _decay_of_mean(beta1: float, share: float) -> float:
    """Of the first moment while momentum has a share of its lag; with none it is the user's."""
    return with_lag(beta1, share) if share else beta1


def _bias(beta: float, step: Tensor) -> Tensor:
    """How much of its weight an average that began with zeros has by now."""
    return (1 - beta**step).clamp(min=1 - beta)


def _mean_share(mean: Tensor, square: Tensor, noise: Noise, ranks: int) -> Tensor:
    """The share of a second moment that the mean gradient has as well, in [1 / N, 1]: all of the
    signal's, and 1 / N of the noise's.

    Of a second moment that has overflown it is 1 / N, as of mere noise."""
    factor, constant = _weights(noise, ranks)
    share = torch.add(square, LEAST)
    share = torch.div(mean, share, out=share).mul_(mean)
    return share.mul_(factor).add_(constant).clamp_(1 / ranks, 1.0)


def _weights(noise: Noise, ranks: int) -> Noise:
    """(factor, constant) of the share: factor * m^2 / v + constant."""
    (scale, constant), shared = noise, 1 - 1 / ranks
    return scale * shared, 1 / ranks - constant * shared
