"""What every quantizer promises."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors.base import CorruptPayload, Key
from compressors.kernels.blocks import CODE_BLOCK
from compressors.quantizers import BF16, FP16, QSGD, Int8, Natural, Quantizer
from compressors.signs import OneBit, SignSGD, TernGrad, TwoBit
from tests.unit.samples import norm2, normal, ordinary, wire

KEY = Key("layer.weight", 7)
DTYPES = (torch.float32, torch.float64)
QUANTIZERS = [
    FP16(),
    BF16(),
    Int8(),
    QSGD(),
    QSGD(norm="l2", bucket=64, seed=1),
    QSGD(bucket=64, error_feedback=True),
    TernGrad(),
    TernGrad(clip=None),
    OneBit(),
    TwoBit(),
    TwoBit(threshold=0.5),
    SignSGD(),
    Natural(error_feedback=True),
]
SETTINGS = [(q, cf) for q in QUANTIZERS for cf in q.forms]


def label(value: object) -> str:
    if not isinstance(value, Quantizer):
        return f"{value}"
    given_options = {k: v for k, v in vars(value).items() if k != "forms"}
    return "-".join([value.name, *(str(v) for v in given_options.values())])


every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=label)
every_setting = pytest.mark.parametrize(("quantizer", "cf"), SETTINGS, ids=label)


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        **ordinary(dtype, 1000),
        "small": normal(1000, dtype) * torch.finfo(dtype).smallest_normal * 1e6,
        "mixed": torch.cat([normal(900, dtype) * 1e-6, torch.zeros(600), normal(777, dtype)]),
        "several blocks": normal(5001, dtype),
    }


CASES = [(name, dtype) for dtype in DTYPES for name in tensors(dtype)]
every_tensor = pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)


@every_setting
@every_tensor
def test_round_trip_size_energies_and_residual(quantizer, cf, name, dtype):
    tensor = tensors(dtype)[name]
    before = tensor.clone()
    payload = quantizer.compress(tensor, cf, KEY)
    assert torch.equal(tensor, before)
    assert (payload.numel, payload.cf, payload.key) == (tensor.numel(), cf, KEY)
    assert payload.dtype == dtype
    assert payload.nbytes == quantizer.payload_nbytes(tensor.numel(), cf, dtype)

    sent = quantizer.decompress(payload)
    assert sent.dtype == dtype
    assert sent.isfinite().all()
    for offset in (0, 1, 4):
        received = wire(quantizer, payload, dtype, offset)
        assert all(torch.equal(a, b) for a, b in zip(received.parts, payload.parts, strict=True))
        assert torch.equal(quantizer.decompress(received), sent)

    scale = norm2(tensor) + norm2(sent)
    assert payload.total == pytest.approx(norm2(tensor), rel=1e-6)
    assert payload.energy == pytest.approx(norm2(sent), rel=1e-6)
    assert payload.error == pytest.approx(norm2(tensor.double() - sent.double()), abs=1e-6 * scale)
    assert payload.error >= 0

    memory = tensor.clone()
    quantizer.subtract_from(memory, payload)
    assert torch.equal(memory, tensor - sent)


@every_setting
@every_tensor
def test_compress_sum_is_add_then_compress(quantizer, cf, name, dtype):
    tensor = tensors(dtype)[name]
    memory = normal(tensor.numel(), dtype, seed=1)
    before, total = tensor.clone(), memory + tensor
    payload = quantizer.compress_sum(memory, tensor, cf, KEY)
    assert torch.equal(memory, total)
    assert torch.equal(tensor, before)
    expected = quantizer.compress(total, cf, KEY)
    assert all(torch.equal(a, b) for a, b in zip(payload.parts, expected.parts, strict=True))
    assert (payload.energy, payload.error, payload.total) == (
        expected.energy,
        expected.error,
        expected.total,
    )


@every_quantizer
def test_several_blocks(quantizer):
    tensor, memory = normal(CODE_BLOCK + 519), normal(CODE_BLOCK + 519, seed=1)
    total = memory + tensor
    payload = quantizer.compress_sum(memory, tensor, 16.0, KEY)
    assert torch.equal(memory, total)
    sent = quantizer.decompress(payload)
    assert payload.nbytes == quantizer.payload_nbytes(CODE_BLOCK + 519, 16.0)
    assert payload.total == pytest.approx(norm2(total), rel=1e-6)
    assert payload.energy == pytest.approx(norm2(sent), rel=1e-6)
    assert payload.error == pytest.approx(norm2(total.double() - sent), rel=2e-6)
    quantizer.subtract_from(memory, payload)
    assert torch.equal(memory, total - sent)


@every_setting
def test_what_is_fed_back_is_a_contraction(quantizer, cf):
    if not quantizer.error_feedback or getattr(quantizer, "threshold", None):
        return
    sparse = torch.zeros(4096)
    sparse[::64] = 1.0
    for tensor in (normal(4096), normal(4096).exp(), normal(4096) ** 3, torch.ones(50), sparse):
        payload = quantizer.compress(tensor, cf, KEY)
        assert payload.error < payload.total


@every_setting
def test_nothing_is_lost(quantizer, cf):
    """Sum of sent + residual = sum of gradients."""
    numel = 3000
    residual, sent, given_in = torch.zeros(3, numel, dtype=torch.float64)
    for step in range(6):
        gradient = normal(numel, torch.float64, seed=step)
        payload = quantizer.compress_sum(residual, gradient, cf, Key("w", step))
        quantizer.add_to(sent, payload)
        quantizer.subtract_from(residual, payload)
        given_in += gradient
    size = max(1.0, float(residual.abs().max()))
    torch.testing.assert_close(sent + residual, given_in, rtol=0, atol=1e-13 * size)


@every_quantizer
def test_same_input_same_bits_and_no_global_randomness(quantizer):
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    tensor = normal(CODE_BLOCK + 1000)
    first, second = (quantizer.compress(t, 8.0, KEY) for t in (tensor, tensor.clone()))
    assert all(torch.equal(a, b) for a, b in zip(first.parts, second.parts, strict=True))
    assert (first.energy, first.error) == (second.energy, second.error)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@every_quantizer
def test_add_to_scales_and_accumulates(quantizer):
    payload = quantizer.compress(normal(1000, torch.float64), 10.0, KEY)
    out = torch.ones(1000, dtype=torch.float64)
    quantizer.add_to(out, payload, 0.25)
    quantizer.add_to(out, payload, 0.5)
    torch.testing.assert_close(out, 1 + 0.75 * quantizer.decompress(payload))


@every_quantizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tensors(quantizer, dtype):
    tensor = normal(1000).to(dtype)
    payload = quantizer.compress(tensor, 10.0, KEY)
    assert payload.nbytes == quantizer.payload_nbytes(1000, 10.0, dtype)
    sent = quantizer.decompress(payload)
    assert sent.dtype == dtype
    expected = quantizer.decompress(quantizer.compress(tensor.float(), 10.0, KEY))
    assert torch.equal(sent, expected.to(dtype))
    memory = torch.zeros(1000)
    quantizer.compress_sum(memory, tensor, 10.0, KEY)
    assert torch.equal(memory, tensor.float())


@every_quantizer
@pytest.mark.parametrize("numel", [1, 50, CODE_BLOCK + 3])
def test_non_finite_input_does_not_hide(quantizer, numel):
    for bad in (float("nan"), float("inf")):
        tensor = torch.ones(numel)
        tensor[0] = bad
        payload = quantizer.compress(tensor, 10.0, KEY)
        assert payload.nbytes == quantizer.payload_nbytes(numel, 10.0)
        assert not np.isfinite(payload.error + payload.energy)
        if bad != bad:
            assert quantizer.decompress(payload)[0].isnan()


@every_setting
def test_poison(quantizer, cf):
    payload = quantizer.compress(normal(1000), cf, KEY)
    assert not quantizer.is_poisoned(payload)
    poisoned = quantizer.poison(payload)
    assert quantizer.is_poisoned(poisoned)
    assert quantizer.decompress(poisoned).isnan().all()
    for numel in (1, 2):
        assert quantizer.is_poisoned(
            quantizer.poison(quantizer.compress(torch.ones(numel), cf, KEY))
        )


@every_quantizer
def test_out_of_another_length_is_refused(quantizer):
    payload = quantizer.compress(normal(1000), 10.0, KEY)
    for numel in (0, 999, 1001):
        out = torch.zeros(numel)
        with pytest.raises(CorruptPayload):
            quantizer.add_to(out, payload)
        assert out.count_nonzero() == 0


@every_quantizer
@settings(max_examples=25)
@given(numel=st.integers(0, 700), cf=st.sampled_from([1.0, 8.0, 32.0]), data=st.data())
def test_any_bytes_of_the_right_size_decode_and_others_are_refused(quantizer, numel, cf, data):
    size = quantizer.payload_nbytes(numel, cf)
    seed = data.draw(st.integers(0, 2**32))
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8))
    guarded = torch.full((numel + 64,), 7.0)
    quantizer.add_to(
        guarded[32 : 32 + numel], quantizer.read(raw, numel, cf, torch.float32, KEY), 0.5
    )
    assert (guarded[:32] == 7.0).all()
    assert (guarded[32 + numel :] == 7.0).all()
    for wrong in {max(0, size - 1), size + 1, 2 * size} - {size}:
        with pytest.raises(CorruptPayload, match=str(size)):
            quantizer.read(torch.zeros(wrong, dtype=torch.uint8), numel, cf, torch.float32, KEY)


@every_quantizer
@settings(max_examples=25)
@given(numel=st.integers(0, 2000), cf=st.floats(1, 100), seed=st.integers(0, 1000))
def test_sizes_of_all_kinds(quantizer, numel, cf, seed):
    tensor = normal(numel, seed=seed)
    payload = quantizer.compress(tensor, cf, KEY)
    assert payload.cf == quantizer.supported(cf, numel)
    assert payload.nbytes == quantizer.payload_nbytes(numel, cf)
    sent = quantizer.decompress(payload)
    assert payload.energy == pytest.approx(norm2(sent), rel=1e-6)
    scale = payload.energy + payload.total
    assert payload.error == pytest.approx(norm2(tensor.double() - sent), abs=1e-6 * scale)


@every_quantizer
def test_supported_is_the_nearest_it_can_do(quantizer):
    can = list(quantizer.forms)
    assert can == sorted(can)
    for cf in (1.0, 2.0, 3.9, 6.0, 12.0, 17.0, 32.0, 1000.0):
        nearest = min(can, key=lambda c: (abs(c - cf), c))
        assert quantizer.supported(cf, 100) == nearest
        assert quantizer.floats(100, cf) == 100 / nearest
    assert 4 * 100_000 / quantizer.payload_nbytes(100_000, 1.0) == pytest.approx(can[0], rel=0.15)


@every_quantizer
def test_wrong_arguments_are_refused(quantizer):
    for cf in (0.5, 0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cf must"):
            quantizer.compress(normal(100), cf, KEY)
    for shape in ((99,), (1,), (100, 1)):
        with pytest.raises(ValueError, match="equally long"):
            quantizer.compress_sum(torch.zeros(100), torch.ones(shape), 10.0, KEY)
    payload = quantizer.compress(normal(100), 10.0, KEY)
    with pytest.raises(NotImplementedError):
        quantizer.recompress(payload, 2.0)
    assert quantizer.indices(payload) is None
