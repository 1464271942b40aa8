"""A sparsifier of one's own: the largest elements of each chunk, with values of two bits.

    torchrun --standalone --nproc-per-node 2 examples/own_sparsifier.py

docs/own_compressor.md explains it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed
from compressors import Key, Levels, Selected, Sparsifier, register


class ChunkedTopK(Sparsifier):
    """The largest elements of each chunk of neighbours, as many of each (SparseLoCo: Sarfi and
    others 2025; DeMo: Peng and others 2024): small layers and quiet rows get their share.

    CHUNK: elements a chunk, more where CFs are larger: each chunk sends at least one."""

    name = "chunked-topk"
    comparable = False  # elements of different chunks are not compared
    exact_count = True  # always k
    CHUNK = 4096

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        if add is not None:
            tensor.add_(add)
        numel = tensor.numel()
        width = max(1, min(numel, max(self.CHUNK, -(-numel // max(1, k)))))
        rows = max(1, -(-numel // width))
        last = numel - (rows - 1) * width  # elements of the last chunk
        each = -(-k // rows)
        if each > last:  # all of the last chunk, and more of the others
            each = -(-(k - last) // (rows - 1))
        sizes = nn.functional.pad(tensor.abs(), (0, rows * width - numel), value=-1.0)
        places = sizes.view(rows, width).topk(each, dim=1).indices.t()  # (each, rows)
        places = places + torch.arange(0, rows * width, width, device=tensor.device)
        # The largest of each chunk, then the second of each, and so on.
        ranked = torch.cat([places[:last].flatten(), places[last:, :-1].flatten()])
        indices = ranked[:k].sort().values
        values = tensor.index_select(0, indices)
        return Selected(indices.int(), values, tensor.double().square().sum())


def main() -> None:
    register("chunked-topk", ChunkedTopK)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    base = ChunkedTopK(values=Levels("int2", bits=2, bucket=64))  # -1, 0, 1 times a scale
    compressor = AdaptiveCompressor(base, policy=Fixed(20)).attach(model)
    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for _ in range(100):
        inputs = torch.randn(64, 100, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"{base.name}: loss {loss.item():.2f}, CF {compressor.cf:g}")
        print(compressor.summary())
    compressor.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
