"""Saved states: what the parts save, whether a state fits, and how those of N ranks become those
of M.

Each part checks what it has saved itself. A state that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaptive.model.parameters import ModelParameter
from policies.state import become, read, require, twin

State = Mapping[str, Any]

ALIKE = ("version", "world_size", "base", "policy", "memory_kind", "synchronisation", "parameters")
"""What the states of one moment have in common."""

HINTS = {
    "world_size": "; adaptive.reshard_states makes states for another number of ranks",
    "rank": "; each rank loads its own state. Where a checkpoint is rank 0's for all, save it with "
    "state_dict(checkpoint='gathered')",
}
"""What to do where a state is of another one of these."""


@contextmanager
def refusing() -> Iterator[None]:
    """Whatever is raised inside is a ValueError about the state."""
    try:
        yield
    except Exception as error:
        told = str(error)
        if not isinstance(error, ValueError):
            told = f"it cannot be loaded, {type(error).__name__}: {told}"
        raise ValueError(told if told.startswith("state") else f"state: {told}") from error


class SavedPart(NamedTuple):
    """What one part of a session saves, under a name of its own in the state.

    save: returns it. check: ValueError unless a saved value fits; it changes nothing. load: goes on
    from a value that `check` has found to be good, and cannot fail. kind: the type of the value,
    for `policies.state.read`."""

    save: Callable[[], Any]
    check: Callable[[Any], None]
    load: Callable[[Any], None]
    kind: Any = Mapping


def swapped(part: Any, **options: Any) -> SavedPart:
    """A part whose `load_state_dict` may find out half-way that a state does not fit: the state is
    loaded into its twin, whose content it takes at the end."""
    new: list[Any] = []

    def check(value: Any) -> None:
        new.append(twin(part))
        new[0].load_state_dict(value, **options)

    return SavedPart(part.state_dict, check, lambda _: become(part, new.pop()))


def check_state(state: State, expected: State, parts: Mapping[str, SavedPart]) -> None:
    """ValueError unless `state` is complete, equals `expected` where that says something, and what
    the parts have saved in it fits these."""
    missing = [key for key in (*expected, *parts, "resharded_from") if key not in state]
    if missing:
        raise ValueError(f"state: {', '.join(missing)} missing; is it a state_dict() of ours?")
    for what, ours in expected.items():
        if what != "parameters" and state[what] != ours:
            told = f"state: {what} is {state[what]!r}, expected {ours!r}"
            raise ValueError(told + HINTS.get(what, ""))
    _check_parameters(read(state, "parameters", Mapping), expected["parameters"])
    for name, part in parts.items():
        part.check(read(state, name, part.kind))


def flat_tensors(parameters: Iterable[ModelParameter]) -> dict[str, Tensor]:
    """Tensors like those that are kept of parameters, by name, without values: for `check_like`."""
    return {p.name: torch.empty(p.local.numel(), dtype=p.dtype, device="meta") for p in parameters}


def check_like(
    what: str, value: Any, like: Any, finite: bool = True, complete: bool = False
) -> None:
    """ValueError unless `value` has no keys but those of the mapping `like` (`complete`: all of
    them), and tensors of the same shapes and dtypes or values of the types in it."""
    if isinstance(like, Mapping):
        require(isinstance(value, Mapping), f"{what} must be a mapping, got {value!r:.80}")
        unknown = sorted(map(str, value.keys() - like.keys()))
        require(not unknown, f"{what} has unknown keys: {', '.join(unknown)}")
        missing = sorted(map(str, like.keys() - value.keys())) if complete else []
        require(not missing, f"{what} has lost {', '.join(missing)}")
        for key in value:
            check_like(f"{what}: {key}", value[key], like[key], finite)
    elif isinstance(like, Tensor):
        fits = isinstance(value, Tensor) and value.shape == like.shape and value.dtype == like.dtype
        fits = fits and (not finite or bool(value.isfinite().all()))
        wanted = f"{'finite ' if finite else ''}{like.dtype} of shape {tuple(like.shape)}"
        require(fits, f"{what} must be {wanted}, got {value!r:.80}")
    else:
        read({what: value}, what, like)


def _check_parameters(state: State, ours: Mapping[str, list[int]]) -> None:
    """ValueError, naming the parameters, unless the state's are the model's."""
    theirs = {str(name): read(state, name, list[int]) for name in state}
    told = {
        "it has parameters that the model has not": [n for n in theirs if n not in ours],
        "it knows nothing of the parameters": [n for n in ours if n not in theirs],
        "parameters had other shapes": [
            f"{name} {tuple(theirs[name])}, here {tuple(shape)}"
            for name, shape in ours.items()
            if theirs.get(name, shape) != shape
        ],
    }
    listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in told.items() if names)
    require(not listed, f"of another model: {listed}")


def reshard_states(states: Sequence[State], world_size: int) -> list[dict[str, Any]]:
    """The `AdaptiveCompressor.state_dict()` of all ranks, taken at one moment, made into states for
    `world_size` ranks: rank k loads the k-th. Pure, no collective; tensors may be shared with those
    that came in. ValueError if the states are not those of all ranks of one run, or damaged.

    What is still to be sent stays right: a rank's payload enters the mean by 1 / world_size, so the
    sum over the new ranks of residuals, and of velocities, is new / old times what it was. Every
    new rank gets a weighted mean of those of neighbouring old ranks, and not all the mean of all:
    ranks with one residual would choose the same elements, and deliver them more slowly. Step
    times, the network's cost and sums of gradients are measured anew, as is what the policy knows
    of them (`Policy.rescale`).
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number >= 1, got {world_size!r}")
    by_rank = _by_rank(states)
    if world_size == len(by_rank):
        return [dict(state) for state in by_rank]
    if tied := read(by_rank[0], "tied_to_ranks", str):
        raise ValueError(
            f"states: those of {len(by_rank)} ranks cannot be resharded for {world_size}, {tied}: "
            f"save the mean, with compressor.averaged(), and begin from it"
        )
    try:
        return [_state(by_rank, rank, world_size) for rank in range(world_size)]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"states: they cannot be resharded, {told}") from error


def shares(old: int, rank: int, new: int) -> dict[int, float]:
    """The weight of each old rank in one new rank's memory, by rank, where it is not 0: as if both
    cut one line into equal parts."""
    overlaps = {
        i: min((rank + 1) * old, (i + 1) * new) - max(rank * old, i * new) for i in range(old)
    }
    return {i: overlap / old for i, overlap in overlaps.items() if overlap > 0}


def _by_rank(states: Sequence[State]) -> list[State]:
    """In the order of ranks; ValueError unless they are of one run at one step, and complete."""
    ordered = sorted(states, key=lambda state: read(state, "rank", int))
    ranks = [state["rank"] for state in ordered]
    whole = read(ordered[0], "world_size", int) if ordered else 1
    if ranks != list(range(whole)):
        raise ValueError(f"states: must be those of all {whole} ranks, got those of {ranks}")
    for rank, state in enumerate(ordered):
        for what in (*ALIKE, "step"):
            first, here = (
                read(read(each, "controller", Mapping) if what == "step" else each, what, object)
                for each in (ordered[0], state)
            )
            told = f"states: {what} is {first!r:.80} on rank 0 and {here!r:.80} on rank {rank}"
            if here != first:
                raise ValueError(f"{told}: they are not of one run at one step")
    return ordered


def _state(states: Sequence[State], rank: int, new: int) -> dict[str, Any]:
    """The state of one new rank, from those of all old ones."""
    old = len(states)
    weights = shares(old, rank, new)
    heir = states[rank * old // new]  # of what cannot be shared out; rank 0's of rank 0
    return {
        **heir,
        "world_size": new,
        "rank": rank,
        "resharded_from": old,
        "link": None,
        "server": {},
        "memory": _memory(states, weights),
        "sync": states[0]["sync"],
        "sum": {},
        "controller": {**heir["controller"], "times": [], "timing": None},
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
            share, to_full = moving[0]["momentum_share"], moving[0]["to_full_momentum"]
            velocities = [each.get("velocity") for each in kept]
            if len({each["momentum_share"] for each in moving}) > 1:
                # Then scale all velocities to those of momentum share 1.
                share = to_full = 1.0
                velocities = [
                    each["velocity"] * each["to_full_momentum"] if "velocity" in each else None
                    for each in kept
                ]
            mean = _mean(weights, velocities)
            shared["velocity"] = torch.zeros_like(moving[0]["velocity"]) if mean is None else mean
            shared |= {"momentum_share": share, "to_full_momentum": to_full}
        elif shares := [each["momentum_share"] for each in kept if "momentum_share" in each]:
            shared["momentum_share"] = shares[0]
        if any("stepped" in each for each in kept):  # alike on all ranks
            shared["stepped"] = True
        if shared:
            found[name] = shared
    return found


def _mean(weights: Mapping[int, float], tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Weighted, of the tensors that are there; those that are not are 0."""
    there = [(weight, t) for i, weight in weights.items() if (t := tensors[i]) is not None]
    if not there:
        return None
    mean = torch.zeros_like(there[0][1])
    for weight, tensor in there:
        mean.add_(tensor, alpha=weight)
    return mean
