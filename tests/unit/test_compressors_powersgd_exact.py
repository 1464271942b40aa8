"""PowerSGD against obvious references: the best approximation, numpy, PyTorch's hook."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from compressors.base import Key
from compressors.powersgd import PowerSGD
from tests.unit.matrices import MATRIX, low_rank, normal, one
from tests.unit.ranks import exchange, same
from tests.unit.samples import norm2


def test_true_rank_is_reproduced_exactly():
    rank, matrix = PowerSGD(), low_rank(3, 8)
    for _ in range(3):
        own, mean = one([rank], [matrix], 8.0)  # rank 3
    torch.testing.assert_close(mean, matrix)
    assert own[0].error <= 1e-12 * own[0].total


def test_warm_start_approaches_the_best_approximation():
    matrix = normal(2400, 5)
    best = torch.linalg.svdvals(matrix.view(40, 60))[:3].square().sum()
    rank, energies = PowerSGD(), []
    for _ in range(300):
        own, _ = one([rank], [matrix], 8.0)
        energies.append(own[0].energy)
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
            level = ranks[w].recompress(reported[w][0], cf / 4.0)
            kept = ranks[w].decompress(level)
            assert level.nbytes == ranks[w].payload_nbytes_for((40, 60), cf, torch.float64)
            assert level.energy == pytest.approx(norm2(kept))
            assert level.error == pytest.approx(norm2(a - kept))
            assert level.total == pytest.approx(norm2(a))
            torch.testing.assert_close(kept, ranks[w].decompress(direct[w][0]))


def test_recompress_of_what_went_uncompressed():
    rank, matrix = PowerSGD(), normal(2400, 1)
    whole = rank.compress(matrix, 1.0, MATRIX)
    assert torch.equal(rank.decompress(whole), matrix)
    assert (whole.error, whole.energy) == (0.0, whole.total)
    level = rank.recompress(whole, 12.0)
    assert same(level, rank.compress(matrix, 12.0, MATRIX))
    vector = rank.compress(normal(30, 1), 4.0, Key("b", 0, (30,)))
    assert rank.recompress(vector, 10.0).cf == 40.0
    assert same(rank.recompress(vector, 10.0), vector)


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
            ranks[w].subtract_from(ours[w], own[w])
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
            out = torch.cat([ours.decompress(payload) for payload in payloads])
            torch.testing.assert_close(out, flat)
            for piece, payload in zip(pieces, payloads, strict=True):
                ours.subtract_from(piece, payload)
            torch.testing.assert_close(memory, state.error_dict[0])
        else:
            q = state.q_memory_dict[0].view(2, 40, rank)
            ours.load_state_dict({"q": {"p0": q[0].t(), "p2": q[1].t()}})
            memory += state.error_dict[0]
