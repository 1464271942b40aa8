"""The moments that an optimizer keeps of gradients: which update it makes by them, and how much of
the second moment is noise.

The update is made by a copy of the user's own optimizer, so no optimizer's formula is repeated
here. Only what all of them have in common is: averages over steps that began with zeros.

How much is noise, the first moment tells: the average over steps of mere noise is small. With
b the decay of the first moment, its square is in the mean (1 - b) / (1 + b) of the second moment
where all is noise, and as large as the second moment where nothing is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from adaptive.bucket import sampling
from adaptive.memory.handover import Group
from adaptive.memory.momentum import MomentumRule
from compressors.kernels.blocks import CACHE_BLOCK, block_bounds, is_host, takes_triton

if TYPE_CHECKING:
    from compressors.kernels.triton_moments import Piece

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""In an optimizer's state of a parameter: they also hold the gradient's noise."""

KEPT = {*SECOND_MOMENTS, "exp_avg", "grad_avg", "momentum_buffer", "mu_product", "step"}
"""What torch's optimizers keep of a parameter. More may be in its state, of somebody else's."""

LEAST = 1e-30
"""Added to second moments, so that none is zero."""


class UpdateJob(NamedTuple):
    """One gradient that is to become an update.

    group: the user's parameter group. share: of the lag of its momentum, in [0, 1]. weights, grad,
    update: the parameter, its gradient, and zeros for the update, alike in shape. state: the
    optimizer's, of that parameter."""

    group: Group
    share: float
    weights: Tensor
    grad: Tensor
    update: Tensor
    state: dict[str, Any]

    @property
    def without_momentum(self) -> bool:
        """The first moment has no part in the update."""
        return "betas" in self.group and self.share == 0


class Twin:
    """A copy of the user's optimizer. It steps zeros by learning rate -1 and without weight decay:
    what becomes of them is the update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = copy(optimizer)

    def update(self, jobs: Sequence[UpdateJob]) -> None:
        """Make the updates by the second moments as they are, and step the states."""
        groups: dict[tuple[int, float], dict[str, Any]] = {}
        states = self._optimizer.state = defaultdict(dict)
        stepped = []
        for job in jobs:
            zeros, grad = job.update, job.grad
            if job.weights.dtype != zeros.dtype:  # the optimizer works in the parameter's precision
                zeros, grad = torch.zeros_like(job.weights), grad.to(job.weights.dtype)
            if job.group["weight_decay"] and not is_decoupled(self._optimizer, job.group):
                sign = -1 if job.group["maximize"] else 1
                grad.add_(job.weights, alpha=sign * job.group["weight_decay"])
            zeros.grad = grad
            aside = job.without_momentum and job.state
            states[zeros] = {**job.state, "exp_avg": grad} if aside else job.state
            settings = _without_decay(job.group, job.share, is_host(zeros.device))
            groups.setdefault((id(job.group), job.share), settings)["params"].append(zeros)
            stepped.append(zeros)
        self._optimizer.param_groups = list(groups.values())
        self._optimizer.step()
        for job, zeros in zip(jobs, stepped, strict=True):
            if zeros is not job.update:
                job.update.copy_(zeros)
        _move_means(jobs, [states[zeros] for zeros in stepped])
        self._optimizer.state, self._optimizer.param_groups = defaultdict(dict), []


def enlarge(jobs: Sequence[UpdateJob], ranks: int) -> Tensor:
    """Make the updates as large as they would be by the mean gradient's second moment. Returns the
    energy of the mean gradient, as far as a sample of this rank's tells."""
    stride = sampling(sum(job.grad.numel() for job in jobs))
    averaged = all("exp_avg" in job.state for job in jobs)
    if averaged and all(map(_takes_triton, jobs)):
        from compressors.kernels import triton_moments  # here, as Triton need not be installed

        pieces = [_piece(job) for job in jobs]
        return triton_moments.enlarge(pieces, ranks, LEAST, stride) * stride
    energies = torch.cat([flat(job.grad)[::stride] for job in jobs]).square_()
    if not averaged:
        return energies.sum(dtype=torch.float64) * stride
    moments = [
        (flat(job.state["exp_avg"]), flat(job.state["exp_avg_sq"]), flat(job.update))
        for job in jobs
    ]
    noises = [_noise(job.group, job.share, job.state) for job in jobs]
    if is_host(energies.device):  # block by block, in the cache
        for noise, (mean, square, update) in zip(noises, moments, strict=True):
            for start, stop in block_bounds(update, CACHE_BLOCK):
                block = mean[start:stop], square[start:stop]
                parts = _parts_of_mean([block[0]], [block[1]], [noise], ranks)
                update[start:stop].mul_(parts[0].rsqrt_())
        samples = [(mean[::stride], square[::stride]) for mean, square, _ in moments]
        means, squares = map(list, zip(*samples, strict=True))
        parts = _parts_of_mean(means, squares, noises, ranks)
    else:
        means, squares, updates = map(list, zip(*moments, strict=True))
        parts = _parts_of_mean(means, squares, noises, ranks)
        torch._foreach_div_(updates, list(torch._foreach_sqrt(parts)))
        parts = [part[::stride] for part in parts]
    return energies.mul_(torch.cat([*parts])).sum(dtype=torch.float64) * stride


def _takes_triton(job: UpdateJob) -> bool:
    """Whether a kernel may enlarge the update."""
    if not job.group["betas"][0]:
        return False
    state, step = job.state, job.state["step"]
    tensors = (state["exp_avg"], state["exp_avg_sq"], job.update, job.grad)
    known = all(takes_triton(each) and each.dtype == torch.float32 for each in tensors)
    return known and (step.device.type == "cpu" or step.dtype == torch.float32)


def _piece(job: UpdateJob) -> Piece:
    """The same as `compressors.kernels.triton_moments` takes it."""
    from compressors.kernels.triton_moments import Piece

    state, step = job.state, job.state["step"]
    beta1, beta2 = _decay_of_means(job.group["betas"][0], job.share), job.group["betas"][1]
    return Piece(
        mean=flat(state["exp_avg"]),
        square=flat(state["exp_avg_sq"]),
        update=flat(job.update),
        grad=flat(job.grad),
        betas=(beta1, beta2),
        step=float(step) if step.device.type == "cpu" else step,
        of_noise=(1 - beta1) / (1 + beta1),
    )


def part_of_mean(group: Group, share: float, state: Mapping[str, Tensor], ranks: int) -> Tensor:
    """Which part of each element's second moment the mean gradient has as well, flat."""
    mean, square = flat(state["exp_avg"]), flat(state["exp_avg_sq"])
    return _parts_of_mean([mean], [square], [_noise(group, share, state)], ranks)[0]


def typical_energy(job: UpdateJob) -> Tensor | None:
    """||g||^2 in the mean over steps, by the second moment; None if there is none yet."""
    square = job.state.get("exp_avg_sq" if "betas" in job.group else "square_avg")
    if square is None:
        return None
    return square.sum(dtype=torch.float64) / _bias(decay_of_squares(job.group), job.state)


def undelivered(group: Group, share: float, state: Mapping[str, Tensor], part: Any) -> Tensor:
    """m / (sqrt(v) + eps), both without their bias: times beta1 / (1 - beta1) it is what momentum
    has yet to deliver. part: of the second moment that counts, like the moments, or 1."""
    beta1, beta2 = group["betas"]
    mean = state["exp_avg"] / _bias(_decay_of_means(beta1, share), state)
    square = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
    square = square / _bias(beta2, state)
    return mean.div_(square.mul_(part).sqrt_().add_(group["eps"]))


def scale_second_moments(state: Mapping[str, Tensor], factor: Tensor) -> None:
    """factor: of each element, flat."""
    for name in SECOND_MOMENTS:
        if name in state:
            state[name].mul_(shaped(factor, state[name]))


def is_decoupled(optimizer: Optimizer, group: Group) -> bool:
    """Weight decay is taken off the parameter, not added to its gradient."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))


def decay_of_squares(group: Group) -> float:
    """Of the second moment, or of one that is not an average what comes near."""
    beta2: float = group["betas"][1] if "betas" in group else group.get("alpha", 0.9)
    return beta2


def shaped(flat: Tensor, p: Tensor) -> Tensor:
    """A view of a flat tensor like `p`, whose elements lie in the order of memory."""
    return flat.as_strided(p.size(), p.stride())


def flat(tensor: Tensor) -> Tensor:
    """A view of a dense tensor with its elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _without_decay(group: Group, share: float, host: bool) -> dict[str, Any]:
    """The user's group with no parameters, no weight decay, learning rate -1, and momentum with a
    share of its lag; on the host fused where torch can, which is four times as fast."""
    own = {**group, "params": [], "weight_decay": 0.0, "lr": -1.0}
    if host and group.get("fused", False) is None and not group["foreach"]:
        own["fused"] = True
    if "betas" in group:
        own["betas"] = (_with_lag(group["betas"][0], share), group["betas"][1])
    return own


def _move_means(jobs: Sequence[UpdateJob], states: Sequence[Mapping[str, Tensor]]) -> None:
    """Let the first moments of jobs without momentum take the gradients in, which the twin was
    given in their place. states: what it stepped."""
    of_weight = defaultdict(list)
    for job, stepped in zip(jobs, states, strict=True):
        if job.without_momentum:
            of_weight[1 - job.group["betas"][0]].append((job.state, stepped))
    for weight, pairs in of_weight.items():
        began = [own["exp_avg"] for own, stepped in pairs if own is stepped]
        if began:  # the twin has begun an average with its first value
            torch._foreach_mul_(began, weight)
        went_on = [pair for pair in pairs if pair[0] is not pair[1]]
        if went_on:
            means, grads = ([pair[i]["exp_avg"] for pair in went_on] for i in (0, 1))
            torch._foreach_lerp_(means, grads, weight)


@lru_cache(maxsize=64)
def _with_lag(beta1: float, share: float) -> float:
    return MomentumRule(beta1).with_lag(share).momentum


def _decay_of_means(beta1: float, share: float) -> float:
    """Of the first moment while momentum has a share of its lag; with none it is the user's."""
    return _with_lag(beta1, share) if share else beta1


def _bias(beta: float, state: Mapping[str, Tensor]) -> Tensor:
    """How much of its weight an average that began with zeros has by now."""
    return (1 - beta ** state["step"]).clamp(min=1 - beta)


def _noise(group: Group, share: float, state: Mapping[str, Tensor]) -> tuple[Any, float]:
    """By what the ratio of an element's squared first moment to its second moment is to be
    multiplied for an unbiased one of all that is not noise but for a constant, and that constant.
    A first moment that does not decay is the last gradient, and tells nothing: all is the mean's.
    """
    beta1, beta2 = _decay_of_means(group["betas"][0], share), group["betas"][1]
    if beta1 == 0:
        scale, constant = 0 * _bias(beta2, state), -1.0
    else:
        of_noise = (1 - beta1) / (1 + beta1)
        scale = _bias(beta2, state) / _bias(beta1, state) ** 2 / (1 - of_noise)
        constant = of_noise / (1 - of_noise)
    on_host = scale.device.type == "cpu"  # where an optimizer keeps its steps unless capturable
    return float(scale) if on_host else scale, constant


def _parts_of_mean(
    means: list[Tensor], squares: list[Tensor], noises: list[tuple[Any, float]], ranks: int
) -> list[Tensor]:
    """Which part of each second moment the mean gradient has as well, in [1 / N, 1]: all of the
    signal's, and 1 / N of the noise's. From first moments, second ones, and `_noise` of each."""
    shared = 1 - 1 / ranks
    parts = list(torch._foreach_mul(means, means))
    torch._foreach_div_(parts, list(torch._foreach_add(squares, LEAST)))
    torch._foreach_mul_(parts, [scale * shared for scale, _ in noises])
    torch._foreach_add_(parts, [1 / ranks - constant * shared for _, constant in noises])
    torch._foreach_clamp_min_(parts, 1 / ranks)
    torch._foreach_clamp_max_(parts, 1.0)
    return parts
