"""Other people's rules for training with little communication, written down plainly.

Each is a `Rule`: n replicas live in this process, and once each has its gradient of the present
step, the rule moves them all. Nothing travels: what a rank would have sent is counted in bits, by
the elements of its messages. A mean of dense gradients counts 32 bits an element, whatever
algorithm adds them up; a compressed mean that travels there and back counts once, as that one does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_

from docs.studies.messages import (
    CHUNK,
    Residual,
    Tensors,
    dct,
    elements_sent,
    from_chunks,
    idct,
    largest,
    largest_of_chunks,
    mean_of_sent,
    one_bit,
    to_chunks,
    two_bits,
)
from runs.config import TrainConfig

FP32, INT16 = 32, 16
"""Bits."""


@dataclass
class Replica:
    """One rank's model and the user's optimizer of it."""

    model: nn.Module
    optimizer: optim.Optimizer

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def gradients(self) -> Tensors:
        """Those of `parameters`, in the same order; zero where backward left none."""
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]

    def clip(self, norm: float | None) -> None:
        """All gradients as one vector; None: not at all."""
        if norm is not None:
            clip_grad_norm_(self.parameters, norm)

    def groups(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """Each of `parameters`, in the same order, with the optimizer's settings for it."""
        by_parameter = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        return ((p, by_parameter[p]) for p in self.parameters)


@dataclass
class Rule(ABC):
    """How replicas move. bits: what one rank has sent so far. The fields of subclasses are
    settings."""

    config: TrainConfig
    replicas: Sequence[Replica]
    bits: int = field(default=0, init=False)

    @abstractmethod
    def step(self, step: int) -> None:
        """Take step number `step`, the first of which is 0: each replica has its own gradients,
        not clipped, and its optimizer the learning rate."""

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """What the user may set, with the paper's values."""
        own = {f.name for f in fields(Rule)}
        return {f.name: f.default for f in fields(cls) if f.name not in own}


@dataclass
class Dense(Rule):
    """The mean gradient, clipped, then the user's optimizer: what DDP does."""

    def step(self, step: int) -> None:
        exchanged = self.exchange([replica.gradients for replica in self.replicas])
        for replica in self.replicas:
            for parameter, gradient in zip(replica.parameters, exchanged, strict=True):
                parameter.grad = gradient.clone()
            replica.clip(self.config.clip_grad)
            replica.optimizer.step()

    def exchange(self, gradients: Sequence[Tensors]) -> Tensors:
        """The mean of what the ranks have, as it arrives."""
        self.bits += FP32 * _numel(gradients[0])
        return _mean(gradients)


@dataclass
class Bf16(Dense):
    """The mean of gradients rounded to bf16, as PyTorch's bf16_compress_hook takes it: each is
    rounded and divided by the number of ranks before the sum, which is bf16 as well."""

    def exchange(self, gradients: Sequence[Tensors]) -> Tensors:
        self.bits += 16 * _numel(gradients[0])
        n = len(gradients)
        halves = [[g.bfloat16() / n for g in rank] for rank in gradients]
        return [torch.stack(same).sum(dim=0).float() for same in zip(*halves, strict=True)]


@dataclass
class OneBitAdam(Dense):
    """1-bit Adam (Tang and others 2021, algorithm 1).

    Dense Adam for a share `warmup` of the steps; then the second moment v is frozen, and with m the
    momentum that all ranks agree on, rank i sends 1 bit an element of its own,

        m_i = beta1 m + (1 - beta1) g_i,   s_i = C(m_i + e_i),   e_i <- m_i + e_i - s_i,

    and the mean comes back in 1 bit too, m <- C(mean s_i + e), e <- mean s_i + e - m. The update is
    m / (sqrt(v) + eps). C(x) is the sign of x, times its root mean square, tensor by tensor: so it
    keeps the norm of x, as the paper says. Where v is 0 the momentum is masked, as DeepSpeed masks
    it: an element that had no gradient would take endless steps. v has Adam's correction for its
    start. The mean gradient is known to nobody then, so each rank's own is clipped.
    """

    warmup: float = 0.2

    def __post_init__(self) -> None:
        zeros = [torch.zeros_like(p) for p in self.replicas[0].parameters]
        self.residuals = [Residual(zeros) for _ in self.replicas]
        self.back = Residual(zeros)
        self.momentum, self.second, self.masks = zeros, zeros, zeros

    @property
    def dense_steps(self) -> int:
        return max(1, round(self.warmup * self.config.steps))

    def step(self, step: int) -> None:
        if step < self.dense_steps:
            super().step(step)
            return
        if step == self.dense_steps:
            self._freeze()
        self.momentum = self._exchange_momenta()
        for replica in self.replicas:
            states = zip(replica.groups(), self.momentum, self.second, strict=True)
            for (parameter, group), momentum, second in states:
                update = momentum / (second.sqrt() + group["eps"])
                _descend(parameter, group, update)

    def _freeze(self) -> None:
        """Take over the moments of Adam, which are the same on all ranks."""
        replica = self.replicas[0]
        states = [replica.optimizer.state[p] for p in replica.parameters]
        late = 1 - self._betas[1] ** self.dense_steps
        self.momentum = [state["exp_avg"].clone() for state in states]
        self.second = [state["exp_avg_sq"] / late for state in states]
        self.masks = [(second > 0).to(second.dtype) for second in self.second]

    @property
    def _betas(self) -> tuple[float, float]:
        beta1, beta2 = self.replicas[0].optimizer.param_groups[0]["betas"]
        return beta1, beta2

    def _exchange_momenta(self) -> Tensors:
        beta1, _ = self._betas
        sent = []
        for replica, residual in zip(self.replicas, self.residuals, strict=True):
            replica.clip(self.config.clip_grad)
            parts = zip(self.momentum, replica.gradients, self.masks, strict=True)
            own = [mask * (beta1 * m + (1 - beta1) * g) for m, g, mask in parts]
            sent.append(residual.send(own, self._compress))
        self.bits += _numel(self.momentum) + FP32 * len(self.momentum)
        return self.back.send(_mean(sent), self._compress)

    def _compress(self, values: Tensors) -> Tensors:
        return [one_bit(x, mask) for x, mask in zip(values, self.masks, strict=True)]


@dataclass
class DeMo(Rule):
    """DeMo (Peng and others 2024, algorithm 1), in two points as the authors' demo.py has it.

    Rank i adds its gradient, times the learning rate (demo.py; it matters with a schedule), to its
    own momentum, m_i <- decay m_i + lr g_i, takes the `k` largest coefficients q_i of the discrete
    cosine transform of each chunk, and m_i <- m_i - idct(q_i). The ranks exchange the q_i, and all
    take a step of lr times the sign of idct(mean q_i). The mean of a coefficient is over the ranks
    that have sent it (demo.py). Chunks are up to 64 x 64 elements, 64 of vectors: each side is the
    largest divisor of the tensor's that is not above 64. Weight decay is decoupled; nothing is
    clipped. Bits: 16 of index and 32 of value for each coefficient (demo.py sends indices in 64).
    """

    k: int = 32
    decay: float = 0.999

    def __post_init__(self) -> None:
        self.momenta = [[torch.zeros_like(p) for p in r.parameters] for r in self.replicas]

    def step(self, step: int) -> None:
        taken = [self._take_all(*rank) for rank in zip(self.replicas, self.momenta, strict=True)]
        for coefficients in taken[0]:
            chunks, height, width = coefficients.shape
            self.bits += chunks * min(self.k, height * width) * (FP32 + INT16)
        exchanged = [mean_of_sent(same) for same in zip(*taken, strict=True)]
        for replica in self.replicas:
            for (parameter, group), mean in zip(replica.groups(), exchanged, strict=True):
                _descend(parameter, group, from_chunks(idct(mean), parameter.shape).sign())

    def _take_all(self, replica: Replica, momenta: Tensors) -> Tensors:
        """What a rank sends in this step."""
        states = zip(replica.groups(), replica.gradients, momenta, strict=True)
        return [
            self.take(momentum.mul_(self.decay).add_(gradient, alpha=group["lr"]))
            for (_, group), gradient, momentum in states
        ]

    def take(self, momentum: Tensor) -> Tensor:
        """Take the largest coefficients out of a tensor's momentum, in place; all coefficients of
        its chunks (chunks, height, width), those not taken 0."""
        coefficients = dct(to_chunks(momentum))
        taken = largest(coefficients.flatten(1), self.k).view_as(coefficients)
        momentum.sub_(from_chunks(idct(taken), momentum.shape))
        return taken


@dataclass
class DiLoCo(Rule):
    """DiLoCo (Douillard and others 2023, algorithm 1).

    Each rank takes `steps` steps with the user's optimizer, its own gradient clipped. Then the mean
    of the outer gradients, where all stood before minus where the rank is now, moves where they
    stood by SGD with Nesterov momentum, and all go on from there, with their own moments. There is
    an exchange after the last step, too: in a short run whose learning rate falls to 0 the outer
    momentum then overshoots. On 600 steps of the GPT in docs/research/defaults.md perplexity was
    7.37 after the last outer step, and 6.79 of rank 0's own parameters before it.
    """

    steps: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        self.anchor = [p.detach().clone() for p in self.replicas[0].parameters]
        momentum = self.outer_momentum
        self.outer = optim.SGD(
            self.anchor, lr=self.outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    def step(self, step: int) -> None:
        for replica in self.replicas:
            replica.clip(self.config.clip_grad)
            replica.optimizer.step()
        if (step + 1) % self.steps == 0 or step + 1 == self.config.steps:
            self._meet()

    @torch.no_grad()
    def _meet(self) -> None:
        moved = [
            [a - p for a, p in zip(self.anchor, replica.parameters, strict=True)]
            for replica in self.replicas
        ]
        for anchor, mean in zip(self.anchor, self.exchange(moved), strict=True):
            anchor.grad = mean
        self.outer.step()
        for replica in self.replicas:
            for parameter, anchor in zip(replica.parameters, self.anchor, strict=True):
                parameter.copy_(anchor)

    def exchange(self, outer_gradients: Sequence[Tensors]) -> Tensors:
        """The mean of the ranks' outer gradients, as it arrives."""
        self.bits += FP32 * _numel(outer_gradients[0])
        return _mean(outer_gradients)


@dataclass
class SparseLoCo(DiLoCo):
    """SparseLoCo (Sarfi and others 2025, algorithm 1).

    As DiLoCo with a plain outer step; of the outer gradient d_i rank i sends, with error feedback,

        e_i <- decay e_i + d_i,   s_i = Q(top-k(e_i)),   e_i <- e_i - s_i,

    the k largest elements of each chunk of 4,096 (64 is a density of 1.6%), in 2 bits each. Chunks
    are consecutive elements of a tensor, the last one what is left, of which as many are sent.
    Q keeps the sign, and of the magnitude whether it is above the mean of the tensor's that are
    sent; both kinds stand for their own mean. Bits: 12 of index and 2 of value for each element,
    and two fp32 magnitudes for each tensor. value_bits=32 leaves Q out.
    """

    steps: int = 15
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    k: int = 64
    decay: float = 0.95
    value_bits: int = 2

    def __post_init__(self) -> None:
        if self.value_bits not in (2, FP32):
            raise ValueError(f"value_bits={self.value_bits}: must be 2 or {FP32}")
        super().__post_init__()
        self.residuals = [Residual(self.anchor) for _ in self.replicas]

    def exchange(self, outer_gradients: Sequence[Tensors]) -> Tensors:
        for tensor in outer_gradients[0]:
            sent = elements_sent(tensor.numel(), self.k)
            self.bits += sent * (ceil(log2(CHUNK)) + self.value_bits)
            self.bits += 2 * FP32 if self.value_bits == 2 else 0
        pairs = zip(self.residuals, outer_gradients, strict=True)
        return _mean([residual.send(own, self._compress, self.decay) for residual, own in pairs])

    def _compress(self, values: Tensors) -> Tensors:
        kept = [largest_of_chunks(x, self.k) for x in values]
        return kept if self.value_bits == FP32 else [two_bits(x) for x in kept]


PEERS: dict[str, type[Rule]] = {
    "dense": Dense,
    "bf16": Bf16,
    "onebit-adam": OneBitAdam,
    "demo": DeMo,
    "diloco": DiLoCo,
    "sparseloco": SparseLoCo,
}


def _mean(ranks: Sequence[Tensors]) -> Tensors:
    """Of each tensor, over the ranks."""
    return [torch.stack(same).mean(dim=0) for same in zip(*ranks, strict=True)]


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


@torch.no_grad()
def _descend(parameter: nn.Parameter, group: dict[str, Any], update: Tensor) -> None:
    """A step with decoupled weight decay, as AdamW takes it."""
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.sub_(update, alpha=group["lr"])
