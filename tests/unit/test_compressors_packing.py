"""The bit packer against what its docstring says, written down byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors import CorruptPayload
from compressors.kernels.blocks import CODE_BLOCK
from compressors.wire import packing
from compressors.wire.packing import (
    codes_nbytes,
    digits_nbytes,
    pack_codes,
    pack_digits,
    padded,
    unpack_codes,
    unpack_digits,
)
from tests.unit.samples import normal, use_device_kernels


def packed_by_hand(codes: np.ndarray, bits: int) -> list[int]:
    """Plane by plane: byte j holds the codes at j, j + length, j + 2 * length, ..."""
    out, low = [], 0
    for width in (4, 2, 1):
        if bits & width:
            plane = (codes >> low) & ((1 << width) - 1)
            length = codes.size // 8 * width
            for j in range(length):
                out.append(sum(int(c) << (i * width) for i, c in enumerate(plane[j::length])))
            low += width
    return out


@settings(max_examples=60)
@given(bits=st.integers(1, 7), eighths=st.integers(0, 40), seed=st.integers(0, 2**32))
def test_packing(bits, eighths, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, 8 * eighths, np.uint8)
    out = torch.empty(codes_nbytes(codes.size, bits), dtype=torch.uint8)
    pack_codes(torch.from_numpy(codes), bits, out)
    assert out.tolist() == packed_by_hand(codes, bits)
    back = torch.full((codes.size,), 99, dtype=torch.uint8)
    unpack_codes(out, bits, back)
    assert back.tolist() == codes.tolist()


@pytest.mark.parametrize("count", [CODE_BLOCK - 1, CODE_BLOCK, CODE_BLOCK + 1, 2 * CODE_BLOCK + 16])
def test_packing_goes_block_by_block(monkeypatch, count):
    size = padded(count)
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 8, size, np.uint8))
    whole = torch.empty(codes_nbytes(count, 3), dtype=torch.uint8)
    pack_codes(codes, 3, whole)
    pieces = []
    for start in range(0, size, CODE_BLOCK):
        block = codes[start : start + CODE_BLOCK]
        pieces.append(torch.empty(codes_nbytes(block.numel(), 3), dtype=torch.uint8))
        pack_codes(block, 3, pieces[-1])
    assert torch.equal(whole, torch.cat(pieces))
    back = torch.empty_like(codes)
    unpack_codes(whole, 3, back)
    assert torch.equal(back, codes)
    monkeypatch.setattr(packing, "native", lambda tensor: tensor)  # the path of other devices
    again = torch.empty_like(whole)
    pack_codes(codes, 3, again)
    assert torch.equal(again, whole)
    unpack_codes(whole, 3, back.zero_())
    assert torch.equal(back, codes)


@pytest.mark.parametrize(
    "count", [0, 1, 4, 5, 6, 11, 243, CODE_BLOCK - 1, CODE_BLOCK, CODE_BLOCK + 2]
)
def test_digits(count):
    digits = torch.from_numpy(np.random.default_rng(1).integers(0, 3, count)).float()
    out = torch.empty(digits_nbytes(count), dtype=torch.uint8)
    pack_digits(digits, out)
    if count <= CODE_BLOCK and count:
        each = -(-count // 5)
        by_hand = np.zeros(5 * each, int)
        by_hand[:count] = digits.numpy()
        assert out.tolist() == (by_hand.reshape(each, 5) @ 3 ** np.arange(5)).tolist()
    back = torch.full_like(digits, 9)
    unpack_digits(out, torch.tensor([5.0, 6.0, 7.0]), back)
    assert torch.equal(back, digits + 5)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 31), st.integers(0, 9))
@settings(max_examples=60)
def test_numbers_round_trip(numbers, width, free):
    numbers, count = [n % 2**width for n in numbers], len(numbers) + free
    dtype = np.uint8 if width <= 8 else np.int32
    for convert in (lambda array: array, torch.from_numpy):
        some = convert(np.array(numbers, np.int32))
        packed = convert(np.full(packing.numbers_nbytes(width, count), 99, np.uint8))
        packing.pack_numbers(some, width, count, packed)
        unpacked = convert(np.full(count, 99, dtype))
        packing.unpack_numbers(packed, width, unpacked)
        assert unpacked.tolist() == numbers + [0] * free


def test_numbers_that_fill_up_a_plane_must_be_zero():
    packed = np.array([0b11_01_10_00], np.uint8)  # three numbers of two bits, then a fourth one
    with pytest.raises(CorruptPayload, match="zero"):
        packing.unpack_numbers(packed, 2, np.empty(3, np.uint8))


@pytest.mark.parametrize("count", [1, 8, 1000, 1003])
def test_signs(monkeypatch, count):
    x = normal(count)
    x[0] = 0.0  # counts as positive
    expected = np.packbits(x.numpy() >= 0, bitorder="little")
    for _ in ("host", "device"):
        packed, positive = torch.full((-(-count // 8),), 99, dtype=torch.uint8), torch.empty(count)
        packing.pack_signs(x, packed, positive)
        assert packed.tolist() == expected.tolist()
        assert torch.equal(positive, (x >= 0).float())
        back = torch.full((count,), 9.0)
        packing.unpack_signs(packed, back)
        assert torch.equal(back, positive)
        use_device_kernels(monkeypatch)
