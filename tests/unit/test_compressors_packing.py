"""The bit packer against what its docstring says, written down byte by byte."""

from __future__ import annotations

from contextlib import nullcontext

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
    packed_codes,
    packed_digits,
    padded,
    unpack_codes,
    unpack_digits,
)
from tests.unit.device_path import device_path
from tests.unit.samples import normal


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
@given(bits=st.integers(1, 7), eighths=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_packing(bits, eighths, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, 8 * eighths, np.uint8)
    out = torch.empty(codes_nbytes(codes.size, bits), dtype=torch.uint8)
    pack_codes(torch.from_numpy(codes), bits, out)
    assert out.tolist() == packed_by_hand(codes, bits)
    q = torch.from_numpy(codes).float() - 1
    assert torch.equal(packed_codes(q, 1, bits), out)
    check_unpacked_codes(out, bits, q)


def check_unpacked_codes(packed: torch.Tensor, bits: int, q: torch.Tensor) -> None:
    """By both paths, with an offset of 1."""
    if q.numel() <= CODE_BLOCK:
        back = torch.full_like(q, 99)
        unpack_codes(packed, bits, 1, back)
        assert torch.equal(back, q)
    with device_path():
        back = torch.full_like(q, 99)
        unpack_codes(packed, bits, 1, back)
        assert torch.equal(back, q)


@pytest.mark.parametrize("bits", [3, 4, 7])
@pytest.mark.parametrize(
    "count", [1, 9, CODE_BLOCK - 1, CODE_BLOCK, CODE_BLOCK + 1, 2 * CODE_BLOCK]
)
def test_a_device_packs_all_blocks_at_once(count, bits):
    q = torch.from_numpy(np.random.default_rng(0).integers(-1, 2**bits - 1, count)).float()
    pieces = []
    for block in q.split(CODE_BLOCK):
        codes = torch.ones(padded(block.numel()), dtype=torch.uint8)  # q = 0 fills them up
        codes[: block.numel()] = (block + 1).to(torch.uint8)
        pieces.append(torch.empty(codes_nbytes(block.numel(), bits), dtype=torch.uint8))
        pack_codes(codes, bits, pieces[-1])
    whole = packed_codes(q, 1, bits)
    assert whole.numel() == codes_nbytes(count, bits)
    assert torch.equal(whole, torch.cat(pieces))
    check_unpacked_codes(whole, bits, q)


@pytest.mark.parametrize(
    "count", [1, 4, 5, 6, 11, 243, CODE_BLOCK - 1, CODE_BLOCK, CODE_BLOCK + 2, 2 * CODE_BLOCK]
)
def test_digits(count):
    digits = torch.from_numpy(np.random.default_rng(1).integers(0, 3, count)).float()
    pieces, values = [], torch.tensor([5.0, 6.0, 7.0])
    for block in digits.split(CODE_BLOCK):
        out = torch.empty(digits_nbytes(block.numel()), dtype=torch.uint8)
        pack_digits(block, out)
        by_hand = np.zeros(5 * out.numel(), int)
        by_hand[: block.numel()] = block.numpy()
        assert out.tolist() == (by_hand.reshape(-1, 5) @ 3 ** np.arange(5)).tolist()
        back = torch.full_like(block, 9)
        unpack_digits(out, values, back)
        assert torch.equal(back, block + 5)
        pieces.append(out)
    whole = packed_digits(digits)
    assert whole.numel() == digits_nbytes(count)
    assert torch.equal(whole, torch.cat(pieces))
    with device_path():
        back = torch.full_like(digits, 9)
        unpack_digits(whole, values, back)
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
        assert not packing.unpack_numbers(packed, width, unpacked)
        assert unpacked.tolist() == numbers + [0] * free


def test_numbers_that_fill_up_a_plane_must_be_zero():
    packed = np.array([0b11_01_10_00], np.uint8)  # three numbers of two bits, then a fourth one
    with pytest.raises(CorruptPayload, match="zero"):
        packing.unpack_numbers(packed, 2, np.empty(3, np.uint8))
    on_device = torch.from_numpy(packed), 2, torch.empty(3, dtype=torch.uint8)
    assert packing.unpack_numbers(*on_device)


@pytest.mark.parametrize("count", [1, 8, 1000, 1003])
def test_signs(count):
    x = normal(count)
    x[0] = 0.0  # counts as positive
    expected = np.packbits(x.numpy() >= 0, bitorder="little").tolist()
    packed, positive = torch.full((-(-count // 8),), 99, dtype=torch.uint8), torch.empty(count)
    packing.pack_signs(x, packed, positive)
    assert packed.tolist() == packing.packed_signs(x >= 0).tolist() == expected
    assert torch.equal(positive, (x >= 0).float())
    for path in (nullcontext, device_path):
        back = torch.full((count,), 9.0)
        with path():
            packing.unpack_signs(packed, back)
        assert torch.equal(back, positive)
