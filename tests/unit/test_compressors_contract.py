"""What every compressor promises, whatever it keeps."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors import Compressor, CorruptPayload, Key, NoCompression, RandomK, TopK, kept
from tests.unit.samples import norm2, normal, ordinary, wire

KEY = Key("layer.weight", 7)
CFS = (1.0, 1.5, 10.0, 1000.0)
DTYPES = (torch.float32, torch.float64)


def compressors() -> list[Compressor]:
    return [
        NoCompression(),
        TopK(),
        RandomK(seed=3),
        RandomK(seed=3, unbiased=True),
        RandomK(seed=3, unbiased=True, values="bf16"),
    ]


def label(compressor: Compressor) -> str:
    return compressor.name + ("-unbiased" if getattr(compressor, "unbiased", False) else "")


every_compressor = pytest.mark.parametrize("compressor", compressors(), ids=label)


CASES = [(name, dtype) for dtype in DTYPES for name in ordinary(dtype)]
every_tensor = pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda v: str(v))


@every_compressor
@every_tensor
@pytest.mark.parametrize("cf", CFS)
def test_payload_size_round_trip_energies_and_residual(compressor, name, dtype, cf):
    tensor = ordinary(dtype)[name]
    before = tensor.clone()
    payload = compressor.compress(tensor, cf, KEY)
    assert torch.equal(tensor, before)
    assert payload.numel == tensor.numel()
    assert payload.key == KEY
    assert payload.nbytes == compressor.payload_nbytes(tensor.numel(), cf, dtype)

    sent = compressor.decompress(payload)
    assert sent.dtype == dtype
    for offset in (0, 1, 4):
        received = wire(compressor, payload, dtype, offset)
        assert received.nbytes == payload.nbytes
        assert all(torch.equal(a, b) for a, b in zip(received.parts, payload.parts, strict=True))
        assert torch.equal(compressor.decompress(received), sent)

    lost = tensor.double() - sent.double()
    scale = norm2(tensor) + norm2(sent)
    assert payload.energy == pytest.approx(norm2(sent), rel=1e-6)
    assert payload.error == pytest.approx(norm2(lost), rel=1e-6, abs=1e-6 * scale)
    assert payload.error >= 0

    memory = tensor.clone()
    compressor.subtract_from(memory, payload)
    assert torch.equal(memory, tensor - sent)


@every_compressor
@every_tensor
@pytest.mark.parametrize("cf", CFS)
def test_compress_sum_is_add_then_compress(compressor, name, dtype, cf):
    tensor = ordinary(dtype)[name]
    memory = normal(tensor.numel(), dtype, seed=1)
    before, total = tensor.clone(), memory + tensor
    payload = compressor.compress_sum(memory, tensor, cf, KEY)
    assert torch.equal(memory, total)
    assert torch.equal(tensor, before)
    expected = compressor.compress(total, cf, KEY)
    assert all(torch.equal(a, b) for a, b in zip(payload.parts, expected.parts, strict=True))
    assert (payload.energy, payload.error) == (expected.energy, expected.error)


@every_compressor
def test_same_input_same_bits(compressor):
    tensor = normal(200_000)
    first, second = (compressor.compress(t, 50.0, KEY) for t in (tensor, tensor.clone()))
    assert all(torch.equal(a, b) for a, b in zip(first.parts, second.parts, strict=True))
    assert (first.energy, first.error) == (second.energy, second.error)


@every_compressor
def test_global_random_state_is_left_alone(compressor):
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    payload = compressor.compress(normal(100), 10.0, KEY)
    compressor.decompress(compressor.recompress(payload, 2.0))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@every_compressor
def test_add_to_scales_and_accumulates(compressor):
    tensor = normal(1000, torch.float64)
    payload = compressor.compress(tensor, 10.0, KEY)
    out = torch.ones(1000, dtype=torch.float64)
    compressor.add_to(out, payload, 0.25)
    compressor.add_to(out, payload, 0.5)
    torch.testing.assert_close(out, 1 + 0.75 * compressor.decompress(payload))


@every_compressor
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_works(compressor, dtype):
    tensor = normal(1000).to(dtype)
    payload = compressor.compress(tensor, 10.0, KEY)
    assert payload.nbytes == compressor.payload_nbytes(1000, 10.0, dtype)
    received = wire(compressor, payload, dtype, offset=1)
    assert torch.equal(compressor.decompress(received), compressor.decompress(payload))
    memory = torch.zeros(1000)
    compressor.compress_sum(memory, tensor, 10.0, KEY)
    assert torch.equal(memory, tensor.float())


@every_compressor
def test_non_finite_input_neither_crashes_nor_hides(compressor):
    for numel in (50, 100_000):
        for bad in (float("nan"), float("inf")):
            for count in (1, numel):
                tensor = torch.ones(numel)
                tensor[:count] = bad
                payload = compressor.compress(tensor, 10.0, KEY)
                assert payload.nbytes == compressor.payload_nbytes(numel, 10.0)
                assert not np.isfinite(payload.error + payload.energy)


@every_compressor
def test_poison(compressor):
    payload = compressor.compress(normal(1000), 10.0, KEY)
    assert not compressor.is_poisoned(payload)
    poisoned = compressor.poison(payload)
    assert compressor.is_poisoned(wire(compressor, poisoned, torch.float32))
    assert compressor.decompress(poisoned).isnan().sum() == payload.parts[-1].numel()


@every_compressor
@pytest.mark.parametrize("cf", CFS)
def test_total_and_indices(compressor, cf):
    tensor = normal(1000)
    payload = compressor.compress(tensor, cf, KEY)
    assert payload.total == pytest.approx(norm2(tensor), rel=1e-6)
    indices = compressor.indices(payload)
    if indices is None:
        assert payload.parts[-1].numel() == 1000
    else:
        assert indices.dtype == torch.int64
        kept_at = compressor.decompress(payload).nonzero().flatten()
        assert torch.equal(indices.sort().values, kept_at)


@every_compressor
def test_out_of_another_length_is_refused(compressor):
    payload = compressor.compress(normal(1000), 10.0, KEY)
    for numel in (0, 999, 1001):
        out = torch.zeros(numel)
        with pytest.raises(CorruptPayload):
            compressor.add_to(out, payload)
        assert out.count_nonzero() == 0


@every_compressor
def test_bytes_of_another_length_are_refused(compressor):
    size = compressor.payload_nbytes(1000, 10.0)
    for wrong in (0, size - 1, size + 1):
        with pytest.raises(CorruptPayload, match=str(size)):
            compressor.read(torch.zeros(wrong, dtype=torch.uint8), 1000, 10.0, torch.float32, KEY)


@every_compressor
@settings(max_examples=60)
@given(data=st.data())
def test_fuzzed_bytes_never_write_out_of_bounds(compressor, data):
    """Random, truncated or altered bytes: CorruptPayload, or a payload that stays inside `out`."""
    dtype = data.draw(st.sampled_from(DTYPES))
    numel = data.draw(st.integers(0, 40))
    cf = data.draw(st.sampled_from([1.0, 1.5, 4.0, 100.0]))
    raw = bytearray(compressor.payload_nbytes(numel, cf, dtype))
    if data.draw(st.booleans()):
        raw = bytearray(data.draw(st.binary(max_size=400)))
    else:
        valid = torch.empty(len(raw), dtype=torch.uint8)
        compressor.compress(normal(numel, dtype), cf, KEY).write(valid)
        raw[:] = bytes(valid.tolist())
        for position in data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=4)):
            if raw:
                raw[position] = data.draw(st.integers(0, 255))
        raw = raw[: len(raw) - data.draw(st.sampled_from([0, 0, 1, 4]))]
    guarded = torch.full((numel + 64,), 7.0, dtype=dtype)
    out = guarded[32 : 32 + numel]
    try:
        received = compressor.read(
            torch.tensor(list(raw), dtype=torch.uint8), numel, cf, dtype, KEY
        )
        compressor.add_to(out, received)
    except CorruptPayload:
        assert (out == 7.0).all()
    assert (guarded[:32] == 7.0).all()
    assert (guarded[32 + numel :] == 7.0).all()


@every_compressor
def test_cf_and_factor_below_one_are_refused(compressor):
    if compressor.name == "none":
        return  # every CF is 1 to it
    tensor = normal(100)
    for cf in (0.5, 0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cf must"):
            compressor.compress(tensor, cf, KEY)
    payload = compressor.compress(tensor, 10.0, KEY)
    for factor in (0.5, 0, float("nan")):
        with pytest.raises(ValueError, match="factor must"):
            compressor.recompress(payload, factor)


@every_compressor
def test_memory_and_tensor_must_match(compressor):
    for shape in ((99,), (1,), (100, 1)):
        with pytest.raises(ValueError, match="equally long"):
            compressor.compress_sum(torch.zeros(100), torch.ones(shape), 10.0, KEY)


@every_compressor
def test_floats_counts_elements(compressor):
    for numel, cf in ((0, 10.0), (5, 100.0), (1000, 3.0)):
        expected = numel if compressor.name == "none" else kept(numel, cf)
        assert compressor.floats(numel, cf) == expected


def test_dense_is_the_tensor_itself():
    tensor = normal(100)
    dense = NoCompression()
    payload = dense.compress(tensor, 100.0, KEY)
    assert dense.supported(100.0, 100) == 1.0
    assert payload.cf == 1.0
    assert payload.error == 0.0
    assert payload.parts[0].data_ptr() == tensor.data_ptr()
    assert dense.recompress(payload, 10.0) is payload
