"""Compressors on one thread: top-k with all that a step needs against the textbook sequence, every
compressor against a copy of the tensor, and multi-level compression against two direct ones."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive.bucket import Unit, compress_levels, record_levels, strided_sample
from adaptive.statistics.vector import Tally
from compressors import Compressor, RoundsCompressor, TopK, compressor_names, make_compressor
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
    in_rounds(compressor, [residual[:numel].add_(grad[:numel])], cf, [key])


def in_rounds(
    compressor: RoundsCompressor,
    residuals: Sequence[Tensor],
    cf: float,
    keys: Sequence[Key],
    exchange: Callable[[Tensor], object] = lambda handed: None,
) -> list[Payload]:
    """What has come of all rounds in a world of one, off the residuals. exchange: of each round."""
    own: list[Payload] = []
    rounds = compressor.rounds(residuals, [cf] * len(keys), keys, 1, own.extend)
    handed = next(rounds)
    try:
        while True:
            exchange(handed)
            handed = rounds.send(handed)
    except StopIteration as stop:
        for residual, payload in zip(residuals, own, strict=True):
            compressor.subtract_from(residual, payload)
        return list(stop.value)


LOW, HIGH = 10.0, 1000.0
PAPER = {
    "topk": "1.49 to 1.83",
    "dgc": "1.27 to 1.52",
    "redsync": "1.1 to 1.5",
    "randomk": "1.34 to 1.64",
}
"""Of three models (GraVAC, table of multi-level compression)."""


def _direct(compressor: Compressor, grad: Tensor) -> None:
    compressor.compress(grad, LOW, KEY)
    compressor.compress(grad, HIGH, KEY)


def _levels(compressor: Compressor, grad: Tensor) -> None:
    compressor.recompress(compressor.compress(grad, LOW, KEY), HIGH / LOW)


def bench_levels(numel: int, rounds: int, seed: int) -> list[Row]:
    """CF 10 and 1000 of one tensor: both direct / the second from the first."""
    torch.set_num_threads(1)
    grad, rows = gradient(numel, seed), []
    for name in ("topk", "dgc", "redsync", "sidco", "threshold", "randomk"):
        compressor = make_compressor(name)
        times = interleaved(
            {
                "direct": partial(_direct, compressor, grad),
                "levels": partial(_levels, compressor, grad),
            },
            rounds,
        )
        paper = f"; the paper's: {PAPER[name]}" if name in PAPER else ""
        ratio = median_ratio(times["direct"], times["levels"])
        what = f"{name} CF {LOW:g} and {HIGH:g}: two direct / two levels"
        rows.append(Row(what, ratio, "", describe(times) + paper))
    return rows


class _Watch(TorchDispatchMode):
    """Notes the largest memory block that a torch operation has made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {t.untyped_storage().data_ptr() for t in _tensors((args, tuple(kwargs.values())))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for each in value:
            yield from _tensors(each)


def largest_allocation(step: Callable[[], object]) -> int:
    """Bytes of the largest block that torch makes in a step, or of all that NumPy holds at its
    peak, whichever is more."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    with _Watch() as watch:
        step()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return max(peak, watch.largest)
