"""`examples/grace.py`: it reads no value of its own, and says what it cannot wrap."""

from __future__ import annotations

import pytest
import torch

from compressors import Key
from compressors.base import Spec, any_nonfinite
from examples.grace import GraceCompressor
from tests.unit.device_path import count_operations, meta
from tests.unit.samples import compressed, decompressed


class EveryTenth:
    """A GRACE compressor that reads no value either."""

    def compress(self, tensor, name):
        return [tensor[::10].clone()], tensor.numel()

    def decompress(self, tensors, ctx):
        out = torch.zeros(ctx, device=tensors[0].device)
        out[::10] = tensors[0]
        return out


def test_on_a_device_no_value_is_read_whatever_the_size():
    counts = []
    for numel in (10**6, 10**7):
        compressor = GraceCompressor(EveryTenth(), ratio=None, cf=10)
        tensor, key = meta(numel), Key("w")

        def step(compressor=compressor, tensor=tensor, key=key):
            payload = compressor.compress(tensor, Spec.of(tensor, 10.0, key))
            data = torch.empty(payload.nbytes, dtype=torch.uint8, device="meta")
            payload.write(data)
            compressor.add_to(tensor, payload, -1.0)
            spec = Spec((tensor.numel(),), 10.0, tensor.dtype, key)
            (received,) = compressor.read(data[None], spec)
            flag = any_nonfinite([received.as_nonfinite(torch.ones((), device="meta").bool())])
            compressor.add_to(tensor, received.as_zeros(flag))

        step()  # finds the sizes by compressing noise, on the host
        counts.append(count_operations(step))
    assert counts[0] == counts[1]


class RandomK:
    """As GRACE's random-k: the indices are in the ctx, and do not travel."""

    def compress(self, tensor, name):
        indices = torch.randperm(tensor.numel())[: tensor.numel() // 10]
        return [tensor[indices]], (indices, tensor.numel())

    def decompress(self, tensors, ctx):
        indices, numel = ctx
        return torch.zeros(numel).scatter_(0, indices, tensors[0])


class ByValue(EveryTenth):
    """Makes as many tensors as its argument wants."""

    def compress(self, tensor, name):
        return [tensor[tensor > 1]], tensor.numel()


@pytest.mark.parametrize("inner", [RandomK(), ByValue()])
def test_what_follows_from_more_than_the_size_is_refused(inner):
    compressor = GraceCompressor(inner, ratio=None, cf=10)
    with pytest.raises(ValueError, match="must depend on the number of elements and the CF alone"):
        compressed(compressor, torch.ones(40), 10.0, Key("w"))


def test_a_gradient_that_is_not_finite_is_told_of_and_decodes_to_nothing():
    compressor = GraceCompressor(EveryTenth(), ratio=None, cf=10)
    payload = compressed(compressor, torch.ones(40), 10.0, Key("w"))
    assert not any_nonfinite([payload])
    assert decompressed(compressor, payload).sum() == 4
    assert any_nonfinite([payload.as_nonfinite()])
    assert decompressed(compressor, payload.as_zeros()).sum() == 0


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"inner": object()}, TypeError, "inner must have a method compress"),
        ({"inner": EveryTenth()}, ValueError, "ratio must name an attribute of inner"),
        ({"inner": EveryTenth(), "ratio": None}, ValueError, "cf goes with ratio=None"),
    ],
)
def test_wrong_settings_are_refused(settings, error, told):
    with pytest.raises(error, match=told):
        GraceCompressor(**settings)
