"""Timing contenders fairly: in turn, so that the machine's moods hit all alike; and the process
groups to time them in."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@dataclass(frozen=True)
class Row:
    """One line of the bench: a ratio, what it is of, and its goal ("": reported only)."""

    what: str
    ratio: float
    goal: str = ""
    detail: str = ""

    @property
    def falls_short(self) -> bool:
        """Whether there is a goal, and the ratio does not reach it."""
        sign, _, bound = self.goal.partition(" ")
        if not bound:
            return False
        return not (self.ratio <= float(bound) if sign == "<=" else self.ratio >= float(bound))

    def __str__(self) -> str:
        detail = f"  ({self.detail})" if self.detail else ""
        return f"{self.ratio:8.2f}  {self.goal:<8} {self.what}{detail}"


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    device: torch.device | None = None,
) -> dict[str, list[float]]:
    """Seconds of each contender in each of `rounds` rounds, all of them once a round; of a CUDA
    device by its own clock."""
    cuda = device is not None and device.type == "cuda"
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(warmup + rounds):
        for name, run in contenders.items():
            took = _on_device(run) if cuda else _on_host(run)
            if index >= warmup:
                times[name].append(took)
    return times


def _on_host(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _on_device(run: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def median_ratio(a: list[float], b: list[float]) -> float:
    """Median over rounds of a / b."""
    return median(x / y for x, y in zip(a, b, strict=True))


def describe(times: Mapping[str, list[float]]) -> str:
    """Median milliseconds of each contender."""
    return ", ".join(f"{name} {1e3 * median(t):.4g} ms" for name, t in times.items())


@contextmanager
def group(backend: str, ranks: int = 1) -> Iterator[None]:
    """A default process group of so many ranks, of which this process is one; of more than one the
    others are made by torch's fake process group."""
    store: dist.Store = dist.HashStore()
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = FakeStore()
    dist.init_process_group(backend, rank=0, world_size=ranks, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_processes(workers: int, function: Any, *args: Any) -> Any:
    """function(rank, *args) in `workers` fresh gloo processes; what rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, args=(workers, folder, function, args), nprocs=workers, daemon=True)
        return torch.load(f"{folder}/result", weights_only=False)


def _work(rank: int, workers: int, folder: str, function: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=workers
    )
    result = function(rank, *args)
    if rank == 0:
        torch.save(result, f"{folder}/result")
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work
