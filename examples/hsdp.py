"""A small language model on several nodes: sharded inside a node by FSDP2, replicated over nodes,
with what the nodes exchange compressed.

On two nodes of eight GPUs, on each of them:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/hsdp.py

On a CPU, with two "nodes" of two processes:

    torchrun --standalone --nproc-per-node 4 examples/hsdp.py --replicas 2 --steps 60

`--checkpoint FOLDER` saves there in the end, and goes on from what is there.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from adaptive import AdaptiveCompressor

TEXT = Path(__file__).resolve().parents[1] / "README.md"
CONTEXT, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2


class Block(nn.Module):
    """A layer of a transformer that sees the past only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.attention(self.norm(x)).view(batch, length, 3 * HEADS, -1).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.feed_forward(x)


class ByteModel(nn.Module):
    """Tells the next byte of a text: scores of shape (places, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(read_arguments(), device)
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A language model on FSDP2, compressed")
    parser.add_argument("--replicas", type=int, help="default: one a node")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--policy", default="goodput", help="fixed: always CF 10")
    parser.add_argument("--checkpoint", type=Path)
    return parser.parse_args(words)


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    replicas = args.replicas or ranks // int(os.environ["LOCAL_WORLD_SIZE"])

    # Rows are replicas: ranks that follow each other are on one node, and share one replica.
    mesh = init_device_mesh(
        device.type, (replicas, ranks // replicas), mesh_dim_names=("replica", "shard")
    )
    torch.manual_seed(0)
    model = ByteModel().to(device)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if device.type == "cuda" else None, reduce_dtype=torch.float32
    )
    # Of the two dimensions torch gets the second one only: what replicas exchange is ours.
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"], mp_policy=precision)
    fully_shard(model, mesh=mesh["shard"], mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    compressor = AdaptiveCompressor("topk", (10, 100), policy=args.policy)
    compressor.attach_fsdp(model, mesh, optimizer=optimizer)

    # A file for each rank: while gradients are compressed, AdamW's moments are each replica's own,
    # as is what waits in the residual.
    file = args.checkpoint / f"rank{rank}.pt" if args.checkpoint else None
    first = 0
    if file and file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        compressor.load_state_dict(saved["compressor"])
        first = saved["step"]

    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    for step in range(first, args.steps):
        pick = torch.Generator().manual_seed(step * ranks + rank)
        starts = torch.randint(len(text) - CONTEXT - 1, (8,), generator=pick).tolist()
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).to(device)
        scores = model(batch[:, :-1])
        loss = F.cross_entropy(scores.float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps - 1:
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item():.4f}, CF {compressor.cf:g}", flush=True)

    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        saved = {
            "step": args.steps,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "compressor": compressor.state_dict(),
        }
        torch.save(saved, file)
    compressor.close()
    if rank == 0:
        print(compressor.summary(), flush=True)


if __name__ == "__main__":
    main()
