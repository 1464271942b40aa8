"""Real gloo processes for a bench."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


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
