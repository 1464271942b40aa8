"""What compressing and decoding take, in nanoseconds an element, for `--coding`.

    python docs/studies/coding.py topk+fp32@10 dgc+fp32@1000 qsgd@4.5714
    python docs/studies/coding.py topk@10+100 dgc@10+100

Processor time of one thread, for one tensor: accumulate, select, pack, take what is sent off the
residual, and decode one payload for each of two workers. Medians of rounds. "textbook@CF" is top-k
as papers write it down, by `torch.topk` and a dense copy of what is sent. "NAME@FLOOR+CANDIDATE" is
what compressing at two CFs takes (GraVAC, section 3.2): each from the whole tensor, and in levels,
the candidate from what the floor has kept.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from compressors import make_compressor
from compressors.base import Spec
from runs.bench.compressors import textbook
from runs.coding import KEY, nanoseconds


def of_contender(spec: str, numel: int, rounds: int, workers: int = 2) -> float:
    """Of a contender NAME@CF, for each element."""
    name, _, cf = spec.partition("@")
    if name != "textbook":
        return nanoseconds(make_compressor(name), float(cf), numel, rounds, workers)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator)
    residual, mean, spent = torch.zeros(numel), torch.zeros(numel), []
    for _ in range(rounds):
        began = time.process_time()
        indices, values, *_ = textbook(residual, grad, float(cf))
        for _ in range(workers):
            mean.index_add_(0, indices, values, alpha=1 / workers)
        spent.append(time.process_time() - began)
    return 1e9 * median(spent) / numel


def two_levels(spec: str, numel: int, rounds: int) -> tuple[float, float]:
    """Of NAME@FLOOR+CANDIDATE, for each element: each from the whole tensor, and in levels."""
    name, _, cfs = spec.partition("@")
    floor, candidate = map(float, cfs.split("+"))
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    how, at_floor = make_compressor(name), Spec((numel,), floor, key=KEY)
    apart, in_levels = [], []
    for _ in range(rounds):
        began = time.process_time()
        kept = how.compress(grad, at_floor)
        compressed = time.process_time()
        how.compress(grad, at_floor.at(candidate))
        twice = time.process_time()
        how.smaller(kept, candidate / floor)
        apart.append(twice - began)
        in_levels.append(compressed - began + time.process_time() - twice)
    return 1e9 * median(apart) / numel, 1e9 * median(in_levels) / numel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", nargs="+", metavar="NAME@CF")
    parser.add_argument("--numel", type=int, default=25_600_000)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for spec in given.spec:
        if "+" in spec.partition("@")[2]:
            apart, levels = two_levels(spec, given.numel, given.rounds)
            ratio = f"{apart / levels:.2f} times"
            print(f"{spec:20} {apart:8.2f} ns an element apart, {levels:.2f} in levels: {ratio}")
            continue
        print(f"{spec:20} {of_contender(spec, given.numel, given.rounds):8.2f} ns an element")


if __name__ == "__main__":
    main()
