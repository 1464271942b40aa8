"""Bytes on the wire for each kept element, beside the fewest that any code could do with."""

from __future__ import annotations

from math import lgamma, log

from compressors import kept, make_compressor
from compressors.wire.indices import choose_format
from runs.bench.timing import Row

VALUES = {
    "topk": (4, "<= 6.1"),
    "topk+bf16": (2, "<= 4.1"),
    "topk+int8": (1, ""),
    "topk+int4": (0.5, "<= 2.3"),
}


def bench_wire(numel: int) -> list[Row]:
    """Bytes a kept element of the payload; the bound is log2 of the binomial, plus the values."""
    rows = []
    for size in (1_000_000, numel):
        for name, (value_bytes, goal) in VALUES.items():
            compressor = make_compressor(name)
            for cf in (10.0, 100.0, 1000.0):
                k = kept(size, cf)
                ours = compressor.payload_nbytes(size, cf) / k
                bound = bound_nbytes(size, k) / k + value_bytes
                what = f"{name} CF {cf:g} of {size / 1e6:g} M: bytes / kept element"
                detail = f"bound {bound:.2f}, {choose_format(size, k)}"
                rows.append(Row(what, ours, goal, detail))
    return rows


def bound_nbytes(numel: int, k: int) -> float:
    """Bytes that no format can beat on average: log2 of the number of subsets of `k` of `numel`
    elements, divided by 8."""
    subsets = lgamma(numel + 1) - lgamma(k + 1) - lgamma(numel - k + 1)
    return subsets / log(2) / 8
