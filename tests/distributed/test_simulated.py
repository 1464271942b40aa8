"""Simulated ranks, threads of one process, against real ones: alike to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    AdaptiveCompressor,
    Fixed,
    Goodput,
    GraVAC,
    LinkSpec,
    LocalSteps,
    MemoryTimeline,
    Network,
)
from policies import Context
from runs.modelled_clock import ModelledClock
from runs.simulate.group import ring_sum
from runs.simulate.ranks import WorkerError
from runs.simulate.ranks import run_ranks as simulate
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, batch, flat_parameters, same

STEPS = 14
SETTINGS: dict[str, dict[str, Any]] = {
    "topk with residual": {
        "policy": lambda: GraVAC(window=3, dense_window=2, epsilon=0.05),
        "memory": "residual",
    },
    "momentum": {"policy": lambda: Goodput(goal="time")},
    "sharded": {"exchange": "sharded", "cfs": [4.0, 1.0, 9.0]},
    "votes": {"exchange": "voted_indices", "cfs": [4.0, 1.0, 9.0]},
    "powersgd": {"base": "powersgd", "cfs": [1.0, 3.0, 6.0], "memory": "residual"},
    "local steps": {"sync": LocalSteps(3), "cfs": [4.0, 1.0], "exchange": "sharded"},
    "sums on the wire": {"base": "fp16", "cfs": [2.0], "exchange": "all_reduce"},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the real ranks have it: several would round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """Several buckets; buffers, which DDP broadcasts; a part that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(12, 40), nn.BatchNorm1d(40)
        self.sometimes, self.last = nn.Linear(40, 40), nn.Linear(40, 3)

    def forward(self, x: torch.Tensor, more: bool) -> torch.Tensor:
        hidden = self.norm(self.first(x)).tanh()
        return self.last(self.sometimes(hidden) if more else hidden)


def _train(rank: int, name: str) -> dict[str, Any]:
    """Everything that a rank has in the end."""
    given = {**SETTINGS[name]}
    cfs = given.pop("cfs", None)
    given["policy"] = Scripted(cfs) if cfs else given["policy"]()
    base = given.pop("base", "topk")
    torch.manual_seed(rank)  # rank 0's weights are everybody's
    model = DDP(Net(), bucket_cap_mb=0.004, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    timeline = MemoryTimeline()
    clock = ModelledClock(0.01, LinkSpec(1e6, 0.001))
    compressor = AdaptiveCompressor(
        base, (2, 50), timeline=timeline, network=Network(clock=clock), **given
    )
    compressor.attach(model, optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, rank, torch.float32)
        loss = (model(x + torch.randn(()), step % 5 != 3) - y).square().mean()
        loss.backward()
        optimizer.step()
    state = compressor.state_dict()
    return {
        "parameters": flat_parameters(model),
        "buffers": list(model.buffers()),
        "state": state,
        "records": repr(timeline.steps),
        "cfs": [record.report.cf for record in timeline.steps],
        "events": repr(timeline.events),
        "bytes": compressor.summary().bytes_sent,
    }


def _train_all(rank: int) -> dict[str, Any]:
    return {name: _train(rank, name) for name in SETTINGS}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_simulated_run_is_a_real_one_to_the_bit(ranks: int) -> None:
    real = run_ranks(ranks, _train_all)
    simulated = simulate(ranks, lambda rank, _: _train_all(rank))
    for name in SETTINGS:
        for rank in range(ranks):
            ours, theirs = simulated[rank][name], real[rank][name]
            for what in theirs:
                assert same(ours[what], theirs[what]), (name, rank, what)
    assert len(set(simulated[0]["topk with residual"]["cfs"])) > 2
    assert len({each["sharded"]["parameters"].sum().item() for each in simulated}) == 1


SIZES = [1, 2, 7, 16, 1000, 4099, 3 << 18, (5 << 18) + 3]
DTYPES = [torch.float32, torch.float16, torch.float64]


def _numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size % 997)
    return torch.randn(size, generator=generator).exp().to(dtype)


def _sums(rank: int) -> list[torch.Tensor]:
    sums = [_numbers(rank, size, dtype) for dtype in DTYPES for size in SIZES]
    for each in sums:
        dist.all_reduce(each)
    return sums


@pytest.mark.parametrize("ranks", [3, 5])
def test_sums_are_rounded_as_gloo_rounds_them(ranks: int) -> None:
    real = iter(run_ranks(ranks, _sums)[0])
    for dtype in DTYPES:
        for size in SIZES:
            ours = [_numbers(rank, size, dtype) for rank in range(ranks)]
            ring_sum(ours)
            theirs = next(real)
            assert all(torch.equal(each, theirs) for each in ours), (dtype, size)


@given(size=st.integers(0, 70), ranks=st.integers(1, 9))
@settings(deadline=None)
def test_a_sum_has_every_rank_once_in_every_element(size: int, ranks: int) -> None:
    tensors = [torch.arange(size) + 100**rank for rank in range(ranks)]
    ring_sum(tensors)
    total = ranks * torch.arange(size) + sum(100**rank for rank in range(ranks))
    assert all(torch.equal(tensor, total) for tensor in tensors)


def test_the_other_collectives() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> list[Any]:
        everyone: list[Any] = [None] * 3
        dist.all_gather_object(everyone, {"rank": rank})
        told = [rank]
        dist.broadcast_object_list(told, src=2)
        received = torch.zeros(3, dtype=torch.int64)
        dist.all_to_all_single(received, torch.arange(3) + 10 * rank)
        dist.barrier()
        return [dist.get_rank(), dist.get_world_size(group), everyone, told, received.tolist()]

    for rank, found in enumerate(simulate(3, work)):
        everyone = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert found == [rank, 3, everyone, [2], [rank, 10 + rank, 20 + rank]]
    assert not dist.is_initialized()


def test_each_rank_has_random_numbers_of_its_own() -> None:
    before = torch.get_rng_state()

    def work(rank: int, group: dist.ProcessGroup) -> list[float]:
        torch.manual_seed(rank % 2)
        drawn = []
        for _ in range(3):
            drawn.append(torch.rand(()).item())
            dist.barrier()
        return drawn

    first, second, third = simulate(3, work)
    assert first == third
    assert first != second
    assert torch.equal(torch.get_rng_state(), before)


def _never_ends(rank: int, group: dist.ProcessGroup) -> None:
    while True:
        dist.barrier()
        if rank == 1:
            raise ValueError("rank 1\nhas had enough")


def _ends_early(rank: int, group: dist.ProcessGroup) -> None:
    dist.barrier()
    if rank != 1:
        dist.all_reduce(torch.zeros(5))


def _goes_elsewhere(rank: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(5 if rank != 1 else 6))


def _takes_the_largest(rank: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(5), op=dist.ReduceOp.MAX)


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (_never_ends, "worker 1 failed: ValueError: rank 1 has had enough"),
        (_ends_early, "worker 0 failed: .* all-reduce of 5 .* worker 1 will not come"),
        (_goes_elsewhere, "worker 0 is in an all-reduce of 5 .*, worker 1 in .* of 6"),
        (_takes_the_largest, "op must be SUM"),
    ],
)
def test_what_would_hang_is_an_error(work: Any, what: str) -> None:
    with pytest.raises(WorkerError, match=what):
        simulate(3, work)
    assert simulate(2, lambda rank, _: rank) == [0, 1]  # nothing is left behind


class Listening(Fixed):
    """Keeps what it is told of the run."""

    def start(self, context: Context) -> None:
        super().start(context)
        self.told = context


def _told(rank: int, optimizer: Any, sync: Any, exchange: str) -> tuple[float, float]:
    model, policy = DDP(nn.Linear(8, 4)), Listening(20)
    steps = [optimizer(model.parameters(), lr=0.1)]
    options: dict[str, Any] = {"policy": policy, "sync": sync, "exchange": exchange}
    AdaptiveCompressor(**options).attach(model, optimizer=steps).close()
    return policy.told.early, policy.told.proven


@pytest.mark.parametrize(
    ("ranks", "optimizer", "sync", "exchange", "early", "proven"),
    [
        (2, torch.optim.SGD, None, "auto", 1.0, inf),
        (2, torch.optim.AdamW, None, "auto", 40.0, inf),
        (2, torch.optim.AdamW, LocalSteps(2), "auto", 1.0, inf),
        (4, torch.optim.AdamW, None, "auto", 1.0, inf),
        (8, torch.optim.RMSprop, None, "auto", 1.0, inf),
        (9, torch.optim.AdamW, None, "auto", 40.0, 80.0),
        (9, torch.optim.AdamW, None, "all_gather", 40.0, 80.0),
        (9, torch.optim.AdamW, None, "voted_indices", 40.0, 1.0),
        (9, torch.optim.SGD, None, "sharded", 1.0, 1.0),
        (9, torch.optim.AdamW, LocalSteps(2), "auto", 1.0, 1.0),
        (16, torch.optim.SGD, None, "auto", 1.0, 10.0),
        (17, torch.optim.SGD, None, "auto", 1.0, 1.0),
        (9, torch.optim.RMSprop, None, "auto", 1.0, 1.0),
        (17, torch.optim.AdamW, None, "auto", 40.0, 1.0),
    ],
)
def test_a_policy_knows_what_was_tried_among_so_many_ranks(
    ranks: int, optimizer: Any, sync: Any, exchange: str, early: float, proven: float
) -> None:
    found = simulate(ranks, lambda rank, _: _told(rank, optimizer, sync, exchange))
    assert found == [(early, proven)] * ranks


def _sent(rank: int, optimizer: Any) -> tuple[list[float], float, torch.Tensor, torch.Tensor]:
    """Bytes of each step at CF 20, the bytes that policies are told, the rank's parameters, and the
    sum of the rank's gradients less its residual."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(300, 40))
    of = optimizer(model.parameters())
    kept = MemoryTimeline()
    network = Network(clock=ModelledClock(0.1, LinkSpec.parse("10mbit"), 100.0))
    options: dict[str, Any] = {"policy": Fixed(20), "timeline": kept, "network": network}
    compressor = AdaptiveCompressor(**options).attach(model, optimizer=of)
    own = torch.zeros(300 * 40 + 40)
    for step in range(6):
        x = torch.randn(8, 300, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        own += torch.cat([grad.flatten() for grad in grads])
        loss.backward()
        of.step()
        of.zero_grad()
    residuals = compressor.running()._parameters.values()
    waits = torch.cat([p.unsent.flatten() for p in residuals if p.unsent is not None])
    compressor.close()
    told = kept.header.wire_bytes[20.0] if kept.header else nan  # rank 0 keeps the timeline
    sent = [each.report.wire_bytes - each.report.statistics_bytes for each in kept.steps]
    return sent, told, flat_parameters(model), own - waits


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_nine_ranks_send_means_at_a_smaller_cf_and_lose_nothing(name: str) -> None:
    """Bytes are those that policies are told, which count one tensor and not nine shards. All ranks
    have the same parameters. SGD has moved them by all that the ranks do not keep."""
    made = {"SGD": partial(torch.optim.SGD, lr=0.01), "AdamW": partial(torch.optim.AdamW, lr=0.01)}
    found = simulate(9, lambda rank, _: _sent(rank, made[name]))
    sent, told, at, _ = found[0]
    assert sent[1:] == pytest.approx([told] * 5, rel=0.1)
    torch.manual_seed(0)
    before = flat_parameters(nn.Linear(300, 40))
    for _, _, other, _ in found[1:]:
        assert torch.equal(other, at)
    if name == "SGD":
        delivered = torch.stack([each[3] for each in found]).mean(0)
        torch.testing.assert_close(before - at, 0.01 * delivered, rtol=1e-4, atol=1e-6)
