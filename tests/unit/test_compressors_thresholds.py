"""Threshold sparsifiers: their rules against references that do the obvious in NumPy."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from compressors import Key, TopK, kept, thresholds
from compressors.base import Spec
from compressors.contrib import sidco
from compressors.contrib.adacomp import AdaComp
from compressors.contrib.sidco import SIDCo
from compressors.kernels import blocks, host
from compressors.sparsifier import SparsePayload, Sparsifier
from compressors.thresholds import DGC, RedSync, Threshold
from tests.unit.device_path import device_path
from tests.unit.samples import compressed, decompressed, norm2, normal, ordinary

KEY = Key("w", 5)


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """Ascending positions of the k largest magnitudes, the lower first among equals."""
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])


def reaching(x: np.ndarray, threshold: float, k: int) -> np.ndarray:
    found = np.flatnonzero(np.abs(x) >= x.dtype.type(threshold))
    if found.size > k:
        found = found[largest(x[found], k)]
    return found if found.size else largest(x, min(k, 1))


def spread(x: np.ndarray, size: int, start: int = 0) -> np.ndarray:
    stride = max(1, x.size // size)
    stride -= stride % 2 == 0
    return np.abs(x[start % stride :: stride])


def quantile(sample: np.ndarray, share: float) -> float:
    rank = min(sample.size, max(1, round(share * sample.size)))
    return float(np.sort(sample)[::-1][rank - 1])


def by_dgc(x: np.ndarray, k: int) -> np.ndarray:
    percent = min(x.size / 100, 65_536)
    size = min(x.size, int(max(x.size / 1000, percent, 32 * x.size / k)))
    return reaching(x, quantile(spread(x, size, KEY.step), k / x.size), k)


def size_of(numel: int, k: int, rank: int) -> int:
    usual = min(max(numel // 32, 4096), 65_536)
    return min(numel, max(usual, -(-rank * numel // k)))


def by_threshold(x: np.ndarray, k: int) -> np.ndarray:
    return reaching(x, quantile(spread(x, size_of(x.size, k, 32)), k / x.size), k)


def by_fixed(x: np.ndarray, k: int) -> np.ndarray:
    return reaching(x, 1.5, k)


def by_redsync(x: np.ndarray, k: int) -> np.ndarray:
    """Bisect (mean, max), or (0, mean) if the mean is too high already, over the whole tensor."""
    magnitude = np.abs(x)
    mean, most = float(magnitude.mean(dtype=np.float64)), float(magnitude.max())
    mean = min(mean, most)
    counts = {}

    def count(threshold: float) -> int:
        counts[threshold] = int((magnitude >= x.dtype.type(threshold)).sum())
        return counts[threshold]

    low, high = (0.0, mean) if count(mean) <= k else (mean, most)
    count(high)
    for _ in range(30):
        if 0.9 * k <= counts[high] <= k:
            break
        middle = (low + high) / 2
        low, high = (middle, high) if count(middle) > k else (low, middle)
    return reaching(x, high, k)


def expo(x: np.ndarray, share: float) -> float:
    return -x.mean() * log(share)


def staged(x: np.ndarray, share: float, stages: int) -> float:
    if stages == 1 or share >= 0.25:
        return expo(x, share)
    threshold = expo(x, 0.25)
    for _ in range(stages - 1):
        above = x[x > threshold] - threshold
        if above.size:
            threshold += expo(above, (4 * share) ** (1 / (stages - 1)))
    return threshold


def by_sidco(x: np.ndarray, k: int) -> np.ndarray:
    sample = spread(x, size_of(x.size, k, 8)).astype(np.float64)
    wanted = k / x.size * sample.size
    sample = sample[sample > 0]
    if wanted >= sample.size:
        return reaching(x, 0.0, k)
    counts = {}
    for m in (1, 2, 3, 4):
        threshold = staged(sample, wanted / sample.size, m)
        count = (sample >= threshold).sum()
        counts[m] = (abs(log(count / wanted)) if count else np.inf, m, threshold)
    distance, _, threshold = min(counts.values())
    if distance == np.inf:
        threshold = sample.max()
    return reaching(x, threshold, k)


def by_adacomp(g: np.ndarray, latest: np.ndarray, size: int, k: int) -> np.ndarray:
    sent = []
    for start in range(0, g.size, size):
        places = range(start, min(start + size, g.size))
        peak = max(abs(g[i]) for i in places)
        sent += [i for i in places if abs(g[i] + latest[i]) >= peak and g[i] != 0]
    found = np.array(sent, np.int64)
    if found.size > k:
        found = found[largest(g[found], k)]
    return found if found.size else largest(g, min(k, 1))


RULES = {
    "dgc": (DGC(), by_dgc),
    "threshold": (Threshold(), by_threshold),
    "threshold 1.5": (Threshold(1.5), by_fixed),
    "redsync": (RedSync(), by_redsync),
    "sidco": (SIDCo(), by_sidco),
}
every_rule = pytest.mark.parametrize(("compressor", "rule"), RULES.values(), ids=RULES)


def check(compressor: Sparsifier, x: np.ndarray, cf: float, expected: np.ndarray) -> None:
    payload = compressed(compressor, torch.from_numpy(x), cf, KEY)
    np.testing.assert_array_equal(payload.parts[0].numpy(), expected)
    np.testing.assert_array_equal(payload.parts[1].numpy()[: expected.size], x[expected])
    assert float(payload.total) == pytest.approx((x.astype(np.float64) ** 2).sum(), rel=1e-6)


def heavy(rng: np.random.Generator, numel: int) -> np.ndarray:
    return rng.standard_normal(numel) ** 3


def sparse(rng: np.random.Generator, numel: int) -> np.ndarray:
    return rng.standard_normal(numel) * (rng.random(numel) < 0.02)


def outlier(rng: np.random.Generator, numel: int) -> np.ndarray:
    x = rng.standard_normal(numel)
    x[numel // 3] = 1e7
    return x


DATA = {
    "normal": lambda rng, numel: rng.standard_normal(numel),
    "laplace": lambda rng, numel: rng.laplace(size=numel),
    "heavy": heavy,
    "uniform": lambda rng, numel: rng.random(numel) - 0.5,
    "sparse": sparse,
    "outlier": outlier,
    "ascending": lambda rng, numel: np.arange(1.0, numel + 1),
    "block": lambda rng, numel: rng.standard_normal(numel) * (np.arange(numel) < numel // 9),
}


@every_rule
@pytest.mark.parametrize(
    ("numel", "dtype", "cfs"), [(900, "f8", (2.0, 10.0, 300.0)), (150_000, "f4", (3.0, 100.0))]
)
def test_equals_reference(compressor, rule, numel, dtype, cfs):
    for draw in DATA.values():
        x = draw(np.random.default_rng(numel), numel).astype(dtype)
        for cf in cfs:
            check(compressor, x, cf, rule(x, kept(numel, cf)))


@every_rule
def test_accumulates_and_then_follows_the_rule(compressor, rule):
    rng = np.random.default_rng(8)
    memory, grad = (rng.standard_normal(140_000).astype(np.float32) for _ in range(2))
    total, held = memory + grad, torch.from_numpy(memory)
    payload = compressor.compress(held, Spec.of(held, 50.0, KEY), torch.from_numpy(grad))
    np.testing.assert_array_equal(memory, total)
    np.testing.assert_array_equal(payload.parts[0].numpy(), rule(total, 2800))


@pytest.mark.parametrize("rule", ["dgc", "threshold", "threshold 1.5", "redsync"])
@given(
    arrays(np.float32, st.integers(1, 200), elements=st.integers(-3, 3).map(float)),
    st.floats(1.01, 400),
)
@settings(max_examples=20)
def test_equal_magnitudes(rule, x, cf):
    compressor, reference = RULES[rule]
    k = kept(x.size, cf)
    check(compressor, x, cf, reference(x, k) if k < x.size else np.arange(x.size))


@pytest.mark.parametrize("numel", [1, 2, 50, 999, 3000])
@pytest.mark.parametrize("size", [None, 1, 7, 50, 5000])
def test_adacomp_equals_reference(numel, size):
    rng = np.random.default_rng(numel)
    for scale, cf in ((0.1, 30.0), (1.0, 4.0), (3.0, 100.0), (0.1, 2.0)):
        residual = rng.standard_normal(numel)
        latest = rng.standard_normal(numel) * scale
        g, k = residual + latest, kept(numel, cf)
        payload = compressed(
            AdaComp(size), torch.from_numpy(residual), cf, KEY, torch.from_numpy(latest)
        )
        expected = by_adacomp(g, latest, size or -(-numel // k), k)
        np.testing.assert_array_equal(payload.parts[0].numpy(), expected)
        payload = compressed(AdaComp(size), torch.from_numpy(g), cf, KEY)
        expected = by_adacomp(g, g, size or -(-numel // k), k)
        np.testing.assert_array_equal(payload.parts[0].numpy(), expected)


@pytest.mark.parametrize(("size", "scale"), [(50, 0.01), (999, 1.0), (50, 100.0)])
def test_adacomp_over_several_blocks(size, scale):
    rng = np.random.default_rng(3)
    residual, latest = (rng.standard_normal(140_001).astype(np.float32) for _ in range(2))
    latest *= np.float32(scale)
    latest[:60_000] *= np.float32(1e-3)
    g = residual + latest
    for cf in (20.0, 500.0):
        payload = compressed(
            AdaComp(size), torch.from_numpy(residual.copy()), cf, KEY, torch.from_numpy(latest)
        )
        expected = by_adacomp(g, latest, size, kept(g.size, cf))
        np.testing.assert_array_equal(payload.parts[0].numpy(), expected)


@pytest.mark.parametrize("guess", [0.0, 0.5, 100.0])
def test_adacomp_does_not_depend_on_its_guess(monkeypatch, guess):
    x = torch.from_numpy(np.random.default_rng(4).standard_normal(100_000).astype(np.float32))
    memory = x.flip(0).contiguous()
    expected = compressed(AdaComp(), memory.clone(), 100.0, KEY, x)
    monkeypatch.setattr(host, "_guess_in_bins", lambda *args: guess)
    found = AdaComp().compress(memory, Spec.of(memory, 100.0, KEY), x)
    assert torch.equal(memory, x + x.flip(0))
    assert torch.equal(found.parts[0], expected.parts[0])
    assert float(found.total) == pytest.approx(float(expected.total))


def test_adacomp_sends_no_zeros():
    x = torch.zeros(1000)
    x[10] = 1.0
    assert AdaComp(10).compress(x, Spec.of(x, 4.0, KEY)).parts[0].tolist() == [10]


def test_redsync_searches_in_one_pass(monkeypatch):
    passes = []
    collect = host._collect
    monkeypatch.setattr(
        host, "_collect", lambda *args, **more: passes.append(1) or collect(*args, **more)
    )
    x = torch.from_numpy(np.random.default_rng(5).standard_normal(500_000))
    payload = RedSync().compress(x, Spec.of(x, 100.0, KEY))
    assert len(passes) == 1
    assert 4500 <= payload.parts[0].numel() <= 5000


@pytest.mark.parametrize(("mean", "most"), [(np.nan, 1.0), (np.inf, np.inf), (1.0, np.nan)])
def test_redsync_without_a_mean_does_not_search(mean, most):
    assert thresholds.bisect(np.array([1.0, most]), mean, 1) == 0.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_all_rounds_of_the_bisection_at_once_end_where_they_do_one_by_one(dtype):
    rng = np.random.default_rng(12)
    for numel, k in ((2, 1), (50, 3), (3000, 30), (3000, 2000), (3000, 2999)):
        for draw in (*DATA.values(), lambda rng, numel: rng.integers(0, 4, numel)):
            x = np.sort(np.abs(draw(rng, numel).astype(dtype)))[::-1].copy()
            mean = float(x.mean(dtype=np.float64))
            top, mean64 = torch.from_numpy(x[: k + 1]), torch.tensor(mean, dtype=torch.float64)
            found = float(thresholds.bisect_at_once(top, mean64, k))
            expected = dtype(thresholds.bisect(x, mean, k))
            assert found == pytest.approx(expected, rel=2e-7, abs=1e-7), (numel, k)
            assert (x >= dtype(found)).sum() == (x >= expected).sum(), (numel, k)


def test_dgc_samples_a_thousandth_to_a_hundredth_where_that_is_enough():
    assert DGC().sample_size(25_600_000, 256_000) == 65_536
    assert DGC().sample_size(200_000_000, 2_000_000) == 200_000
    assert DGC().sample_size(1_000_000, 100_000) == 10_000
    assert DGC().sample_size(1_000_000, 1_000) == 32_000
    assert DGC().sample_size(500, 5) == 500


def test_dgc_of_a_small_tensor_is_top_k_and_its_sample_moves_with_the_step():
    x = torch.from_numpy(np.random.default_rng(6).standard_normal(1000))
    assert torch.equal(
        DGC().compress(x, Spec.of(x, 40.0, KEY)).parts[0],
        TopK().compress(x, Spec.of(x, 40.0, KEY)).parts[0],
    )
    x = torch.from_numpy(np.random.default_rng(7).standard_normal(200_000))
    counts = {DGC().compress(x, Spec.of(x, 100.0, Key("w", s))).parts[0].numel() for s in range(6)}
    assert len(counts) > 1


def quantile_of(x: np.ndarray, share: float) -> float:
    with np.errstate(all="ignore"):
        found = sidco.fitted_quantiles(np, x[None], np.array([log(share)]))
    return float(found[0])


@pytest.mark.parametrize("share", [0.2, 0.01, 0.001])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_fit_recovers_its_own_distribution(share, scale):
    x = np.random.default_rng(9).exponential(scale, 200_000)
    assert (x > quantile_of(x, share)).mean() == pytest.approx(share, rel=0.15)


def test_a_fit_of_equal_magnitudes():
    assert quantile_of(np.full(100, 2.0), 0.01) == pytest.approx(2 * log(100))


def test_stages_help_where_the_fit_is_bad():
    """The reason for stages: normal data have a lighter tail than the exponential fit."""
    x = np.random.default_rng(10).standard_normal(1_000_000)
    one = (np.abs(x) >= quantile_of(np.abs(x), 1e-3)).sum()
    best = compressed(SIDCo(), torch.from_numpy(x), 1000.0, KEY).parts[0].numel()
    assert one < 500 < 800 < best <= 1000


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf")])
def test_bad_threshold(bad):
    with pytest.raises(ValueError, match="threshold must"):
        Threshold(bad)


def test_bad_options():
    for size in (0, 131_073, 2.5):
        with pytest.raises(ValueError, match="bin_size must"):
            AdaComp(size)


# What holds for all of them


COMPRESSORS = {
    **{name: compressor for name, (compressor, _) in RULES.items()},
    "adacomp": AdaComp(),
    "adacomp 50": AdaComp(bin_size=50),
}
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)


@every_compressor
def test_at_most_k_elements_are_kept_and_as_they_were(compressor):
    for dtype in (torch.float32, torch.float64):
        tensors = {
            **ordinary(dtype),
            "two": torch.tensor([0.0, -2.5], dtype=dtype),
            "largest": normal(10_000, dtype).clamp(-1, 1) * torch.finfo(dtype).max,
        }
        for name, tensor in tensors.items():
            for cf in (1.0, 1.5, 1000.0):
                payload = compressor.compress(tensor, Spec.of(tensor, cf, KEY))
                indices, numel = payload.parts[0], tensor.numel()
                assert indices.dtype == torch.int32
                assert min(numel, 1) <= indices.numel() <= kept(numel, cf), (name, cf)
                assert bool((indices.diff() > 0).all()), (name, cf)
                sent = decompressed(compressor, payload)
                assert torch.equal(sent[indices.long()], tensor[indices.long()]), (name, cf)
                assert sent.count_nonzero() <= indices.numel(), (name, cf)
                assert bool(sent.any()) == bool(tensor.any()), (name, cf)


@every_compressor
@pytest.mark.parametrize(("numel", "factor"), [(1, 1.7), (1000, 1.0), (20_000, 1.7), (9000, 100.0)])
def test_recompress_keeps_the_largest_of_what_was_kept(compressor, numel, factor):
    x = normal(numel)
    payload = compressor.compress(x, Spec.of(x, 10.0, KEY))
    further = compressor.smaller(payload, factor)
    assert further.nbytes == compressor.nbytes(Spec((numel,), 10.0 * factor))
    held = decompressed(compressor, payload).abs()
    count = min(kept(numel, 10.0 * factor), payload.parts[0].numel())
    expected = held.topk(count).indices.sort().values
    assert torch.equal(further.parts[0].long(), expected)
    assert float(further.error) == pytest.approx(
        norm2(x - decompressed(compressor, further)), rel=1e-5, abs=1e-5
    )


@every_compressor
def test_non_finite_input_neither_crashes_nor_hides(compressor):
    for numel in (50, 10_000):
        for bad in (float("nan"), float("inf")):
            for count in (1, numel // 2, numel):
                for cf in (1.0, 10.0):
                    tensor = torch.ones(numel)
                    tensor[:count] = bad
                    payload = compressor.compress(tensor, Spec.of(tensor, cf, KEY))
                    assert payload.parts[0].numel() <= kept(numel, cf)
                    assert not np.isfinite(float(payload.total))
                    assert not np.isfinite(float(payload.error) + float(payload.energy))


@every_compressor
@pytest.mark.parametrize(("numel", "cf"), [(0, 10.0), (1, 1.0), (5000, 1.5), (5000, 1000.0)])
def test_device_path_keeps_the_same(compressor, numel, cf):
    """Also where fewer elements are found than there are slots, and in what is sent."""
    x, add = normal(numel), normal(numel, seed=1)
    host_side = (
        compressor.compress(x, Spec.of(x, cf, KEY)),
        compressed(compressor, x.clone(), cf, KEY, add),
    )
    with device_path():
        memory = x.clone()
        payloads = (
            compressor.compress(x, Spec.of(x, cf, KEY)),
            compressor.compress(memory, Spec.of(memory, cf, KEY), add),
        )
        assert torch.equal(memory, x + add)
        for expected, found in zip(host_side, payloads, strict=True):
            check_same(compressor, expected, found)
            check_same(compressor, compressor.smaller(expected, 2), compressor.smaller(found, 2))


def check_same(compressor: Sparsifier, expected: SparsePayload, found: SparsePayload) -> None:
    """`found`, made as on a device, is `expected`, made on the host, with every slot filled."""
    count, free = expected.parts[0].numel(), found.capacity - expected.parts[0].numel()
    indices, values = found.parts
    assert indices.tolist() == expected.parts[0].tolist() + [found.numel] * free
    assert torch.equal(values, expected.parts[1])
    assert not values[count:].any()
    sizes = torch.stack([expected.energies, found.energies])
    assert (sizes.diff(dim=0).abs() <= 2e-6 * sizes[0, 0]).all()
    raw = torch.empty(found.nbytes, dtype=torch.uint8)
    found.write(raw)
    spec = Spec((found.numel,), found.cf, torch.float32, KEY)
    (received,) = compressor.read(raw[None], spec)
    assert not bool(received.invalid)
    assert torch.equal(decompressed(compressor, received), decompressed(compressor, found))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "force_device_path", False)
        again = torch.empty_like(raw)
        expected.write(again)
        assert torch.equal(raw, again)


@every_compressor
def test_the_capacity_is_well_used_on_normal_data(compressor):
    if compressor is COMPRESSORS["threshold 1.5"]:
        return  # whose rule does not aim at it
    for cf in (10.0, 100.0):
        payload = compressed(compressor, normal(200_000), cf, KEY)
        assert payload.parts[0].numel() >= 0.7 * kept(200_000, cf)
