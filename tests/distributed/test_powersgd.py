"""PowerSGD on real processes: nothing lost, and the same gradients as PyTorch's own hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from compressors.powersgd import PowerSGD
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted
from tests.distributed.test_exchanges import _check, run


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("cap", [0.004, 25])
@pytest.mark.parametrize("options", [{}, {"dense_below": 50}, {"granularity": "bucket"}], ids=str)
def test_invariant_with_changing_ranks(
    world_size: int, cap: float, options: dict[str, Any]
) -> None:
    cfs = [4.0, 2.0, 1.0, 10.0, 3.0]
    _check(run_ranks(world_size, run, "powersgd", options, cap, cfs, 5))


SIZE, LAYERS, STEPS = 32, 3, 12


def _gradients(rank: int, ours: bool, matrix_rank: int) -> list[torch.Tensor]:
    """The mean gradients of a few steps at fixed parameters and changing batches. Both start from
    the same Q, after two steps without compression."""
    torch.manual_seed(3)
    net = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS))).double()
    q = torch.randn(SIZE, matrix_rank, dtype=torch.float64)
    model = DDP(net)
    if ours:
        base = PowerSGD()
        base.load_state_dict({"q": {n: q.t() for n, _ in net.named_parameters()}})
        policy = Scripted([1.0, 1.0] + [SIZE / (2 * matrix_rank)] * STEPS)
        AdaptiveCompressor(base, (2, 16), policy=policy, memory="residual").attach(model)
    else:
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=matrix_rank,
            start_powerSGD_iter=2,
            min_compression_rate=1,
            orthogonalization_epsilon=0,
        )
        state.q_memory_dict[0] = q.flatten().repeat(LAYERS)
        state.p_memory_dict[0] = torch.empty(LAYERS * SIZE * matrix_rank, dtype=torch.float64)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    means = []
    for step in range(STEPS):
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(16, SIZE, generator=generator, dtype=torch.float64)
        (model(x) ** 2).mean().backward()
        means.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return means


@pytest.mark.parametrize("matrix_rank", [1, 2, 4])
def test_the_same_gradients_as_pytorchs_hook(matrix_rank: int) -> None:
    ours = run_ranks(2, _gradients, True, matrix_rank)[0]
    theirs = run_ranks(2, _gradients, False, matrix_rank)[0]
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=f"step {step}: {a - b}")
