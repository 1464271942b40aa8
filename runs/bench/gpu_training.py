"""Training a GPT of GPT-2's size on a GPU over an emulated slow network: seconds to the same loss.

    python -m runs.bench.gpu_training --text DIR [--network 1gbit] [--seconds 180] [--workers 2]

All workers are on one device, joined by gloo, whose collectives `network=` holds back until such a
link could have carried them. The contenders train side by side, each for so many seconds, from the
same weights on the same batches, of test.txt. Losses are those on valid.txt; what these take does
not count. It needs nothing but torch and NumPy.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed
from runs.models.gpt import ByteGPT

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 17, 768, 12, 512, 8
"""121 million parameters: GPT-2's width and heads, with five layers more in the place of its table
of 50,257 symbols, of which bytes would use 256."""
LR, WARMUP = 3e-4, 20
TEST_BATCHES = 4

PARTS = "test.txt", "valid.txt"
"""What is trained on, and what losses are measured on."""

CONTENDERS: dict[str, dict[str, Any]] = {
    "dense": {"base": "none"},
    "bf16": {"base": "bf16", "policy": Fixed(2), "memory": "none"},
    "the default": {},
}
"""Arguments of AdaptiveCompressor, beside `network`."""


@dataclass(frozen=True)
class Point:
    """Of a run: seconds of training and steps until then, the loss on the test set (nats a byte),
    MB that a worker has sent, and the CF."""

    seconds: float
    step: int
    loss: float
    mb: float
    cf: float


def _worker(rank: int, name: str, asked: argparse.Namespace, store: str, points: Any) -> None:
    device = torch.device(asked.device)
    dist.init_process_group(
        "gloo", store, timedelta(seconds=300), rank=rank, world_size=asked.workers
    )
    torch.manual_seed(0)
    gpt = ByteGPT(256, LENGTH, asked.width, asked.layers, asked.heads).to(device)
    model = DDP(gpt, gradient_as_bucket_view=True)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.95), fused=fused)
    compressor = AdaptiveCompressor(**CONTENDERS[name], network=asked.network)
    compressor.attach(model, optimizer=optimizer)
    train, test = (_bytes(Path(asked.text, part)) for part in PARTS)
    order = torch.Generator().manual_seed(1000 + rank)
    seconds, step, mb, evaluate_at = 0.0, 0, 0.0, 0.0
    while True:
        if seconds >= evaluate_at or seconds >= asked.seconds:
            loss = _loss(gpt, test, device)
            if rank == 0:
                points.put((name, Point(seconds, step, loss, mb, compressor.cf)))
            evaluate_at = seconds + asked.every
        if seconds >= asked.seconds:
            break
        dist.barrier()
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP)
        inputs, targets = _batch(train, order, device)
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(inputs)
        F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        step += 1
        took = torch.tensor(time.perf_counter() - began)
        dist.broadcast(took, 0)  # all workers evaluate and end after the same step
        seconds += float(took)
        mb = compressor.summary().bytes_sent / 1e6
    dist.destroy_process_group()


def _bytes(path: Path) -> Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8).astype(np.int64))


def _batch(text: Tensor, order: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=order)
    both = text[starts + torch.arange(LENGTH + 1)].to(device)
    return both[:, :-1], both[:, 1:]


@torch.no_grad()
def _loss(model: nn.Module, text: Tensor, device: torch.device) -> float:
    order = torch.Generator().manual_seed(7)
    total = 0.0
    for _ in range(TEST_BATCHES):
        inputs, targets = _batch(text, order, device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(inputs)
        total += F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).item()
    return total / TEST_BATCHES


def table(points: dict[str, list[Point]]) -> list[str]:
    """Lines: each contender's end, and when it came to the losses at which the others ended."""
    lines = [f"{'contender':<14}  steps  seconds/step  MB sent    CF   loss  seconds to the end of"]
    for name, own in points.items():
        end = own[-1]
        reached = ", ".join(
            f"{other} {_reached(own, theirs[-1].loss)}"
            for other, theirs in points.items()
            if other != name
        )
        lines.append(
            f"{name:<14} {end.step:6d} {end.seconds / max(1, end.step):13.3f} {end.mb:8.0f} "
            f"{end.cf:5.0f} {end.loss:6.3f}  {reached}"
        )
    return lines


def _reached(points: list[Point], loss: float) -> str:
    first = next((point for point in points if point.loss <= loss), None)
    return "never" if first is None else f"{first.seconds:.0f} s (step {first.step})"


def main(words: list[str] | None = None) -> int:
    told = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    told.add_argument("--text", required=True, metavar="DIR", help="a folder of WikiText-2")
    told.add_argument("--network", default="1gbit", help="the emulated network (1gbit)")
    told.add_argument("--seconds", type=float, default=180, help="of each contender (180)")
    told.add_argument("--every", type=float, default=4, help="seconds between evaluations (4)")
    told.add_argument("--workers", type=int, default=2, help="of each contender (2)")
    told.add_argument("--contenders", nargs="*", default=list(CONTENDERS), choices=CONTENDERS)
    told.add_argument("--device", default="cuda", help="of all workers (cuda)")
    told.add_argument("--layers", type=int, default=LAYERS)
    told.add_argument("--width", type=int, default=WIDTH)
    told.add_argument("--heads", type=int, default=HEADS)
    told.add_argument("--points", metavar="FILE", help="write all evaluations there, as JSON")
    asked = told.parse_args(words)
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        told.error(f"--device {asked.device}: torch sees no CUDA device")
    for part in PARTS:
        if not Path(asked.text, part).is_file():
            told.error(f"--text {asked.text}: has no {part}")
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes, stores = [], tempfile.mkdtemp()
    for name in asked.contenders:
        store = f"file://{stores}/{name.replace(' ', '-')}"
        for rank in range(asked.workers):
            process = context.Process(target=_worker, args=(rank, name, asked, store, queue))
            process.start()
            processes.append(process)
    points: dict[str, list[Point]] = {name: [] for name in asked.contenders}
    while any(process.is_alive() for process in processes) or not queue.empty():
        if queue.empty():
            time.sleep(0.2)
            continue
        name, point = queue.get()
        points[name].append(point)
    shutil.rmtree(stores)
    if asked.points:
        kept = {name: [asdict(point) for point in own] for name, own in points.items()}
        Path(asked.points).write_text(json.dumps(kept))
    if all(points.values()):
        print("\n".join(table(points)))
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    raise SystemExit(main())
