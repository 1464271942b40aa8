"""Top-k against an obvious NumPy reference, above all where a sampled threshold misleads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from compressors import Key, TopK, kept
from compressors.base import Spec
from compressors.kernels import host
from compressors.kernels.blocks import CACHE_BLOCK
from tests.unit.device_path import device_path
from tests.unit.samples import compressed

KEY = Key("w")
LARGE = 600_000


def reference(x: np.ndarray, k: int) -> np.ndarray:
    """Ascending indices of the k largest magnitudes, the lower index first among equals."""
    magnitude = np.abs(x)
    if k == 0:
        return np.empty(0, np.int64)
    kth = np.sort(magnitude)[::-1][k - 1]
    above = np.flatnonzero(magnitude > kth)
    equal = np.flatnonzero(magnitude == kth)
    return np.sort(np.concatenate([above, equal[: k - above.size]]))


def check(x: np.ndarray, cf: float) -> None:
    payload = compressed(TopK(), torch.from_numpy(x), cf, KEY)
    indices, values = (part.numpy() for part in payload.parts)
    expected = reference(x, kept(x.size, cf))
    assert indices.dtype == np.int32
    assert values.dtype == x.dtype
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, x[expected])
    wide = x.astype(np.float64) ** 2
    total, energy = wide.sum(), wide[expected].sum()
    assert float(payload.energy) == pytest.approx(energy, rel=1e-6)
    assert float(payload.error) == pytest.approx(total - energy, rel=1e-6, abs=1e-6 * total)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("numel", [0, 1, 2, 100, 3000, 8191, 8192, 20_000, 131_073])
def test_equals_reference(numel, dtype):
    x = np.random.default_rng(numel).standard_normal(numel).astype(dtype)
    for cf in (1, 1.5, 3, 5, 10, 100, 1000, 1e9):
        check(x, cf)


@given(
    arrays(np.float32, st.integers(0, 300), elements=st.integers(-3, 3).map(float)),
    st.floats(1, 400),
)
@settings(max_examples=40)
def test_ties_go_to_the_lower_index(x, cf):
    check(x, cf)


def spikes(rng: np.random.Generator) -> np.ndarray:
    x = np.zeros(LARGE)
    x[rng.choice(LARGE, 500, replace=False)] = rng.standard_normal(500)
    return x


def comb(period: int) -> np.ndarray:
    x = np.linspace(0.1, 0.2, LARGE)
    x[::period] += 100
    return x


def one_block(rng: np.random.Generator) -> np.ndarray:
    x = np.zeros(LARGE)
    x[300_000:360_000] = rng.standard_normal(60_000)
    return x


def last_elements(rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal(LARGE) * 1e-3
    x[-50_000:] += 1
    return x


SAMPLE_STRIDE = max(LARGE // host._SAMPLE | 1, host._STRIDE)
LARGE_CASES = {
    "normal": lambda rng: rng.standard_normal(LARGE),
    "heavy tail": lambda rng: rng.standard_cauchy(LARGE),
    "few spikes in zeros": spikes,
    "ascending": lambda rng: np.arange(LARGE) - 10.0,
    "descending": lambda rng: np.arange(LARGE)[::-1] + 1.0,
    "sample sees only large": lambda rng: comb(SAMPLE_STRIDE),
    "period 64": lambda rng: comb(64),
    "sample sees only small": lambda rng: np.roll(comb(SAMPLE_STRIDE), 1),
    "one block": one_block,
    "last elements": last_elements,
    "zero": lambda rng: np.zeros(LARGE),
    "constant": lambda rng: np.full(LARGE, -3.0),
    "two values": lambda rng: rng.integers(0, 2, LARGE) * 2.0 - 1.0,
    "few values": lambda rng: rng.integers(-9, 10, LARGE) * 0.5,
    "denormal": lambda rng: rng.standard_normal(LARGE) * 1e-42,
    "huge": lambda rng: rng.standard_normal(LARGE) * 1e30,
    "normal and huge": lambda rng: np.where(rng.random(LARGE) < 1e-4, 1e25, 1.0),
}


@pytest.mark.parametrize("name", LARGE_CASES)
def test_large_equals_reference(name):
    x = LARGE_CASES[name](np.random.default_rng(1)).astype(np.float32)
    for cf in (10, 1000):
        check(x, cf)


@pytest.mark.parametrize("cf", [1.5, 100])
def test_large_float64(cf):
    check(np.random.default_rng(2).standard_normal(LARGE // 3), cf)


@pytest.mark.parametrize("name", ["normal", "ascending", "sample sees only large", "constant"])
def test_large_sum_and_residual(name):
    x = LARGE_CASES[name](np.random.default_rng(3)).astype(np.float32)
    memory = np.random.default_rng(4).standard_normal(LARGE).astype(np.float32)
    total = memory + x
    held = torch.from_numpy(memory)
    payload = TopK().compress(held, Spec.of(held, 100, KEY), torch.from_numpy(x))
    np.testing.assert_array_equal(memory, total)
    expected = reference(total, LARGE // 100)
    np.testing.assert_array_equal(payload.parts[0].numpy(), expected)
    TopK().add_to(held, payload, -1.0)
    total[expected] = 0
    np.testing.assert_array_equal(memory, total)


def test_a_misleading_sample_really_takes_further_passes(monkeypatch):
    passes = []
    collect = host._collect
    monkeypatch.setattr(host, "_collect", lambda *args: passes.append(args[2]) or collect(*args))
    rng = np.random.default_rng(1)
    compressed(TopK(), torch.from_numpy(LARGE_CASES["normal"](rng).astype(np.float32)), 100, KEY)
    assert len(passes) == 1
    passes.clear()
    x = LARGE_CASES["sample sees only large"](rng).astype(np.float32)
    compressed(TopK(), torch.from_numpy(x), 20, KEY)
    assert len(passes) > 1
    assert passes[-1] == 0


def test_what_is_held_stays_small_when_the_guess_is_low(monkeypatch):
    held = []
    largest = host.Candidates.largest
    monkeypatch.setattr(
        host.Candidates, "largest", lambda self: held.append(self.count) or largest(self)
    )
    x = LARGE_CASES["ascending"](np.random.default_rng()).astype(np.float32)
    monkeypatch.setattr(host, "_guess", lambda sample, rank: 0.0)
    compressed(TopK(), torch.from_numpy(x), 100, KEY)
    assert len(held) > 1
    assert max(held) <= 2 * (LARGE // 100) + 2 * CACHE_BLOCK


@pytest.mark.parametrize("k", [1, 2, 50, 9_000, 99_990, 100_000])
@pytest.mark.parametrize("sort", [-1, 0, 1])
def test_kth_largest(k, sort):
    x = np.random.default_rng(k).standard_normal(100_000)
    ordered = np.sort(x)[::-1]
    x = {-1: ordered, 0: x, 1: ordered[::-1]}[sort]
    assert host._rank_value(x, k) == ordered[k - 1]


@pytest.mark.parametrize("numel", [0, 1, 5000])
@pytest.mark.parametrize("cf", [1.0, 1.5, 100.0])
def test_device_path_equals_reference(numel, cf):
    with device_path():
        _check_on_a_device(numel, cf)


def _check_on_a_device(numel: int, cf: float) -> None:
    x = np.random.default_rng(5).standard_normal(numel).astype(np.float32)
    check(x, cf)
    memory = torch.ones(numel)
    payload = TopK().compress(memory, Spec.of(memory, cf, KEY), torch.from_numpy(x))
    assert torch.equal(memory, torch.from_numpy(x + 1))
    expected = reference(x + 1, kept(numel, cf))
    np.testing.assert_array_equal(payload.parts[0].numpy(), expected)
    again = TopK().smaller(payload, 2.0)
    np.testing.assert_array_equal(again.parts[0].numpy(), reference(x + 1, kept(numel, 2 * cf)))


@pytest.mark.parametrize("cf", [1.0, 1.5, 300.0])
@pytest.mark.parametrize("factor", [1.0, 1.7, 1e6])
@pytest.mark.parametrize("numel", [1, 1000, 140_000])
def test_recompress_equals_direct(numel, cf, factor):
    x = torch.from_numpy(np.random.default_rng(numel).standard_normal(numel).astype(np.float32))
    further = TopK().smaller(TopK().compress(x, Spec.of(x, cf, KEY)), factor)
    direct = TopK().compress(x, Spec.of(x, cf * factor, KEY))
    assert (further.cf, further.numel, further.key) == (direct.cf, direct.numel, direct.key)
    assert torch.equal(further.parts[0], direct.parts[0])
    assert torch.equal(further.parts[1], direct.parts[1])
    assert float(further.energy) == pytest.approx(float(direct.energy), rel=1e-6)
    assert float(further.error) == pytest.approx(
        float(direct.error), rel=1e-5, abs=1e-6 * float(x.square().sum())
    )


def test_recompress_of_a_received_payload_says_that_the_error_is_unknown():
    payload = compressed(TopK(), torch.randn(100), 2.0, KEY)
    data = torch.empty(payload.nbytes, dtype=torch.uint8)
    payload.write(data)
    (received,) = TopK().read(data[None], Spec((100,), 2.0, torch.float32, KEY))
    further = TopK().smaller(received, 5.0)
    assert np.isnan(float(further.error))
    assert float(further.energy) > 0


def test_tensor_must_be_flat():
    with pytest.raises(ValueError, match="flat"):
        compressed(TopK(), torch.zeros(2, 3), 2.0, KEY)


def test_more_than_31_bits_of_positions_are_refused():
    with pytest.raises(ValueError, match="2147483647"):
        compressed(TopK(), torch.zeros(1).expand(2**31), 2.0, KEY)
