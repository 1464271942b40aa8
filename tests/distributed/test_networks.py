"""A network that changes in the middle of a run: Goodput follows."""

from __future__ import annotations

from policies import DENSE, Goodput, Policy
from tests.distributed.modelled import ModelledRun
from tests.distributed.processes import run_ranks

FAST, SLOW = 0.0, 0.06
"""Seconds of a dense exchange; the rest of a step takes 0.005 s."""

BF16 = 2.0
"""The CF of a rung that loses 1%."""

FOLLOWS = 40
"""Steps within which the CF follows a change."""

SETTLED = 110
"""Steps before the first change."""


def _fast_slow_fast(rank: int) -> list[list[float]]:
    """CFs sent on a fast network, then on one that slows down, then on one that is fast again:
    in each part the last is what the policy stays at."""
    run, parts = ModelledRun(rank, Goodput(goal="time")), []
    for dense_seconds, before in ((FAST, SETTLED), (SLOW, 0), (FAST, 60), (SLOW, 60)):
        for _ in range(before):
            run.step()
        run.network(dense_seconds)
        parts.append([run.step() for _ in range(FOLLOWS)])
    return parts


def test_goodput_follows_both_ways() -> None:
    everyone = run_ranks(2, _fast_slow_fast)
    assert everyone[0] == everyone[1]
    first, *_ = everyone[0]
    assert set(first) == {DENSE}  # nothing has changed yet
    ends = [part[-1] for part in everyone[0]]
    assert ends[0] == DENSE
    assert ends[2] in (DENSE, BF16)  # which is left for no less than the margin
    assert min(ends[1], ends[3]) > DENSE


def _beside_a_slower_rank(rank: int, policy: Policy) -> list[float]:
    """CFs sent where the network costs nothing, and rank 0 waits for rank 1."""
    run = ModelledRun(rank, policy)
    run.link.others = 0.0 if rank else 0.06
    return [run.step() for _ in range(40)]


def test_waiting_for_a_slower_rank_is_no_slow_network() -> None:
    mine, theirs = run_ranks(2, _beside_a_slower_rank, Goodput(goal="time"))
    assert mine == theirs
    assert set(mine[25:]) == {DENSE}
