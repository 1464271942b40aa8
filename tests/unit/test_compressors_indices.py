"""Index formats against what their docstrings say, written down bit by bit."""

from __future__ import annotations

from math import comb, lgamma, log, log2

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors import InvalidPayload, kept, make_compressor
from compressors.base import Spec
from compressors.wire.indices import FORMATS, IndexFormat, choose_format
from tests.unit.device_path import device_path

every_format = pytest.mark.parametrize("form", [*FORMATS, IndexFormat(0)], ids=str)
some_formats = pytest.mark.parametrize(
    "form", [*map(IndexFormat, (None, 0, 3, 8, 11, 30))],
    ids=str,
)  # fmt: skip


def sample(numel: int, count: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.sort(rng.choice(numel, count, replace=False)).astype(np.int32))


def bound_nbytes(numel: int, k: int) -> float:
    """Bytes that no format can beat on average: log2 of the number of subsets of `k` of `numel`
    elements, divided by 8."""
    return (lgamma(numel + 1) - lgamma(k + 1) - lgamma(numel - k + 1)) / log(2) / 8


def bit_string(on: list[int], nbits: int) -> bytes:
    packed = bytearray(-(-nbits // 8))
    for position in on:
        packed[position // 8] |= 1 << position % 8
    return bytes(packed)


def folded_string(numbers: list[int], width: int) -> bytes:
    """Byte j holds the numbers at j, j + length, j + 2 * length, ..., the first one lowest."""
    length = -(-len(numbers) * width // 8)
    runs = [numbers[j::length] for j in range(length)]
    return bytes(sum(n << i * width for i, n in enumerate(run)) for run in runs)


def reference(form: IndexFormat, indices: list[int], numel: int, capacity: int) -> bytes:
    free = capacity - len(indices)
    if form.low is None:
        return bit_string(indices, numel)
    unary = [(i >> form.low) + rank for rank, i in enumerate(indices)]
    packed = bit_string(unary, capacity + -(-numel // 2**form.low))
    padded, shift = indices + [0] * free, 0
    while shift < form.low:
        width = next(w for w in (8, 4, 2, 1) if w <= form.low - shift)
        packed += folded_string([(i >> shift) % 2**width for i in padded], width)
        shift += width
    return packed


@st.composite
def problems(draw: st.DrawFn, largest: int = 300_000) -> tuple[list[int], int, int]:
    """(indices, numel, capacity), from empty to full."""
    numel = draw(st.one_of(st.integers(0, 40), st.integers(0, largest)))
    capacity = draw(st.integers(0, min(numel, 60)))
    indices = draw(st.sets(st.integers(0, max(0, numel - 1)), max_size=capacity))
    return sorted(indices), numel, capacity


@some_formats
@settings(max_examples=20)
@given(problem=problems())
def test_round_trip_and_reference(form, problem):
    indices, numel, capacity = problem
    given_ = torch.tensor(indices, dtype=torch.int32)
    encoded = form.encode(given_, numel, capacity)
    assert (encoded.dtype, encoded.dim()) == (torch.uint8, 1)
    assert encoded.numel() == form.nbytes(numel, capacity)
    assert bytes(encoded.tolist()) == reference(form, indices, numel, capacity)
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), encoded])[1:]
    for data in (encoded, odd):
        ((decoded, _),) = form.decode(data[None], numel, capacity)
        assert decoded.dtype == torch.int32
        assert decoded.tolist() == indices


@some_formats
@pytest.mark.parametrize(
    ("numel", "capacity", "count"),
    [
        (0, 0, 0),
        (1, 1, 1),
        (1, 0, 0),
        (1000, 1000, 1000),
        (65_536, 65_536, 65_536),
        (65_537, 65_535, 65_535),
        (140_000, 140_000, 140_000),
        (1_000_000, 100_000, 100_000),
        (1_000_000, 1_000, 400),
        (1_000_000, 1_000, 0),
    ],
)
def test_large_round_trip(form, numel, capacity, count):
    indices = sample(numel, count)
    encoded = form.encode(indices, numel, capacity)
    assert encoded.numel() == form.nbytes(numel, capacity)
    assert torch.equal(form.decode(encoded[None], numel, capacity)[0][0], indices)


@every_format
def test_the_largest_positions_fit(form):
    numel, indices = 2**31 - 1, [0, 1, 65_535, 65_536, 2**30, 2**31 - 3, 2**31 - 2]
    if form.nbytes(numel, 9) > 1 << 20:
        return  # gigabytes of bits
    encoded = form.encode(torch.tensor(indices, dtype=torch.int32), numel, 9)
    assert encoded.numel() == form.nbytes(numel, 9)
    assert form.decode(encoded[None], numel, 9)[0][0].tolist() == indices


@every_format
def test_too_many_indices_are_refused(form):
    with pytest.raises(ValueError, match="at most 3"):
        form.encode(sample(100, 4), 100, 3)


@some_formats
@pytest.mark.parametrize(("numel", "capacity"), [(0, 0), (100, 10), (70_000, 100)])
def test_other_sizes_and_types_are_refused(form, numel, capacity):
    size = form.nbytes(numel, capacity)
    for wrong in {0, size - 1, size + 1, 2 * size} - {size, -1}:
        with pytest.raises(InvalidPayload):
            form.decode(torch.zeros(1, wrong, dtype=torch.uint8), numel, capacity)
    with pytest.raises(InvalidPayload):
        form.decode(torch.zeros(1, size, dtype=torch.int8), numel, capacity)


@some_formats
@settings(max_examples=30)
@given(data=st.data())
def test_fuzzed_bytes(form, data):
    """InvalidPayload, or what `encode` makes of indices that ascend within bounds."""
    indices, numel, capacity = data.draw(problems(largest=140_000))
    size = form.nbytes(numel, capacity)
    raw = bytearray(data.draw(st.binary(min_size=min(size, 300), max_size=300)))
    if data.draw(st.booleans()):
        raw = bytearray(reference(form, indices, numel, capacity))
        for position in data.draw(st.lists(st.integers(0, max(0, size - 1)), max_size=3)):
            if raw:
                raw[position] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.sampled_from([len(raw), len(raw), size, size - 1]))]
    try:
        ((decoded, _),) = form.decode(torch.tensor([list(raw)], dtype=torch.uint8), numel, capacity)
    except InvalidPayload:
        decoded = None
    if len(raw) == size:
        check_device_path(form, raw, numel, capacity, decoded)
    if decoded is None:
        return
    assert decoded.dtype == torch.int32
    found = decoded.tolist()
    assert len(found) <= capacity
    assert all(a < b for a, b in zip([-1, *found], [*found, numel], strict=True))
    assert bytes(raw) == reference(form, found, numel, capacity)


def check_device_path(
    form: IndexFormat, raw: bytes, numel: int, capacity: int, expected: torch.Tensor | None
) -> None:
    """It takes the bytes that the host takes, and of others it makes nothing out of bounds."""
    data = torch.tensor(list(raw), dtype=torch.uint8)
    with device_path():
        for exact in (False, True):
            ((found, corrupt),) = form.decode(data[None], numel, capacity, exact)
            known = expected is not None and not (exact and expected.numel() < capacity)
            assert bool(corrupt) != known
            assert (found.dtype, found.numel()) == (torch.int32, capacity)
            assert all(0 <= i <= numel - exact for i in found.tolist())
            if known:
                assert found.tolist() == expected.tolist() + [numel] * (capacity - len(expected))
                assert torch.equal(form.encode(found, numel, capacity, exact), data)


def tampered(form: IndexFormat, numel: int, capacity: int, byte: int, value: int) -> torch.Tensor:
    raw = form.encode(sample(numel, capacity - 1), numel, capacity)
    raw[byte] = value
    return raw


@pytest.mark.parametrize(
    ("form", "numel", "byte", "value"),
    [
        (IndexFormat(None), 100, -1, 0x80),  # bit 103
        (IndexFormat(None), 100, 1, 0xFF),  # more than capacity
        (IndexFormat(8), 100, 1, 0xFF),  # high parts that do not exist
        (IndexFormat(4), 100, -1, 0xF0),  # the unused slot is not zero
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_tampering_shows(form, numel, byte, value):
    with pytest.raises(InvalidPayload):
        form.decode(tampered(form, numel, 8, byte, value)[None], numel, 8)


@pytest.mark.parametrize("exact", [False, True])
def test_an_index_that_comes_twice_and_bits_after_the_last_slot_show(exact):
    form, twice = IndexFormat(4), torch.tensor([3, 20, 20], dtype=torch.int32)
    followed = form.encode(sample(100, 3), 100, 3)
    followed[-1] |= 0x80
    for data in (form.encode(twice, 100, 3), followed):
        with pytest.raises(InvalidPayload):
            form.decode(data[None], 100, 3, exact)


@given(numel=st.integers(0, 2**31 - 1), share=st.floats(0, 1))
@settings(max_examples=100)
def test_the_chosen_format_is_the_smallest(numel, share):
    capacity = int(share**4 * numel)
    chosen = choose_format(numel, capacity).nbytes(numel, capacity)
    assert chosen == min(form.nbytes(numel, capacity) for form in FORMATS)
    assert chosen >= int(bound_nbytes(numel, capacity)) - 1
    if capacity <= numel / 10:  # and the ends of a few byte strings
        assert chosen <= bound_nbytes(numel, capacity) * (1 + 1e-9) + 0.65 * capacity / 8 + 6


def test_ties_go_to_the_faster():
    for numel, capacity in ((0, 0), (1, 1), (64, 2), (100, 50), (10_000, 100)):
        sizes = [form.nbytes(numel, capacity) for form in FORMATS]
        assert choose_format(numel, capacity) is FORMATS[sizes.index(min(sizes))]


@pytest.mark.parametrize("numel", [1_000_000, 25_600_000])
@pytest.mark.parametrize(("cf", "most"), [(10, 0.66), (100, 1.08), (1000, 1.5)])
def test_bytes_an_index(numel, cf, most):
    k = numel // cf
    assert bound_nbytes(numel, k) / k < choose_format(numel, k).nbytes(numel, k) / k < most


@pytest.mark.parametrize(
    ("base", "most"), [("topk+fp32", 6.1), ("topk+bf16", 4.1), ("topk+int4", 2.3)]
)
@pytest.mark.parametrize("numel", [1_000_000, 25_600_000])
@pytest.mark.parametrize("cf", [10.0, 100.0, 1000.0])
def test_bytes_a_kept_element(base, most, numel, cf):
    """With its value and all headers: the table of docs/research/results.md."""
    assert make_compressor(base).nbytes(Spec((numel,), cf)) <= most * kept(numel, cf)


def test_bound_is_the_binomial():
    for numel, k in ((0, 0), (10, 3), (200, 50), (1000, 1000)):
        assert bound_nbytes(numel, k) == pytest.approx(log2(comb(numel, k)) / 8, abs=1e-9)


@some_formats
def test_device_path_is_the_same(form):
    for numel, capacity, count in ((0, 0, 0), (1, 1, 1), (1000, 100, 70), (70_000, 70_000, 69_999)):
        indices = sample(numel, count)
        encoded = form.encode(indices, numel, capacity)
        check_device_path(form, bytes(encoded.tolist()), numel, capacity, indices)


@every_format
def test_every_format_round_trips(form):
    for numel, capacity, count in ((1, 1, 1), (1000, 300, 70), (70_001, 100, 100)):
        indices = sample(numel, count)
        encoded = form.encode(indices, numel, capacity)
        assert encoded.numel() == form.nbytes(numel, capacity)
        assert torch.equal(form.decode(encoded[None], numel, capacity)[0][0], indices)
