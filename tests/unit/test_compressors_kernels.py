"""Kernels: those of the host and the reference give the same results."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from compressors.kernels import (
    HOST,
    REFERENCE,
    Kernels,
    add_and_norm,
    kernels_at,
    kernels_for,
    squared_norm,
)
from compressors.kernels.blocks import CACHE_BLOCK, ThresholdSearch, numbers_of_rows, rows, scratch
from compressors.kernels.host import Host
from compressors.kernels.triton import Triton
from tests.unit.samples import norm2, normal

SIZES = (1, 2, 700, 8192, CACHE_BLOCK + 5)
both = pytest.mark.parametrize("kernels", [HOST, REFERENCE], ids=["host", "reference"])
every_size = pytest.mark.parametrize("numel", SIZES)


def test_a_tensor_finds_its_kernels():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32):
        assert kernels_for(torch.zeros(1, dtype=dtype)) is HOST
    assert kernels_for(torch.zeros(1, device="meta")) is REFERENCE
    assert kernels_at(torch.device("cpu")) is HOST
    assert kernels_at(torch.device("meta")) is REFERENCE


@pytest.mark.parametrize("kernels", [Host, Triton])
def test_what_is_overridden_keeps_its_signature(kernels):
    own = [name for name, value in vars(kernels).items() if inspect.isfunction(value)]
    assert len(own) >= 7
    for name in own:
        assert inspect.signature(getattr(kernels, name)) == inspect.signature(
            getattr(Kernels, name)
        ), name


@both
def test_lists_of_indices(kernels):
    """Places that hold nothing come last, and are there on a device only."""
    empty = kernels is REFERENCE
    named = torch.tensor([7, 2, 7, 0, 2], dtype=torch.int32)
    union = kernels.union(named, 6, 9)
    assert union.tolist() == [0, 2, 7] + [9, 9, 9] * empty
    x = torch.arange(10.0, 19.0)
    values = kernels.take_present(x, union)
    assert values.tolist() == [10, 12, 17] + [0, 0, 0] * empty
    assert kernels.in_bounds(union, 9).max() <= 8
    noise = torch.cat([values[:3], torch.full((3,), 5.0)])
    assert kernels.without_empty(noise, union, 9).tolist() == values.tolist()
    filled = kernels.filled(union, 9)
    assert filled is None if kernels is HOST else filled.tolist() == [True] * 3 + [False] * 3


@both
@pytest.mark.parametrize("k", [1, 1000, 5000])
def test_progressions_and_hashes(kernels, k):
    numel, start, stride = 1_000_003, 999_999, 777_777
    found = kernels.progression(k, start, stride, numel, torch.device("cpu"))
    assert found.tolist() == [(start + i * stride) % numel for i in range(k)]
    factor, offset, columns = -0x61C8864680B583EB, 12345678901234567, 1000
    slots = kernels.slots(torch.arange(k), factor, offset, columns)
    hashed = [(factor * i + offset) % 2**64 >> 32 for i in range(k)]
    assert slots.tolist() == [h * 2 * columns >> 32 for h in hashed]


@both
def test_the_heaviest_come_first_and_among_equal_ones_the_lower(kernels):
    estimates = torch.randint(0, 50, (CACHE_BLOCK + 100,)).float()
    found = kernels.heaviest(lambda start, stop: estimates[start:stop].clone(), 40, len(estimates))
    assert found.tolist() == estimates.sort(descending=True, stable=True).indices[:40].tolist()


@both
@every_size
def test_norms(kernels, numel):
    for dtype, scale in ((torch.float32, 1e-25), (torch.float32, 1e25), (torch.float64, 1.0)):
        x, y = normal(numel, dtype) * scale, normal(numel, dtype, seed=1) * scale
        total = x + y
        assert kernels.squared_norm(x) == pytest.approx(norm2(x), rel=1e-6)
        assert kernels.add_and_norm(x, y) == pytest.approx(norm2(total), rel=1e-6)
        assert torch.equal(x, total)


def test_norms_of_other_dtypes_and_lengths():
    half = normal(1000).half()
    assert squared_norm(half) == pytest.approx(norm2(half))
    memory = torch.ones(1000)
    assert add_and_norm(memory, half) == pytest.approx(norm2(1 + half.float()))
    assert torch.equal(memory, 1 + half.float())
    for shape in ((999,), (1000, 1)):
        with pytest.raises(ValueError, match="equally long"):
            add_and_norm(memory, torch.ones(shape))


@both
@every_size
def test_selections_equal_an_obvious_reference(kernels, numel):
    k = max(1, numel // 50)
    x, add = normal(numel), normal(numel, seed=1)
    total = x + add
    order = np.argsort(-total.abs().numpy(), kind="stable")
    expected = np.sort(order[:k])
    kth = float(total.abs()[order[k - 1]])
    assert kernels.largest(total, k).tolist() == expected.tolist()
    assert kernels.kth_largest(total.abs(), k) == kth
    found = {
        "select": kernels.select(x.clone(), k, add),
        "exactly": kernels.select_above(x.clone(), kth, k, add),
        "too many": kernels.select_above(x.clone(), 0.0, k, add),
        "by count": kernels.select_by_count(
            x.clone(), k, add, ThresholdSearch(*[lambda most, mean, k: kth] * 2)
        ),
        "bins": kernels.select_bins(total.clone(), min(numel, CACHE_BLOCK), 1, None),
    }
    none = kernels.select_above(x.clone(), 1e9, k, add)
    free = [] if kernels is HOST else [numel] * (k - 1)  # slots, of which there are always k
    assert none.indices.tolist() == [order[0], *free]
    assert none.values.tolist() == [total[order[0]], *(0 for _ in free)]
    assert found.pop("bins").indices.tolist() == [order[0]]
    for name, selected in found.items():
        assert selected.indices.dtype == torch.int32, name
        assert selected.indices.tolist() == expected.tolist(), name
        assert torch.equal(selected.values, total[expected]), name
        assert float(selected.total) == pytest.approx(norm2(total), rel=1e-6), name


def test_rows_of_flat_tensors():
    for numel in (0, 3, 8, 20):
        x = torch.arange(float(numel))
        matrices = rows(x, 8)
        assert torch.equal(torch.cat([m.flatten() for m in matrices] or [x]), x)
        if numel:
            beside = numbers_of_rows(torch.arange(2.0 * -(-numel // 8)), x, 8)
            assert [m.shape for m in beside] == [(len(m), 2) for m in matrices]


def test_scratch_memory_is_used_again():
    cpu = torch.device("cpu")
    first = scratch("test", 10, torch.float32, cpu)
    assert scratch("test", 20, torch.float32, cpu).data_ptr() == first.data_ptr()
    assert scratch("other", 10, torch.float32, cpu).data_ptr() != first.data_ptr()
    assert scratch("test", 10, torch.float64, cpu).data_ptr() != first.data_ptr()


@both
@pytest.mark.parametrize("nbytes", [0, 1, 125, (1 << 14) + 1])
def test_bit_maps(kernels, nbytes):
    flags = np.random.default_rng(nbytes).random(8 * nbytes) < 0.3
    positions = torch.from_numpy(np.flatnonzero(flags).astype(np.int32))
    packed = torch.full((nbytes,), 99, dtype=torch.uint8)
    kernels.set_bits(positions, None, packed)
    assert packed.tolist() == np.packbits(flags, bitorder="little").tolist()
    count = positions.numel() + 3
    found = positions.tolist() + [8 * nbytes] * 3
    assert kernels.find_bits(packed, count).tolist() == found
    assert kernels.find_bits(packed, 2).tolist() == found[:2]
