"""Norms and selections in Triton against the host's, run by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from compressors import DGC, Compressor, Key, RedSync, TopK
from compressors.base import Spec
from compressors.kernels import HOST
from compressors.kernels.blocks import Selected, ThresholdSearch
from compressors.kernels.triton import fits
from compressors.thresholds import bisect, bisect_at_once
from tests.unit.device_path import Launches, count_operations, meta, triton_path
from tests.unit.samples import norm2, normal
from tests.unit.triton_compile import Kernel, assembly

triton = pytest.importorskip("triton", minversion="3.3")
DEVICE = "cpu"

from compressors.kernels.triton import select as triton_select  # noqa: E402
from compressors.kernels.triton.select import SIZES, Sizes  # noqa: E402

KEY = Key("w", 5)
KERNELS = ("_accumulate", "_sample", "_gather", "_digit", "_count", "_take", "_select_alone")

on_gpu = [Sizes(16, 4, 4, 1, 0), Sizes(16, 2, 16, 1, 60)]  # each is compiled
interpreted = st.builds(
    Sizes,
    block=st.just(16),
    programs=st.sampled_from([1, 2, 4]),
    share=st.sampled_from([1, 4, 16]),
    warps=st.just(1),
    alone=st.sampled_from([0, 60]),
    sample=st.sampled_from([8, 32]),
)
sizes = st.sampled_from(on_gpu) if DEVICE == "cuda" else interpreted
few = settings(max_examples=8, deadline=None)


def reference(x: np.ndarray, k: int, threshold: float = 0.0) -> np.ndarray:
    """Ascending positions of the elements that reach the threshold, at most the `k` largest, at
    least the largest; the lower index first among equals. NaN is above infinity."""
    magnitude = np.where(np.isnan(x), inf, np.abs(x).astype(np.float64))
    order = np.lexsort((np.arange(x.size), -magnitude, ~np.isnan(x)))
    reached = np.flatnonzero(~(np.abs(x) < np.float32(threshold)))
    chosen = [i for i in order[:k] if i in reached] or order[:1]
    return np.sort(np.array(chosen, np.int64))


def check(found: Selected, x: np.ndarray, k: int, expected: np.ndarray) -> None:
    missing = k - expected.size
    assert (found.indices.dtype, found.values.dtype) == (torch.int32, torch.float32)
    assert found.indices.tolist() == [*expected.tolist(), *[x.size] * missing]
    values = np.append(x[expected], np.zeros(missing, np.float32))
    np.testing.assert_array_equal(found.values.cpu().numpy(), values)
    assert isinstance(found.total, Tensor)
    assert (found.total.dtype, found.total.shape) == (torch.float64, ())
    norm = norm2(torch.from_numpy(x))
    assert float(found.total) == pytest.approx(norm, rel=1e-12, abs=0.0, nan_ok=True)


def given_to(x: Tensor | np.ndarray) -> Tensor:
    """A copy where the kernels work."""
    return torch.as_tensor(x).to(DEVICE, copy=True)


awkward = st.one_of(
    st.integers(-3, 3).map(float),
    st.floats(width=32),
    st.sampled_from([nan, -nan, inf, -inf, 0.0, -0.0, 1e-45, -1e-42, 3e38, 1.0, 1.0000001]),
)


@few
@given(data=st.data(), numel=st.integers(2, 120), sizes=sizes)
def test_what_is_selected_is_what_sorting_says(data: Any, numel: int, sizes: Sizes) -> None:
    x = data.draw(arrays(np.float32, numel, elements=awkward))
    k = data.draw(st.integers(1, numel))
    check(triton_select.select(given_to(x), k, None, sizes), x, k, reference(x, k))


@few
@given(data=st.data(), numel=st.integers(2, 120), sizes=sizes)
def test_above_a_threshold_as_comparing_says(data: Any, numel: int, sizes: Sizes) -> None:
    x = data.draw(arrays(np.float32, numel, elements=awkward))
    k = data.draw(st.integers(1, numel))
    threshold = data.draw(st.one_of(awkward, st.sampled_from(np.abs(x).tolist())))
    given = torch.tensor(threshold, dtype=torch.float64, device=DEVICE)
    each = data.draw(st.sampled_from([threshold, given, given.float()]))
    found = triton_select.select_above(given_to(x), each, k, None, sizes)
    check(found, x, k, reference(x, k, threshold))


NAN_BITS = (0x7FC00000, 0xFFC00001, 0x7FC12345, 0x7FFFFFFF)


@pytest.mark.parametrize("threshold", [nan, -1.0, -0.0, 1e-45, 2.0, 3e38, inf])
def test_thresholds_and_elements_that_are_no_usual_numbers(threshold: float) -> None:
    """All NaN are equal, reach every threshold, and are above infinity; NaN excludes nothing."""
    odd = np.array(NAN_BITS, np.uint32).view(np.float32)
    usual = np.array([2.0, -0.0, 1e-45, -2.0, 5e-42, 1e38, 0.0, 1.5], np.float32)
    infinite = np.array([inf, -inf], np.float32)
    for x in (usual, np.concatenate([usual, infinite]), np.concatenate([usual, infinite, odd])):
        for k in (2, 7):
            for small in (Sizes(4, 2, 2, 1, 0), Sizes(alone=20)):
                found = triton_select.select_above(given_to(x), threshold, k, None, small)
                check(found, x, k, reference(x, k, threshold))


@few
@given(numel=st.integers(2, 150), offset=st.integers(0, 3), seed=st.integers(0, 99), sizes=sizes)
def test_the_sum_is_selected_as_on_the_host_to_the_bit(
    numel: int, offset: int, seed: int, sizes: Sizes
) -> None:
    x, add = normal(numel + offset, seed=seed)[offset:], normal(numel, seed=seed + 1)
    k = 1 + seed % numel
    expected = HOST.select(x.clone(), k, add)
    held = given_to(normal(numel + offset, seed=seed))
    found = triton_select.select(held[offset:], k, given_to(add), sizes)
    assert torch.equal(held[offset:].cpu(), x + add)
    assert torch.equal(held[:offset].cpu(), normal(numel + offset, seed=seed)[:offset])
    check(found, (x + add).numpy(), k, expected.indices.numpy())
    again = triton_select.select(held[offset:], k, None, sizes)
    assert torch.equal(found.total, again.total)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize("numel", [2, 16, 700])
def test_norms(numel: int, scale: float) -> None:
    small = Sizes(16, 8, 4, 1)
    x, y = normal(numel) * scale, normal(numel, seed=1) * scale
    memory = given_to(x)
    assert float(triton_select.squared_norm(memory, small)) == pytest.approx(norm2(x), rel=1e-12)
    norm = triton_select.add_and_norm(memory, given_to(y), small)
    assert float(norm) == pytest.approx(norm2(x + y), rel=1e-12)
    assert torch.equal(memory.cpu(), x + y)


@pytest.mark.parametrize("name", ["zero", "constant", "two values", "one octave", "ascending"])
def test_where_lists_overflow_the_chunks_are_read(name: str) -> None:
    """Half of the elements or more begin with the same digit as the k-th largest one, and a list
    holds one in eight."""
    numel, small = 150, Sizes(16, 4, 8, 1)
    x = {
        "zero": np.zeros(numel),
        "constant": np.full(numel, -0.3),
        "two values": np.random.default_rng(0).integers(0, 2, numel) * 2.0 - 3.0,
        "one octave": np.random.default_rng(0).uniform(1.0, 1.125, numel),
        "ascending": 1.0 + np.arange(numel) / 2**23,
    }[name].astype(np.float32)
    for k in (1, 60, numel):
        found = triton_select.select(given_to(x), k, None, small)
        check(found, x, k, reference(x, k))
    found = triton_select.select_above(given_to(x), 1e9, 7, None, small)
    check(found, x, 7, reference(x, 1))


@pytest.mark.parametrize("k", [1, 8, 9, 60, 150])
def test_a_sample_that_is_wrong_costs_time_only(k: int) -> None:
    """The sample has the eight first elements, which are the only large ones."""
    small = Sizes(16, 4, 8, 1, 0, sample=8)
    x = np.random.default_rng(0).uniform(1.0, 2.0, 150).astype(np.float32)
    x[:8] += 9
    check(triton_select.select(given_to(x), k, None, small), x, k, reference(x, k))
    above = triton_select.select_above(given_to(x), 1.5, k, None, small)
    check(above, x, k, reference(x, k, 1.5))


@few
@given(numel=st.integers(3, 200), cf=st.floats(1.1, 50), seed=st.integers(0, 99), sizes=sizes)
def test_by_count_as_on_the_host(numel: int, cf: float, seed: int, sizes: Sizes) -> None:
    x, add, k = normal(numel, seed=seed), normal(numel, seed=seed + 1), max(1, int(numel / cf))
    search = ThresholdSearch(bisect, bisect_at_once)
    expected = HOST.select_by_count(x.clone(), k, add, search)
    held = given_to(x)
    found = triton_select.select_by_count(held, k, given_to(add), search, sizes)
    check(found, (x + add).numpy(), k, expected.indices.numpy())


@pytest.mark.parametrize("compressor", [TopK(), DGC(), RedSync()], ids=lambda c: c.name)
@pytest.mark.parametrize("numel", [0, 1, 2, 4099])
def test_a_whole_compressor_is_as_on_the_host(compressor: Compressor, numel: int) -> None:
    for cf in (1.0, 1.5, 30.0):
        memory, add = normal(numel), normal(numel, seed=1)
        held = given_to(memory)
        expected = compressor.compress(memory, Spec.of(memory, cf, KEY), add)
        with triton_path():
            found = compressor.compress(held, Spec.of(held, cf, KEY), given_to(add))
            further = compressor.smaller(found, 4.0)
            compressor.add_to(held, found, -1.0)
            assert found.parts[0].numel() == max(min(numel, 1), int(numel / cf))
        indices, values = (part.cpu() for part in found.parts)
        count = expected.parts[0].numel()
        assert torch.equal(indices[:count], expected.parts[0])
        assert torch.equal(values, expected.parts[1])
        assert (indices[count:] == numel).all()
        torch.testing.assert_close(found.energies.cpu(), expected.energies, rtol=1e-5, atol=1e-6)
        compressor.add_to(memory, expected, -1.0)
        assert torch.equal(held.cpu(), memory)
        again = compressor.smaller(expected, 4.0).parts[0]
        assert torch.equal(further.parts[0].cpu()[: again.numel()], again)


def test_only_what_the_kernels_know_takes_them() -> None:
    x = normal(40)
    assert not fits(x)
    with triton_path():
        assert fits(x)
        assert fits(x, x)
        assert fits(x[1:], None)
        for other in (x.half(), x.double(), x[::2], x[:0], torch.nn.Parameter(x)):
            assert not fits(other)
        assert not fits(x, x.half())


def test_launches_do_not_grow_with_the_tensor_and_no_value_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = Launches()
    for name in KERNELS:
        monkeypatch.setattr(triton_select, name, launches)

    def count(call: Callable[..., object], *args: object) -> int:
        before = len(launches.grids)
        operations = count_operations(lambda: call(*args))
        return operations + len(launches.grids) - before

    assert count(triton_select.select, meta(SIZES.alone), 7, meta(SIZES.alone)) == 1
    assert count(triton_select.select_above, meta(SIZES.alone), meta(1)[0], 7, None) == 1
    for numel in (SIZES.alone + 1, 2**31 - 1):
        x, add, threshold, k = meta(numel), meta(numel), meta(1)[0], numel // 100
        assert count(triton_select.select, x, k, add) == 8
        assert count(triton_select.select_above, x, threshold, k, add) == 8
        assert count(triton_select.add_and_norm, x, add) == 2
    assert all(0 < grid[0] <= SIZES.programs and grid[1:] in ((), (1,)) for grid in launches.grids)


# Compiled for a GPU that need not be there -------------------------------------------------------

TYPES = {
    **dict.fromkeys(("x", "add", "values", "taken"), "*fp32"),
    **dict.fromkeys(("squares", "total", "threshold"), "*fp64"),
    **dict.fromkeys(("counts", "positions", "listed", "above", "equal", "indices"), "*i32"),
    **dict.fromkeys(("k", "numel", "chunk", "capacity", "rank", "digit"), "i32"),
}


def _kernel(name: str, aligned: bool = True, **constants: None) -> Kernel:
    block, warps, odd = SIZES.block, SIZES.warps, ("k", "numel", "digit")
    more: dict[str, int] = {}
    if name == "_accumulate":
        odd = ()
    if name == "_gather":
        odd = ("k", "numel", "x", "add")
    if name == "_select_alone":
        block, warps, odd = 1 << 13, 16, ("k", "numel", "x", "add")
    if name == "_take":
        more, odd = {"programs": SIZES.programs}, ("k", "numel", "x", "positions", "values")
    if name == "_sample":
        more, warps, odd = {"sample": SIZES.sample, "cleared": 2048}, 32, ("rank", "numel")
    fixed = {**({} if name == "_sample" else {"block": block}), **more, **constants}
    return Kernel(name, TYPES, fixed, aligned, odd, warps)


def test_kernels_compile_for_a_gpu() -> None:
    kernels = [_kernel(name) for name in KERNELS]
    kernels += [
        _kernel("_accumulate", aligned=False),
        _kernel("_accumulate", add=None),
        _kernel("_gather", add=None),
        _kernel("_take", threshold=None),
        _kernel("_select_alone", add=None, threshold=None),
    ]
    for kernel, found in zip(kernels, assembly(triton_select.__name__, kernels), strict=True):
        assert "ld.global" in found, kernel.name
        assert ".ftz" not in found, kernel.name  # denormals are magnitudes like others
        lists = "x" in kernel.odd or kernel.name == "_sample"
        assert ".v4." in found or lists or not kernel.aligned, kernel.name  # 16 bytes at once
