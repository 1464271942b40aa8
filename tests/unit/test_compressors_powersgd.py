"""PowerSGD: what travels, remains and is kept, against references, and with unfriendly input.

Ranks are simulated in one process, in lockstep.
"""

from __future__ import annotations

from itertools import pairwise
from math import isfinite, nan, prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from compressors.base import InvalidPayload, Key, Spec, any_nonfinite
from compressors.powersgd import PowerSGD, layout, orthonormal_rows
from tests.unit.matrices import KEYS, MATRIX, NUMELS, SHAPES, buckets, low_rank, normal, one
from tests.unit.ranks import exchange, same
from tests.unit.samples import compressed, decompressed, norm2, specs

either_path = pytest.mark.usefixtures("either_path")

# What travels


@pytest.mark.parametrize(
    ("shape", "cf", "rank"),
    [
        ((100, 100), 10.0, 5),
        ((100, 100), 1000.0, 1),
        ((512, 256, 3, 3), 100.0, 4),
        ((100, 100), 1.0, 0),  # dense
        ((100,), 10.0, 0),  # a vector
        ((1, 100), 10.0, 0),
        ((2, 2), 10.0, 0),  # nothing to save
        ((3, 1000), 2.9, 1),
        ((0, 5), 10.0, 0),
    ],
)
def test_rank_from_cf_and_shape(shape, cf, rank):
    assert layout(cf, prod(shape), shape).rank == rank


@pytest.mark.parametrize("cf", [1.5, 10.0, 1e6])
def test_a_rank_that_is_given_is_that_of_every_matrix_at_any_cf(cf):
    powersgd, matrix = PowerSGD(rank=2), low_rank(2, 8)
    for _ in range(3):
        (own,), mean = one([powersgd], [matrix], cf)
    assert [part.numel() for part in own.parts] == [2 * 40, 2 * 60, 0]
    torch.testing.assert_close(mean, matrix)
    assert powersgd.nearest(Spec.shaped((40, 60), cf)) == 2400 / (2 * 100)
    assert powersgd.nearest(Spec.shaped((40, 60), 1.0)) == 1  # dense is dense
    assert powersgd.nearest(Spec.shaped((100,), cf)) == 1
    for rank in (0, -1, 1.5):
        with pytest.raises(ValueError, match="rank="):
            PowerSGD(rank=rank)


@pytest.mark.parametrize("cf", [1.0, 1.5, 3.0, 10.0, 100.0, 1e6])
def test_sizes_and_supported_cf(cf):
    powersgd = PowerSGD()
    for shape in ((64, 100), (7,), (5, 3, 2), (300, 2)):
        numel = int(np.prod(shape))
        payload = compressed(powersgd, normal(numel, 0, torch.float32), cf, Key("w", 0, shape))
        rank, sides = layout(cf, numel, shape).rank, shape[0] + numel // shape[0]
        assert powersgd.floats(Spec.shaped(shape, cf)) == (rank * sides if rank else numel)
        assert payload.nbytes == powersgd.nbytes(Spec.shaped(shape, cf))
        assert payload.nbytes == 4 * powersgd.floats(Spec.shaped(shape, cf))
        real = powersgd.nearest(Spec.shaped(shape, cf))
        assert real == pytest.approx(numel / powersgd.floats(Spec.shaped(shape, cf)))
        assert layout(real, numel, shape).rank == rank
    for numel in (0, 1, 2, 3, 97, 10_000, 10_001, 10_099):
        payload = compressed(powersgd, normal(numel, 0, torch.float32), cf, Key("w"))
        assert payload.nbytes == powersgd.nbytes(Spec((numel,), cf))
        assert powersgd.floats(Spec((numel,), cf)) == payload.nbytes / 4
        assert powersgd.nearest(Spec((numel,), cf)) >= 1
        plan = layout(cf, numel)
        if plan.rank:
            assert plan.rest < plan.rows <= plan.cols <= plan.rows + 2
            assert plan.rows * plan.cols + plan.rest == numel


def test_yields_the_same_sizes_whatever_the_data():
    sizes = []
    for value in (0.0, 1.0, nan):
        tensors = [torch.full((n,), value) for n in NUMELS]
        generator = PowerSGD().rounds(
            tensors, specs(tensors, [4.0] * len(tensors), KEYS), 1, lambda _: None
        )
        first = next(generator)
        second = generator.send(first.clone())
        sizes.append((first.shape, second.shape))
        with pytest.raises(StopIteration):
            generator.send(second)
    assert len(set(sizes)) == 1
    total = sum(sizes[0][0]) + sum(sizes[0][1])
    assert total * 4 == sum(PowerSGD().nbytes(Spec.shaped(s, 4.0)) for s in SHAPES[:-1]) + 4


def test_bad_input_is_refused():
    def start(x, cf, key):
        return next(PowerSGD().rounds([x], [Spec.of(x, cf, key)], 1, lambda _: None))

    x = torch.zeros(2400)
    with pytest.raises(ValueError, match=r"key\.shape"):
        start(x[:-1], 4.0, MATRIX)
    with pytest.raises(ValueError, match="cf must"):
        start(x, 0.5, MATRIX)
    for wrong in ({}, {"q": 3}, {"q": {"w": [1.0]}}, {"q": {"w": torch.full((1, 60), nan)}}):
        with pytest.raises(ValueError, match="state"):
            PowerSGD().load_state_dict(wrong)


# Error feedback


@either_path
@pytest.mark.parametrize("against", ["own", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_of_sent_and_residuals_is_sum_of_gradients(against, dtype):
    world, ranks = 3, [PowerSGD(seed=5) for _ in range(3)]
    memory = [[torch.zeros(n, dtype=dtype) for n in NUMELS] for _ in range(world)]
    gradients = [torch.zeros(n, dtype=torch.float64) for n in NUMELS]
    sent = [torch.zeros(n, dtype=torch.float64) for n in NUMELS]
    for step, cf in enumerate((4.0, 8.0, 2.0, 1.0, 3.0, 100.0, 4.0, 4.0)):
        skipped = {1: (0, 2)} if step == 5 and against == "own" else {}
        for w, bucket in enumerate(buckets(world, 100 * step, dtype)):
            for i, grad in enumerate(bucket):
                if i not in skipped.get(w, ()):
                    memory[w][i] += grad
                    gradients[i] += grad
        before = [[m.clone() for m in tensors] for tensors in memory]
        reported, payloads = exchange(ranks, memory, cf, KEYS, skipped)
        for w in range(world):
            assert all(torch.equal(a, b) for a, b in zip(memory[w], before[w], strict=True))
            taken = reported[w] if against == "own" else payloads[w]
            for i, payload in enumerate(taken):
                ranks[w].add_to(memory[w][i], payload, -1.0)
            for i in skipped.get(w, ()):
                assert torch.equal(memory[w][i], before[w][i])
        for i, payload in enumerate(payloads[0]):
            sent[i] += world * decompressed(ranks[0], payload).double()
    for i, total in enumerate(gradients):
        residual = sum(memory[w][i].double() for w in range(world))
        close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
        torch.testing.assert_close(sent[i] + residual, total, **close)


@either_path
def test_mean_of_own_payloads_is_what_is_decoded_and_energies_are_theirs():
    world, ranks = 3, [PowerSGD() for _ in range(3)]
    bucket = buckets(world, 3)
    for _ in range(2):
        reported, payloads = exchange(ranks, bucket, 3.0, KEYS)
    for i, numel in enumerate(NUMELS):
        mean = sum(decompressed(ranks[w], reported[w][i]) for w in range(world)) / world
        torch.testing.assert_close(decompressed(ranks[0], payloads[0][i]), mean)
        for w in range(world):
            own, a = reported[w][i], bucket[w][i]
            kept = decompressed(ranks[w], own)
            assert own.numel == numel
            assert float(own.total) == pytest.approx(norm2(a))
            assert float(own.energy) == pytest.approx(norm2(kept))
            assert float(own.error) == pytest.approx(norm2(a - kept), abs=1e-9)


def test_residuals_against_the_mean_pile_up_but_all_that_is_decoded_is_the_same():
    """Why `report` is what to take off: noise that differs between ranks never leaves otherwise."""
    shares, decoded = {}, {}
    for against in ("own", "mean"):
        ranks = [PowerSGD() for _ in range(2)]
        memory = [torch.zeros(2400, dtype=torch.float64) for _ in range(2)]
        for step in range(60):
            for w in range(2):
                memory[w] += normal(2400, 2 * step + w)
            own, payloads = exchange(ranks, [[m] for m in memory], 3.0, [MATRIX])
            for w in range(2):
                taken = own[w][0] if against == "own" else payloads[w][0]
                ranks[w].add_to(memory[w], taken, -1.0)
        shares[against] = sum(float(p[0].energy) for p in own) / sum(float(p[0].total) for p in own)
        decoded[against] = decompressed(ranks[0], payloads[0][0])
    torch.testing.assert_close(decoded["own"], decoded["mean"], rtol=1e-4, atol=1e-5)
    assert shares["mean"] < 0.8 * shares["own"]


# State


@either_path
def test_q_and_payloads_are_identical_on_all_ranks():
    ranks = [PowerSGD(seed=2) for _ in range(4)]
    for step, cf in enumerate((4.0, 2.0, 8.0, 3.0)):
        _, payloads = exchange(ranks, buckets(4, 50 * step, torch.float32), cf, KEYS)
        for rank, got in zip(ranks, payloads, strict=True):
            assert all(same(a, b) for a, b in zip(got, payloads[0], strict=True))
            q, first = rank.state_dict()["q"], ranks[0].state_dict()["q"]
            assert q.keys() == first.keys()
            assert all(torch.equal(q[name], first[name]) for name in first)
    assert set(q) == {"p0", "p1", "p3"}


def test_first_columns_survive_changes_of_rank():
    rank = PowerSGD()
    matrix = [[low_rank(6, 1)]]
    for _ in range(5):
        exchange([rank], matrix, 4.0, [MATRIX])
    wide = rank.state_dict()["q"]["w"]
    assert wide.shape == (6, 60)
    exchange([rank], matrix, 12.0, [MATRIX])  # rank 2
    narrow = rank.state_dict()["q"]["w"]
    assert torch.equal(narrow[2:], wide[2:])  # wait
    span, before = orthonormal_rows(narrow[:2]), orthonormal_rows(wide[:2])
    assert float((span @ before.t()).det().abs()) > 0.99
    _, mean = one([rank], matrix[0], 4.0)
    torch.testing.assert_close(mean, matrix[0][0])


def test_a_higher_rank_starts_from_the_columns_there_are():
    rank = PowerSGD(seed=9)
    exchange([rank], [[low_rank(6, 1)]], 24.0, [MATRIX])
    (first,) = rank.state_dict()["q"]["w"]
    start = rank._start("w", 3, 60, first)
    torch.testing.assert_close(start @ start.t(), torch.eye(3, dtype=torch.float64))
    assert float((start[0] @ first).abs() / first.norm()) == pytest.approx(1)
    again = PowerSGD(seed=9)._start("w", 3, 60, first)
    other = PowerSGD(seed=8)._start("w", 3, 60, first)
    assert torch.equal(again, PowerSGD(seed=9)._start("w", 3, 60, first))
    assert not torch.allclose(again, other)


def test_probing_changes_nothing_and_starts_warm():
    rank, matrix = PowerSGD(), normal(2400, 4)
    cold = rank.compress(matrix, Spec.of(matrix, 12.0, MATRIX))
    assert rank.state_dict() == {"q": {}}
    for _ in range(30):
        own, _ = one([rank], [matrix], 12.0)
    state = rank.state_dict()["q"]["w"]
    warm = rank.compress(matrix, Spec.of(matrix, 12.0, MATRIX))
    assert torch.equal(rank.state_dict()["q"]["w"], state)
    assert float(warm.energy) > float(cold.energy)
    assert float(warm.energy) == pytest.approx(float(own[0].energy), rel=1e-2)
    assert float(warm.energy) == pytest.approx(norm2(decompressed(rank, warm)))


def test_state_dict_round_trip_in_the_middle():
    straight, before = PowerSGD(seed=1), PowerSGD(seed=1)
    after = PowerSGD(seed=1)
    for step, cf in enumerate((4.0, 2.0, 8.0, 3.0, 1.5)):
        bucket = buckets(1, step, torch.float32)
        _, (expected,) = exchange([straight], bucket, cf, KEYS)
        running = before if step < 3 else after
        _, (got,) = exchange([running], bucket, cf, KEYS)
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))
        if step == 2:
            after.load_state_dict(before.state_dict())
            before.state_dict()["q"]["p0"].zero_()  # a copy


# The contract of a compressor


@pytest.mark.parametrize(
    "key", [Key("w"), MATRIX, Key("w", 0, (2400,))], ids=lambda k: str(k.shape)
)
@pytest.mark.parametrize("cf", [1.0, 1.5, 10.0, 1000.0])
def test_a_payload_decodes_to_what_its_energies_say(key, cf):
    powersgd, tensor = PowerSGD(), normal(2400, 2, torch.float32)
    payload = powersgd.compress(tensor, Spec.of(tensor, cf, key))
    sent = decompressed(powersgd, payload)
    out = torch.full((2400,), nan)
    powersgd.mean_of(out, [payload], 1.0)
    torch.testing.assert_close(out, sent)
    assert float(payload.energy) == pytest.approx(norm2(sent), rel=1e-6)
    assert float(payload.error) == pytest.approx(norm2(tensor - sent), rel=1e-5, abs=1e-9)
    for wrong in (torch.zeros(2399), torch.zeros(2401), torch.zeros(40, 60)):
        with pytest.raises(InvalidPayload):
            powersgd.add_to(wrong, payload)
        with pytest.raises(InvalidPayload):
            powersgd.mean_of(wrong, [payload], 1.0)
    out = torch.ones(2400, dtype=torch.float64)
    powersgd.add_to(out, payload, 0.5)
    torch.testing.assert_close(out, 1 + 0.5 * sent.double(), rtol=1e-5, atol=1e-6)


# Against references


def test_energies_count_the_elements_beside_the_matrix():
    """Of 1,000 elements 31 x 32 make the matrix, and 8 are sent as they are."""
    powersgd, a = PowerSGD(), torch.randn(1000, dtype=torch.float64)
    a[-8:] = 100.0
    payload = powersgd.compress(a.clone(), Spec((1000,), 2.0, a.dtype, Key("a")))
    assert payload.parts[-1].numel() == 8
    for each in (payload, powersgd.smaller(payload, 5.0)):
        c = torch.zeros_like(a)
        powersgd.add_to(c, each)
        torch.testing.assert_close(
            torch.tensor(each.scalars), torch.tensor([*map(norm2, (a, c, a - c))])
        )


@pytest.mark.parametrize("rank", range(1, 26))
def test_a_cf_that_is_a_rank_gives_this_rank(rank):
    """50 / rank is rounded, and so is the quotient by it."""
    assert layout(50 / rank, 10_000, (100, 100)).rank == rank


def test_matrices_start_from_other_columns():
    starts = [PowerSGD()._start(name, 1, 1000, torch.zeros(1)) for name in ("a", "b")]
    assert abs(starts[0] @ starts[1].t()) < 0.2


def test_true_rank_is_reproduced_exactly():
    rank, matrix = PowerSGD(), low_rank(3, 8)
    for _ in range(3):
        own, mean = one([rank], [matrix], 8.0)  # rank 3
    torch.testing.assert_close(mean, matrix)
    assert float(own[0].error) <= 1e-12 * float(own[0].total)


def test_warm_start_approaches_the_best_approximation():
    matrix = normal(2400, 5)
    best = torch.linalg.svdvals(matrix.view(40, 60))[:3].square().sum()
    rank, energies = PowerSGD(), []
    for _ in range(300):
        own, _ = one([rank], [matrix], 8.0)
        energies.append(float(own[0].energy))
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(energies))
    assert energies[0] < 0.8 * best
    assert energies[-1] == pytest.approx(float(best), rel=1e-3)


def test_truncation_is_what_the_same_rounds_give_at_that_rank():
    bucket = [[normal(2400, 1)], [normal(2400, 2)]]
    start = normal(6 * 60, 3).view(6, 60)

    def run(cf):
        ranks = [PowerSGD(), PowerSGD()]
        for rank in ranks:
            rank.load_state_dict({"q": {"w": start}})
        return ranks, exchange(ranks, bucket, cf, [MATRIX])

    ranks, (reported, _) = run(4.0)
    for cf in (4.0, 5.0, 8.0, 12.0, 24.0, 1000.0):
        _, (direct, _) = run(cf)
        for w in range(2):
            a = bucket[w][0]
            level = ranks[w].smaller(reported[w][0], cf / 4.0)
            kept = decompressed(ranks[w], level)
            assert level.nbytes == 8 * ranks[w].floats(Spec.shaped((40, 60), cf))
            assert float(level.energy) == pytest.approx(norm2(kept))
            assert float(level.error) == pytest.approx(norm2(a - kept))
            assert float(level.total) == pytest.approx(norm2(a))
            torch.testing.assert_close(kept, decompressed(ranks[w], direct[w][0]))


def test_recompress_of_what_went_uncompressed():
    rank, matrix = PowerSGD(), normal(2400, 1)
    whole = rank.compress(matrix, Spec.of(matrix, 1.0, MATRIX))
    assert torch.equal(decompressed(rank, whole), matrix)
    assert (float(whole.error), float(whole.energy)) == (0.0, float(whole.total))
    level = rank.smaller(whole, 12.0)
    assert same(level, rank.compress(matrix, Spec.of(matrix, 12.0, MATRIX)))
    vector = compressed(rank, normal(30, 1), 4.0, Key("b", 0, (30,)))
    assert rank.smaller(vector, 10.0).cf == 40.0
    assert same(rank.smaller(vector, 10.0), vector)


@pytest.mark.parametrize("world", [1, 3])
def test_equals_numpy_reference(world):
    """Algorithm 1 with error feedback (Algorithm 2) written down plainly, in columns."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((60, 3))
    ranks = [PowerSGD() for _ in range(world)]
    for rank in ranks:
        rank.load_state_dict({"q": {"w": torch.from_numpy(q.T.copy())}})
    memory = [np.zeros((40, 60)) for _ in range(world)]
    ours = [torch.zeros(2400, dtype=torch.float64) for _ in range(world)]
    for _ in range(5):
        for w in range(world):
            gradient = rng.standard_normal((40, 60))
            memory[w] += gradient
            ours[w] += torch.from_numpy(gradient.ravel())
        p, _ = np.linalg.qr(sum(m @ q for m in memory))
        q = sum(m.T @ p for m in memory) / world
        memory = [m - p @ (m.T @ p).T for m in memory]
        own, mean = one(ranks, ours, 8.0)
        for w in range(world):
            ranks[w].add_to(ours[w], own[w], -1.0)
            np.testing.assert_allclose(ours[w].view(40, 60), memory[w], atol=1e-10)
        np.testing.assert_allclose(mean.view(40, 60), p @ q.T, atol=1e-10)


class Bucket:
    """As much of a GradBucket as PyTorch's hook looks at."""

    def __init__(self, flat: torch.Tensor, shapes) -> None:
        self.flat, self.shapes = flat, shapes

    def buffer(self):
        return self.flat

    def index(self):
        return 0

    def is_last(self):
        return True

    def gradients(self):
        pieces = self.flat.split([int(np.prod(shape)) for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


class Alone:
    """A group of one rank, whose sum is what it has, at once: on gloo the callbacks of PyTorch's
    hook run in a thread that now and then takes the process with it."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)

    def size(self):
        return 1

    def _all_reduce(self, tensor, group, async_op):
        self.future = torch.futures.Future()
        self.future.set_result([tensor])
        return self

    def get_future(self):
        return self.future

    def wait(self):
        return True


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_equals_pytorch_hook(monkeypatch, rank):
    shapes = ((40, 40), (33,), (40, 40))
    keys = [Key(f"p{i}", 0, shape) for i, shape in enumerate(shapes)]
    state = PowerSGDState(Alone(monkeypatch), rank, start_powerSGD_iter=2, min_compression_rate=1)
    state.iter = 2
    ours, memory = PowerSGD(), torch.zeros(3233, dtype=torch.float64)
    cf = 1600 / (80 * rank)
    for step in range(6):
        gradient = normal(3233, step)
        flat = gradient.clone()
        powerSGD_hook(state, Bucket(flat, shapes)).wait()
        if step:  # the first is random: it leaves the Q that both start from
            memory += gradient
            pieces = memory.split([1600, 33, 1600])
            _, (payloads,) = exchange([ours], [pieces], cf, keys)
            out = torch.cat([decompressed(ours, payload) for payload in payloads])
            torch.testing.assert_close(out, flat)
            for piece, payload in zip(pieces, payloads, strict=True):
                ours.add_to(piece, payload, -1.0)
            torch.testing.assert_close(memory, state.error_dict[0])
        else:
            q = state.q_memory_dict[0].view(2, 40, rank)
            ours.load_state_dict({"q": {"p0": q[0].t(), "p2": q[1].t()}})
            memory += state.error_dict[0]


# Unfriendly gradients


@either_path
@pytest.mark.parametrize("bad", [nan, float("inf")])
def test_not_finite_on_one_rank_is_nan_on_all_and_changes_nothing(bad):
    ranks = [PowerSGD() for _ in range(3)]
    exchange(ranks, buckets(3, 0, torch.float32), 4.0, KEYS)
    before = ranks[0].state_dict()["q"]
    for position, cf in ((0, 4.0), (2, 4.0), (3, 2.0)):
        bucket = buckets(3, 1, torch.float32)
        bucket[1][position][0] = bad
        reported, payloads = exchange(ranks, bucket, cf, KEYS)
        for rank, got in zip(ranks, payloads, strict=True):
            for payload, numel in zip(got, NUMELS, strict=True):
                assert any_nonfinite([payload])
                assert bool(decompressed(rank, payload).isnan().all())
                out = torch.zeros(numel)
                rank.mean_of(out, [payload], 1.0)
                assert bool(out.isnan().all())
            state = rank.state_dict()["q"]  # a device may have added rows to start from
            assert all(torch.equal(state[n][: len(rows)], rows) for n, rows in before.items())
        assert not isfinite(reported[1][position].total)
        for rank, own in zip(ranks, reported, strict=True):
            assert all(bool(decompressed(rank, payload).isfinite().all()) for payload in own)
            assert all(payload.energy.isnan() and payload.error.isnan() for payload in own)
    _, payloads = exchange(ranks, buckets(3, 2, torch.float32), 4.0, KEYS)
    assert not any(any_nonfinite([payload]) for payload in payloads[0])


def test_nan_where_q_is_zero_is_not_hidden():
    rank = PowerSGD()
    rank.load_state_dict({"q": {"w": torch.eye(60)[:1]}})
    matrix = torch.ones(2400)
    matrix[5] = nan
    _, payloads = exchange([rank], [[matrix]], 24.0, [MATRIX])
    assert any_nonfinite([payloads[0][0]])


@either_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_gradients_send_zero_and_keep_q(dtype):
    ranks = [PowerSGD() for _ in range(2)]
    matrix = low_rank(2, 3).to(dtype)
    zero = torch.zeros_like(matrix)
    for _ in range(3):
        _, mean = one(ranks, [zero, zero], 12.0)
        assert mean.count_nonzero() == 0
    for _ in range(5):
        one(ranks, [matrix, zero], 12.0)  # one rank has nothing
    before = ranks[0]._start("w", 2, 60, matrix)
    own, mean = one(ranks, [zero, zero], 12.0)
    assert mean.count_nonzero() == 0
    assert (float(own[0].energy), float(own[0].error), float(own[0].total)) == (0, 0, 0)
    after = ranks[0]._start("w", 2, 60, matrix)
    torch.testing.assert_close(before.abs(), after.abs())
    own, mean = one(ranks, [matrix, zero], 12.0)
    torch.testing.assert_close(mean, matrix / 2, rtol=1e-4, atol=1e-4)
    assert float(own[1].energy) == 0


@either_path
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 1e30),
        (torch.float32, 1e-30),
        (torch.float32, 1e-42),
        (torch.float64, 1e140),
        (torch.float64, 1e-140),
        (torch.float64, 1e-310),
    ],
)
def test_tiny_and_huge_gradients(dtype, scale):
    ranks = [PowerSGD() for _ in range(2)]
    matrix = (low_rank(2, 3) * scale).to(dtype)
    for _ in range(6):
        own, mean = one(ranks, [matrix, matrix], 12.0)
        assert bool(mean.isfinite().all())
        assert bool(ranks[0].state_dict()["q"]["w"].isfinite().all())
        left = matrix.clone()
        ranks[0].add_to(left, own[0], -1.0)
        assert bool(left.isfinite().all())
    if 1e-300 < scale < 1e200 and (dtype == torch.float64 or scale > 1e-38):
        torch.testing.assert_close(mean / scale, matrix / scale, rtol=1e-4, atol=1e-4)


@either_path
def test_orthonormal_rows_of_anything_finite():
    x = normal(300, 0).view(3, 100)
    cases = {
        "normal": x,
        "zero": torch.zeros(3, 100),
        "zero row": x * torch.tensor([[1.0], [0.0], [1.0]]),
        "equal rows": x[:1].expand(3, 100),
        "nearly equal": x[:1] + 1e-9 * x,
        "single": x.float(),
        "scales": x * torch.tensor([[1e-100], [1.0], [1e100]], dtype=x.dtype),
        "huge": x * 1e300,
        "denormal": x * 1e-310,
        "single huge": x.float() * 1e37,
        "single denormal": x.float() * 1e-42,
        "square": x[:, :3],
        "many": normal(2000, 1).view(20, 100),
        "many single": normal(2000, 1, torch.float32).view(20, 100) * 1e37,
        "many zero": torch.zeros(20, 20),
    }
    for name, rows in cases.items():
        basis = orthonormal_rows(rows)
        eye = torch.eye(len(rows), dtype=rows.dtype)
        torch.testing.assert_close(basis @ basis.t(), eye, rtol=0, atol=3e-6, msg=name)
        assert torch.equal(basis, orthonormal_rows(rows.clone()))
    for j in (1, 2):  # nested
        projected = x[:j] @ orthonormal_rows(x)[:j].t() @ orthonormal_rows(x)[:j]
        torch.testing.assert_close(projected, x[:j])
    assert not bool(orthonormal_rows(x * nan).isfinite().any())
