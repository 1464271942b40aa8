"""Kernels: host and device hold the same functions with the same results, as a reference has."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from compressors.kernels import add_and_norm, device, host, kernels_for, squared_norm
from compressors.kernels.blocks import CACHE_BLOCK, numbers_of_rows, reduce_rows, rows, scratch
from tests.unit.samples import norm2, normal

SIZES = (1, 2, 700, 8192, CACHE_BLOCK + 5)
both = pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])
every_size = pytest.mark.parametrize("numel", SIZES)


def test_both_hold_the_same_functions_and_a_tensor_finds_its_own():
    of_device = dict(inspect.getmembers(device, inspect.isfunction))
    shared = [name for name in of_device if hasattr(host, name) and name[0] != "_"]
    assert len(shared) >= 10
    for name in shared:
        ours, theirs = (inspect.signature(getattr(module, name)) for module in (host, device))
        assert list(ours.parameters) == list(theirs.parameters)
    assert kernels_for(torch.zeros(1)) is kernels_for(torch.zeros(1).double()) is host
    assert kernels_for(torch.zeros(1).half()) is device
    assert kernels_for(torch.zeros(1, device="meta")) is device


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
        "by count": kernels.select_by_count(x.clone(), k, add, lambda most, mean, k: kth),
        "bins": kernels.select_bins(total.clone(), min(numel, CACHE_BLOCK), 1, None),
    }
    none = kernels.select_above(x.clone(), 1e9, k, add)
    free = [] if kernels is host else [numel] * (k - 1)  # slots, of which there are always k
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
        sums = [float(part.sum()) for part in x.split(8)] if numel else []
        if numel:
            assert reduce_rows(x, 8, lambda matrix: matrix.sum(dim=1)).tolist() == sums
            beside = numbers_of_rows(torch.arange(2.0 * len(sums)), x, 8)
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
    found = positions.tolist() + ([] if kernels is host else [8 * nbytes] * 3)
    assert kernels.find_bits(packed, count).tolist() == found
    assert kernels.find_bits(packed, 2).tolist() == found[:2]
