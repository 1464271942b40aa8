"""PowerSGD and gradients that are not finite, zero, tiny or huge."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest
import torch

from compressors.powersgd import PowerSGD, orthonormal_rows
from tests.unit.matrices import KEYS, MATRIX, NUMELS, buckets, low_rank, normal, one
from tests.unit.ranks import exchange


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
                assert rank.is_poisoned(payload)
                assert bool(rank.decompress(payload).isnan().all())
                out = torch.zeros(numel)
                rank.write_to(out, payload)
                assert bool(out.isnan().all())
            state = rank.state_dict()["q"]
            assert all(torch.equal(state[name], before[name]) for name in before)
        assert not np.isfinite(reported[1][position].total)
    _, payloads = exchange(ranks, buckets(3, 2, torch.float32), 4.0, KEYS)
    assert not any(ranks[0].is_poisoned(payload) for payload in payloads[0])


def test_nan_where_q_is_zero_is_not_hidden():
    rank = PowerSGD()
    rank.load_state_dict({"q": {"w": torch.eye(60)[:1]}})
    matrix = torch.ones(2400)
    matrix[5] = nan
    _, payloads = exchange([rank], [[matrix]], 24.0, [MATRIX])
    assert rank.is_poisoned(payloads[0][0])


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
    before = ranks[0]._warm.start("w", 2, 60, matrix)
    own, mean = one(ranks, [zero, zero], 12.0)
    assert mean.count_nonzero() == 0
    assert (own[0].energy, own[0].error, own[0].total) == (0, 0, 0)
    after = ranks[0]._warm.start("w", 2, 60, matrix)
    torch.testing.assert_close(before.abs(), after.abs())
    own, mean = one(ranks, [matrix, zero], 12.0)
    torch.testing.assert_close(mean, matrix / 2, rtol=1e-4, atol=1e-4)
    assert own[1].energy == 0


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
        ranks[0].subtract_from(left, own[0])
        assert bool(left.isfinite().all())
    if 1e-300 < scale < 1e200 and (dtype == torch.float64 or scale > 1e-38):
        torch.testing.assert_close(mean / scale, matrix / scale, rtol=1e-4, atol=1e-4)


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
