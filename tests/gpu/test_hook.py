"""The hook on a CUDA device: nothing waits, nothing is lost, and ranks end alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from adaptive.network.collectives import Exchange
from tests.distributed.balance import balance
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, loss_of, small_net
from tests.distributed.test_device_path import ByStep


@pytest.fixture
def nccl() -> Iterator[None]:
    """A process group of one rank: its collectives run on streams of their own, as any do."""
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


# Adam's first updates are all as large as one another, unless its eps is seen.
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.01),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, 1e-3, eps=1e-2),
    "fused adamw": lambda ps: torch.optim.AdamW(ps, 1e-3, eps=1e-2, fused=True),
}


@contextmanager
def waiting_is(mode: str) -> Iterator[None]:
    """Here an operation that waits for the device raises ("error"), or not ("default")."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("base", "policy"),
    [
        *product(["topk", "dgc"], ["goodput", "gravac", "accordion", "fixed"]),
        *product(["randomk", "int8", "qsgd", "bf16", "powersgd"], ["gravac", "accordion"]),
    ],
)
@pytest.mark.usefixtures("nccl")
def test_fifty_steps_wait_for_nothing(
    base: str, policy: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what docs/gpu.md says: ranks tell each other which moments their optimizers keep."""
    gather_objects = Exchange.gather_objects

    def told(exchange: Exchange, own: Any) -> Any:
        with waiting_is("default"):
            return gather_objects(exchange, own)

    monkeypatch.setattr(Exchange, "gather_objects", told)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
    model = DDP(net, bucket_cap_mb=0.5)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    compressor = AdaptiveCompressor(base, (2, 100), policy=policy)
    compressor.attach(model, optimizer=chosen)
    x = torch.randn(64, 256, device="cuda")
    for step in range(55):
        # The first steps load kernels and allocate.
        with waiting_is("error" if step >= 5 else "default"):
            model(x).sub(x).square().mean().backward()
            chosen.step()
            chosen.zero_grad()
    assert bool(flat_parameters(model).isfinite().all())
    assert compressor.summary().steps == 55
    compressor.detach()


def _balance(rank: int, base: str, options: dict[str, Any], bad_at: int | None) -> Any:
    torch.cuda.set_device(0)
    cfs = [10.0, 100.0, 1.0, 3.0] if base in ("topk", "dgc", "randomk") else [4.0, 1.0]
    policy, ddp = ByStep(cfs), {"bucket_cap_mb": 0.004}
    result = balance(
        *(rank, base, policy, 8),
        options=options,
        ddp_options=ddp,
        bad_at=bad_at,
        device="cuda",
        dtype=torch.float32,  # so that Triton's kernels run
    )
    return {key: result[key] for key in ("deviation", "nonfinite")} | {
        "parameters": result["parameters"].cpu()
    }


@pytest.mark.parametrize("bad_at", [None, 4])
@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("topk", {"exchange": "all_gather"}),
        ("topk", {"exchange": "sharded"}),
        ("topk", {"exchange": "voted_indices"}),
        ("dgc", {"granularity": "layer"}),
        ("topk", {"granularity": "layer"}),
        ("randomk", {"exchange": "all_reduce"}),
        ("int8", {}),
    ],
    ids=str,
)
def test_two_ranks_on_one_device_lose_nothing(
    base: str, options: dict[str, Any], bad_at: int | None
) -> None:
    results = run_ranks(2, _balance, base, options, bad_at)
    for result in results:
        assert result["deviation"] < 1e-5
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert all(result["nonfinite"])


def _train(rank: int, device: str, optimizer: str) -> torch.Tensor:
    if device == "cuda":
        torch.cuda.set_device(0)
    model = DDP(small_net(torch.float32).to(device), bucket_cap_mb=0.004)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    policy = ByStep([10.0, 3.0, 1.0, 50.0])
    compressor = AdaptiveCompressor("topk+int8", (1, 1000), policy=policy)
    compressor.attach(model, optimizer=chosen)
    for step in range(12):
        chosen.zero_grad()
        loss_of(model, step, rank).backward()
        chosen.step()
    compressor.detach()
    return flat_parameters(model).cpu()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_train_as_on_the_host(optimizer: str) -> None:
    """Rounding may move a value to the next of its 8-bit levels: that is less than is allowed."""
    host, cuda = (run_ranks(2, _train, device, optimizer) for device in ("cpu", "cuda"))
    assert torch.equal(cuda[0], cuda[1])
    torch.testing.assert_close(cuda[0], host[0], rtol=1e-5, atol=2e-5)
