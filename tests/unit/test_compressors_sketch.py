"""Count-sketch against an obvious reference; ranks are simulated in one process, in lockstep."""

from __future__ import annotations

from math import isfinite, nan

import numpy as np
import pytest
import torch

from compressors.base import InvalidPayload, Key, Spec, any_nonfinite, kept
from compressors.contrib.sketch import CountSketch, Sketch
from tests.unit.ranks import exchange, same
from tests.unit.samples import compressed, decompressed, norm2, specs

NUMELS = (5000, 3, 700, 1, 0)
KEYS = [Key(f"p{i}") for i in range(len(NUMELS))]
KEY = Key("w")


either_path = pytest.mark.usefixtures("either_path")


def heavy(numel: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Heavy-tailed, as a sketch needs them."""
    values = np.random.default_rng(seed).standard_t(1.5, numel)
    return torch.from_numpy(values).to(dtype)


def buckets(world: int, seed: int, dtype: torch.dtype = torch.float64):
    """One a rank."""
    return [[heavy(n, seed + 7 * w + i, dtype) for i, n in enumerate(NUMELS)] for w in range(world)]


# The sketch itself


@either_path
@pytest.mark.parametrize(
    ("rows", "numel"),
    [(1, 530_000), (3, 3000), (5, 3000)],  # one is more than a block
)
def test_table_and_recovery_equal_plain_reference(rows, numel):
    columns, k = 997, 50
    sketch = CountSketch(rows, columns, "x")
    x = heavy(numel, 1).numpy()
    table = np.zeros((rows, columns))
    estimates = np.zeros((rows, numel))
    for row, (factor, offset) in enumerate(sketch.hashes):
        hashes = [(int(factor) * i + int(offset)) % 2**64 for i in range(numel)]
        slots = np.array([(h >> 32) * 2 * columns >> 32 for h in hashes])
        column, sign = slots % columns, np.where(slots < columns, 1, -1)
        np.add.at(table[row], column, sign * x)
        estimates[row] = sign * table[row, column]
    np.testing.assert_allclose(sketch.table(torch.from_numpy(x)), table, atol=1e-9)
    estimate = np.abs(np.median(estimates, axis=0))
    expected = np.lexsort((np.arange(numel), -estimate))[:k]
    assert sketch.heaviest(torch.from_numpy(table), k, numel).tolist() == expected.tolist()


def test_hashes_are_even_and_differ_by_row_and_identity():
    numel, columns = 200_000, 50
    counts = []
    for identity in ("a", "b"):
        slots = CountSketch(3, columns, identity)._slots(0, numel, torch.device("cpu"))
        counts.extend(row.numpy() for row in slots)
    for slot in counts:
        seen = np.bincount(slot, minlength=2 * columns)
        assert seen.size == 2 * columns
        assert seen.min() * seen.size / slot.size > 0.7
        assert seen.max() * seen.size / slot.size < 1.3
    for i, left in enumerate(counts):
        for right in counts[:i]:
            assert np.mean(left == right) < 3 / columns


def test_outstanding_coordinates_are_found():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    places = torch.arange(5) * 19_999
    x[places] = torch.tensor([300.0, -350.0, 400.0, -450.0, 500.0])
    payload = Sketch().compress(x, Spec.of(x, 20.0, KEY))
    assert set(places.tolist()) <= set(payload.parts[0][:40].tolist())


@either_path
def test_ties_and_zeros_give_the_lowest_positions():
    sketch = CountSketch(3, 20, "x")
    assert sketch.heaviest(torch.zeros(3, 20), 7, 1000).tolist() == list(range(7))
    assert sorted(sketch.heaviest(torch.zeros(3, 20).double(), 1000, 1000)) == list(range(1000))


# Sizes


@pytest.mark.parametrize("cf", [1.0, 1.5, 3.0, 10.0, 100.0, 1e6])
@pytest.mark.parametrize("numel", [0, 1, 2, 7, 100, 9999])
def test_sizes_and_supported_cf(cf, numel):
    sketch, tensor = Sketch(), heavy(numel, 0, torch.float32)
    sizes, generator = [], sketch.rounds([tensor], specs([tensor], [cf], [KEY]), 1, lambda _: None)
    for _ in range(2):
        sizes.append(len(generator.send(torch.zeros(sizes[0]) if sizes else None)))
    assert sum(sizes) == sketch.floats(Spec((numel,), cf))
    assert sketch.nbytes(Spec.shaped((numel,), cf)) == 4 * sum(sizes)
    if kept(numel, cf) >= 8:
        assert sum(sizes) <= kept(numel, cf)
    assert sum(sizes) <= max(numel, 0)
    assert sketch.nearest(Spec((numel,), cf)) == max(1, numel / max(1, sum(sizes)))


def test_bad_options_and_input_are_refused():
    for rows in (0, 2, -1):
        with pytest.raises(ValueError, match="rows must"):
            Sketch(rows=rows)
    for share in (0.0, 1.0, nan):
        with pytest.raises(ValueError, match="share must"):
            Sketch(share=share)
    with pytest.raises(ValueError, match="cf must"):
        compressed(Sketch(), heavy(10, 0), 0.5, KEY)
    with pytest.raises(ValueError, match="factor must"):
        Sketch().smaller(compressed(Sketch(), heavy(10, 0), 2.0, KEY), 0.5)


# Error feedback


@either_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_of_sent_and_residuals_is_sum_of_gradients(dtype):
    world, ranks = 3, [Sketch(seed=5) for _ in range(3)]
    memory = [[torch.zeros(n, dtype=dtype) for n in NUMELS] for _ in range(world)]
    gradients = [torch.zeros(n, dtype=torch.float64) for n in NUMELS]
    sent = [torch.zeros(n, dtype=torch.float64) for n in NUMELS]
    for step, cf in enumerate((4.0, 8.0, 2.0, 1.0, 3.0, 100.0, 4.0)):
        skipped = {1: (0, 1)} if step == 4 else {}
        for w, bucket in enumerate(buckets(world, 100 * step, dtype)):
            for i, grad in enumerate(bucket):
                if i not in skipped.get(w, ()):
                    memory[w][i] += grad
                    gradients[i] += grad
        reported, payloads = exchange(ranks, memory, cf, KEYS, skipped)
        for w in range(world):
            assert all(same(a, b) for a, b in zip(payloads[w], payloads[0], strict=True))
            for i, own in enumerate(reported[w]):
                before = memory[w][i].clone()
                if i in skipped.get(w, ()):
                    assert norm2(decompressed(ranks[w], own)) == 0
                    assert float(own.total) == float(own.error) == 0
                else:
                    kept_of_it = decompressed(ranks[w], own)
                    assert float(own.total) == pytest.approx(norm2(before), rel=1e-5)
                    assert float(own.energy) == pytest.approx(norm2(kept_of_it), rel=1e-5)
                    left = norm2(before - kept_of_it)
                    assert float(own.error) == pytest.approx(
                        left, rel=1e-4, abs=1e-5 * float(own.total)
                    )
                ranks[w].add_to(memory[w][i], own, -1.0)
                if i not in skipped.get(w, ()):  # an exact projection
                    gone = kept_of_it != 0
                    assert memory[w][i][gone].count_nonzero() == 0
                    assert torch.equal(memory[w][i][~gone], before[~gone])
        for i, payload in enumerate(payloads[0]):
            sent[i] += world * decompressed(ranks[0], payload).double()
    for i, total in enumerate(gradients):
        residual = sum(memory[w][i].double() for w in range(world))
        close = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {}
        torch.testing.assert_close(sent[i] + residual, total, **close)


def test_decoded_is_the_mean_at_the_shared_coordinates():
    ranks, bucket = [Sketch() for _ in range(3)], buckets(3, 9)
    reported, payloads = exchange(ranks, bucket, 10.0, KEYS)
    for i in range(len(NUMELS)):
        mean = sum(bucket[w][i] for w in range(3)) / 3
        decoded = decompressed(ranks[0], payloads[0][i])
        at = payloads[0][i].indices
        if at is None:
            torch.testing.assert_close(decoded, mean)
        else:
            torch.testing.assert_close(decoded[at], mean[at])
            assert (
                len(set(at.tolist())) == at.numel() == ranks[0].budget(Spec((NUMELS[i],), 10.0)).k
            )
        for w in range(3):
            assert torch.equal(reported[w][i].parts[0], payloads[0][i].parts[0])


@either_path
def test_recompress_keeps_the_first():
    sketch, tensor = Sketch(), heavy(5000, 1)
    payload = sketch.compress(tensor, Spec.of(tensor, 10.0, KEY))
    for factor in (1.0, 2.5, 1e5):
        level = sketch.smaller(payload, factor)
        k = sketch.budget(Spec((5000,), 10.0 * factor)).k
        assert torch.equal(level.parts[0], payload.parts[0][:k])
        sent = decompressed(sketch, level)
        assert float(level.energy) == pytest.approx(norm2(sent))
        assert float(level.error) == pytest.approx(norm2(tensor - sent))
    whole = sketch.compress(tensor, Spec.of(tensor, 1.0, KEY))
    assert torch.equal(decompressed(sketch, whole), tensor)
    assert float(whole.error) == 0
    assert same(sketch.smaller(whole, 10.0), payload)


# Unfriendly gradients


@either_path
@pytest.mark.parametrize("bad", [nan, float("inf")])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_not_finite_on_one_rank_is_so_on_all(bad, position):
    ranks, bucket = [Sketch() for _ in range(3)], buckets(3, 1, torch.float32)
    bucket[1][position][0] = bad
    reported, payloads = exchange(ranks, bucket, 4.0, KEYS)
    for got in payloads:
        for payload, numel in zip(got, NUMELS, strict=True):
            assert numel == 0 or bool(any_nonfinite([payload]))
    for own in reported:
        assert all(bool(decompressed(ranks[0], payload).isfinite().all()) for payload in own)
        assert all(payload.energy.isnan() and payload.error.isnan() for payload in own)
    assert not isfinite(reported[1][position].total)


@either_path
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(5000),
        torch.full((5000,), -0.25),
        heavy(5000, 0, torch.float32) * 1e-42,
        heavy(5000, 0, torch.float32) * 1e30,
        heavy(5000, 0) * 1e140,
    ],
    ids=["zero", "constant", "denormal", "huge", "huge double"],
)
def test_unusual_values_keep_the_sum(tensor):
    ranks = [Sketch(), Sketch()]
    own, payloads = exchange(ranks, [[tensor], [tensor]], 10.0, [KEY])
    left = tensor.clone()
    ranks[0].add_to(left, own[0][0], -1.0)
    assert bool(left.isfinite().all())
    torch.testing.assert_close(left + decompressed(ranks[0], payloads[0][0]), tensor)


# The contract of a compressor


@pytest.mark.parametrize("cf", [1.0, 10.0, 1000.0])
def test_a_payload_goes_into_a_tensor_of_its_length_only(cf):
    sketch = Sketch()
    payload = compressed(sketch, heavy(5000, 2, torch.float32), cf, KEY)
    for wrong in (torch.zeros(4999), torch.zeros(5001)):
        with pytest.raises(InvalidPayload):
            sketch.add_to(wrong, payload)


def test_error_feedback_sends_everything_in_the_end():
    """Even where the sketch finds nothing that stands out: no coordinate is left for ever."""
    sketch = Sketch()
    gradient = torch.randn(500, generator=torch.Generator().manual_seed(3))
    memory, sent = torch.zeros(500), torch.zeros(500)
    for step in range(600):
        memory += gradient
        payload = sketch.compress(memory, Spec.of(memory, 10.0, Key("w", step)))
        sketch.add_to(memory, payload, -1.0)
        sketch.add_to(sent, payload, 1 / 600)
    assert norm2(sent - gradient) < 0.05 * norm2(gradient)
