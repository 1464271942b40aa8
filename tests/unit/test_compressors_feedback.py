"""Error feedback loses nothing: sum of sent + residual = sum of gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors import Compressor, Key, NoCompression, RandomK, TopK

finite = st.floats(-1e6, 1e6, allow_subnormal=True)


@pytest.mark.parametrize(
    "compressor", [NoCompression(), TopK(), RandomK(seed=1)], ids=lambda c: c.name
)
@given(data=st.data(), numel=st.integers(0, 60), steps=st.integers(1, 8))
@settings(max_examples=60)
def test_nothing_is_lost(compressor: Compressor, data, numel: int, steps: int):
    residual, sent, given_in = torch.zeros(3, numel, dtype=torch.float64)
    size = 0.0
    for step in range(steps):
        values = data.draw(st.lists(finite, min_size=numel, max_size=numel))
        gradient = torch.tensor(values, dtype=torch.float64)
        size += float(gradient.abs().sum())
        cf = data.draw(st.one_of(st.sampled_from([1.0, 10.0, 1000.0]), st.floats(1, 100)))
        payload = compressor.compress_sum(residual, gradient, cf, Key("w", step))
        if data.draw(st.booleans()):
            payload = compressor.recompress(payload, data.draw(st.floats(1, 20)))
        wire = torch.empty(payload.nbytes, dtype=torch.uint8)
        payload.write(wire)
        received = compressor.read(wire, numel, payload.cf, torch.float64, payload.key)
        compressor.add_to(sent, received)
        compressor.subtract_from(residual, payload)
        given_in += gradient
    torch.testing.assert_close(sent + residual, given_in, rtol=0, atol=1e-14 * size)


@pytest.mark.parametrize("compressor", [TopK(), RandomK(seed=1)], ids=lambda c: c.name)
def test_nothing_is_lost_in_a_large_tensor(compressor: Compressor):
    numel = 300_000
    random = torch.Generator().manual_seed(0)
    residual, sent, given_in = torch.zeros(3, numel, dtype=torch.float64)
    for step, cf in enumerate((10.0, 1000.0, 1.5, 1.0, 100.0)):
        gradient = torch.randn(numel, dtype=torch.float64, generator=random)
        payload = compressor.compress_sum(residual, gradient, cf, Key("w", step))
        compressor.add_to(sent, payload)
        compressor.subtract_from(residual, payload)
        given_in += gradient
    torch.testing.assert_close(sent + residual, given_in, rtol=0, atol=1e-13)
