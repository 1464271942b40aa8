"""PowerSGD against PyTorch's own hook: a world of one, so that only the work is timed."""

from __future__ import annotations

import tempfile
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.futures import Future

from compressors import PowerSGD
from compressors.base import Key
from compressors.powersgd import layout
from runs.bench.compressors import in_rounds
from runs.bench.timing import Row, describe, interleaved, median_ratio

SHAPES = {
    "convolutions": [(512, 4608)] * 3,
    "attention": [(768, 768)] * 10,
    "small matrices": [(128, 128)] * 40,
}
"""Equal shapes, so that one CF means one rank."""


class _Bucket:
    """What PyTorch's hook asks of a `GradBucket`."""

    def __init__(self, shapes: list[tuple[int, int]], grad: Tensor) -> None:
        self._grad = grad
        self._tensors = [
            piece.view(shape)
            for piece, shape in zip(grad.split([a * b for a, b in shapes]), shapes, strict=True)
        ]

    def buffer(self) -> Tensor:
        return self._grad

    def gradients(self) -> list[Tensor]:
        return self._tensors

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def _hook_step(state: theirs.PowerSGDState, bucket: _Bucket, buffer: Tensor, grad: Tensor) -> None:
    buffer.copy_(grad)
    done: Future[Tensor] = theirs.powerSGD_hook(state, bucket)  # type: ignore[arg-type]
    done.wait()


def _our_step(
    compressor: PowerSGD,
    residuals: list[Tensor],
    keys: list[Key],
    cf: float,
    out: Tensor,
    grad: Tensor,
) -> None:
    sizes = [r.numel() for r in residuals]
    for residual, piece in zip(residuals, grad.split(sizes), strict=True):
        residual.add_(piece)
    found = in_rounds(compressor, residuals, cf, keys, dist.all_reduce)
    for piece, payload in zip(out.split(sizes), found, strict=True):
        compressor.write_to(piece, payload)


def bench_lowrank(rounds: int, seed: int) -> list[Row]:
    """Hook / ours for ranks 1, 2 and 4; ours with all statistics, which the hook has not."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
        )
        try:
            for name, shapes in SHAPES.items():
                for rank in (1, 2, 4):
                    rows.append(_compare(name, shapes, rank, rounds, seed))
        finally:
            dist.destroy_process_group()
    return rows


def _compare(name: str, shapes: list[tuple[int, int]], rank: int, rounds: int, seed: int) -> Row:
    numel = sum(a * b for a, b in shapes)
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    state = theirs.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1
    )
    state.iter = 2
    buffer = grad.clone()
    bucket = _Bucket(shapes, buffer)
    keys = [Key(f"{i}", 0, shape) for i, shape in enumerate(shapes)]
    residuals = [torch.zeros(a * b) for a, b in shapes]
    rows, cols = shapes[0]
    cf = rows * cols / ((rows + cols) * rank)
    compressor = PowerSGD()
    assert layout(cf, prod(shapes[0]), shapes[0]).rank == rank
    times = interleaved(
        {
            "hook": partial(_hook_step, state, bucket, buffer, grad),
            "ours": partial(_our_step, compressor, residuals, keys, cf, torch.empty(numel), grad),
        },
        5 * rounds,
        warmup=3,
    )
    what = f"powersgd rank {rank}, {name} ({numel / 1e6:.1f} M): PyTorch's hook / ours"
    return Row(what, median_ratio(times["hook"], times["ours"]), ">= 1", describe(times))
