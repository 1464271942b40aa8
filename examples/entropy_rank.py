"""EDGC: PowerSGD's rank falls as the entropy of gradients does.

    torchrun --standalone --nproc-per-node 2 examples/entropy_rank.py

Yi and others, "EDGC: Entropy-driven Dynamic Gradient Compression for Efficient LLM Training"
(2025). A sample of the gradients tells their entropy H, in some steps of every window. Gradients
are taken for normal, H = log(sigma sqrt(2 pi e)). A matrix of such numbers loses sigma g(r) at rank
r, where g follows from the law of Marchenko and Pastur for singular values of random matrices. A
rank r0 was right when the entropy was H0. So that compression loses no more than then, the rank is
now the smallest r with

    g(r) <= exp(H0 - H) g(r0)

The entropy is a statistic of the policy's own: counts of gradients, by their binary exponent.
"""

from __future__ import annotations

import time
from functools import lru_cache
from math import log, prod, sqrt
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Plan, Policy, StepReport
from policies import DENSE, Context

LOWEST = -100
"""The least binary exponent that is told apart: smaller gradients, and zeros, count as that."""


class EntropyRank(Policy):
    """EDGC. The first window is dense, and the next one at the largest rank; later ones go by
    entropy. Tensors of one dimension are sent dense.

    rank, least: the largest rank and the smallest. window: in steps. every: steps between two
        samples. stride: between two elements of a sample.
    """

    name = "edgc"
    layerwise = True
    measures = 1 - LOWEST

    def __init__(
        self, rank: int = 8, least: int = 1, window: int = 100, every: int = 10, stride: int = 20
    ) -> None:
        self.rank, self.least, self.window = rank, least, window
        self.every, self.stride = every, stride

    def start(self, context: Context) -> None:
        self._shapes = {k: (s[0], prod(s[1:])) for k, s in context.layers.items()}
        self._matrices = {k: shape for k, shape in self._shapes.items() if min(shape) > 1}
        self._step, self._counts, self._reason = 0, np.zeros(self.measures), ""
        self.ranks: dict[str, int] = {}
        self._first: float | None = None  # the entropy that ranks are compared with

    def measure(self, gradients: Tensor) -> Tensor:
        exponents = torch.frexp(gradients[:: self.stride]).exponent.clamp(LOWEST, 0) - LOWEST
        counts = torch.zeros(self.measures, dtype=torch.float64, device=gradients.device)
        return counts.index_add_(0, exponents.int(), counts.new_ones(len(exponents)))

    def plan(self) -> Plan:
        layers, sent = {}, 0.0
        for layer, (n, m) in self._shapes.items():
            rank = self.ranks.get(layer, 0)
            layers[layer] = max(DENSE, n * m / (rank * (n + m))) if rank else DENSE
            sent += n * m / layers[layer]
        cf = sum(n * m for n, m in self._shapes.values()) / sent
        measure = self._step % self.every == 0
        return Plan(cf, (), self._reason, layers=layers if self.ranks else {}, measure=measure)

    def observe(self, report: StepReport) -> None:
        self._reason = ""
        if len(report.measured):
            self._counts += report.measured
        self._step += 1
        if self._step % self.window == 0 and self._counts.any():
            now, self._counts = entropy(self._counts), np.zeros(self.measures)
            first = self._first = now if self._first is None else self._first
            before = dict(self.ranks)
            for layer, (n, m) in self._matrices.items():
                top, lost = min(self.rank, n, m), losses(n, m)
                allowed = np.exp(first - now) * lost[top]
                fits = (r for r in range(self.least, top) if lost[r] <= allowed)
                self.ranks[layer] = next(fits, top)
            if self.ranks != before:
                self._reason = f"entropy {first:.3g} -> {now:.3g}"

    def state_dict(self) -> dict[str, Any]:
        counts = self._counts.tolist()
        return {"step": self._step, "counts": counts, "ranks": self.ranks, "first": self._first}

    def load_state_dict(self, state: Any) -> None:
        self._step, self._counts = state["step"], np.array(state["counts"])
        self.ranks, self._first = dict(state["ranks"]), state["first"]


def entropy(counts: np.ndarray) -> float:
    """The differential entropy of numbers, in nats, from how many have each binary exponent.
    Numbers of exponent x lie in two intervals, 2^x wide together. Zeros tell nothing."""
    known = counts[1:] > 0
    p = counts[1:][known] / counts[1:].sum()
    return float(-(p * (np.log(p) - log(2) * (np.arange(LOWEST + 1, 1)[known]))).sum())


@lru_cache
def losses(n: int, m: int) -> np.ndarray:
    """g: the norm of what is lost of an n x m matrix of independent normal numbers of variance 1 at
    each rank, from 0."""
    n, m = sorted((n, m))
    low, high = ((1 - sqrt(n / m)) ** 2, (1 + sqrt(n / m)) ** 2)
    x = low + (high - low) * (np.arange(20_000) + 0.5) / 20_000  # eigenvalues of A A^T / m
    density = np.sqrt((high - x) * (x - low)) / x
    share = np.cumsum(density) / density.sum()
    # The i-th of n eigenvalues is the mean of those in the i-th of n equal shares.
    of_each = np.array([x[np.searchsorted(share, (i + 0.5) / n)] for i in range(n)]) * m
    return np.sqrt(np.append(np.cumsum(of_each)[::-1], 0.0))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    teacher = torch.randn(100, 50) / 10  # the same on all ranks, by the seed above
    model = DDP(nn.Linear(100, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    policy = EntropyRank(rank=8, window=50)
    compressor = AdaptiveCompressor("powersgd", (1, 1000), policy=policy).attach(model)
    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for _ in range(400):
        inputs = torch.randn(64, 100, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"EDGC: loss {loss.item():.4f}, CF {compressor.cf:.3g}, ranks {policy.ranks}")
        print(compressor.explain())
        print(compressor.summary())
    compressor.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
