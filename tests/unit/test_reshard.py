"""States for another number of ranks: what is still to be sent stays right; whose states fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive import reshard_states
from adaptive.memory.momentum import MomentumRule
from adaptive.model.state import shares
from tests.distributed.setting import waiting

numbers = st.integers(1, 4)


def _state(rank: int, world_size: int, memory: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": 9,
        "world_size": world_size,
        "rank": rank,
        "base": "topk",
        "policy": "fixed",
        "memory_kind": "momentum",
        "synchronisation": "EveryStep()",
        "tied_to_ranks": "",
        "parameters": {"w": [5], "b": [3]},
        "resharded_from": None,
        "compressor": {},
        "link": [0.0, 1.0],
        "memory": memory,
        "sync": {},
        "sum": {"w": torch.ones(5)},
        "controller": {
            "step": 7,
            "times": [(1.0, [0.1])],
            "timing": {},
            "totals": {"steps": 7 + rank},
        },
    }


@given(old=numbers, new=numbers)
def test_shares_add_up(old: int, new: int) -> None:
    rows = [shares(old, rank, new) for rank in range(new)]
    for row in rows:
        assert sum(row.values()) == pytest.approx(1)
    for i in range(old):
        assert sum(row.get(i, 0.0) for row in rows) == pytest.approx(new / old)


@given(
    old=numbers,
    new=numbers,
    nesterov=st.booleans(),
    has=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=4, max_size=4),
    shares=st.lists(st.sampled_from([0.25, 1.0]), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_the_mean_of_what_is_still_to_be_sent_stays(
    old: int,
    new: int,
    nesterov: bool,
    has: list[tuple[bool, bool]],
    shares: list[float],
    seed: int,
) -> None:
    """Whoever of the old ranks has a residual or a velocity, whatever its momentum share."""
    generator = torch.Generator().manual_seed(seed)
    rule = MomentumRule(0.9, nesterov=nesterov)
    memories = []
    for (residual, velocity), share in zip(has[:old], shares, strict=False):
        kept: dict[str, Any] = {}
        if residual:
            kept["residual"] = torch.randn(5, generator=generator, dtype=torch.float64)
        if velocity:
            kept["velocity"] = torch.randn(5, generator=generator, dtype=torch.float64)
            kept |= {"momentum_share": share, "to_full_momentum": rule.velocity_scale(share, 1.0)}
        memories.append({"w": kept} if kept else {})
    before = [_state(rank, old, memory) for rank, memory in enumerate(memories)]
    after = reshard_states(before[::-1], new)
    assert [(state["rank"], state["world_size"]) for state in after] == [
        (rank, new) for rank in range(new)
    ]
    means = [
        sum(waiting(state["memory"].get("w", {}), 0.9, nesterov) for state in states) / len(states)
        for states in (before, after)
    ]
    assert torch.allclose(*(torch.as_tensor(mean, dtype=torch.float64) for mean in means))
    moving = ["velocity" in state["memory"].get("w", {}) for state in after]
    assert old == new or all(moving) or not any(moving)


def test_what_depends_on_the_number_of_ranks_is_left_out() -> None:
    memories = [{"w": {"residual": torch.full((5,), float(rank))}} for rank in range(2)]
    states = [_state(rank, 2, memory) for rank, memory in enumerate(memories)]
    four = reshard_states(states, 4)
    assert [float(state["memory"]["w"]["residual"][0]) for state in four] == [0, 0, 1, 1]
    assert [state["controller"]["totals"]["steps"] for state in four] == [7, 7, 8, 8]
    one = reshard_states(states, 1)[0]
    assert torch.equal(one["memory"]["w"]["residual"], torch.full((5,), 0.5))
    for state in (*four, one):
        controller = state["controller"]
        assert state["resharded_from"] == 2
        assert (state["sum"], state["link"]) == ({}, None)
        assert (controller["times"], controller["timing"]) == ([], None)
        assert controller["step"] == 7
    assert [state["resharded_from"] for state in reshard_states(states, 2)] == [None, None]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda states: states[:1], r"all 2 ranks, got those of \[0\]"),
        (lambda states: [states[0], states[0]], r"all 2 ranks, got those of \[0, 0\]"),
        (lambda states: [states[0], {**states[1], "base": "dgc"}], "base is 'topk' on rank 0"),
        (
            lambda states: [
                states[0],
                {**states[1], "controller": {**states[1]["controller"], "step": 8}},
            ],
            "step is 7 on rank 0 and 8 on rank 1",
        ),
        (lambda states: [{**state, "memory": None} for state in states], "cannot be resharded"),
    ],
)
def test_states_that_are_not_of_one_moment_are_refused(change: Any, told: str) -> None:
    states = [_state(rank, 2, {"w": {"residual": torch.ones(5)}}) for rank in range(2)]
    with pytest.raises(ValueError, match=told):
        reshard_states(change(states), 3)


@pytest.mark.parametrize("states", [[], 5, _state(0, 1, {})], ids=["none", "5", "one state"])
def test_what_is_no_list_of_states_is_refused(states: Any) -> None:
    with pytest.raises(ValueError, match="states: must be a list of all ranks' states, got"):
        reshard_states(states, 2)


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(world_size: Any) -> None:
    with pytest.raises(ValueError, match="world_size must be a whole number >= 1, got"):
        reshard_states([_state(0, 1, {})], world_size)
