"""On a device several of DDP's buckets are exchanged as one piece: as if DDP had one bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, TwoLevel
from adaptive.step.averager import Averager
from adaptive.sync import every_step
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, same

CAP = 0.002
"""MiB of a bucket, of which the model then has several."""

PIECE, ALL = 5_000, 10**9
"""Bytes of a piece: of two or three buckets, and of all of them."""

STEPS = 6
CASES: dict[str, dict[str, Any]] = {
    "top-k, momentum": {"base": "topk", "policy": Fixed(10), "momentum": 0.9},
    "int8": {"base": "int8", "policy": Fixed(4)},
    "in shards": {"base": "topk", "policy": Fixed(10), "exchange": "sharded"},
    "half precision": {"base": "topk", "policy": Fixed(10), "dtype": torch.bfloat16},
    "loss scale": {"base": "topk", "policy": Fixed(10), "momentum": 0.9, "scaled": True},
    # Several buckets are in another order then, by which 4-bit values would be scaled.
    "unused": {"base": "topk+fp32", "policy": Fixed(10), "momentum": 0.9, "unused": True},
}


class _Net(nn.Module):
    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(30, 30) for _ in range(6)))
        self.left_out = nn.Linear(30, 30) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers(x))


def _mean_calls() -> list[int]:
    """The elements of each flat tensor whose mean is asked for, from now on."""
    numels: list[int] = []
    original = Averager.mean

    def counted(self: Averager, bucket: Any, flat: torch.Tensor, *args: Any) -> Future:
        numels.append(flat.numel())
        return original(self, bucket, flat, *args)

    Averager.mean = counted  # type: ignore[method-assign]
    return numels


def _train(
    cap: float,
    piece: int,
    base: str = "topk",
    policy: Any = None,
    momentum: float = 0.0,
    exchange: Any = "auto",
    dtype: torch.dtype = torch.float32,
    scaled: bool = False,
    unused: bool = False,
) -> dict[str, Any]:
    """piece: bytes of one; 0: there are none."""
    every_step.joined_nbytes = lambda device: piece
    numels = _mean_calls()
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = _Net(unused).to(dtype)
    model = DDP(net, bucket_cap_mb=cap, find_unused_parameters=unused)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=momentum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    compressor = AdaptiveCompressor(base, (2, 100), policy=policy, exchange=exchange)
    compressor.attach(model, optimizer=optimizer, scaler=scaler)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x.to(dtype)).float().square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    compressor.flush()
    compressor.detach()  # the policy is of the next way, too
    numel = sum(p.numel() for p in model.parameters())
    return {
        "parameters": flat_parameters(model),
        "sent": compressor.summary().bytes_sent,
        "per step": len(numels) / STEPS,
        "whole": sum(numels) == STEPS * numel,
    }


def _compared(rank: int, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """In one bucket, in buckets that are joined, in pieces of a few, and in buckets apart."""
    ways = ((1000.0, 0), (CAP, ALL), (CAP, PIECE), (CAP, 0))
    return {name: [_train(*way, **CASES[name]) for way in ways] for name in names}


def test_all_buckets_as_one_piece_are_as_one_bucket() -> None:
    ranks = run_ranks(2, _compared, list(CASES), limit=180)
    for name in CASES:
        one, joined, pieces, apart = ranks[0][name]
        assert torch.equal(one["parameters"], joined["parameters"]), name
        assert one["sent"] == joined["sent"], name
        assert 1 == joined["per step"] < pieces["per step"] < apart["per step"], name
        for way, result in enumerate(ranks[0][name]):
            assert result["whole"], name
            assert torch.isfinite(result["parameters"]).all()
            assert same(result["parameters"], ranks[1][name][way]["parameters"]), name


def _dense(rank: int) -> float:
    return float(_train(CAP, ALL, "topk", Fixed(1))["per step"])


def test_a_dense_step_takes_buckets_as_they_come() -> None:
    assert min(run_ranks(2, _dense)) > 3


def _two_levels(rank: int) -> list[dict[str, Any]]:
    exchange = TwoLevel(node=2)
    policy = Fixed(10)
    return [
        _train(*way, base="topk", policy=policy, momentum=0.9, exchange=exchange)
        for way in ((1000.0, 0), (CAP, ALL))
    ]


def test_pieces_among_nodes() -> None:
    ranks = run_ranks(4, _two_levels, limit=120)
    assert torch.equal(ranks[0][0]["parameters"], ranks[0][1]["parameters"])
    for _, joined in ranks:
        assert same(joined["parameters"], ranks[0][1]["parameters"])


def _raises(rank: int, breaks: str) -> str:
    """What a backward raises whose second half fails, or whose exchange does."""
    every_step.joined_nbytes = lambda device: ALL
    torch.manual_seed(0)
    model = DDP(_Net(unused=False), bucket_cap_mb=CAP)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    compressor = AdaptiveCompressor("topk", (2, 100), policy=Fixed(10))
    compressor.attach(model, optimizer=optimizer)

    def backward_fails(grad: torch.Tensor) -> None:
        raise ValueError("a gradient that fails")

    def exchange_fails(original: Callable[..., Any]) -> Callable[..., Any]:
        def mean(*args: Any) -> Any:
            def fail(future: Any) -> Any:
                raise ValueError("an exchange that fails")

            return original(*args).then(fail)

        return mean

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    if breaks == "backward":
        model.module.layers[0].weight.register_hook(backward_fails)
    else:
        session = compressor._session
        assert session is not None
        session._averager.mean = exchange_fails(session._averager.mean)  # type: ignore
    with pytest.raises((ValueError, RuntimeError)) as raised:
        step()
    compressor.detach()
    return str(raised.value)


@pytest.mark.parametrize("breaks", ["backward", "exchange"])
def test_what_fails_is_told_by_every_bucket_of_a_piece(breaks: str) -> None:
    assert "that fails" in run_ranks(1, _raises, breaks)[0]  # several may fail at different times
