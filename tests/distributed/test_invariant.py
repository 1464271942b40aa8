"""Sum of sent + residual = sum of gradients, over any run: nothing is lost and nothing invented."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.distributed.balance import balance
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted

STEPS = 9


def _run(rank: int, base: str, cfs: list[float], probe: list[float], ddp_options: dict) -> float:
    """Largest deviation from the invariant, relative to the largest sum."""
    policy = Scripted(cfs, tuple(probe))
    return float(balance(rank, base, policy, STEPS, ddp_options=ddp_options)["deviation"])


@pytest.mark.parametrize("base", ["topk", "randomk"])
@pytest.mark.parametrize(
    "ddp_options",
    [
        {},
        {"bucket_cap_mb": 0.002},
        {"static_graph": True, "bucket_cap_mb": 0.002},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.002},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.004},
    ],
    ids=["plain", "buckets", "static", "unused", "view"],
)
def test_invariant_across_switches_and_bucket_rebuilds(base: str, ddp_options: dict) -> None:
    cfs = [10.0, 100.0, 1.0, 1000.0, 1.5, 10.0, 1.0, 30.0]
    worst = run_ranks(2, _run, base, cfs, [10.0, 20.0], ddp_options)
    assert max(worst) < 1e-12


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    base=st.sampled_from(["topk", "randomk"]),
    cfs=st.lists(st.one_of(st.just(1.0), st.floats(1, 2000)), min_size=1, max_size=STEPS),
    probe=st.lists(st.floats(1.1, 1500), max_size=2, unique=True),
    cap=st.sampled_from([0.001, 0.003, 25]),
)
def test_invariant_for_any_sequence_of_cfs(
    base: str, cfs: list[float], probe: list[float], cap: float
) -> None:
    worst = run_ranks(2, _run, base, cfs, probe, {"bucket_cap_mb": cap})
    assert max(worst) < 1e-12


def test_invariant_on_four_ranks() -> None:
    worst = run_ranks(4, _run, "topk", [7.0, 1.0, 90.0], [20.0], {"bucket_cap_mb": 0.002})
    assert max(worst) < 1e-12
