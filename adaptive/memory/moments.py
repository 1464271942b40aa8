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
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from adaptive.memory.handover import Group
from adaptive.memory.momentum_rule import MomentumRule
from compressors.kernels.blocks import CACHE_BLOCK, block_bounds, is_host, takes_triton

if TYPE_CHECKING:
    from compressors.kernels.triton.moments import Piece

ADAPTIVE = (Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad)
"""torch's own optimizers that divide by the root of a second moment, element by element."""

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""In an optimizer's state of a parameter: they also hold the gradient's noise."""

LEAST = 1e-30
"""Added to second moments, so that none is zero."""


def is_adaptive(optimizer: Optimizer | None) -> bool:
    """Whether this is one of `ADAPTIVE`, or inherits the `step` of one."""
    kind: Any = type(optimizer)
    return optimizer is not None and _is_adaptive(kind)


@cache
def _is_adaptive(kind: Any) -> bool:
    step = inspect.unwrap(kind.step)
    return any(issubclass(kind, each) and step is inspect.unwrap(each.step) for each in ADAPTIVE)


class Moments(NamedTuple):
    """The moments of one parameter.

    group: the user's parameter group. share: of the momentum's lag that the step had, in [0, 1].
    state: the optimizer's, with tensors of the shard that is here."""

    group: Group
    share: float
    state: dict[str, Any]

    @property
    def have_noise(self) -> bool:
        """Both moments are there, so that noise can be told."""
        return "exp_avg" in self.state and "exp_avg_sq" in self.state

    @property
    def mean(self) -> Tensor:
        return flat(self.state["exp_avg"])

    @property
    def square(self) -> Tensor:
        return flat(self.state["exp_avg_sq"])


def enlarge(updates: Sequence[Tensor], moments: Sequence[Moments], ranks: int) -> None:
    """Make updates (flat, in place) as large as the mean gradient's second moment would: divide
    each element by the root of that moment's share of this rank's own."""
    if not updates:
        return
    if all(map(_takes_triton, updates, moments)):
        from compressors.kernels.triton import (
            moments as triton_moments,  # here, as Triton need not be installed
        )

        pieces = [_piece(u, m) for u, m in zip(updates, moments, strict=True)]
        triton_moments.enlarge(pieces, ranks, LEAST)
        return
    noises = [_noise(m) for m in moments]
    if not is_host(updates[0].device):
        shares = _mean_shares([m.mean for m in moments], [m.square for m in moments], noises, ranks)
        torch._foreach_div_(list(updates), list(torch._foreach_sqrt(shares)))
        return
    for noise, own, update in zip(noises, moments, updates, strict=True):
        mean, square = own.mean, own.square
        for start, stop in block_bounds(update, CACHE_BLOCK):  # block by block, in the cache
            block = [mean[start:stop]], [square[start:stop]]
            update[start:stop].mul_(_mean_shares(*block, [noise], ranks)[0].rsqrt_())


def mean_share(moments: Moments, ranks: int) -> Tensor:
    """The share of each element's second moment that the mean gradient has as well, flat."""
    return _mean_shares([moments.mean], [moments.square], [_noise(moments)], ranks)[0]


def undelivered(moments: Moments, share_of_square: Any) -> Tensor:
    """m / (sqrt(v) + eps) without bias, flat: times beta1 / (1 - beta1) it is what momentum has yet
    to deliver. share_of_square: of the second moment that counts, flat, or 1."""
    group, state = moments.group, moments.state
    beta1, beta2 = group["betas"]
    mean = moments.mean / _bias(_decay_of_mean(beta1, moments.share), state)
    square = flat(state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"])
    square = square / _bias(beta2, state)
    return mean.div_(square.mul_(share_of_square).sqrt_().add_(group["eps"]))


def normalized(grad: Tensor, group: Group, state: Mapping[str, Any], stride: int) -> Tensor:
    """A sample of a gradient (flat, every stride-th element) divided by the root of the second
    moment as it is: the update that comes of it without momentum and decay; `grad` itself where
    there is no second moment yet."""
    name = next((name for name in SECOND_MOMENTS if name in state), None)
    if name is None:
        return grad
    square = flat(state[name])[::stride]
    if name != "sum":  # an average
        square = square / _bias(decay_of_square(group), state)
    return grad / square.sqrt().add_(group["eps"])


def scale_second_moments(state: Mapping[str, Tensor], factor: Tensor) -> None:
    """factor: of each element, flat."""
    for name in SECOND_MOMENTS:
        if name in state:
            state[name].mul_(factor.view(state[name].shape))


def is_decoupled(optimizer: Optimizer, group: Group) -> bool:
    """Weight decay is taken off the parameter, not added to its gradient."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))


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


def _takes_triton(update: Tensor, moments: Moments) -> bool:
    """Whether a kernel may enlarge the update."""
    if not moments.group["betas"][0]:
        return False
    step = moments.state["step"]
    tensors = (moments.state["exp_avg"], moments.state["exp_avg_sq"], update)
    fits = all(takes_triton(t) and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    return fits and (step.device.type == "cpu" or step.dtype == torch.float32)


def _piece(update: Tensor, moments: Moments) -> Piece:
    """The same as `compressors.kernels.triton.moments` takes it."""
    from compressors.kernels.triton.moments import Piece

    step = moments.state["step"]
    beta1 = _decay_of_mean(moments.group["betas"][0], moments.share)
    return Piece(
        mean=moments.mean,
        square=moments.square,
        update=update,
        betas=(beta1, moments.group["betas"][1]),
        step=float(step) if step.device.type == "cpu" else step,
        of_noise=(1 - beta1) / (1 + beta1),
    )


def _decay_of_mean(beta1: float, share: float) -> float:
    """Of the first moment while momentum has a share of its lag; with none it is the user's."""
    return with_lag(beta1, share) if share else beta1


def _bias(beta: float, state: Mapping[str, Tensor]) -> Tensor:
    """How much of its weight an average that began with zeros has by now."""
    return (1 - beta ** state["step"]).clamp(min=1 - beta)


def _noise(moments: Moments) -> tuple[Any, float]:
    """(scale, constant): an unbiased estimate of the signal's share of a second moment is
    scale * m^2 / v - constant. A first moment that does not decay is the last gradient, and tells
    nothing: then all counts as signal."""
    beta1 = _decay_of_mean(moments.group["betas"][0], moments.share)
    beta2 = moments.group["betas"][1]
    if beta1 == 0:
        scale, constant = 0 * _bias(beta2, moments.state), -1.0
    else:
        of_noise = (1 - beta1) / (1 + beta1)
        bias1, bias2 = _bias(beta1, moments.state), _bias(beta2, moments.state)
        scale, constant = bias2 / bias1**2 / (1 - of_noise), of_noise / (1 - of_noise)
    on_host = scale.device.type == "cpu"  # where an optimizer keeps its steps unless capturable
    return float(scale) if on_host else scale, constant


def _mean_shares(
    means: list[Tensor], squares: list[Tensor], noises: list[tuple[Any, float]], ranks: int
) -> list[Tensor]:
    """The share of each second moment that the mean gradient has as well, in [1 / N, 1]: all of the
    signal's, and 1 / N of the noise's. From first moments, second ones, and `_noise` of each.

    Of a second moment that has overflown it is 1 / N, as of mere noise."""
    shared = 1 - 1 / ranks
    roots = list(torch._foreach_add(squares, LEAST))
    torch._foreach_sqrt_(roots)
    shares = list(torch._foreach_div(means, roots))
    torch._foreach_mul_(shares, shares)
    torch._foreach_mul_(shares, [scale * shared for scale, _ in noises])
    torch._foreach_add_(shares, [1 / ranks - constant * shared for _, constant in noises])
    torch._foreach_clamp_min_(shares, 1 / ranks)
    torch._foreach_clamp_max_(shares, 1.0)
    return shares
