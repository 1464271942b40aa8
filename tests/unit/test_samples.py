"""The arithmetic on samples, of one section and of several, on the host and on a device."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from adaptive.statistics.signal import (
    Sections,
    energies,
    largest,
    products,
    sampled,
    sketched,
)
from tests.unit.device_path import device_path

CPU = torch.device("cpu")


def one_section(wanted: list[int], size: int, weight: float = 1.0) -> Sections:
    return Sections([size], [wanted], [weight], CPU)


@given(
    arrays(np.float32, (3, 20), elements=st.floats(-4, 4, width=32)),
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
    arrays(np.float32, (1, 3), elements=st.floats(0, 5, width=32)),
)
def test_the_largest_are_as_sorting_says(a: np.ndarray, wanted: list[int], above: np.ndarray):
    before = a.copy()
    found = [largest(torch.from_numpy(a), one_section(wanted, 20), above)]
    with device_path():
        found.append(largest(torch.from_numpy(a), one_section(wanted, 20), above))
    assert np.array_equal(a, before)
    for masks in found:
        for row, k, mask in zip(np.abs(a), wanted, masks.numpy(), strict=True):
            assert np.array_equal(mask, row >= np.sort(row)[-k])


def test_it_looks_where_the_last_smallest_was() -> None:
    above = np.zeros((1, 1), np.float32)
    largest(torch.tensor([[1.0, -5.0, 3.0]]), one_section([2], 3), above)
    assert 0 < above[0, 0] < 3


@given(
    st.booleans(),
    st.lists(st.integers(1, 9), min_size=2, max_size=4),
    st.integers(0, 10**6),
    st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_each_section_is_as_it_is_by_itself(
    device: bool, sizes: list[int], seed: int, scale: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    a = torch.randint(-3, 4, (2, sum(sizes)), generator=draw).float() * scale
    wanted = [[1, size] for size in sizes]
    weights = [1.0 + i for i in range(len(sizes))]
    above = np.zeros((len(sizes), 2))
    with device_path() if device else nullcontext():
        several = Sections(sizes, wanted, weights, CPU)
        mask, norms = largest(a, several, above), energies(a, several)
        products_of_all = products(a, a[0], several)
    added = torch.zeros(2, dtype=torch.float64)
    for i, (piece, size) in enumerate(zip(a.split(sizes, 1), sizes, strict=True)):
        single = Sections([size], [wanted[i]], [weights[i]], CPU)
        piece = piece.contiguous()
        start = sum(sizes[:i])
        assert torch.equal(mask[:, start : start + size], largest(piece, single, np.zeros((1, 2))))
        torch.testing.assert_close(norms[:, i : i + 1], energies(piece, single))
        added += products(piece.double(), piece[0].double(), single)
    torch.testing.assert_close(products_of_all, added)


@pytest.mark.parametrize("numel", [5, 256, 1000])
@pytest.mark.parametrize("device", [False, True])
def test_sums_of_one_section(numel: int, device: bool) -> None:
    draw = np.random.default_rng(numel)
    a, g = draw.normal(size=(3, numel)).astype("f"), draw.normal(size=numel).astype("f")
    sent = np.abs(a) > 1
    signs = draw.integers(0, 2, numel) * 2 - 1
    with device_path() if device else nullcontext():
        section = one_section([1, 1, 1], numel, weight=9.0)
        rows = torch.from_numpy(np.vstack([g, np.where(sent, a, 0)]))
        x = rows.double().numpy()
        norms = energies(rows, section)
        assert (norms.dtype, norms.shape) == (torch.float64, (4, 1))
        assert norms[:, 0].numpy() == pytest.approx((x * x).sum(1))
        found = products(rows, rows[0], section)
        assert found.dtype == torch.float64
        assert found.numpy() == pytest.approx(9 * x @ x[0], rel=1e-4)
        sketches = sketched(rows, torch.from_numpy(signs).to(torch.int8), 300, section)
    wanted = np.zeros((4, 256))
    for i in range(numel):
        wanted[:, (i + 300) % 256] += 3 * signs[i] * x[:, i]
    assert sketches.numpy() == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_samples_lie_one_after_the_other() -> None:
    a, b = torch.arange(5.0), torch.arange(10.0, 14.0)
    assert sampled([a, b], [2, 3]).tolist() == [0, 2, 4, 10, 13]
    assert sampled([a], [1]).data_ptr() == a.data_ptr()
