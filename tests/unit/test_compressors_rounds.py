"""PowerSGD and sketches on a device: what the host finds, and not one value read."""

from __future__ import annotations

from math import prod

import pytest
import torch

from compressors.base import Key, Spec, any_nonfinite
from compressors.contrib.sketch import Sketch
from compressors.powersgd import PowerSGD
from tests.unit.device_path import count_operations, device_path, meta
from tests.unit.matrices import KEYS, buckets
from tests.unit.ranks import exchange, lockstep
from tests.unit.samples import decompressed, specs

SHAPES = ((100, 100), (250, 40), (50, 200), (80, 125), (40, 250))
both = pytest.mark.parametrize("make", [PowerSGD, Sketch])


def run(make):
    """Three ranks over some steps: all that they reported, got back and decoded."""
    ranks, made = [make(seed=3) for _ in range(3)], []
    memory = [[torch.zeros_like(x) for x in bucket] for bucket in buckets(3, 0)]
    for step, cf in enumerate((4.0, 2.0, 8.0, 1.0, 30.0)):
        keys = [key._replace(step=step) for key in KEYS]
        for tensors, bucket in zip(memory, buckets(3, 100 * step), strict=True):
            for a, gradient in zip(tensors, bucket, strict=True):
                a.add_(gradient)
        own, means = exchange(ranks, memory, cf, keys, {1: (0, 2)} if step == 2 else {})
        for rank, tensors, reported in zip(ranks, memory, own, strict=True):
            for a, payload in zip(tensors, reported, strict=True):
                levels = (
                    payload,
                    rank.smaller(payload, 3.0),
                    rank.compress(a, Spec.of(a, cf, payload.key)),
                )
                made += [decompressed(rank, each) for each in levels]
                made += [each.energies for each in levels]
                rank.add_to(a, payload, -1.0)
        for payload in means[0]:
            made.append(torch.full((payload.numel,), 7.0, dtype=payload.dtype))
            ranks[0].mean_of(made[-1], [payload], 1.0)
    return made


@both
def test_a_device_finds_what_the_host_finds(make):
    on_host = run(make)
    with device_path():
        on_device = run(make)
    for ours, expected in zip(on_device, on_host, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-7)


@both
@pytest.mark.parametrize("cf", [1.0, 10.0, 1000.0])
def test_no_value_is_read_and_operations_do_not_grow_with_the_size(make, cf):
    counts = []
    for scale in (20, 2000):  # 1 and 100 million elements
        shapes = [(scale * rows, cols) for rows, cols in SHAPES]
        keys = [Key(f"p{i}", 0, shape) for i, shape in enumerate((*shapes, (33,), ()))]
        tensors = [meta(prod(key.shape)) for key in keys]
        compressor = make()

        def step(compressor=compressor, keys=keys, tensors=tensors):
            own: list = []
            cfs = [*([cf] * (len(keys) - 1)), 1.0]
            (means,) = lockstep(
                [compressor.rounds(tensors, specs(tensors, cfs, keys), 4, own.extend)]
            )
            for tensor, payload, mean in zip(tensors, own, means, strict=True):
                any_nonfinite([mean])
                compressor.add_to(tensor, payload, -1.0)
                compressor.mean_of(tensor, [mean], 1.0)
                compressor.smaller(payload, cf)
                compressor.compress(tensor, Spec.of(tensor, cf, payload.key))

        step()  # with nothing known, PowerSGD draws where to start
        counts.append(count_operations(step))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("make", "most"), [(PowerSGD, 100), (Sketch, 290)])
def test_operations_for_a_bucket_of_five_matrices(make, most):
    compressor = make()
    keys = [Key(f"p{i}", 0, shape) for i, shape in enumerate(SHAPES)]
    tensors = [meta(prod(shape)) for shape in SHAPES]

    def sums() -> None:
        rounds = compressor.rounds(tensors, specs(tensors, [10.0] * 5, keys), 4, lambda own: None)
        handed = next(rounds)
        for _ in range(compressor.rounds_count - 1):
            handed = rounds.send(handed)
        with pytest.raises(StopIteration):
            rounds.send(handed)

    sums()
    assert count_operations(sums) <= most
