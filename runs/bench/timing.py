"""Timing contenders fairly: in turn, so that the machine's moods hit all alike; and real processes
to time them in."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@dataclass(frozen=True)
class Row:
    """One line of the bench: a ratio, what it is of, and its goal (None: reported only)."""

    what: str
    ratio: float
    goal: str
    detail: str

    @property
    def falls_short(self) -> bool:
        """Whether there is a goal, and the ratio does not reach it."""
        bound = self.goal.removeprefix(">= ").removeprefix("<= ")
        if not bound:
            return False
        return not (self.ratio <= float(bound) if "<" in self.goal else self.ratio >= float(bound))


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each contender in each of `rounds` rounds, all of them once a round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(warmup + rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if index >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def median_ratio(a: list[float], b: list[float]) -> float:
    """Median over rounds of a / b."""
    return median(x / y for x, y in zip(a, b, strict=True))


def describe(times: Mapping[str, list[float]]) -> str:
    """Median milliseconds of each contender."""
    return ", ".join(f"{name} {1e3 * median(t):.1f} ms" for name, t in times.items())


def in_processes(workers: int, function: Any, *args: Any) -> Any:
    """function(rank, *args) in `workers` fresh gloo processes; what rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, args=(workers, folder, function, args), nprocs=workers)
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
    dist.barrier()
    dist.destroy_process_group()
