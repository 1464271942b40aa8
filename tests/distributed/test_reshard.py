"""A run that goes on with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    Accordion,
    AdaptiveCompressor,
    Delayed,
    Goodput,
    GraVAC,
    LinkSpec,
    LocalSteps,
    Network,
    reshard_states,
)
from runs.modelled_clock import ModelledClock
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    flat_parameters,
    local_gradients,
    loss_of,
    small_net,
    waiting,
)

POLICIES = {
    "accordion": lambda: Accordion(interval=5, per_layer=True),
    "goodput": lambda: Goodput(goal="time", opening=3, cooldown=4),
    "gravac": lambda: GraVAC(window=4, dense_window=3, epsilon=0.05),
}
MOMENTUM, STEPS = 0.9, 20


def _mean(vector: Tensor) -> Tensor:
    dist.all_reduce(vector)
    return vector / dist.get_world_size()


def _stage(rank: int, policy: str, base: str, folder: str, start: int) -> dict[str, Any]:
    """Steps from `start` on, from what an earlier stage has left; what has come in, in units of
    the mean gradient, and what was sent and still waits of it."""
    world_size, clock = dist.get_world_size(), ModelledClock(0.01, LinkSpec.parse("1mbit"))
    model = DDP(small_net(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=MOMENTUM)
    compressor = AdaptiveCompressor(
        base, (2, 100), policy=POLICIES[policy](), network=Network(clock=clock)
    ).attach(model, optimizer=optimizer)
    names = [name for name, _ in model.module.named_parameters()]
    came: Tensor | float = 0.0
    sent: Tensor | float = 0.0
    refused = ""
    if start:
        files = sorted(Path(folder).glob("rank*"))
        before = [torch.load(file, weights_only=False) for file in files]
        loss_of(model, 0, rank).backward()  # let DDP order its buckets
        model.module.load_state_dict(before[0]["model"])
        optimizer.load_state_dict(before[0]["optimizer"])
        came, sent = before[0]["came"], before[0]["sent"]
        states = [each["compressor"] for each in before]
        with pytest.raises(ValueError, match="world_size") as caught:
            compressor.load_state_dict(states[min(rank, len(states) - 1)])
        refused = str(caught.value)
        compressor.load_state_dict(reshard_states(states, world_size)[rank])
    for step in range(start, start + STEPS):
        gradients = local_gradients(model, step, rank)
        came = came + _mean(torch.cat([gradients[name] for name in names])) / (1 - MOMENTUM)
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        sent = sent + torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.step()
    state = compressor.state_dict()
    kept = [state["memory"].get(name, {}) for name in names]
    sizes = [p.numel() for p in model.parameters()]
    left = torch.cat(
        [waiting(k, MOMENTUM) + torch.zeros(n).double() for k, n in zip(kept, sizes, strict=True)]
    )
    result = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "compressor": state,
        "came": came,
        "sent": sent,
    }
    dist.barrier()
    if rank == 0:
        for file in Path(folder).glob("rank*"):
            file.unlink()
    dist.barrier()
    torch.save(result, Path(folder, f"rank{rank}"))
    return {
        "parameters": flat_parameters(model),
        "deviation": float((sent + _mean(left) - came).norm() / torch.as_tensor(came).norm()),
        "refused": refused,
        "steps": compressor.summary().steps,
        "compressed": sum(n for cf, n in compressor.summary().steps_at_cf.items() if cf > 1),
        "plan": (compressor.cf, compressor.layer_cfs),
        "ranks_before": state["resharded_from"],
    }


@pytest.mark.parametrize(
    ("policy", "base", "old", "new"),
    [
        ("goodput", "topk", 2, 4),
        pytest.param(*("gravac", "topk", 4, 2), marks=pytest.mark.long),
        pytest.param(*("accordion", "redsync", 3, 2), marks=pytest.mark.long),
        pytest.param(*("gravac", "powersgd", 2, 3), marks=pytest.mark.long),
        ("accordion", "topk", 2, 1),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    policy: str, base: str, old: int, new: int, tmp_path: Any
) -> None:
    run_ranks(old, _stage, policy, base, str(tmp_path), 0)
    results = run_ranks(new, _stage, policy, base, str(tmp_path), STEPS)
    for result in results:
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert result["plan"] == results[0]["plan"]
        assert result["deviation"] < 1e-9
        assert f"world_size is {old}, expected {new}" in result["refused"]
        assert "reshard_states" in result["refused"]
        assert result["steps"] == 2 * STEPS
        assert result["compressed"] > STEPS / 2
        assert result["ranks_before"] is None


def _under_way(rank: int, sync: Any, folder: str, old: int) -> tuple[Tensor, Tensor]:
    """The mean of the ranks' parameters while exchanges are under way, and after these have landed.
    old: the number of ranks before; 0: this is their run."""
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compressor = AdaptiveCompressor("topk", (8, 8), policy="fixed", sync=sync).attach(model)

    def train(start: int, stop: int) -> Tensor:
        for step in range(start, stop):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        with compressor.averaged():
            return flat_parameters(model)

    if old:
        files = [Path(folder, f"rank{i}") for i in range(old)]
        before = [torch.load(file, weights_only=True) for file in files]
        model.module.load_state_dict(before[rank * old // dist.get_world_size()]["model"])
        states = reshard_states([each["compressor"] for each in before], dist.get_world_size())
        compressor.load_state_dict(states[rank])
    else:
        train(0, 7)
        state = {"model": model.module.state_dict(), "compressor": compressor.state_dict()}
        torch.save(state, Path(folder, f"rank{rank}"))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return train(7, 7), train(7, 14)


@pytest.mark.parametrize("sync", [LocalSteps(3, overlap=2), Delayed(2)], ids=str)
def test_exchanges_under_way_keep_the_mean_among_another_number_of_ranks(
    sync: Any, tmp_path: Path
) -> None:
    """A rank's own part of an exchange goes with this rank's parameters."""
    expected, _ = run_ranks(2, _under_way, sync, str(tmp_path), 0)[0]
    for mean, landed in run_ranks(4, _under_way, sync, str(tmp_path), 2):
        torch.testing.assert_close(mean, expected)
        torch.testing.assert_close(landed, expected)
