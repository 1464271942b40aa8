"""Top-k with all that a step needs, against the textbook sequence. One thread."""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
from torch import Tensor

from adaptive.multilevel import measure_levels
from adaptive.sample import strided_sample
from adaptive.tally import Tally
from compressors import TopK
from compressors.base import Key, Payload, kept
from runs.bench.timing import Row, interleaved, median_ratio

KEY = Key("bench")


def textbook(residual: Tensor, grad: Tensor, cf: float) -> tuple[Tensor, Tensor, float, float]:
    """Accumulate, select, pack, residual, energies: as papers write it down."""
    residual.add_(grad)
    _, indices = torch.topk(residual.abs(), kept(residual.numel(), cf), sorted=False)
    values = residual[indices]
    dense = torch.zeros_like(residual).scatter_(0, indices, values)
    total = float(residual.norm() ** 2)
    residual.sub_(dense)
    return indices, values, float(values.norm() ** 2), total


def ours(residual: Tensor, grad: Tensor, cf: float, candidate: float | None = None) -> Payload:
    """The same; with a candidate, all three gains of both CFs are measured as well."""
    compressor = TopK()
    if candidate is None:
        payload = compressor.compress_sum(residual, grad, cf, KEY)
    else:
        first = partial(compressor.compress_sum, residual, grad, key=KEY)
        tally = Tally(cfs=(cf, candidate))
        payload, _ = measure_levels(
            compressor, lambda lowest: first(cf=lowest), strided_sample(grad), KEY, tally
        )
    compressor.subtract_from(residual, payload)
    return payload


def bench_topk(numel: int, rounds: int, seed: int) -> list[Row]:
    """Ratios at CF 100 and 1000, after checking that both keep the same."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(numel, generator=generator)
    grad *= torch.rand(numel, generator=generator)  # not quite normal, as gradients are not
    rows = []
    for cf in (100.0, 1000.0):
        _check(grad, cf)
        state = {name: torch.zeros(numel) for name in ("textbook", "ours", "candidate", "copy")}
        times = interleaved(
            {
                "textbook": partial(textbook, state["textbook"], grad, cf),
                "ours": partial(ours, state["ours"], grad, cf),
                "candidate": partial(ours, state["candidate"], grad, cf, 10 * cf),
                "copy": partial(state["copy"].copy_, grad),
            },
            rounds,
        )
        milliseconds = {name: 1e3 * median(seconds) for name, seconds in times.items()}
        detail = ", ".join(f"{name} {ms:.1f} ms" for name, ms in milliseconds.items())
        speedup = median_ratio(times["textbook"], times["ours"])
        rows.append(Row(f"topk CF {cf:g}: textbook / ours", speedup, ">= 10", detail))
        copies = median_ratio(times["ours"], times["copy"])
        rows.append(Row(f"topk CF {cf:g}: ours / copy", copies, "", ""))
        candidate = median_ratio(times["candidate"], times["ours"])
        what = f"topk CF {cf:g}: with candidate CF {10 * cf:g} and gains / without"
        rows.append(Row(what, candidate, "<= 1.10", ""))
    return rows


def _check(grad: Tensor, cf: float) -> None:
    a, b = torch.zeros_like(grad), torch.zeros_like(grad)
    for _ in range(2):
        total = float((a + grad).double().square().sum())  # textbook's float32 norm is 0.3% off
        _, values, _, _ = textbook(a, grad, cf)
        energy = float(values.double().square().sum())
        payload = ours(b, grad, cf)
        kept_values = payload.parts[1] if payload.parts[1].is_floating_point() else payload.parts[0]
        same = torch.equal(values.abs().sort().values, kept_values.abs().sort().values)
        if not (same and torch.equal(a, b)):
            raise RuntimeError("top-k does not keep what the textbook sequence keeps")
        torch.testing.assert_close(payload.energy, energy, rtol=1e-5, atol=0)
        torch.testing.assert_close(payload.error, total - energy, rtol=1e-5, atol=0)
