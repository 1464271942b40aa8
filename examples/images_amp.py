"""An image classifier with SGD and automatic mixed precision. Nothing is downloaded: it learns to
read the digits of a seven-segment display, shifted, dimmed and with noise on them.

    torchrun --standalone --nproc-per-node 2 examples/images_amp.py --network 10mbit

On CUDA it computes in fp16, with a GradScaler; on a CPU in bf16, without. The lines that
compression needs are marked with "<--".
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor  # <--

SIZE = 20
# Rows and columns of the segments in a glyph of 11 by 7, and which of them each digit lights.
SEGMENTS = {
    "a": (slice(0, 1), slice(1, 6)),
    "b": (slice(1, 5), slice(6, 7)),
    "c": (slice(6, 10), slice(6, 7)),
    "d": (slice(10, 11), slice(1, 6)),
    "e": (slice(6, 10), slice(0, 1)),
    "f": (slice(1, 5), slice(0, 1)),
    "g": (slice(5, 6), slice(1, 6)),
}
DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abfgcd")


def glyphs() -> Tensor:
    """(10, 11, 7), 0 or 1."""
    drawn = torch.zeros(10, 11, 7)
    for digit, lit in enumerate(DIGITS):
        for segment in lit:
            drawn[(digit, *SEGMENTS[segment])] = 1.0
    return drawn


def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (count, 1, SIZE, SIZE) and the digits on them (count,)."""
    digits = torch.randint(10, (count,), generator=generator)
    down = torch.randint(SIZE - 11, (count,), generator=generator).tolist()
    right = torch.randint(SIZE - 7, (count,), generator=generator).tolist()
    light = 0.5 + 0.5 * torch.rand(count, 1, 1, generator=generator)
    images = 0.2 * torch.randn(count, 1, SIZE, SIZE, generator=generator)
    for image, glyph, y, x in zip(images, glyphs()[digits] * light, down, right, strict=True):
        image[0, y : y + 11, x : x + 7] += glyph
    return images, digits


def make_net() -> nn.Module:
    def stage(inputs: int, outputs: int) -> nn.Sequential:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

    stages = stage(1, 32), stage(32, 64), stage(64, 128)
    return nn.Sequential(*stages, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--network", help="emulate a slow link, e.g. 10mbit")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = DDP(make_net().to(device))
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    scaler = torch.amp.GradScaler(device.type, enabled=cuda)
    compressor = AdaptiveCompressor(
        network=args.network
    )  # <-- memory=Momentum(clip_norm=), if you clip
    compressor.attach(model, optimizer=optimizer, scaler=scaler)  # <-- the scaler, too

    generator = torch.Generator().manual_seed(1 + rank)  # other images on every rank
    for step in range(args.steps):
        images, digits = (x.to(device) for x in draw(args.batch_size, generator))
        with torch.autocast(device.type, torch.float16 if cuda else torch.bfloat16):
            loss = F.cross_entropy(model(images), digits)
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # the exchange happens here, compressed
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if rank == 0 and (step + 1) % max(1, args.steps // 10) == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, CF {compressor.cf:g}", flush=True)

    model.eval()
    images, digits = (x.to(device) for x in draw(1000, torch.Generator().manual_seed(0)))
    with torch.no_grad():
        accuracy = (model.module(images).argmax(dim=1) == digits).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.3f} on 1000 other images")
        print(compressor.summary())  # <-- bytes sent, and the CFs that were chosen
    compressor.close()  # <--
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
