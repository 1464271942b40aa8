"""Non-finite gradients: as in dense DDP on every rank, and nothing non-finite in the memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from compressors import compressor_names
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, batch, loss_of, small_net


class _Poisonable(nn.Module):
    """A net whose first layer's gradient can be made non-finite, the others' not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()
        self.bad = 0.0
        self.net[0].weight.register_hook(self._spoil)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def _spoil(self, g: torch.Tensor) -> torch.Tensor:
        return (g.sign() if self.bad > 1 else g) * self.bad if self.bad else g


def _run(rank: int, cf: float, momentum: float, bad: float) -> dict[str, Any]:
    module = _Poisonable()
    model = DDP(module, bucket_cap_mb=0.002, gradient_as_bucket_view=bool(momentum))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    policy = Scripted([10.0, 10.0, 10.0, cf, 10.0])
    compressor = AdaptiveCompressor("topk", (1, 100), policy=policy).attach(
        model, optimizer=optimizer
    )

    def step(index: int) -> None:
        optimizer.zero_grad()
        x, y = batch(index, rank)
        ((model(x) - y) ** 2).mean().backward()

    for index in range(3):
        step(index)
        optimizer.step()
    before = compressor.state_dict()["memory"]["net.0.weight"]
    module.bad = bad if rank == 1 else 1.0
    step(3)
    hit = {n: not bool(p.grad.isfinite().all()) for n, p in module.net.named_parameters()}
    memory = compressor.state_dict()["memory"]
    after = memory["net.0.weight"]
    module.bad = 0.0
    optimizer.zero_grad()
    x, y = batch(3, rank)
    with model.no_sync():
        ((module(x) - y) ** 2).mean().backward()
    return {
        "hit": hit,
        "memory": memory,
        "changed": {kind: torch.as_tensor(after[kind] - before[kind]) for kind in before},
        "gradient": module.net[0].weight.grad.flatten(),
    }


@pytest.mark.parametrize("cf", [10.0, 50.0, 1.0], ids=["compressed", "another CF", "dense"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_ranks_end_non_finite_and_memories_keep_what_is_finite(
    cf: float, momentum: float, bad: float
) -> None:
    healthy, hurt = run_ranks(2, _run, cf, momentum, bad)
    assert healthy["hit"] == hurt["hit"]
    assert healthy["hit"]["0.weight"]
    assert not healthy["hit"]["4.weight"]  # another bucket goes on
    assert not any(bool(each.any()) for each in hurt["changed"].values())  # exactly as it was
    if not momentum:  # what was accumulated stays; of a dense step that is nothing
        waits = healthy["gradient"] * (cf > 1)
        torch.testing.assert_close(healthy["changed"]["residual"], waits, rtol=0, atol=1e-15)
    else:
        assert bool(healthy["changed"]["residual"].any()) == (cf > 1)
        assert bool(healthy["changed"]["velocity"].any())
    for result in (healthy, hurt):
        for memory in result["memory"].values():
            assert all(bool(torch.as_tensor(kept).isfinite().all()) for kept in memory.values())


def _scaled(rank: int, cf: float, scale: float | None) -> dict[str, Any]:
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    enabled = scale is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=enabled)
    compressor = AdaptiveCompressor("topk", (1, 100), policy=Scripted([cf, cf, 1.0, cf]))
    compressor.attach(model, optimizer=optimizer, scaler=scaler)
    for index in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, index, rank)).backward()
        scaler.step(optimizer)
        scaler.update()
        if enabled and index == 2:
            scaler.update(64.0)  # the scale moves; the residual must not
    memory = compressor.state_dict()["memory"]
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "memory": {n: m["residual"] for n, m in memory.items()},
    }


@pytest.mark.parametrize("cf", [10.0, 1.0])
def test_the_residual_is_kept_in_unscaled_units(cf: float) -> None:
    plain, scaled = run_ranks(2, _scaled, cf, None), run_ranks(2, _scaled, cf, 1024.0)
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(a["parameters"], b["parameters"])
        torch.testing.assert_close(a["memory"], b["memory"])


def _alike(flags: list[bool]) -> bool:
    """Whether all ranks have the same."""
    total = torch.tensor(flags, dtype=torch.float64)
    dist.all_reduce(total)
    return bool(((total == 0) | (total == dist.get_world_size())).all())


def _memory(compressor: AdaptiveCompressor) -> dict[str, dict[str, Any]]:
    return compressor.state_dict()["memory"]


def _huge(rank: int, size: float, momentum: float) -> dict[str, str]:
    """What went wrong with each compressor when one rank's gradient was huge in one step."""
    wrong = {}
    for base in compressor_names():
        for cf in (10.0, 1.0):
            module = _Poisonable().float()
            model = DDP(module, bucket_cap_mb=0.002)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-30, momentum=momentum)
            policy = Scripted([10.0, 10.0, 10.0, cf, 10.0])
            compressor = AdaptiveCompressor(base, (1, 100), policy=policy)
            compressor.attach(model, optimizer=optimizer)
            found = ""
            for step in range(7):
                optimizer.zero_grad()
                x, y = batch(step, rank, torch.float32)
                module.bad = size if rank == 1 and step == 3 else 0.0
                (model(x) - y).square().mean().backward()
                finite = [bool(p.grad.isfinite().all()) for p in model.parameters()]
                if step != 3:
                    optimizer.step()
                    if not all(finite):
                        found = f"gradients of step {step} are not finite"
                elif not _alike(finite):
                    found = "the ranks end the step differently"
            held = [torch.as_tensor(t) for m in _memory(compressor).values() for t in m.values()]
            if not all(bool(tensor.isfinite().all()) for tensor in held):
                found = found or "the memory is not finite"
            if found:
                wrong[f"{base} at CF {cf:g}"] = found
    return wrong


@pytest.mark.parametrize(
    ("size", "momentum"),
    [
        (1e38, 0.9),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((1e18, 0.9), (1e25, 0.0), (1e38, 0.0), (1e-38, 0.9))
        ),
    ],
)
def test_a_huge_gradient_in_one_step_is_gone_with_it(size: float, momentum: float) -> None:
    assert run_ranks(2, _huge, size, momentum) == [{}, {}]
