"""Simulated ranks on a GPU: which stream waits for what, with streams and events that note it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from runs.parser import UsageError
from runs.simulate import command, group
from runs.simulate.ranks import run_ranks

CUDA = torch.device("cuda", 0)
RANKS = 3


class _Event:
    """What a stream had to do until it was recorded."""

    def __init__(self) -> None:
        self.done: set[str] = set()

    def record(self, stream: _Stream) -> None:
        self.done = set(stream.behind)


class _Stream:
    """Knows all that it is behind of: pieces of work, by name."""

    def __init__(self) -> None:
        self.behind: set[str] = set()

    def wait_event(self, event: _Event) -> None:
        self.behind |= event.done


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable[[], _Stream]:
    """Every tensor is on a GPU, and every thread has a stream of its own; the present thread's."""
    own = threading.local()

    def current(device: Any = None) -> _Stream:
        if not hasattr(own, "stream"):
            own.stream = _Stream()
        stream: _Stream = own.stream
        return stream

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(group, "device_with_streams", lambda tensors: CUDA if tensors else None)
    monkeypatch.setattr(group, "new_future", lambda device: Future())
    return current


def _all_reduce(mine: Tensor) -> None:
    dist.all_reduce(mine)


def _all_gather(mine: Tensor) -> None:
    dist.all_gather([torch.zeros(4) for _ in range(RANKS)], mine)


def _all_to_all(mine: Tensor) -> None:
    sizes = [2, 1, 1]
    dist.all_to_all_single(
        torch.zeros(RANKS * sizes[dist.get_rank()]), mine, [sizes[dist.get_rank()]] * RANKS, sizes
    )


def _broadcast(mine: Tensor) -> None:
    dist.broadcast(mine, 1)


@pytest.mark.parametrize("collective", [_all_reduce, _all_gather, _all_to_all, _broadcast])
def test_a_collective_is_behind_what_all_ranks_have_done_and_all_go_on_behind_it(
    collective: Callable[[Tensor], None],
    streams: Callable[[], _Stream],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything = {f"made by {rank}" for rank in range(RANKS)}
    copied = Tensor.copy_

    def copy(to: Tensor, given: Tensor, *more: Any) -> Tensor:
        assert streams().behind >= everything  # what is read and what is overwritten
        streams().behind.add("moved")
        return copied(to, given, *more)

    def work(rank: int, _: Any) -> set[str]:
        mine = torch.ones(4) * rank
        streams().behind.add(f"made by {rank}")
        collective(mine)
        return set(streams().behind)

    monkeypatch.setattr(Tensor, "copy_", copy)
    assert all(behind >= {"moved", *everything} for behind in run_ranks(RANKS, work))


def test_a_message_is_received_behind_what_its_sender_has_done(
    streams: Callable[[], _Stream],
) -> None:
    def work(rank: int, _: Any) -> set[str]:
        streams().behind.add(f"made by {rank}")
        if rank == 0:
            dist.send(torch.ones(4), 2)
        elif rank == 2:
            dist.recv(torch.zeros(4), 0)
        return set(streams().behind)

    assert run_ranks(RANKS, work)[2] == {"made by 0", "made by 2"}


def test_backward_runs_on_the_thread_of_its_rank() -> None:
    """On a GPU torch would have one thread for all of them."""

    def work(rank: int, _: Any) -> bool:
        return bool(torch._C._is_multithreading_enabled())

    assert run_ranks(2, work) == [False, False]
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("device", ["cuda:7", "gpu"])
def test_a_device_that_is_not_there_is_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=f"one of cpu, cuda, cuda:0, cuda:1, got '{device}'"):
        command.check_device(device)
    command.check_device("cuda:1")


def test_without_a_gpu_only_the_host_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"one of cpu \(torch finds no CUDA device here\), got"):
        command.check_device("cuda")
