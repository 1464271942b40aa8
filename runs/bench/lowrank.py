"""PowerSGD against PyTorch's own hook: a world of one, so that only the work is timed."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.futures import Future

from compressors import PowerSGD
from compressors.base import Key
from compressors.powersgd import layout
from runs.bench.compressors import in_rounds
from runs.bench.timing import Row, describe, group, interleaved, median_ratio

if TYPE_CHECKING:
    from runs.bench.command import Benching

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
        parts = zip(grad.split([a * b for a, b in shapes]), shapes, strict=True)
        self._tensors = [part.view(shape) for part, shape in parts]

    def buffer(self) -> Tensor:
        return self._grad

    def gradients(self) -> list[Tensor]:
        return self._tensors

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def bench_lowrank(asked: Benching) -> list[Row]:
    """Hook / ours for ranks 1, 2 and 4; ours with all statistics, which the hook has not."""
    torch.set_num_threads(1)
    with group("gloo"):
        return [
            _compare(name, shapes, rank, asked.rounds, asked.seed)
            for name, shapes in SHAPES.items()
            for rank in (1, 2, 4)
        ]


def _compare(name: str, shapes: list[tuple[int, int]], rank: int, rounds: int, seed: int) -> Row:
    sizes = [a * b for a, b in shapes]
    grad = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))
    state = theirs.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1
    )
    state.iter = 2
    buffer, out = grad.clone(), torch.empty_like(grad)
    bucket = _Bucket(shapes, buffer)
    keys = [Key(f"{i}", 0, shape) for i, shape in enumerate(shapes)]
    residuals = [torch.zeros(size) for size in sizes]
    rows, cols = shapes[0]
    cf = rows * cols / ((rows + cols) * rank)
    compressor = PowerSGD()
    assert layout(cf, prod(shapes[0]), shapes[0]).rank == rank

    def hook() -> None:
        buffer.copy_(grad)
        done: Future[Tensor] = theirs.powerSGD_hook(state, bucket)  # type: ignore[arg-type]
        done.wait()

    def ours() -> None:
        for residual, piece in zip(residuals, grad.split(sizes), strict=True):
            residual.add_(piece)
        found = in_rounds(compressor, residuals, cf, keys, dist.all_reduce)
        for piece, payload in zip(out.split(sizes), found, strict=True):
            compressor.write_to(piece, payload)

    times = interleaved({"hook": hook, "ours": ours}, 5 * rounds, warmup=3)
    what = f"powersgd rank {rank}, {name} ({sum(sizes) / 1e6:.1f} M): PyTorch's hook / ours"
    return Row(what, median_ratio(times["hook"], times["ours"]), ">= 1", describe(times))
