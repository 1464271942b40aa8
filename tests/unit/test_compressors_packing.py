"""The bit packer against what its docstring says, written down byte by byte."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors.kernels import kernels_for
from compressors.kernels.blocks import CODE_BLOCK
from compressors.wire import packing
from compressors.wire.packing import codes_nbytes, pack_codes, unpack_codes
from tests.quick import quick
from tests.unit.device_path import device_path
from tests.unit.samples import normal


def packed_by_hand(codes: np.ndarray, levels: int) -> list[int]:
    """Digit by digit: byte j holds those of the codes at j, j + length, j + 2 * length, ..."""
    if levels == 3:
        return folded_by_hand(codes, 3, 5)
    codes = np.append(codes, np.zeros(-codes.size % 8, codes.dtype))
    out, low, bits = [], 0, levels.bit_length() - 1
    for width in (4, 2, 1):
        if bits & width:
            out += folded_by_hand((codes >> low) % (1 << width), 1 << width, 8 // width)
            low += width
    return out


def folded_by_hand(digits: np.ndarray, base: int, runs: int) -> list[int]:
    length = -(-digits.size // runs)
    each = (digits[j::length] for j in range(length))
    return [sum(int(digit) * base**i for i, digit in enumerate(column)) for column in each]


@settings(max_examples=60)
@given(
    levels=st.sampled_from([2, 3, 4, 8, 16, 32, 64, 128]),
    count=st.integers(1, 320),
    seed=st.integers(0, 2**32),
)
def test_codes(levels, count, seed):
    codes = np.random.default_rng(seed).integers(0, levels, count, np.uint8)
    check_codes(torch.from_numpy(codes).float() - 1, levels, packed_by_hand(codes, levels))


@pytest.mark.parametrize("levels", quick(3, 16, of=[2, 3, 8, 16, 128]))
@pytest.mark.parametrize("count", [CODE_BLOCK, CODE_BLOCK + 1, 2 * CODE_BLOCK + 2])
def test_codes_of_several_blocks(count, levels):
    codes = np.random.default_rng(0).integers(0, levels, count, np.uint8)
    expected = []
    for start in range(0, count, CODE_BLOCK):
        expected += packed_by_hand(codes[start : start + CODE_BLOCK], levels)
    check_codes(torch.from_numpy(codes).float() - 1, levels, expected)


def check_codes(q: torch.Tensor, levels: int, expected: list[int]) -> None:
    """By both paths, with an offset of 1."""
    nbytes = codes_nbytes(q.numel(), levels)
    out, back = torch.empty(nbytes, dtype=torch.uint8), torch.full_like(q, 99)
    for block, to in zip(q.split(CODE_BLOCK), back.split(CODE_BLOCK), strict=True):
        packed = out[-nbytes:][: codes_nbytes(block.numel(), levels)]
        pack_codes(block, levels, 1, packed)
        unpack_codes(packed, levels, 1, to)
        nbytes -= packed.numel()
    assert out.tolist() == expected
    assert torch.equal(back, q)
    with device_path():
        again = torch.empty_like(out)
        pack_codes(q, levels, 1, again)
        assert torch.equal(again, out)
        unpack_codes(out, levels, 1, back.fill_(99))
    assert torch.equal(back, q)


@pytest.mark.parametrize("levels", [2, 3, 4, 64])
def test_any_bytes_decode_alike(levels):
    both = torch.empty(2, {3: 5, 2: 8, 4: 4}.get(levels, 1) * 256)
    packed = torch.arange(256, dtype=torch.uint8)[: codes_nbytes(both.shape[1], levels)]
    for path, out in zip((nullcontext, device_path), both, strict=True):
        with path():
            unpack_codes(packed, levels, 1, out)
    assert torch.equal(*both)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 31), st.integers(0, 9))
@settings(max_examples=60)
def test_numbers_round_trip(numbers, width, free):
    numbers, count = [n % 2**width for n in numbers], len(numbers) + free
    for convert in (lambda array: array, torch.from_numpy):
        some = convert(np.array(numbers, np.int32))
        packed = convert(np.full(packing.numbers_nbytes(count, 1 << width), 99, np.uint8))
        packing.pack_numbers(some, 1 << width, count, packed)
        unpacked, follows = packing.unpack_numbers(packed, 1 << width, count)
        assert not follows
        assert str(unpacked.dtype).endswith("uint8" if width <= 8 else "int32")
        assert unpacked.tolist() == numbers + [0] * free


def test_what_follows_the_last_number_is_told():
    packed = np.array([0b11_01_10_00], np.uint8)  # three numbers of two bits, then a fourth one
    for data in (packed, torch.from_numpy(packed)):
        numbers, follows = packing.unpack_numbers(data, 4, 3)
        assert numbers.tolist() == [0, 2, 1]
        assert follows


@pytest.mark.parametrize("count", [1, 8, 1000, 1003])
def test_bits(count):
    bits = normal(count) >= 0
    expected = np.packbits(bits.numpy(), bitorder="little").tolist()
    for path in (nullcontext, device_path):
        back = torch.full((count,), 9.0)
        with path():
            packed = kernels_for(bits).pack_bits(bits)
            kernels_for(back).unpack_bits(packed, back)
        assert packed.tolist() == expected
        assert torch.equal(back, bits.float())
