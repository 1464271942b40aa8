"""Random-k: the same everywhere, nested, uniform, unbiased."""

from __future__ import annotations

from functools import partial
from math import gcd

import numpy as np
import pytest
import torch

from compressors import Key, RandomK, kept
from compressors.base import Spec
from compressors.randomk import seeded_indices as indices_on
from tests.unit import samples
from tests.unit.device_path import count_operations, meta
from tests.unit.samples import decompressed

either_path = pytest.mark.usefixtures("either_path")
normal = partial(samples.normal, dtype=torch.float64, seed=1)
seeded_indices = partial(indices_on, device=torch.device("cpu"))


@either_path
@pytest.mark.parametrize("numel", [1, 2, 3, 64, 97, 1024, 1025, 5000, 30_030])
def test_indices_are_a_permutation_with_nested_prefixes(numel):
    for step in range(5):
        indices = seeded_indices(0, Key("w", step), numel, numel)
        np.testing.assert_array_equal(np.sort(indices), np.arange(numel))
        for k in (1, numel // 3, numel - 1):
            np.testing.assert_array_equal(
                seeded_indices(0, Key("w", step), numel, k), indices[: max(0, k)]
            )


@either_path
@pytest.mark.parametrize("numel", [2**31 - 1, 2**31 - 2, 2**30])
def test_no_overflow_at_the_largest_sizes(numel):
    """Against the definition, start + i * stride mod numel, in Python's integers."""
    for step in range(5):
        indices = seeded_indices(1, Key("w", step), numel, 5000).tolist()
        stride = (indices[1] - indices[0]) % numel
        assert gcd(stride, numel) == 1
        assert indices == [(indices[0] + i * stride) % numel for i in range(5000)]


@either_path
def test_indices_never_change_between_processes_or_versions():
    """Ranks may be different processes on different machines: no hash() and no global state."""
    assert seeded_indices(0, Key("layer.weight", 3), 1000, 6).tolist() == [
        995,
        298,
        601,
        904,
        207,
        510,
    ]


def test_two_ranks_choose_alike_and_steps_names_seeds_differ():
    def chosen(seed: int, key: Key) -> list[int]:
        return seeded_indices(seed, key, 10_000, 50).tolist()

    assert chosen(0, Key("a", 1)) == chosen(0, Key("a", 1))
    others = [chosen(0, Key("a", 2)), chosen(0, Key("b", 1)), chosen(1, Key("a", 1))]
    assert chosen(0, Key("a", 1)) not in others

    ranks = [RandomK(seed=4), RandomK(seed=4)]
    gradients = [normal(1000), normal(1000).flip(0)]
    key = Key("w", 9)
    payloads = [c.compress(g, Spec.of(g, 10.0, key)) for c, g in zip(ranks, gradients, strict=True)]
    reduced = payloads[0].with_parts(payloads[0].parts[0] + payloads[1].parts[0])
    expected = sum(decompressed(c, p) for c, p in zip(ranks, payloads, strict=True))
    torch.testing.assert_close(decompressed(ranks[0], reduced), expected)


@either_path
@pytest.mark.parametrize("unbiased", [False, True])
def test_decompressed_equals_reference(unbiased):
    x = normal(1000)
    compressor = RandomK(seed=2, unbiased=unbiased)
    payload = compressor.compress(x, Spec.of(x, 7.0, Key("w", 1)))
    k = kept(1000, 7.0)
    expected = np.zeros(1000)
    indices = seeded_indices(2, Key("w", 1), 1000, k)
    expected[indices] = x.numpy()[indices] * (1000 / k if unbiased else 1)
    np.testing.assert_allclose(decompressed(compressor, payload).numpy(), expected, rtol=1e-15)
    assert len(payload.parts) == 1


@either_path
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("cf", [1.0, 10.0])
@pytest.mark.parametrize("factor", [1.0, 1.7, 1e6])
@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_recompress_equals_direct(numel, factor, cf, unbiased):
    compressor, key, x = RandomK(seed=2, unbiased=unbiased), Key("w", 5), normal(numel)
    further = compressor.smaller(compressor.compress(x, Spec.of(x, cf, key)), factor)
    direct = compressor.compress(x, Spec.of(x, cf * factor, key))
    torch.testing.assert_close(further.parts[0], direct.parts[0], rtol=1e-14, atol=0)
    if not unbiased:
        assert torch.equal(further.parts[0], direct.parts[0])
    total = float(x.square().sum())
    assert float(further.energy) == pytest.approx(float(direct.energy), rel=1e-12)
    assert float(further.error) == pytest.approx(float(direct.error), rel=1e-11, abs=1e-12 * total)
    assert further.cf == direct.cf


@pytest.mark.parametrize("unbiased", [False, True])
def test_on_a_device_no_value_is_read_whatever_the_size(unbiased):
    compressor, counts = RandomK(unbiased=unbiased), []
    for numel in (10**6, 10**8):
        memory, key = meta(numel), Key("w")

        def step(memory=memory, key=key):
            payload = compressor.compress(memory, Spec.of(memory, 10.0, key), memory)
            data = torch.empty(payload.nbytes, dtype=torch.uint8, device="meta")
            payload.write(data)
            compressor.add_to(memory, payload, -1.0)
            spec = Spec((memory.numel(),), 10.0, memory.dtype, key)
            compressor.add_to(memory, *compressor.read(data[None], spec))
            compressor.smaller(payload, 3.0)

        counts.append(count_operations(step))
    assert counts[0] == counts[1] <= 45


def test_every_element_is_equally_likely():
    numel, k, steps = 60, 6, 5000
    counts = np.zeros(numel)
    for step in range(steps):
        counts[seeded_indices(0, Key("w", step), numel, k)] += 1
    expected = steps * k / numel
    deviation = np.sqrt(expected * (1 - k / numel))
    assert np.abs(counts - expected).max() < 4.5 * deviation


def test_unbiased_on_average():
    x = normal(50)
    compressor, steps = RandomK(seed=6, unbiased=True), 1500
    mean = torch.zeros(50, dtype=torch.float64)
    for step in range(steps):
        compressor.add_to(mean, compressor.compress(x, Spec.of(x, 5.0, Key("w", step))), 1 / steps)
    deviation = x.abs() * (4 / steps) ** 0.5  # variance of one: x^2 (numel / k - 1)
    assert ((mean - x).abs() < 4.5 * deviation).all()
