"""What holds for every registered compressor, sparsifiers with coded values included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors import Compressor, CorruptPayload, Key, compressor_names, make_compressor

NAMES = [*compressor_names(), "topk+bf16", "dgc+fp16", "redsync+int8", "topk+qsgd", "randomk+int8"]
KEY = Key("layer.weight", 3)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

every_name = pytest.mark.parametrize("name", NAMES)


def normal(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


def received(compressor: Compressor, payload, dtype: torch.dtype):
    data = torch.empty(payload.nbytes, dtype=torch.uint8)
    payload.write(data)
    return compressor.read(data, payload.numel, payload.cf, dtype, payload.key)


@every_name
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 2, 63, 5000])
def test_every_dtype_and_size_arrives_as_it_was_sent(name, dtype, numel):
    compressor = make_compressor(name)
    tensor = normal(numel, dtype)
    before = tensor.clone()
    payload = compressor.compress(tensor, compressor.supported(20.0, max(numel, 1)), KEY)
    assert torch.equal(tensor, before)
    assert payload.dtype == dtype
    assert payload.nbytes == compressor.payload_nbytes(numel, payload.cf, dtype)
    sent = compressor.decompress(payload)
    assert sent.dtype == dtype
    assert torch.equal(compressor.decompress(received(compressor, payload, dtype)), sent)
    assert bool(sent.isfinite().all())
    if dtype in (torch.float32, torch.float64):
        lost = float((tensor.double() - sent.double()).square().sum())
        assert payload.error == pytest.approx(lost, rel=1e-5, abs=1e-5 * payload.total + 1e-30)
        assert payload.energy == pytest.approx(float(sent.double().square().sum()), rel=1e-5)


@every_name
def test_non_contiguous_input(name):
    compressor = make_compressor(name)
    wide = normal(4000)
    cf = compressor.supported(10.0, 2000)
    strided = compressor.decompress(compressor.compress(wide[::2], cf, KEY))
    straight = compressor.decompress(compressor.compress(wide[::2].contiguous(), cf, KEY))
    torch.testing.assert_close(strided, straight, rtol=1e-5, atol=1e-6)


@every_name
def test_the_global_random_state_is_left_alone(name):
    compressor = make_compressor(name)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    compressor.compress(normal(3000), compressor.supported(10.0, 3000), KEY)
    assert torch.equal(torch.get_rng_state(), before)


@every_name
@settings(max_examples=25)
@given(
    numel=st.integers(0, 700),
    cf=st.sampled_from([1.0, 2.0, 7.0, 30.0, 500.0]),
    noise=st.randoms(use_true_random=False),
    cut=st.integers(-3, 3),
    kind=st.sampled_from(["random", "zeros", "ones", "flipped"]),
)
def test_any_bytes_give_an_error_or_something_inside_the_tensor(name, numel, cf, noise, cut, kind):
    compressor = make_compressor(name)
    cf = compressor.supported(cf, max(numel, 1))
    size = compressor.payload_nbytes(numel, cf)
    if kind == "flipped":
        good = compressor.compress(normal(numel), cf, KEY)
        raw = torch.empty(good.nbytes, dtype=torch.uint8)
        good.write(raw)
        data = bytearray(bytes(raw.tolist()))
        for _ in range(min(3, len(data))):
            data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
    else:
        fill = {"zeros": lambda: 0, "ones": lambda: 255, "random": lambda: noise.randrange(256)}
        data = bytearray(fill[kind]() for _ in range(size))
    length = max(0, len(data) + cut)
    data = (data + bytes(8))[:length]
    around = torch.full((numel + 200,), 7.0)
    out = around[100 : 100 + numel]
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    try:
        payload = compressor.read(tensor, numel, cf, torch.float32, KEY)
        compressor.add_to(out, payload)
    except CorruptPayload:
        assert bool((out == 7.0).all())  # nothing was written
    else:
        assert length == size
    assert bool((around[:100] == 7.0).all())
    assert bool((around[100 + numel :] == 7.0).all())
