"""The saved states of N ranks, made into those of another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policies import state as saved

State = Mapping[str, Any]

ALIKE = ("version", "world_size", "base", "policy", "memory_kind", "parameters")
"""Of the states of one moment."""


def reshard_states(states: Sequence[State], world_size: int) -> list[dict[str, Any]]:
    """The `AdaptiveCompressor.state_dict()` of all ranks, taken at one moment, made into states for
    `world_size` ranks: rank k loads the k-th. Pure, no collective; tensors may be shared with those
    that came in. Each of them needs the states of all old ranks.

    What is still to be sent stays right: a rank's payload enters the mean by 1 / world_size, so the
    sum over the new ranks of residuals, and of velocities, is new / old times what it was. Every
    new rank gets a weighted mean of those of neighbouring old ranks (from 2 to 4 each is kept
    twice, from 4 to 2 pairs are averaged), and not all the mean of all: ranks with one residual
    would choose the same elements, and deliver them more slowly.

    The policy keeps its place and the gains, and measures anew what depends on the number of ranks
    (`Policy.rescale`), as are step times, the network's cost and sums of gradients. The books go
    on. The shadow ladder's residuals, which are only looked at, are copied: the mean of two would
    have less energy than either, and gains would look better than they are.

    ValueError if the states are not those of all ranks of one run at one step, or damaged.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number >= 1, got {world_size!r}")
    by_rank = _by_rank(states)
    if world_size == len(by_rank):
        return [dict(state) for state in by_rank]
    try:
        return [_state(by_rank, rank, world_size) for rank in range(world_size)]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"states: they cannot be resharded, {told}") from error


def shares(old: int, rank: int, new: int) -> dict[int, float]:
    """The weight of each old rank in one new rank's memory, by rank, where it is not 0.

    As if both cut one line into equal parts. Over the old ranks they add up to 1, over the new ones
    to new / old."""
    overlaps = {
        i: min((rank + 1) * old, (i + 1) * new) - max(rank * old, i * new) for i in range(old)
    }
    return {i: overlap / old for i, overlap in overlaps.items() if overlap > 0}


def _by_rank(states: Sequence[State]) -> list[State]:
    """In the order of ranks; ValueError unless they are of one run at one step, and complete."""
    if not states:
        raise ValueError("states: must be those of all ranks, got none")
    ranks = [saved.count(state, "rank") for state in states]
    if sorted(ranks) != list(range(len(states))):
        raise ValueError(f"states: must be those of ranks 0 to {len(states) - 1}, got {ranks}")
    ordered = [
        state for _, state in sorted(zip(ranks, states, strict=True), key=lambda each: each[0])
    ]
    whole = saved.count(ordered[0], "world_size")
    if whole != len(ordered):
        raise ValueError(f"states: must be those of all {whole} ranks, got {len(ordered)}")
    first = _moment(ordered[0])
    for rank, state in enumerate(ordered):
        for what, value in _moment(state).items():
            if value != first[what]:
                raise ValueError(
                    f"states: {what} is {first[what]!r:.80} on rank 0 and {value!r:.80} on rank "
                    f"{rank}: they are not of one run at one step"
                )
    return ordered


def _moment(state: State) -> dict[str, Any]:
    """What the states of one moment have in common."""
    controller = saved.part(state, "controller")
    alike = {what: saved.field(state, what) for what in ALIKE}
    return {**alike, "step": saved.count(controller, "step")}


def _state(states: Sequence[State], rank: int, new: int) -> dict[str, Any]:
    old = len(states)
    weights = shares(old, rank, new)
    heir = states[rank * old // new]  # of what cannot be shared out; rank 0's of rank 0
    controller = heir["controller"]
    return {
        **heir,
        "world_size": new,
        "rank": rank,
        "resharded_from": old,
        "link": None,
        "memory": _memory(states, weights),
        "sum": {},
        "controller": {
            **controller,
            "layers": _layers(states, weights),
            "energies": [],
            "peers": {
                name: torch.zeros_like(sketch) for name, sketch in controller["peers"].items()
            },
            "times": [],
            "timing": None,
        },
    }


def _memory(states: Sequence[State], weights: Mapping[int, float]) -> dict[str, Any]:
    """By parameter. A velocity that any rank has all get, as the optimizer's would be."""
    found = {}
    for name in dict.fromkeys(name for state in states for name in state["memory"]):
        kept = [state["memory"].get(name, {}) for state in states]
        shared: dict[str, Any] = {}
        if any("residual" in kept[i] for i in weights):
            shared["residual"] = _mean(weights, [each.get("residual") for each in kept])
        moving = [each for each in kept if "velocity" in each]
        if moving:
            lags = {each["lag"] for each in moving}
            full = len(lags) > 1  # then all move with the whole of their momentum's lag
            mean = _mean(weights, [_velocity(each, full) for each in kept])
            shared["velocity"] = torch.zeros_like(moving[0]["velocity"]) if mean is None else mean
            shared["lag"] = 1.0 if full else moving[0]["lag"]
            shared["to_full_lag"] = 1.0 if full else moving[0]["to_full_lag"]
        if any("stepped" in each for each in kept):  # alike on all ranks
            shared["stepped"] = True
        if shared:
            found[name] = shared
    return found


def _velocity(kept: State, full: bool) -> Tensor | None:
    """full: as it would be if it moved with the whole of its momentum's lag."""
    velocity = kept.get("velocity")
    return velocity * kept["to_full_lag"] if full and velocity is not None else velocity


def _mean(weights: Mapping[int, float], tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Weighted, of the tensors that are there; those that are not are 0."""
    there = [(weight, t) for i, weight in weights.items() if (t := tensors[i]) is not None]
    if not there:
        return None
    if len(there) == 1 and there[0][0] == 1:
        return there[0][1]
    mean = torch.zeros_like(there[0][1])
    for weight, tensor in there:
        mean.add_(tensor, alpha=weight)
    return mean


def _layers(states: Sequence[State], weights: Mapping[int, float]) -> dict[str, Any]:
    """The sums of each layer, which are to be added up over the ranks, too."""
    found = {}
    for name in states[0]["controller"]["layers"]:
        each = {i: states[i]["controller"]["layers"][name] for i in weights}
        energy = sum(weight * each[i][0] for i, weight in weights.items())
        lists = [
            [
                sum(weight * each[i][part][n] for i, weight in weights.items())
                for n in range(len(each[min(each)][part]))
            ]
            for part in (1, 2)
        ]
        found[name] = [energy, *lists]
    return found
