"""Whether coding gradients without loss pays: the exponents of bf16 by Huffman's code.

    python -m docs.studies.lossless [--model gpt-10m] [--steps 40]

One worker trains a language model on bytes by AdamW. The bytes of its last gradient in bf16 that
hold sign and exponent are coded by zlib, by Huffman's code alone and with matches; those that hold
the mantissa are noise and travel as they are. Printed are the bytes that are left, what coding and
decoding take of one thread's processor time, and the rate of the link below which that is less than
what the network saves. Each rank codes its gradient and decodes one other's.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from docs.studies.common import columns
from runs.tasks import make_task

CODERS = {"Huffman": zlib.Z_HUFFMAN_ONLY, "with matches": zlib.Z_DEFAULT_STRATEGY}
ROUNDS = 5


def gradient(model: str, steps: int) -> Tensor:
    """(elements,), float32."""
    task = make_task("text", model=model)
    net = task.build_model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(net, task.batch(step, 0, 1)).backward()
        optimizer.step()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def seconds(do: Callable[[], Any]) -> float:
    """Of processor time, the median of some rounds."""
    spent = []
    for _ in range(ROUNDS):
        began = time.process_time()
        do()
        spent.append(time.process_time() - began)
    return median(spent)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt-10m")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    values = gradient(given.model, given.steps)
    planes = values.bfloat16().view(torch.uint8).view(-1, 2)  # little-endian: mantissa, exponent
    exponents = planes[:, 1].contiguous().numpy().tobytes()
    raw = 2 * len(values)
    rows: list[Sequence[str]] = [
        ("coder", "bytes left", "coding ns/el.", "decoding ns/el.", "pays below Mbit/s")
    ]
    for name, strategy in CODERS.items():

        def encode(strategy: int = strategy) -> bytes:
            coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, strategy)
            return coder.compress(exponents) + coder.flush()

        coded = encode()
        assert zlib.decompress(coded, -15) == exponents
        left = len(values) + len(coded)
        code, decode = seconds(encode), seconds(partial(zlib.decompress, coded, -15))
        rate = 8 * (raw - left) / (code + decode) / 1e6
        nano = [f"{1e9 * each / len(values):.1f}" for each in (code, decode)]
        rows.append((name, f"{left / raw:.0%}", *nano, f"{rate:.0f}"))
    print(f"{len(values) / 1e6:.3g} M elements")
    print(columns(rows))


if __name__ == "__main__":
    main()
