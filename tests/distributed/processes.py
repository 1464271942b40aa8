"""Runs a function in several real gloo processes, with a time limit that fails instead of hanging.

Each process imports the test's module anew, so the function must be at module level. Return values
travel back by torch.save.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "adaptive", "numpy", "pytest"]
PRELOAD += ["hypothesis"]
"""Imported once, by the fork server: a process then starts in 0.1 s instead of a second and more
(optimizers and DDP import torch._dynamo when they are first used)."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    limit: float = 90,
    timeout: float = 60,
    lost: Collection[int] = (),
) -> list:
    """function(rank, *args) in `world_size` processes; the list of their return values.

    Fails if a process raises (with its traceback) or if they take longer than `limit` seconds.
    timeout: of the process group, in seconds. lost: ranks that die or are stopped on the way;
    nothing is expected of them, and None stands for what they return.
    """
    expected = [rank for rank in range(world_size) if rank not in lost]
    with tempfile.TemporaryDirectory() as folder:
        # A fork of the test process would inherit autograd's threads; a fork server has torch
        # imported and nothing run.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        processes = [
            context.Process(
                target=_run_rank,
                args=(rank, world_size, folder, timeout, bool(lost), function, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit
        try:
            while any(processes[rank].is_alive() for rank in expected):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{function.__name__} hung for {limit} s on {world_size} ranks"
                    )
                if any(processes[rank].exitcode not in (None, 0) for rank in expected):
                    time.sleep(1)  # let the others tell what they saw
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.join()
        errors = sorted(Path(folder).glob("error*"))
        if errors:
            raise AssertionError("\n".join(error.read_text() for error in errors))
        return [
            torch.load(Path(folder, f"result{rank}"), weights_only=False)
            if rank in expected
            else None
            for rank in range(world_size)
        ]


def _run_rank(
    rank: int,
    world_size: int,
    folder: str,
    timeout: float,
    alone: bool,
    function: Callable[..., Any],
    args: tuple,
) -> None:
    """alone: other ranks may be gone in the end, so that nobody waits for them."""
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        result = function(rank, *args)
        torch.save(result, Path(folder, f"result{rank}"))
        if not alone:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise SystemExit(1) from None
