"""Every compressor with all that a step needs, against a copy of the tensor. One thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isqrt

import torch
from torch import Tensor

from compressors import Compressor, RoundsCompressor, compressor_names, make_compressor
from compressors.base import Key, Payload
from runs.bench.allocations import largest_allocation
from runs.bench.textbook import KEY, bench_topk, gradient, our_step
from runs.bench.timing import Row, describe, interleaved, median_ratio

CF = 100.0
GOALS = {
    **dict.fromkeys(("topk", "dgc", "redsync", "sidco", "threshold", "adacomp"), "<= 5"),
    **dict.fromkeys(("qsgd", "fp16", "bf16", "int8"), "<= 8"),
}
CODED = ("topk+bf16", "topk+int8", "topk+int4", "topk+qsgd")


def bench_compressors(numel: int, rounds: int, seed: int) -> list[Row]:
    """Top-k against the textbook, then each compressor in copies and by its largest allocation."""
    rows = bench_topk(numel, rounds, seed)
    side = isqrt(numel)
    grad = gradient(numel, seed)
    for name in (*compressor_names(), *CODED):
        if name == "none":
            continue
        compressor = make_compressor(name)
        cf = compressor.supported_for(CF, (side, side))
        state = {each: torch.zeros(numel) for each in ("ours", "copy")}
        step = _step(compressor, state["ours"], grad, cf)
        copy = partial(state["copy"].copy_, grad)
        times = interleaved({name: step, "copy": copy}, rounds)
        ratio = median_ratio(times[name], times["copy"])
        allocated = largest_allocation(step) / (4 * numel)
        detail = f"{describe(times)}, largest allocation {allocated:.3f} of the gradient"
        rows.append(Row(f"{name} CF {cf:g}: step / copy", ratio, GOALS.get(name, ""), detail))
    return rows


def _step(
    compressor: Compressor, residual: Tensor, grad: Tensor, cf: float
) -> Callable[[], object]:
    if isinstance(compressor, RoundsCompressor):
        side = isqrt(grad.numel())
        return partial(_rounds, compressor, residual, grad, cf, KEY._replace(shape=(side, side)))
    wire = torch.empty(compressor.payload_nbytes(grad.numel(), cf), dtype=torch.uint8)
    return partial(our_step, compressor, wire, residual, grad, cf)


def _rounds(
    compressor: RoundsCompressor, residual: Tensor, grad: Tensor, cf: float, key: Key
) -> None:
    """A step in a world of one, on the largest square matrix that the tensor holds."""
    numel = key.shape[0] * key.shape[1]
    a = residual[:numel].add_(grad[:numel])
    own: list[Payload] = []
    rounds = compressor.rounds([a], [cf], [key], 1, own.extend)
    handed = next(rounds)
    try:
        while True:
            handed = rounds.send(handed)
    except StopIteration:
        compressor.subtract_from(a, own[0])
