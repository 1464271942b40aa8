"""A small byte-level GPT on two nodes, with AdamW. Nothing is downloaded: it learns the sources of
Python's standard library.

On both nodes, NODE0 being the name of the first one as the other knows it:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint NODE0:29500 \\
        examples/gpt_two_nodes.py

On one machine, with a link that is as slow as you say:

    torchrun --standalone --nproc-per-node 2 examples/gpt_two_nodes.py --network 10mbit

The lines that compression needs are marked with "<--".
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor  # <--

LENGTH, WIDTH, HEADS, LAYERS = 64, 160, 5, 3


class Block(nn.Module):
    """Attention and a feed-forward layer, each normalised before and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes (batch, length) to logits (batch, length, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.bytes(x) + self.places(places))))
        return logits


def read_text() -> Tensor:
    """Two million bytes of Python."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[:2_000_000]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=16, help="windows a worker")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--network", help="emulate a slow link, e.g. 10mbit")
    parser.add_argument("--save", type=Path, help="a folder for checkpoints")
    parser.add_argument("--resume", type=Path, help="a folder with checkpoints")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    def precision() -> AbstractContextManager[None]:
        has_bf16 = cuda and torch.cuda.is_bf16_supported()
        return torch.autocast("cuda", torch.bfloat16) if has_bf16 else nullcontext()

    torch.manual_seed(0)
    model = DDP(GPT().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, args.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / args.steps)),
    )
    compressor = AdaptiveCompressor(network=args.network)  # <-- the defaults: topk, goodput
    compressor.attach(model, optimizer=optimizer)  # <-- on every rank, before the first backward

    # Every rank saves and loads a file of its own: what it has not sent yet is its own.
    first = 0
    if args.resume:
        state = torch.load(args.resume / f"rank{rank}.pt", map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        compressor.load_state_dict(state["compressor"])  # <--
        first = state["step"]

    text = read_text()
    generator = torch.Generator().manual_seed(1000 * first + rank)  # other data on every rank
    for step in range(first, args.steps):
        at = torch.randint(len(text) - LENGTH - 1, (args.batch_size,), generator=generator)
        windows = torch.stack([text[i : i + LENGTH + 1] for i in at.tolist()]).to(device)
        with precision():
            logits = model(windows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # the exchange happens here, compressed
        schedule.step()
        if rank == 0 and (step + 1) % max(1, args.steps // 10) == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, CF {compressor.cf:g}", flush=True)

    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "compressor": compressor.state_dict(),  # <--
            "step": args.steps,
        }
        torch.save(state, args.save / f"rank{rank}.pt")
    if rank == 0:
        print(compressor.summary())  # <-- bytes sent, and the CFs that were chosen
    compressor.close()  # <--
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
