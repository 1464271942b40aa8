"""Top-k with all that a step needs, against the textbook sequence. One thread."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from adaptive.bucket import Unit, compress_levels, record_levels, strided_sample
from adaptive.statistics.vector import Tally
from compressors import Compressor, TopK
from compressors.base import Key, Payload, kept
from runs.bench.timing import Row, describe, interleaved, median_ratio

KEY = Key("bench")


def gradient(numel: int, seed: int) -> Tensor:
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


def our_step(
    compressor: Compressor, wire: Tensor, residual: Tensor, grad: Tensor, cf: float
) -> Payload:
    """The same, packed for the wire as well."""
    payload = compressor.compress_sum(residual, grad, cf, KEY)
    payload.write(wire)
    compressor.subtract_from(residual, payload)
    return payload


def with_candidate(residual: Tensor, grad: Tensor, cf: float, candidate: float) -> None:
    """The same, not packed, with a candidate CF and all three gains of both."""
    compressor = TopK()
    levels, numel = (cf, candidate), grad.numel()
    unit = Unit(0, numel, KEY, compressor, compressor, cf, levels, ())
    payloads = compress_levels(unit, residual, grad)
    record_levels(unit, payloads, strided_sample(grad), Tally(cfs=levels))
    compressor.subtract_from(residual, payloads[0])


def bench_topk(numel: int, rounds: int, seed: int) -> list[Row]:
    """Ratios at CF 100 and 1000, after checking that both keep the same."""
    torch.set_num_threads(1)
    grad, topk = gradient(numel, seed), TopK()
    rows = []
    for cf in (100.0, 1000.0):
        _check(grad, cf)
        wire = torch.empty(topk.payload_nbytes(numel, cf), dtype=torch.uint8)
        state = {name: torch.zeros(numel) for name in ("textbook", "ours", "candidate", "copy")}
        times = interleaved(
            {
                "textbook": partial(textbook, state["textbook"], grad, cf),
                "ours": partial(our_step, topk, wire, state["ours"], grad, cf),
                "candidate": partial(with_candidate, state["candidate"], grad, cf, 10 * cf),
                "copy": partial(state["copy"].copy_, grad),
            },
            rounds,
        )
        what = f"topk CF {cf:g}: "
        speedup = median_ratio(times["textbook"], times["ours"])
        rows.append(Row(what + "textbook / ours", speedup, ">= 15", describe(times)))
        copies = median_ratio(times["ours"], times["copy"])
        rows.append(Row(what + "ours / copy", copies, "<= 5", ""))
        candidate = median_ratio(times["candidate"], times["ours"])
        what += f"with candidate CF {10 * cf:g} and gains / without"
        rows.append(Row(what, candidate, "<= 1.10", ""))
    return rows


def _check(grad: Tensor, cf: float) -> None:
    a, b = torch.zeros_like(grad), torch.zeros_like(grad)
    topk = TopK()
    wire = torch.empty(topk.payload_nbytes(grad.numel(), cf), dtype=torch.uint8)
    for _ in range(2):
        total = float((a + grad).double().square().sum())  # textbook's float32 norm is 0.3% off
        _, values, _, _ = textbook(a, grad, cf)
        energy = float(values.double().square().sum())
        payload = our_step(topk, wire, b, grad, cf)
        same = torch.equal(values.abs().sort().values, payload.parts[1].abs().sort().values)
        if not (same and torch.equal(a, b)):
            raise RuntimeError("top-k does not keep what the textbook sequence keeps")
        torch.testing.assert_close(float(payload.energy), energy, rtol=1e-5, atol=0)
        torch.testing.assert_close(float(payload.error), total - energy, rtol=1e-5, atol=0)
