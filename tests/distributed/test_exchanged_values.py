"""What arrives is what was meant: with the same data on all ranks, each rank's own gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from compressors import make_compressor
from examples.grace import GraceCompressor, GraceTopK
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, local_gradients, loss_of, small_net
from tests.quick import quick

SPARSE = [
    ("topk", "all_gather"),
    ("topk", "sharded"),
    ("dgc", "all_gather"),
    ("adacomp", "all_gather"),
    ("sketch", "auto"),
    ("randomk", "all_reduce"),
    ("grace", "all_gather"),
    ("grace", "sharded"),
]


def _worst(rank: int, base: str, exchange: str, granularity: str, cap: float) -> tuple[float, int]:
    """Largest difference between what arrived, where anything did, and this rank's gradient; how
    many elements arrived."""
    model = DDP(small_net(), bucket_cap_mb=cap)
    compressor = GraceCompressor(GraceTopK()) if base == "grace" else make_compressor(base)
    AdaptiveCompressor(
        compressor,
        (2, 100),
        policy=Scripted([5.0], (20.0,)),
        exchange=exchange,
        granularity=granularity,
        memory="none",
    ).attach(model)
    worst, arrived = 0.0, 0
    for step in range(4):
        own = local_gradients(model, step, 0)
        model.zero_grad()
        loss_of(model, step, 0).backward()
        for name, p in model.module.named_parameters():
            mean = p.grad.flatten()
            sent = mean != 0
            arrived += int(sent.sum())
            worst = max(worst, float((mean - own[name])[sent].abs().max()) if sent.any() else 0.0)
    return worst, arrived


@pytest.mark.parametrize("cap", quick(0.004, of=[0.004, 25]), ids=["buckets", "one"])
@pytest.mark.parametrize("granularity", ["layer", "bucket"])
@pytest.mark.parametrize(("base", "exchange"), SPARSE)
def test_sparsifiers_bring_the_gradients_own_values(
    base: str, exchange: str, granularity: str, cap: float
) -> None:
    for worst, arrived in run_ranks(2, _worst, base, exchange, granularity, cap):
        assert worst < 1e-12
        assert arrived > 4 * 1139 / 12


def _low_rank_error(rank: int, granularity: str, cap: float) -> list[float]:
    """Share of the gradient's energy that PowerSGD misses, step by step, without a memory."""
    model = DDP(small_net(), bucket_cap_mb=cap)
    AdaptiveCompressor(
        "powersgd", (2, 100), policy=Scripted([2.5]), granularity=granularity, memory="none"
    ).attach(model)
    errors = []
    for _ in range(6):
        own = torch.cat(list(local_gradients(model, 0, 0).values()))
        model.zero_grad()
        loss_of(model, 0, 0).backward()
        mean = torch.cat([p.grad.flatten() for p in model.parameters()])
        errors.append(float((mean - own).square().sum() / own.square().sum()))
    return errors


@pytest.mark.parametrize("granularity", ["layer", "bucket"])
def test_powersgd_is_as_good_in_many_buckets_as_in_one(granularity: str) -> None:
    several = run_ranks(2, _low_rank_error, granularity, 0.004)[0]
    assert several[-1] < 0.5
    assert (
        several[-1] <= several[0] + 1e-9
    )  # warm start: the same gradient is met better and better


def _gains(rank: int, exchange: str, alike: bool) -> dict[str, float]:
    model = DDP(small_net())
    policy = Scripted([10.0], (40.0,))
    AdaptiveCompressor(
        "topk", (2, 100), policy=policy, exchange=exchange, memory="none", granularity="layer"
    ).attach(model)
    for step in range(3):
        loss_of(model, step, 0 if alike else rank).backward()
    first = policy.reports[0].measurements
    return {f"{kind} {cf:g}": m.gain(kind) for cf, m in first.items() for kind in ("error_fed",)}


def test_the_gain_of_the_sharded_exchange_counts_both_compressions() -> None:
    gathered, sharded, alike = (
        run_ranks(4, _gains, exchange, same)[0]
        for exchange, same in (("all_gather", False), ("sharded", False), ("sharded", True))
    )
    one = run_ranks(4, _gains, "all_gather", True)[0]
    for kind, gain in gathered.items():
        assert 0 < sharded[kind] < 0.95 * gain
        # The same data on all ranks: the mean is as sparse as what was sent, and nothing is lost
        # (but for shards that cut a tensor and so keep a few elements more or fewer).
        assert alike[kind] == pytest.approx(one[kind], rel=0.15)
