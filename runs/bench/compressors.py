"""Compressors on one thread: top-k with all that a step needs against the textbook sequence, and
every compressor against a copy of the tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adaptive.exchange.bucket import Unit, compress_levels, record_levels, strided_sample
from adaptive.statistics.vector import Tally
from compressors import Compressor, RoundsCompressor, TopK, compressor_names, make_compressor
from compressors.base import Spec, kept
from runs.bench.timing import Row, describe, interleaved, median_ratio
from runs.coding import KEY, in_rounds, our_step

if TYPE_CHECKING:
    from runs.bench.command import Benching


def _gradient(numel: int, seed: int) -> Tensor:
    """Noise that is not quite normal, as gradients are not."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator)


def textbook(residual: Tensor, grad: Tensor, cf: float) -> tuple[Tensor, Tensor, float, float]:
    """Accumulate, select, pack, residual, energies: as papers write it down."""
    residual.add_(grad)
    _, indices = torch.topk(residual.abs(), kept(residual.numel(), cf), sorted=False)
    values = residual[indices]
    dense = torch.zeros_like(residual).scatter_(0, indices, values)
    total = float(residual.norm() ** 2)
    residual.sub_(dense)
    return indices, values, float(values.norm() ** 2), total


def _with_candidate(residual: Tensor, grad: Tensor, cf: float, candidate: float) -> None:
    """The same, not packed, with a candidate CF and all three gains of both."""
    compressor = TopK()
    levels, numel = (cf, candidate), grad.numel()
    unit = Unit(0, numel, KEY, compressor, compressor, cf, levels, ())
    payloads = compress_levels(unit, residual, grad)
    record_levels(unit, payloads, strided_sample(grad), Tally(cfs=levels))
    compressor.add_to(residual, payloads[0], -1.0)


def _topk_rows(grad: Tensor, rounds: int) -> list[Row]:
    numel, topk, rows = grad.numel(), TopK(), []
    for cf in (100.0, 1000.0):
        wire = torch.empty(topk.nbytes(Spec((numel,), cf)), dtype=torch.uint8)
        state = {name: torch.zeros(numel) for name in ("textbook", "ours", "candidate", "copy")}
        times = interleaved(
            {
                "textbook": partial(textbook, state["textbook"], grad, cf),
                "ours": partial(our_step, topk, wire, state["ours"], grad, cf),
                "candidate": partial(_with_candidate, state["candidate"], grad, cf, 10 * cf),
                "copy": partial(state["copy"].copy_, grad),
            },
            rounds,
        )
        for name, one, other, goal in (
            ("textbook / ours", "textbook", "ours", ">= 15"),
            ("ours / copy", "ours", "copy", "<= 5"),
            (
                f"with candidate CF {10 * cf:g} and gains / without",
                *("candidate", "ours", "<= 1.10"),
            ),
        ):
            ratio = median_ratio(times[one], times[other])
            rows.append(Row(f"topk CF {cf:g}: {name}", ratio, goal, describe(times)))
    return rows


CF = 100.0
GOALS = {
    **dict.fromkeys(("topk", "dgc", "redsync", "sidco", "threshold", "adacomp"), "<= 5"),
    **dict.fromkeys(("qsgd", "fp16", "bf16", "int8"), "<= 8"),
}
CODED = ("topk+bf16", "topk+int8", "topk+int4", "topk+qsgd")


def bench_compressors(asked: Benching) -> list[Row]:
    """Top-k against the textbook, then each compressor in copies."""
    torch.set_num_threads(1)
    numel = asked.numel
    side = isqrt(numel)
    grad = _gradient(numel, asked.seed)
    rows = _topk_rows(grad, asked.rounds)
    for name in (*compressor_names(), *CODED):
        if name == "none":
            continue
        compressor = make_compressor(name)
        cf = compressor.nearest(Spec.shaped((side, side), CF))
        step = _step(compressor, torch.zeros(numel), grad, cf)
        copy = partial(torch.zeros(numel).copy_, grad)
        times = interleaved({name: step, "copy": copy}, asked.rounds)
        ratio = median_ratio(times[name], times["copy"])
        what = f"{name} CF {cf:g}: step / copy"
        rows.append(Row(what, ratio, GOALS.get(name, ""), describe(times)))
    return rows


def _step(
    compressor: Compressor, residual: Tensor, grad: Tensor, cf: float
) -> Callable[[], object]:
    """In rounds: a step in a world of one, on the largest square matrix that the tensor holds."""
    if not isinstance(compressor, RoundsCompressor):
        wire = torch.empty(compressor.nbytes(Spec((grad.numel(),), cf)), dtype=torch.uint8)
        return partial(our_step, compressor, wire, residual, grad, cf)
    side = isqrt(grad.numel())
    square, key = slice(side * side), KEY._replace(shape=(side, side))
    return lambda: in_rounds(compressor, [residual[square].add_(grad[square])], cf, [key])
