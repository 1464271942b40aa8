"""Training with Triton's kernels, in real processes that interpret them, as on the host: of equal
magnitudes both choose the lower index, where torch may choose any."""

from __future__ import annotations

import os
from importlib import import_module
from math import inf
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from compressors.kernels import blocks
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, loss_of, small_net
from tests.distributed.test_device_path import ByStep

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, in each process
pytest.importorskip("triton", minversion="3.3")


def _interpret() -> list[str]:
    """From here on CPU tensors take Triton's kernels. Returns the list of those that are started,
    one after the other: hooks and callbacks are on different threads, and the interpreter is not
    made for that."""
    launching: Any = import_module("compressors.kernels.triton.launching")
    launch, lock, launches = launching.launch, Lock(), []

    def one_by_one(kernel: Any, *arguments: Any, **sizes: Any) -> None:
        with lock:
            launches.append(kernel.__name__)
            launch(kernel, *arguments, **sizes)

    blocks.force_triton = True
    for name in ("codec", "flags", "moments", "select", "sparse"):
        module: Any = import_module(f"compressors.kernels.triton.{name}")
        module.launch = one_by_one
    return launches


def _train(
    rank: int, triton: bool, base: str, adamw: bool, options: dict[str, Any]
) -> tuple[Tensor, set[str]]:
    blocks.force_device_path = triton
    launches = _interpret() if triton else []
    model = DDP(small_net(torch.float32), bucket_cap_mb=0.004)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if adamw:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = ByStep([10.0, 3.0, 1.0])
    compressor = AdaptiveCompressor(base, (1, 1000), policy=policy, **options)
    compressor.attach(model, optimizer=optimizer)
    for step in range(5):
        optimizer.zero_grad()
        bad = step == 3 and not adamw  # on one rank, and so for all
        (loss_of(model, step, rank) * (inf if bad and rank == 1 else 1.0)).backward()
        if bad:
            assert not any(bool(p.grad.isfinite().any()) for p in model.parameters())
        else:
            optimizer.step()
    compressor.detach()
    return flat_parameters(model), set(launches)


WAYS = [
    ("topk+int4", False, {"exchange": "all_gather"}, ["_select_alone", "_add_rows"]),
    ("bf16", True, {}, ["_enlarge", "_judge", "_fill_if"]),
    ("topk", False, {"exchange": "sharded"}, ["_read_indices", "_add_sparse", "_write_sparse"]),
    ("topk", False, {"exchange": "voted_indices"}, ["_read_indices", "_add_if"]),
    ("int8", False, {"exchange": "all_gather"}, ["_bucket_levels", "_dense_mean", "_any_nan"]),
    ("bf16", False, {}, ["_floats", "_dense_mean"]),
]


@pytest.mark.long
@pytest.mark.parametrize(("base", "adamw", "options", "launched"), WAYS, ids=str)
def test_it_trains_as_on_the_host(
    base: str, adamw: bool, options: dict[str, Any], launched: list[str]
) -> None:
    wanted, found = (run_ranks(2, _train, triton, base, adamw, options) for triton in (False, True))
    assert torch.equal(found[0][0], found[1][0])
    # What Adam's updates are rounded to may be the next number for the last bit of an update.
    rounded = 3e-4 if adamw else 1e-6
    torch.testing.assert_close(found[0][0], wanted[0][0], rtol=1e-5, atol=rounded)
    assert found[0][1] >= {*launched}
