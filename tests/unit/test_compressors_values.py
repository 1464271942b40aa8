"""Value formats."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch

from compressors.base import Key, split_rows
from compressors.kernels.blocks import CODE_BLOCK
from compressors.wire.values import (
    Full,
    ValueFormat,
    fill_random16,
    make_values,
    round_at_random,
    value_names,
)
from tests.unit.device_path import device_path, meta

KEY = Key("w", 1)
every_format = pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8", "int4", "qsgd"])


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 1000, CODE_BLOCK + 300])
def test_layout_encode_decode(name, dtype, count):
    form = make_values(name)
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = values.clone()
    parts, sent = form.encode(values, KEY)
    assert torch.equal(values, before)
    layout = form.layout(count, dtype)
    assert tuple((p.numel(), p.dtype) for p in parts) == layout
    assert all(p.is_contiguous() for p in parts)
    assert count == 0 or any(p.is_floating_point() and p.numel() for p in parts)
    decoded = form.decode(parts, count, dtype)
    assert (decoded.shape, decoded.dtype) == (values.shape, dtype)
    assert torch.equal(sent, decoded)
    tolerances = {"fp32": 0, "bf16": 0.004, "fp16": 0.001, "int8": 0.02, "int4": 0.1, "qsgd": 0.8}
    tolerance = tolerances[name]
    assert (decoded.double() - values.double()).abs().max().item() <= tolerance * 5 if count else 1
    assert not form.lossless or torch.equal(decoded, values)
    raw = torch.cat([torch.zeros(1, dtype=torch.uint8), *(p.view(torch.uint8) for p in parts)])
    again = form.decode(split_rows(raw[None, 1:], *layout)[0], count, dtype)
    assert torch.equal(again, decoded)
    assert form.size(count, dtype) == raw.numel() - 1


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 1000, CODE_BLOCK + 300])
def test_a_device_sends_the_same_bytes(name, dtype, count):
    form = make_values(name)
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    parts, decoded = form.encode(values, KEY)
    with device_path():
        again, sent = form.encode(values, KEY)
        assert torch.equal(form.decode(parts, count, dtype), decoded)
    assert tuple((p.numel(), p.dtype) for p in again) == form.layout(count, dtype)
    if name != "qsgd":  # other numbers are drawn there
        assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
        assert torch.equal(sent, decoded)
    of_meta, _ = form.encode(meta(count, dtype), KEY)
    assert form.decode(of_meta, count, dtype).shape == (count,)


@every_format
def test_extremes_decode_to_something_finite(name):
    form = make_values(name)
    for dtype, huge in ((torch.float32, 1e30), (torch.float64, 1e140)):
        tiny = torch.finfo(dtype).smallest_normal / 1000
        for value in (0.0, tiny, huge, -huge, 1.0):
            values = torch.full((300,), value, dtype=dtype)
            decoded = form.decode(form.encode(values, KEY)[0], 300, dtype)
            assert decoded.isfinite().all()
            assert (decoded - values).abs().max() <= values.abs().max()
    nan = torch.tensor([1.0, float("nan")])
    assert form.decode(form.encode(nan, KEY)[0], 2, torch.float32)[1].isnan()


def test_full_does_not_copy():
    values = torch.ones(5)
    (part,), _ = Full().encode(values, KEY)
    assert part.data_ptr() == values.data_ptr()


def test_names():
    assert value_names() == ("bf16", "fp16", "fp32", "int4", "int8", "qsgd")
    form = make_values("int8")
    assert isinstance(form, ValueFormat)
    assert make_values(form) is form
    with pytest.raises(ValueError, match="values must be one of bf16, fp16"):
        make_values("int3")
    with pytest.raises(TypeError, match="values must be"):
        make_values(8)  # type: ignore[arg-type]


def test_random_numbers_are_uniform_and_follow_the_key():
    for draw in (fill, on_device):
        draws = draw(torch.empty(100_003), 0, KEY)
        assert draws.min() >= 0
        assert draws.max() < 65536
        assert torch.equal(draws, draws.round())
        counts = torch.histc(draws, 64, 0, 65536)
        assert ((counts - 100_003 / 64) ** 2 / (100_003 / 64)).sum() < 120  # chi square, 63 degrees
        assert torch.equal(draw(torch.empty(100_003, dtype=torch.int32), 0, KEY).float(), draws)
        quarter = -(-100_003 // 4)
        pairs = [(draws[: -i * quarter], draws[i * quarter :]) for i in (1, 2, 3)]
        pairs.append((draws[:-1], draws[1:]))
        others = [(1, KEY), *((0, key) for key in (Key("v", 1), Key("w", 2), Key("w", 1, rank=1)))]
        pairs += [(draws, draw(torch.empty(100_003), seed, key)) for seed, key in others]
        for first, second in pairs:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert not torch.equal(fill(torch.empty(9), 0, KEY, CODE_BLOCK), fill(torch.empty(9), 0, KEY))
    fill(torch.empty(0), 1, KEY)


@pytest.mark.parametrize("path", [nullcontext, device_path], ids=["host", "device"])
def test_rounding_at_random_moves_as_many_values_up_as_down(path):
    """Also where the chance is as small as a random number of 16 bits can make it."""
    moved = dict.fromkeys((4e-6, -4e-6, 1.1e-5, -1.1e-5), 0.0)
    with path():
        for value, step in product(moved, range(8)):
            q = torch.full((CODE_BLOCK,), value)
            round_at_random(q, 0, Key("w", step), 0)
            moved[value] += float(q.sum())
    few, none = 8 * CODE_BLOCK / 65536, 0.0  # the chances 2**-16 and 0 are the nearest ones
    assert list(moved.values()) == pytest.approx([none, none, few, -few], abs=5 * few**0.5)
    assert moved[4e-6] == moved[-4e-6] == 0


def on_device(out: torch.Tensor, seed: int, key: Key, start: int = 0) -> torch.Tensor:
    with device_path():
        return fill(out, seed, key, start)


def fill(out: torch.Tensor, seed: int, key: Key, start: int = 0) -> torch.Tensor:
    fill_random16(out, seed, key, start)
    return out
