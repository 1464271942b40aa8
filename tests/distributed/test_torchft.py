"""`examples/torchft_ddp.py`: compression below managers that only say what they are told to, and
below torchft's own, with a lighthouse, and a replica that leaves and comes back."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp

from examples.torchft_ddp import CompressedProcessGroup, Replica
from tests.distributed.processes import run_ranks

NUMEL, STEPS = 3000, 6


class Manager:
    """Says what it is told to."""

    def __init__(self, participants: int, commits: list[bool], rank: int = 0) -> None:
        self.participants, self.commits, self.step, self.rank = participants, commits, 0, rank
        self.takes_part = True

    def is_participating(self) -> bool:
        return self.takes_part

    def num_participants(self) -> int:
        return self.participants

    def participating_rank(self) -> int:
        return self.rank

    def current_step(self) -> int:
        return self.step

    def start_quorum(self) -> None:
        """A step begins."""

    def should_commit(self) -> bool:
        self.step += 1
        return self.commits[(self.step - 1) % len(self.commits)]


def _group(manager: Any, **options: Any) -> CompressedProcessGroup:
    return CompressedProcessGroup(dist.group.WORLD, **options).watch(manager)


def _reduced(group: CompressedProcessGroup, gradient: Tensor) -> Tensor:
    """As `Manager.allreduce` does it, but for the division by the number of participants."""
    total, opts = gradient.clone(), AllreduceOptions()
    opts.reduceOp = ReduceOp.SUM
    group.allreduce([total], opts).wait()
    return total


def _gradient(step: int, rank: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))


def _balance(rank: int, base: str) -> tuple[Tensor, Tensor, float]:
    """Two tensors of one size in each step, of which every third does not count."""
    manager = Manager(2, [True, True, False], rank)
    group = _group(manager, base=base, cf=10)
    sent, gradients = torch.zeros(2, NUMEL), torch.zeros(2, NUMEL)
    for step in range(STEPS):
        arrived = torch.zeros(2, NUMEL)
        for i in range(2):
            own = _gradient(step + 100 * i, rank)
            arrived[i] = _reduced(group, own)
            if step % 3 != 2:
                gradients[i] += own
        if manager.should_commit():
            sent += arrived
    remains = torch.stack(group.residuals())
    for total in (gradients, remains):
        dist.all_reduce(total)
    assert group.bytes_sent < group.dense_bytes / 4
    return sent + remains, gradients, float(remains.norm())


@pytest.mark.parametrize("base", ["topk", "dgc+fp32", "signsgd"])
def test_what_steps_that_count_have_sent_and_what_remains_is_the_sum_of_the_gradients(
    base: str,
) -> None:
    for ours, gradients, remains in run_ranks(2, _balance, base):
        torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-4)
        assert remains > 1


def _left_out(rank: int) -> tuple[Tensor, Tensor]:
    """The script leaves the third step out, and asks nobody whether it counts."""
    manager = Manager(2, [True], rank)
    group = _group(manager, cf=10)
    sent, gradients = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(STEPS):
        manager.start_quorum()
        own = _gradient(step, rank)
        arrived = _reduced(group, own)
        if step != 2 and manager.should_commit():
            sent += arrived
            gradients += own
    (remains,) = group.residuals()
    for total in (gradients, remains):
        dist.all_reduce(total)
    return sent + remains, gradients


def test_a_step_that_the_script_leaves_out_leaves_no_trace() -> None:
    for ours, gradients in run_ranks(2, _left_out):
        torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-4)


def _takes_no_part(rank: int) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    manager = Manager(2, [True], rank)
    group = _group(manager, cf=10)
    _reduced(group, _gradient(0, rank))
    manager.should_commit()
    (before,) = (each.clone() for each in group.residuals())
    manager.takes_part, manager.participants = rank == 0, 1
    arrived = _reduced(group, _gradient(1, 0) if rank == 0 else torch.zeros(NUMEL))
    manager.should_commit()
    (after,) = group.residuals()
    small = [float(_reduced(group, torch.full((3,), 1.0 + rank))[0])]
    small.append(float(_reduced(group, torch.full((NUMEL,), inf if rank else 1.0)).isnan().all()))
    manager.should_commit()
    (last,) = group.residuals()
    small.append(float(torch.equal(last, after)))
    return before, after, arrived, small


def test_a_replica_that_takes_no_part_keeps_what_it_has_and_sends_nothing() -> None:
    """Where fewer share the mean, what waits is worth as much less."""
    first, second = run_ranks(2, _takes_no_part)
    before, after, arrived, small = first
    torch.testing.assert_close(arrived + after, before / 2 + _gradient(1, 0))
    assert torch.equal(second[2], arrived)
    assert torch.equal(second[0], second[1])
    # Few elements are summed as they are; what is not finite is so everywhere, and leaves no trace.
    assert small == second[3] == [3.0, 1.0, 1.0]


def test_it_must_know_which_steps_count() -> None:
    group = CompressedProcessGroup(None)
    with pytest.raises(RuntimeError, match="watch"):
        group.allreduce([torch.zeros(NUMEL)], ReduceOp.SUM)
    group.watch(Manager(1, [True]))
    with pytest.raises(RuntimeError, match="already"):
        group.watch(Manager(1, [True]))
    with pytest.raises(ValueError, match="several rounds"):
        CompressedProcessGroup(None, "powersgd")


def _train(replica: Replica, steps: int, participants: int) -> None:
    """Until so many steps that count had so many participants."""
    while steps:
        steps -= replica.step() == participants


def _elastic(rank: int, lighthouse: str) -> tuple[Tensor, int, int, float]:
    replica = Replica(rank, lighthouse, seed=rank)
    _train(replica, 4, participants=3)
    if rank == 2:
        replica.manager.shutdown()
        replica = Replica(rank, lighthouse, seed=7)
    else:
        _train(replica, 1, participants=2)  # there may be more, until the other one is healed
    _train(replica, 5, participants=3)
    waits = sum(float(each.norm()) for each in replica.group.residuals())
    parameters = torch.cat([p.detach().flatten() for p in replica.net.parameters()])
    result = parameters, replica.manager.current_step(), len(replica.group.residuals())
    dist.barrier()
    replica.manager.shutdown(wait=False)
    return *result, waits


@pytest.mark.long
def test_a_replica_leaves_and_comes_back() -> None:
    coordination = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=2000, heartbeat_timeout_ms=1000
    )
    try:
        results = run_ranks(3, _elastic, lighthouse.address())
    finally:
        lighthouse.shutdown()
    parameters, steps, places, waits = zip(*results, strict=True)
    assert torch.equal(parameters[0], parameters[1])
    assert torch.equal(parameters[0], parameters[2])
    assert len({*steps}) == 1
    assert min(places) == max(places) >= 1  # buckets
    assert min(waits) > 0
