"""Detaching, handing over, closing, copying, sub-groups, and models with odd parameters."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    AdaptiveCompressor,
    Event,
    Fixed,
    Residual,
    StepRecord,
    Timeline,
)
from policies import DENSE
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Scripted,
    local_gradients,
    loss_of,
    same,
    small_net,
)


def _mean_gradients(model: DDP, step: int, rank: int) -> dict[str, torch.Tensor]:
    means = local_gradients(model, step, rank)
    for mean in means.values():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return means


def _deviation(model: DDP, means: dict[str, torch.Tensor]) -> float:
    named = model.module.named_parameters()
    return max(float((p.grad.flatten() - means[name]).abs().max()) for name, p in named)


def _detached(rank: int, options: dict[str, Any]) -> tuple[float, float]:
    """How far gradients are from dense ones in the first and second step after detach()."""
    model = DDP(small_net())
    compressor = AdaptiveCompressor("topk", policy="fixed", **options).attach(model)
    for step in range(4):
        model.zero_grad()
        loss_of(model, step, rank).backward()
    compressor.detach()
    deviations = []
    for step in (4, 5):
        means = _mean_gradients(model, step, rank)
        model.zero_grad()
        loss_of(model, step, rank).backward()
        deviations.append(_deviation(model, means))
    return deviations[0], deviations[1]


@pytest.mark.parametrize("options", [{}, {"memory": Residual(clip_norm=0.001)}], ids=str)
def test_after_detach_the_residual_is_sent_once_and_then_all_is_dense(options: dict) -> None:
    for first, second in run_ranks(2, _detached, options):
        assert first > 1e-6  # what the residual held
        assert second < 1e-14


class _FullDisk(Timeline):
    def step(self, record: StepRecord) -> None:
        raise OSError("no space left on device")

    def event(self, event: Event) -> None:
        raise OSError("no space left on device")


def _recorded(rank: int, how: str) -> float:
    model = DDP(small_net())
    timeline = _FullDisk() if how == "full disk" else None
    compressor = AdaptiveCompressor(policy=Scripted([10.0, 20.0]), timeline=timeline)
    compressor.attach(model)
    for step in range(6):
        loss_of(model, step, rank).backward()
        if how == "closed" and step == 2:
            compressor.close()
    return compressor.cf


@pytest.mark.parametrize("how", ["full disk", "closed"])
def test_a_failing_or_closed_timeline_stops_nobody(how: str) -> None:
    assert run_ranks(2, _recorded, how, limit=30) == [20.0, 20.0]


def _in_groups_of_two(rank: int) -> float:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    model = DDP(small_net(), process_group=group)
    AdaptiveCompressor("topk", policy=Fixed(cf=DENSE)).attach(model)
    means = local_gradients(model, 0, rank)
    for mean in means.values():
        dist.all_reduce(mean, group=group)
        mean /= 2
    loss_of(model, 0, rank).backward()
    return _deviation(model, means)


def test_the_mean_is_over_the_models_own_group() -> None:
    assert max(run_ranks(4, _in_groups_of_two)) < 1e-15


class _Odd(nn.Module):
    """Tied, frozen, ignored, empty, half-precision and channels-last parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.ignored = nn.Linear(1, 6)
        self.own = nn.Parameter(torch.ones(6))
        self.empty = nn.Parameter(torch.zeros(0))
        self.narrow = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        self.far = nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).mean(dim=(2, 3)) + self.ignored.bias
        x = self.second(self.first(x) + self.frozen(x)) * self.own * self.narrow.float()
        return x.sum() + self.empty.sum() + self.far.sum()


def _odd(rank: int, cfs: list[float]) -> dict[str, Any]:
    torch.manual_seed(0)
    module = _Odd()
    DDP._set_params_and_buffers_to_ignore_for_model(
        module, ["ignored.weight", "ignored.bias", "own"]
    )
    model = DDP(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    compressor = AdaptiveCompressor("topk", (1, 100), policy=Scripted(cfs))
    compressor.attach(model, optimizer=optimizer)
    torch.manual_seed(rank)
    for step in range(7):
        if step == 5:
            compressor.detach()
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8)).backward()
        optimizer.step()
    twin = copy.deepcopy(model.module)
    reduced = [p for n, p in module.named_parameters() if "ignored" not in n and p.requires_grad]
    return {
        "parameters": [p.detach().clone() for p in reduced],
        "dense_bytes": compressor.summary().dense_bytes,
        "nbytes": sum(p.nbytes for p in reduced),
        "twin": len(list(twin.parameters())),
    }


@pytest.mark.parametrize("cfs", [[1.0], [10.0, 1.0, 3.0]])
def test_odd_parameters(cfs: list[float]) -> None:
    results = run_ranks(2, _odd, cfs)
    for result in results:
        assert result["dense_bytes"] == 7 * result["nbytes"]  # ignored ones are not counted
        for a, b in zip(result["parameters"], results[0]["parameters"], strict=True):
            assert torch.equal(a, b)


def _small_tensors(rank: int, base: str) -> float:
    model = DDP(small_net(), bucket_cap_mb=0.0004)
    AdaptiveCompressor(
        base, (2, 100), policy=Scripted([3.0]), dense_below=600, memory="residual"
    ).attach(model)
    worst = 0.0
    for step in range(3):
        mean = torch.cat(list(local_gradients(model, step, rank).values()))
        dist.all_reduce(mean)
        model.zero_grad()
        loss_of(model, step, rank).backward()
        got = torch.cat([p.grad.flatten() for p in model.parameters()])
        worst = max(worst, float((got - mean / dist.get_world_size()).abs().max()))
    return worst


@pytest.mark.parametrize("base", ["topk", "powersgd", "sketch", "randomk"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_of_small_tensors_only_is_sent_as_it_is(base: str, world_size: int) -> None:
    assert max(run_ranks(world_size, _small_tensors, base)) < 1e-12


def _zeros_made_something(rank: int) -> str:
    model = DDP(small_net(), find_unused_parameters=True)
    compressor = AdaptiveCompressor("signsgd", (32, 32), granularity="bucket")
    with pytest.raises(ValueError, match="granularity must be 'layer'") as caught:
        compressor.attach(model)
    return str(caught.value)


def test_bucket_granularity_is_refused_where_zeros_of_unused_parameters_would_be_sent() -> None:
    assert all("signsgd" in message for message in run_ranks(2, _zeros_made_something))


def _attached_to_the_wrong_model_first(rank: int) -> str:
    compressor = AdaptiveCompressor("powersgd", policy="gravac")
    wrong = DDP(nn.Linear(4, 1) if rank else small_net(), init_sync=False)
    with pytest.raises(RuntimeError, match="set up differently on rank 1"):
        compressor.attach(wrong)
    return compressor.attach(DDP(small_net())).policy.name


def test_a_failed_attach_leaves_the_settings_as_they_were() -> None:
    """Of a model that the base cannot compress a session makes a dense policy."""
    assert run_ranks(2, _attached_to_the_wrong_model_first) == ["gravac", "gravac"]


def _refusing_a_state(rank: int) -> bool:
    """A state that the policy refuses changes nothing, the compressor's own state included."""
    model = DDP(small_net())
    compressor = AdaptiveCompressor("powersgd", (2, 100), policy=Fixed(cf=4)).attach(model)
    for step in range(3):
        loss_of(model, step, rank).backward()
    saved = compressor.state_dict()
    state = {
        **saved,
        "controller": {
            **saved["controller"],
            "policy": {"settings": {"send": 7.0}},
            "step": 99,
        },
    }
    state["compressor"] = {"q": {}}
    with pytest.raises(ValueError, match="send"):
        compressor.load_state_dict(state)
    after = compressor.state_dict()
    return same(after["compressor"], saved["compressor"]) and after["controller"]["step"] == 3


def test_a_refused_state_changes_nothing() -> None:
    assert all(run_ranks(2, _refusing_a_state))


def _threads_left(rank: int) -> int:
    """Threads of emulated links once as many compressors as there were are gone."""
    model = DDP(small_net())
    for step in range(4):
        compressor = AdaptiveCompressor("topk", (2, 100), policy="fixed", network="1gbit").attach(
            model
        )
        loss_of(model, step, rank).backward()
        compressor.detach()
    deadline = time.monotonic() + 10
    while (left := _link_threads()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _link_threads() -> int:
    return sum(thread.name == "emulated-link" for thread in threading.enumerate())


def test_an_emulated_link_leaves_no_thread_behind() -> None:
    assert run_ranks(2, _threads_left) == [0, 0]
