"""DeMo: each rank keeps its own momentum, and the ranks exchange its fast components only.

    torchrun --standalone --nproc-per-node 2 examples/demo_rule.py

Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization" (2024), algorithm 1. With g a
rank's gradient, m its momentum, and q the largest DCT coefficients of each chunk of m:

    m <- decay m + g;  q = fast(m);  m <- m - q;  x <- x - lr sign(mean of q over the ranks)

q is what a compressor sends, and m what a memory keeps. The sign is the memory's, too. What is left
for the optimizer is torch's SGD without momentum, whose weight decay is then decoupled, as DeMo's.
"""

from __future__ import annotations

import time
from functools import lru_cache
from math import gcd, pi, prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Compressor, Fixed, Kept, MemoryRule
from compressors import Payload, Spec, split_rows


class FastComponents(Compressor):
    """The largest DCT coefficients of each chunk of a parameter, as many of each chunk.

    A parameter is seen as a matrix, shape[0] by all the rest (a vector as one row), and cut into
    chunks of equal size. chunk: largest side of a chunk, a power of two; a side is the largest
    power of two that divides the parameter's.
    """

    name = "dct"
    multilevel = False  # a larger CF is compressed from the full tensor
    sampled = False  # neighbours of a sample are no neighbours
    keeps_zeros = False

    def __init__(self, chunk: int = 64) -> None:
        self.chunk = chunk

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        if add is not None:
            x.add_(add)
        rows, a, cols, b = self._sides(spec)
        high, wide = dct(a, x.dtype, x.device), dct(b, x.dtype, x.device)
        coefficients = torch.einsum("ua,iajb,vb->ijuv", high, x.view(rows, a, cols, b), wide)
        coefficients = coefficients.reshape(rows * cols, a * b)
        places = coefficients.abs().topk(self._kept(spec), dim=1).indices
        values = coefficients.gather(1, places).flatten()
        total, kept = (each.double().square().sum() for each in (x, values))
        energies = torch.stack([total, kept, (total - kept).clamp(min=0)])
        return Payload((values, places.int().flatten()), spec, energies)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        rows, a, cols, b = self._sides(payload.spec)
        values, places = (part.view(rows * cols, -1) for part in payload.parts)
        places = places.long().clamp(0, a * b - 1)  # damaged bytes stay within bounds
        coefficients = values.new_zeros(rows * cols, a * b).scatter_(1, places, values)
        coefficients = coefficients.view(rows, cols, a, b)
        high, wide = dct(a, out.dtype, out.device), dct(b, out.dtype, out.device)
        sent = torch.einsum("ua,ijuv,vb->iajb", high, coefficients, wide)
        out.add_(sent.reshape(-1), alpha=scale)

    def nbytes(self, spec: Spec) -> int:
        return self._count(spec) * (spec.dtype.itemsize + 4)

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        count = self._count(spec)
        rows = split_rows(data, (count, spec.dtype), (count, torch.int32))
        return [Payload(parts, spec) for parts in rows]

    def floats(self, spec: Spec) -> float:
        return float(self._count(spec))

    def _kept(self, spec: Spec) -> int:
        """Coefficients that are sent of a chunk."""
        _, a, _, b = self._sides(spec)
        return max(1, int(a * b / spec.cf * (1 + 1e-12)))

    def _count(self, spec: Spec) -> int:
        rows, _, cols, _ = self._sides(spec)
        return rows * cols * self._kept(spec)

    def _sides(self, spec: Spec) -> tuple[int, int, int, int]:
        """Chunks in a column, rows of a chunk, chunks in a row, columns of a chunk."""
        shape = spec.key.shape or (spec.numel,)
        n, m = (1, shape[0]) if len(shape) == 1 else (shape[0], prod(shape[1:]))
        a, b = gcd(n, self.chunk), gcd(m, self.chunk)
        return n // a, a, m // b, b


@lru_cache
def dct(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal DCT-II of n values, a matrix (n, n)."""
    k = torch.arange(n, dtype=torch.float64, device=device)
    matrix = torch.cos(pi / n * (k + 0.5) * k[:, None]) * (2 / n) ** 0.5
    matrix[0] *= 0.5**0.5
    return matrix.to(dtype)


class DecoupledMomentum(MemoryRule):
    """Momentum that what was sent is taken off, and the sign of the ranks' mean."""

    owed = False  # momentum: a dense step after detach() does not begin with it

    def __init__(self, decay: float = 0.999) -> None:
        self.decay = decay

    def accumulate(self, kept: Kept, grad: Tensor, cf: float) -> Tensor:
        kept["residual"].mul_(self.decay)
        return grad

    def received(self, kept: Kept, mean: Tensor, cf: float) -> None:
        mean.sign_()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(128, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, weight_decay=0.1)
    base, memory = FastComponents(chunk=16), DecoupledMomentum(0.95)
    compressor = AdaptiveCompressor(base, memory=memory, policy=Fixed(32)).attach(model)
    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for _ in range(200):
        inputs = torch.randn(64, 128, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :16].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"DeMo: loss {loss.item():.2f}, CF {compressor.cf:g}")
        print(compressor.summary())
    compressor.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
