"""Rules of other papers, made of public parts (examples/), are what their papers say: real ranks
train as a plain loop of the paper's equations does, to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed
from compressors.kernels import blocks
from examples.demo_rule import DecoupledMomentum, FastComponents
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, loss_of, small_net

RANKS = 2
LR = 0.05
ATOL = 1e-11


def _gradients(model: nn.Module, step: int) -> list[list[Tensor]]:
    """Of each parameter, by rank, where all ranks stand alike."""
    ps = [*model.parameters()]
    return [[*torch.autograd.grad(loss_of(model, step, rank), ps)] for rank in range(RANKS)]


def _train(rank: int, steps: int, optimizer: Any = None, **options: Any) -> Any:
    """A model that is trained by these options, and its compressor."""
    model = DDP(small_net())
    made = torch.optim.SGD(model.parameters(), lr=LR) if optimizer is None else optimizer(model)
    compressor = AdaptiveCompressor(**options).attach(model)
    for step in range(steps):
        made.zero_grad()
        loss_of(model, step, rank).backward()
        made.step()
    return model, compressor


# -- DeMo --

DEMO = {"chunk": 4, "decay": 0.9, "cf": 5.0, "steps": 6}


def _cosine(k: int, n: int, of: int) -> float:
    """The value of the k-th function of the orthonormal DCT-II at place n of so many."""
    return np.cos(np.pi * (2 * n + 1) * k / (2 * of)) * np.sqrt((1 if k == 0 else 2) / of)


def _fast(m: np.ndarray) -> np.ndarray:
    """The largest DCT coefficients of each chunk of a matrix, transformed back."""
    sides = [next(s for s in (4, 2, 1) if n % s == 0) for n in m.shape]
    (a, b), q = sides, np.zeros_like(m)
    kept = max(1, int(a * b / DEMO["cf"]))
    for i in range(0, m.shape[0], a):
        for j in range(0, m.shape[1], b):
            waves = {
                (u, v): np.array(
                    [[_cosine(u, y, a) * _cosine(v, x, b) for x in range(b)] for y in range(a)]
                )
                for u in range(a)
                for v in range(b)
            }
            chunk = m[i : i + a, j : j + b]
            of = {wave: float((chunk * values).sum()) for wave, values in waves.items()}
            for wave in sorted(of, key=lambda each: -abs(of[each]))[:kept]:
                q[i : i + a, j : j + b] += of[wave] * waves[wave]
    return q


def _demo() -> Tensor:
    """Algorithm 1 with the sign, decoupled weight decay included."""
    model = small_net()
    ps = [*model.parameters()]
    momenta = [[np.zeros(p.shape) for p in ps] for _ in range(RANKS)]
    for step in range(int(DEMO["steps"])):
        grads = _gradients(model, step)
        for i, p in enumerate(ps):
            mean = np.zeros(p.shape)
            for rank in range(RANKS):
                m = DEMO["decay"] * momenta[rank][i] + grads[rank][i].numpy()
                q = _fast(m.reshape(len(m), -1) if m.ndim > 1 else m[None]).reshape(m.shape)
                momenta[rank][i], mean = m - q, mean + q / RANKS
            with torch.no_grad():
                p.sub_(LR * (torch.from_numpy(np.sign(mean)) + 0.1 * p))
    return flat_parameters(model)


def _with_decay(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, weight_decay=0.1)


def _demo_by_parts(rank: int) -> Tensor:
    rule = {"base": FastComponents(4), "memory": DecoupledMomentum(DEMO["decay"])}
    cf = DEMO["cf"]
    options = {"policy": Fixed(cf), "cf_range": (cf, cf), "optimizer": _with_decay}
    return flat_parameters(_train(rank, int(DEMO["steps"]), **rule, **options)[0])


def _ranks(rank: int) -> dict[str, Any]:
    found = {"demo": _demo_by_parts(rank)}
    blocks.force_device_path = True
    found["demo, device"] = _demo_by_parts(rank)
    return found


def test_each_is_its_papers() -> None:
    results = run_ranks(RANKS, _ranks, limit=150)
    papers = {"demo": _demo()}
    _compare(results, papers)


def _compare(results: Sequence[dict[str, Any]], papers: dict[str, Tensor]) -> None:
    for result in results:
        for name, parameters in result.items():
            paper = papers[name.partition(",")[0]]
            off = float((parameters - paper).abs().max())
            assert off < ATOL, (name, off)
