"""What every compressor promises, whatever it keeps: each invariant once for each compressor.

What only one family promises, and which elements a rule keeps, is in that family's file.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors import (
    DGC,
    QSGD,
    AdaComp,
    Compressor,
    InvalidPayload,
    Key,
    Natural,
    NoCompression,
    PowerSGD,
    RandomK,
    RoundsCompressor,
    Sketch,
    Sparsifier,
    TernGrad,
    Threshold,
    TopK,
    TwoBit,
    compressor_names,
    kept,
    make_compressor,
    register,
    registry,
)
from compressors.base import Spec, any_nonfinite
from compressors.kernels.blocks import CODE_BLOCK
from compressors.quantizers import Quantizer
from tests.unit.samples import compressed, decompressed, norm2, normal, ordinary, wire

KEY = Key("layer.weight", 7)
DTYPES = (torch.float32, torch.float64)
CODED = ("topk+bf16", "topk+int4", "dgc+fp16", "redsync+int8", "topk+qsgd")

COMPRESSORS: dict[str, Compressor] = {
    **{name: make_compressor(name) for name in (*compressor_names(), *CODED)},
    "randomk unbiased": RandomK(seed=3, unbiased=True),
    "threshold 0.5": Threshold(0.5),
    "adacomp 50": AdaComp(bin_size=50),
    "qsgd l2": QSGD(norm="l2", bucket=64, seed=1),
    "qsgd fed back": QSGD(bucket=64, feeds_back=True),
    "terngrad unclipped": TernGrad(clip=None),
    "twobit 0.5": TwoBit(threshold=0.5),
    "natural fed back": Natural(feeds_back=True),
}
ALONE = {  # which need no other ranks, and have payloads that travel
    name: each for name, each in COMPRESSORS.items() if not isinstance(each, RoundsCompressor)
}
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def cfs(compressor: Compressor) -> tuple[float, ...]:
    if isinstance(compressor, Quantizer):
        return tuple(compressor.forms)
    return (1.0,) if compressor.name == "none" else (1.0, 1.5, 10.0, 1000.0)


def tensors(compressor: Compressor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors by what is special about them; those for quantizers need no blocks to select in."""
    if isinstance(compressor, Quantizer):
        return {
            **ordinary(dtype, 1000),
            "small": normal(1000, dtype) * torch.finfo(dtype).smallest_normal * 1e6,
            "several buckets": normal(5001, dtype),
        }
    spikes = torch.zeros(20_000, dtype=dtype)
    spikes[[3, 7_777, 19_999]] = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
    return {
        **ordinary(dtype),
        "two": torch.tensor([0.0, -2.5], dtype=dtype),
        "spikes": spikes,
        "heavy tail": normal(10_000, dtype) ** 9,
        "two values": (normal(10_000, dtype) > 0).to(dtype) * 2 - 1,
    }


def cases(
    compressor: Compressor, dtype: torch.dtype, some: slice = slice(None)
) -> Iterator[tuple[str, torch.Tensor, float]]:
    """(name, tensor, CF); in double precision only what differs there. some: of the CFs."""
    for name, tensor in tensors(compressor, dtype).items():
        if dtype == torch.float64 and name not in ("empty", "one", "denormal", "huge", "normal"):
            continue
        for cf in cfs(compressor)[some]:
            yield name, tensor, compressor.nearest(Spec((max(1, tensor.numel()),), cf))


def equal_parts(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parts, right.parts, strict=True))


# What travels, what is kept, what remains


@every_compressor
@every_dtype
def test_size_round_trip_energies_and_residual(compressor, dtype):
    exact = not isinstance(compressor, RoundsCompressor)  # products of matrices are rounded
    for name, tensor, cf in cases(compressor, dtype):
        case, numel, before = (name, cf), tensor.numel(), tensor.clone()
        payload = compressor.compress(tensor, Spec.of(tensor, cf, KEY))
        assert torch.equal(tensor, before), case
        assert (payload.numel, payload.key, payload.dtype) == (numel, KEY, dtype), case
        assert payload.cf == cf or not exact, case
        assert payload.nbytes == compressor.nbytes(Spec((numel,), cf, dtype)) or not exact, case

        sent = decompressed(compressor, payload)
        assert sent.dtype == dtype, case
        assert bool(sent.isfinite().all()), case
        for offset in (0, 1):
            received = wire(compressor, payload, dtype, offset)
            assert received.nbytes == payload.nbytes, case
            assert equal_parts(received, payload) or not exact, case
            assert torch.equal(decompressed(compressor, received), sent), case

        lost, scale = norm2(tensor.double() - sent.double()), norm2(tensor) + norm2(sent)
        assert float(payload.total) == pytest.approx(norm2(tensor), rel=1e-6), case
        assert float(payload.energy) == pytest.approx(norm2(sent), rel=1e-5, abs=1e-70), case
        assert float(payload.error) == pytest.approx(lost, rel=1e-5, abs=2e-6 * scale + 1e-70), case
        assert float(payload.error) >= 0, case

        memory = tensor.clone()
        compressor.add_to(memory, payload, -1.0)
        if exact:
            assert torch.equal(memory, tensor - sent), case
        else:  # as products of other widths are, by what the largest elements are rounded to
            atol = max(1e-5, 1e-6 * float(norm2(sent) ** 0.5))
            torch.testing.assert_close(memory, tensor - sent, rtol=1.3e-6, atol=atol)


@every_compressor
@every_dtype
def test_compress_sum_is_add_then_compress(compressor, dtype):
    for name, tensor, cf in cases(compressor, dtype, slice(-2, None)):
        memory = normal(tensor.numel(), dtype, seed=1)
        before, total = tensor.clone(), memory + tensor
        payload = compressor.compress(memory, Spec.of(memory, cf, KEY), tensor)
        assert torch.equal(memory, total), (name, cf)
        assert torch.equal(tensor, before), (name, cf)
        if compressor.name == "adacomp":  # which looks at the latest gradient too
            continue
        expected = compressor.compress(total, Spec.of(total, cf, KEY))
        assert equal_parts(payload, expected), (name, cf)
        found = (float(payload.energy), float(payload.error), float(payload.total))
        assert found == (float(expected.energy), float(expected.error), float(expected.total)), (
            name,
            cf,
        )


@every_compressor
@settings(max_examples=5)
@given(data=st.data(), numel=st.integers(0, 60), steps=st.integers(1, 6))
def test_sent_and_residual_make_up_what_came_in(compressor, data, numel, steps):
    """Error feedback loses nothing: sum of sent + residual = sum of gradients."""
    finite = st.floats(-1e6, 1e6, allow_subnormal=True)
    residual, sent, given_in = torch.zeros(3, numel, dtype=torch.float64)
    largest = 0.0
    for step in range(steps):
        values = data.draw(st.lists(finite, min_size=numel, max_size=numel))
        gradient = torch.tensor(values, dtype=torch.float64)
        cf = data.draw(st.one_of(st.sampled_from([1.0, 10.0, 1000.0]), st.floats(1, 100)))
        cf = compressor.nearest(Spec((max(1, numel),), cf))
        payload = compressor.compress(residual, Spec.of(residual, cf, Key("w", step)), gradient)
        if compressor.multilevel and data.draw(st.booleans()):
            payload = compressor.smaller(payload, data.draw(st.floats(1, 20)))
        compressor.add_to(sent, wire(compressor, payload, torch.float64))
        compressor.add_to(residual, payload, -1.0)
        given_in += gradient
        largest = max(largest, *(float(t.abs().sum()) for t in (gradient, residual, sent)))
    torch.testing.assert_close(sent + residual, given_in, rtol=0, atol=1e-13 * largest)


@pytest.mark.parametrize("name", ["topk", "randomk", "dgc", "adacomp", "qsgd fed back"])
def test_nothing_is_lost_in_a_large_tensor(name):
    compressor, numel = COMPRESSORS[name], 300_000
    residual, sent, given_in = torch.zeros(3, numel, dtype=torch.float64)
    for step, cf in enumerate((10.0, 1000.0, 1.5, 1.0, 100.0)):
        gradient = normal(numel, torch.float64, seed=step)
        payload = compressor.compress(residual, Spec.of(residual, cf, Key("w", step)), gradient)
        compressor.add_to(sent, payload)
        compressor.add_to(residual, payload, -1.0)
        given_in += gradient
    torch.testing.assert_close(sent + residual, given_in, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compressor", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_tensors(compressor, dtype):
    for numel in (0, 1, 1000):
        tensor = normal(numel).to(dtype)
        cf = compressor.nearest(Spec((max(1, numel),), 10.0))
        if isinstance(compressor, Sparsifier):
            with pytest.raises(ValueError, match="x must be float32 or float64"):
                compressor.compress(tensor, Spec.of(tensor, cf, KEY))
            continue
        payload = compressor.compress(tensor, Spec.of(tensor, cf, KEY))
        assert payload.nbytes == compressor.nbytes(Spec((numel,), cf, dtype))
        received = wire(compressor, payload, dtype, offset=1)
        sent = decompressed(compressor, payload)
        assert sent.dtype == dtype
        assert bool(sent.isfinite().all())
        assert torch.equal(decompressed(compressor, received), sent)


@every_compressor
def test_same_input_same_bits_and_no_global_randomness(compressor):
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    several_blocks = isinstance(compressor, Quantizer)
    tensor = normal(CODE_BLOCK + 1000 if several_blocks else 200_000)
    first, second = (
        compressor.compress(t, Spec.of(t, 20.0, KEY)) for t in (tensor, tensor.clone())
    )
    assert equal_parts(first, second)
    assert (float(first.energy), float(first.error)) == (float(second.energy), float(second.error))
    if compressor.multilevel:
        decompressed(compressor, compressor.smaller(first, 2.0))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@every_compressor
def test_tensors_that_require_grad_are_compressed_by_their_values(compressor):
    x, add = normal(1000), normal(1000, seed=1)
    plain = compressed(compressor, x.clone(), 10.0, KEY, add)
    x.requires_grad_()
    assert equal_parts(plain, compressed(compressor, x, 10.0, KEY, add.requires_grad_()))


@every_compressor
def test_add_to_scales_and_accumulates(compressor):
    payload = compressed(compressor, normal(1000, torch.float64), 10.0, KEY)
    out = torch.ones(1000, dtype=torch.float64)
    compressor.add_to(out, payload, 0.25)
    compressor.add_to(out, payload, 0.5)
    torch.testing.assert_close(out, 1 + 0.75 * decompressed(compressor, payload))


@every_compressor
def test_indices_are_where_the_kept_elements_are(compressor):
    for cf in (1.0, 1.5, 10.0):
        payload = compressed(compressor, normal(1000), compressor.nearest(Spec((1000,), cf)), KEY)
        indices = payload.indices
        if indices is not None:
            kept_at = decompressed(compressor, payload).nonzero().flatten()
            coarse = kept_at.numel() < indices.numel()  # values may be coded to 0
            assert torch.equal(indices.sort().values, kept_at) or coarse
        elif isinstance(compressor, (Sparsifier, RandomK)):
            assert cf == 1.0


@every_compressor
def test_floats_and_supported_cf(compressor):
    for numel, cf in ((0, 10.0), (5, 100.0), (1000, 3.0)):
        floats, supported = (
            compressor.floats(Spec((numel,), cf)),
            compressor.nearest(Spec((numel,), cf)),
        )
        if compressor.name == "none":
            assert (floats, supported) == (numel, 1.0)
        elif isinstance(compressor, (Sparsifier, RandomK)):
            assert (floats, supported) == (kept(numel, cf), cf)
        elif isinstance(compressor, Quantizer):
            nearest = min(compressor.forms, key=lambda can: (abs(can - cf), can))
            assert (floats, supported) == (numel / nearest, nearest)


@every_compressor
def test_non_contiguous_input(compressor):
    wide = normal(4000)
    cf = compressor.nearest(Spec((2000,), 10.0))
    payload = compressed(compressor, wide[::2], cf, KEY)
    strided = decompressed(compressor, payload)
    lost = norm2(wide[::2] - strided)
    assert float(payload.error) == pytest.approx(lost, rel=1e-5, abs=1e-5)
    straight = decompressed(compressor, compressed(compressor, wide[::2].contiguous(), cf, KEY))
    if compressor.name not in ("natural", "qsgd", "terngrad"):  # seeded by the norm's last bit too
        torch.testing.assert_close(strided, straight, rtol=1e-5, atol=1e-6)


# Not finite


@every_compressor
def test_non_finite_input_neither_crashes_nor_hides(compressor):
    numels = (1, 50, CODE_BLOCK + 3) if isinstance(compressor, Quantizer) else (50, 20_000)
    for numel in numels:
        cf = compressor.nearest(Spec((numel,), 10.0))
        for bad in (float("nan"), float("inf")):
            for count in {1, numel}:
                tensor = torch.ones(numel)
                tensor[:count] = bad
                payload = compressor.compress(tensor, Spec.of(tensor, cf, KEY))
                if not isinstance(compressor, RoundsCompressor):
                    assert payload.nbytes == compressor.nbytes(Spec((numel,), cf))
                assert not np.isfinite(float(payload.error) + float(payload.energy)), (
                    numel,
                    bad,
                    count,
                )
                if isinstance(compressor, Quantizer) and bad != bad:
                    assert decompressed(compressor, payload)[0].isnan()


@every_compressor
def test_what_is_not_finite_survives_the_wire(compressor):
    for numel in (1, 2, 1000):
        cf = compressor.nearest(Spec((numel,), 10.0))
        payload = compressed(compressor, normal(numel), cf, KEY)
        assert not any_nonfinite([payload])
        nonfinite = payload.as_nonfinite()
        assert any_nonfinite([wire(compressor, nonfinite, torch.float32)])
        nans = decompressed(compressor, nonfinite).isnan()
        if isinstance(compressor, (Quantizer, NoCompression)):
            assert nans.all()
        else:
            assert nans.any()


# Refused


@every_compressor
def test_out_of_another_length_is_refused(compressor):
    payload = compressed(compressor, normal(1000), 10.0, KEY)
    for numel in (0, 999, 1001):
        out = torch.zeros(numel)
        with pytest.raises(InvalidPayload):
            compressor.add_to(out, payload)
        assert out.count_nonzero() == 0


@pytest.mark.parametrize("compressor", ALONE.values(), ids=ALONE)
def test_bytes_of_another_length_are_refused(compressor):
    size = compressor.nbytes(Spec((1000,), 10.0))
    for wrong in (0, size - 1, size + 1, 2 * size):
        with pytest.raises(InvalidPayload, match=str(size)):
            compressor.read(
                torch.zeros(1, wrong, dtype=torch.uint8), Spec((1000,), 10.0, torch.float32, KEY)
            )


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        *((kind, "seed", ("a", 0.01, True, None)) for kind in (RandomK, Natural, PowerSGD, QSGD)),
        *((kind, "seed", ("a", 0.01, True, None)) for kind in (Sketch, TernGrad)),
        *((kind, "threshold", ("a", True, 0, -1, nan, inf)) for kind in (Threshold, TwoBit)),
        (TernGrad, "clip", ("a", True, 0, -1, nan, inf)),
        (PowerSGD, "rank", ("a", True, 0, 2.5)),
        (Sketch, "rows", ("a", True, 0, 2, 2.5)),
        (Sketch, "share", ("a", True, 0, 1, nan)),
    ],
)
def test_settings_that_are_none_are_refused(make, name, values):
    """0.01 as the first argument is meant as a share of the elements, and not as a seed."""
    for value in values:
        with pytest.raises((TypeError, ValueError), match=rf"^{name}.* must be .*got|^{name}="):
            make(**{name: value})


@every_compressor
def test_bad_arguments_are_refused(compressor):
    for shape in ((99,), (1,), (100, 1)):
        with pytest.raises(ValueError, match="equally long"):
            compressed(compressor, torch.zeros(100), 10.0, KEY, torch.ones(shape))
    if compressor.name == "none":
        return  # every CF is 1 to it
    tensor = normal(100)
    for cf in (0.5, 0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cf must"):
            compressor.compress(tensor, Spec.of(tensor, cf, KEY))
    payload = compressor.compress(tensor, Spec.of(tensor, 10.0, KEY))
    if not compressor.multilevel:
        with pytest.raises(NotImplementedError):
            compressor.smaller(payload, 2.0)
        return
    for factor in (0.5, 0, float("nan")):
        with pytest.raises(ValueError, match="factor must"):
            compressor.smaller(payload, factor)


@pytest.mark.parametrize("compressor", ALONE.values(), ids=ALONE)
@settings(max_examples=10)
@given(data=st.data(), numel=st.integers(0, 700))
def test_any_bytes_give_an_error_or_something_inside_the_tensor(compressor, data, numel):
    dtype = data.draw(st.sampled_from(DTYPES))
    cf = data.draw(st.sampled_from([1.0, 1.5, 7.0, 30.0, 500.0]))
    cf = compressor.nearest(Spec((max(numel, 1),), cf))
    size = compressor.nbytes(Spec((numel,), cf, dtype))
    noise = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    kind = data.draw(st.sampled_from(["random", "zeros", "ones", "altered"]))
    if kind == "altered":
        raw = torch.empty(size, dtype=torch.uint8)
        compressed(compressor, normal(numel, dtype), cf, KEY).write(raw)
        array = raw.numpy()
        if size:
            array[noise.integers(0, size, 3)] ^= (1 << noise.integers(0, 8, 3)).astype(np.uint8)
    else:
        fill = {"zeros": 0, "ones": 255}.get(kind)
        array = noise.integers(0, 256, size) if fill is None else np.full(size, fill)
    length = max(0, size + data.draw(st.sampled_from([0, 0, 0, -3, -1, 1, 3])))
    array = np.concatenate([array, np.zeros(8)])[:length].astype(np.uint8)
    guarded = torch.full((numel + 200,), 7.0, dtype=dtype)
    out = guarded[100 : 100 + numel]
    try:
        (payload,) = compressor.read(torch.from_numpy(array)[None], Spec((numel,), cf, dtype, KEY))
        compressor.add_to(out, payload)
    except InvalidPayload:
        assert bool((out == 7.0).all())  # nothing was written
    else:
        assert length == size
    assert bool((guarded[:100] == 7.0).all())
    assert bool((guarded[100 + numel :] == 7.0).all())


# By name


def test_names():
    for name, kind in (("none", NoCompression), ("topk", TopK), ("randomk", RandomK)):
        made = make_compressor(name)
        assert type(made) is kind
        assert made.name == name
    base = RandomK(seed=5, unbiased=True)
    assert make_compressor(base) is base
    with pytest.raises(ValueError, match=r"base must be one of .*none.*randomk.*topk.*'topkk'"):
        make_compressor("topkk")
    for other in (None, 3, TopK, ["topk"]):
        with pytest.raises(TypeError, match="base must be"):
            make_compressor(other)


def test_register(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    register("mine", lambda: RandomK(seed=9))
    assert make_compressor("mine").seed == 9
    with pytest.raises(ValueError, match="'mine'"):
        register("mine", TopK)


def test_only_measured_compressors_leave_velocities_less_of_their_lag():
    for base in ("dgc", "randomk", "qsgd"):  # the paper's rule, and those that were not measured
        assert make_compressor(base).momentum_factor == inf


def test_properties_of_each():
    linear = {name for name, c in COMPRESSORS.items() if c.sums}
    assert linear == {"none", "fp16", "bf16", "randomk", "randomk unbiased"}
    not_fed_back = {name for name, c in COMPRESSORS.items() if not c.feeds_back}
    assert not_fed_back == {
        "randomk unbiased", "qsgd", "qsgd l2", "terngrad",
        "terngrad unclipped", "natural",
    }  # fmt: skip
    assert DGC.masking == 1.0


def test_dense_is_the_tensor_itself():
    tensor, dense = normal(100), NoCompression()
    payload = dense.compress(tensor, Spec.of(tensor, 100.0, KEY))
    assert dense.nearest(Spec((100,), 100.0)) == 1.0
    assert (payload.cf, float(payload.error)) == (1.0, 0.0)
    assert payload.parts[0].data_ptr() == tensor.data_ptr()
    assert dense.smaller(payload, 10.0) is payload
