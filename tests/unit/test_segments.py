"""Selection in the segments of a tensor: on the host, by torch's operations, and by Triton's
interpreter, against a loop over the segments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate, pairwise
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressors import TopK, make_compressor
from compressors.base import Spec, kept
from compressors.kernels import HOST, kernels_for, segments
from compressors.kernels.blocks import Selected
from compressors.kernels.reference import Kernels
from tests.unit.device_path import Launches, count_operations, device_path, meta
from tests.unit.samples import norm2, normal
from tests.unit.triton_compile import Kernel, assembly

LENGTHS = st.lists(
    st.one_of(st.integers(1, 40), st.sampled_from([2047, 2048, 2049, 9000])), min_size=2, max_size=9
)
CFS = st.sampled_from([1.0, 1.5, 3.0, 10.0, 1000.0])
Select = Callable[[Tensor, tuple[int, ...], tuple[int, ...], Tensor | None], Selected]


def expected(x: Tensor, lengths: tuple[int, ...], counts: tuple[int, ...]) -> list[int]:
    """Positions of the largest elements of each segment; among equal ones the lower."""
    found = []
    for (start, stop), k in zip(pairwise(accumulate(lengths, initial=0)), counts, strict=True):
        order = np.argsort(-x[start:stop].abs().numpy(), kind="stable")
        found += sorted((start + order[:k]).tolist())
    return found


def made(numel: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Many magnitudes are equal, where the seed is even; some are 0."""
    x = normal(numel, seed=seed).to(dtype)
    return (2 * x).round() if seed % 2 == 0 else x


def check(select: Select, lengths: list[int], cf: float, seed: int, dtype: torch.dtype) -> None:
    numel = sum(lengths)
    x = made(numel, seed, dtype)
    add = made(numel, seed + 1000, dtype) if seed % 3 else None
    both = x.clone() if add is None else x + add
    of = tuple(lengths), tuple(kept(length, cf) for length in lengths)
    found = select(x, *of, add)
    assert torch.equal(x, both)
    assert found.indices.dtype == torch.int32
    assert found.indices.tolist() == expected(both, *of)
    assert torch.equal(found.values, both[found.indices.long()])
    assert float(found.total) == pytest.approx(norm2(both), rel=1e-5)


@given(LENGTHS, CFS, st.integers(0, 99), st.sampled_from([torch.float32, torch.float64]))
def test_on_the_host(lengths: list[int], cf: float, seed: int, dtype: torch.dtype) -> None:
    check(HOST.select_segments, lengths, cf, seed, dtype)


@given(LENGTHS, CFS, st.integers(0, 99), st.sampled_from([torch.float32, torch.float64]))
def test_by_torchs_operations(lengths: list[int], cf: float, seed: int, dtype: torch.dtype) -> None:
    check(Kernels().select_segments, lengths, cf, seed, dtype)


def test_more_segments_than_a_key_can_number(monkeypatch: pytest.MonkeyPatch) -> None:
    segments.segments_of.cache_clear()
    monkeypatch.setattr(segments, "_MOST", 3)
    check(HOST.select_segments, [5, 9, 2, 30, 7], 3.0, 1, torch.float32)
    segments.segments_of.cache_clear()


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=2, max_size=9),
    cf=CFS,
    factor=st.sampled_from([1.0, 2.5, 100.0]),
    base=st.sampled_from(["topk+fp32", "topk+int4"]),
    seed=st.integers(0, 99),
)
def test_a_payload_of_segments_is_that_of_each_by_itself(
    lengths: list[int], cf: float, factor: float, base: str, seed: int
) -> None:
    """Sent values and indices, after the wire, and at a larger CF. (Codes share scales.)"""
    compressor, numel = make_compressor(base), sum(lengths)
    assert isinstance(compressor, TopK)
    x = normal(numel, seed=seed)
    spec = Spec(tuple(lengths), cf)
    payload = compressor.compress(x.clone(), spec)
    wire = torch.empty(payload.nbytes, dtype=torch.uint8)
    payload.write(wire)
    assert payload.nbytes == compressor.nbytes(spec)
    (received,) = compressor.read(wire[None], spec)
    small = compressor.smaller(payload, factor)
    assert small.nbytes == compressor.nbytes(spec.at(cf * factor))
    for each, at in ((received, cf), (payload, cf), (small, cf * factor)):
        counts = tuple(kept(length, at) for length in lengths)
        assert each.indices is not None
        assert each.indices.tolist() == expected(x, tuple(lengths), counts)
        decoded = torch.zeros(numel)
        compressor.add_to(decoded, each)
        if base == "topk+fp32":
            kept_there = torch.zeros(numel).index_fill_(0, each.indices.long(), 1.0)
            assert torch.equal(decoded, x * kept_there)


class AtMost(TopK):
    """Keeps one element less than it may, where it may keep several."""

    exact_count = False

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Any) -> Selected:
        raise NotImplementedError

    def select_segments(self, tensor: Tensor, spec: Spec, add: Tensor | None) -> Selected:
        fewer = tuple(max(1, count - 1) for count in spec.counts)
        return kernels_for(tensor).select_segments(tensor, spec.segments, fewer, add)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_sparsifier_may_keep_fewer_elements_of_each_segment(on_device: bool) -> None:
    lengths, x = (60, 5, 3000), normal(3065)
    with device_path() if on_device else nullcontext():
        payload = AtMost().compress(x.clone(), Spec(lengths, 5.0))
        small = AtMost().smaller(payload, 4.0)
    counts = tuple(kept(length, 20.0) for length in lengths)
    assert payload.indices is not None
    assert payload.indices.numel() == sum(max(1, kept(n, 5.0) - 1) for n in lengths)
    assert small.indices is not None
    assert small.indices.tolist() == expected(x, lengths, counts)
    assert float(small.energy) == pytest.approx(norm2(x[small.indices.long()]))


def test_a_sparsifier_of_ones_own_is_not_handed_segments() -> None:
    """It inherits `select_segments`, which does not select as its own `select` does."""

    class Odd(TopK):
        def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Any) -> Selected:
            return super().select(tensor, k, add, key)

    assert TopK().by_segments
    assert TopK("int4").uncoded().by_segments
    assert not Odd().by_segments
    assert not make_compressor("dgc").by_segments  # type: ignore[attr-defined]


# Triton ------------------------------------------------------------------------------------------

KERNELS = ("_first", "_digit", "_count", "_take")


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=5), CFS, st.integers(0, 99))
def test_by_tritons_interpreter(lengths: list[int], cf: float, seed: int) -> None:
    pytest.importorskip("triton", minversion="3.3")
    from compressors.kernels.triton.segments import select_segments

    def select(*args: Any) -> Selected:
        return select_segments(*args, tile=16)

    check(select, lengths, cf, seed, torch.float32)


def test_what_is_not_finite_counts_as_largest_in_its_segment() -> None:
    pytest.importorskip("triton", minversion="3.3")
    from compressors.kernels.triton.segments import select_segments

    x = torch.tensor([1.0, nan, 2.0, inf, 3.0, -4.0, -inf, 5.0, 6.0])
    for select in (HOST.select_segments, Kernels().select_segments, select_segments):
        assert select(x, (3, 6), (1, 2), None).indices.tolist() == [1, 3, 6]


def test_launches_do_not_grow_with_the_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", minversion="3.3")
    from compressors.kernels.triton import segments as kernels

    launches = Launches()
    for name in KERNELS:
        monkeypatch.setattr(kernels, name, launches)

    def count(select: Any, lengths: tuple[int, ...]) -> int:
        counts, before = tuple(kept(each, 10.0) for each in lengths), len(launches.grids)
        numel = sum(lengths)
        select(meta(numel), lengths, counts, meta(numel))  # makes the tables
        before = len(launches.grids)
        operations = count_operations(lambda: select(meta(numel), lengths, counts, meta(numel)))
        return operations + len(launches.grids) - before

    few, many = (300, 4000), (7, 5000, 90_000, *range(2, 300))
    assert count(kernels.select_segments, few) == count(kernels.select_segments, many) <= 24
    reference = Kernels().select_segments
    assert count(reference, few) == count(reference, many) <= 32


def test_kernels_compile_for_a_gpu() -> None:
    pytest.importorskip("triton", minversion="3.3")
    types = {
        **dict.fromkeys(("x", "add", "values"), "*fp32"),
        **dict.fromkeys(("of", "begins", "lengths", "k", "found", "above", "equal"), "*i32"),
        **dict.fromkeys(("wanted", "ties", "used", "indices"), "*i32"),
        **{"squares": "*fp64", "digit": "i32"},
    }
    odd = {"_digit": ("digit",), "_take": ("x", "indices", "values")}
    fixed = {"block": 2048}
    kernels = [Kernel(name, types, fixed, True, odd.get(name, ()), 8) for name in KERNELS]
    kernels.append(Kernel("_first", types, {**fixed, "add": None}, True, (), 8))
    module = "compressors.kernels.triton.segments"
    for kernel, found in zip(kernels, assembly(module, kernels), strict=True):
        assert "ld.global" in found, kernel.name
        assert ".ftz" not in found, kernel.name
