"""Saved states: their parts, the check whether a state fits, and resharding from N to M ranks.

Each part checks its own saved value. A state that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaptive.model.parameters import ModelParameter
from policies.state import read, require, twin

State = Mapping[str, Any]

EQUAL_ENTRIES = (
    "version",
    "world_size",
    "base",
    "policy",
    "memory_kind",
    "synchronisation",
    "parameters",
)
"""Entries that are equal in the states of all ranks, saved at the same step."""

HINTS = {
    "world_size": "; adaptive.reshard_states makes states for another number of ranks",
    "rank": "; each rank loads its own state. Where a checkpoint is rank 0's for all, save it with "
    "state_dict(checkpoint='gathered')",
    "memory_kind": "; with the settings of the saved run it is the same (a model too small for "
    "compression has memory 'none', unless policy or debug is given)",
    "synchronisation": "; sync='auto' chooses by the latency that attach() measures: to go on from "
    "this state give the saved run's own way, sync=LocalSteps('auto') or sync=None (EveryStep)",
}
"""Advice for a state with another value of these entries."""

AUTO_WAYS = ("EveryStep(", "LocalSteps(steps='auto'")
"""What sync="auto" chooses from. Only a state of one beside the other gets that advice."""


@contextmanager
def refusing() -> Iterator[None]:
    """A context that turns every error inside into a ValueError about the state."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if not isinstance(error, ValueError):
            text = f"it cannot be loaded, {type(error).__name__}: {text}"
        raise ValueError(text if text.startswith("state") else f"state: {text}") from error


class SavedPart(NamedTuple):
    """One part of a session's state, saved under its own name.

    save: returns the value to save. check: raises ValueError unless a saved value fits, and changes
    nothing. load: loads a value that `check` has accepted, and cannot fail. kind: the type of the
    value, for `policies.state.read`."""

    save: Callable[[], Any]
    check: Callable[[Any], None]
    load: Callable[[Any], None]
    kind: Any = Mapping


def swapped(part: Any, **options: Any) -> SavedPart:
    """The saved part for an object whose `load_state_dict` may fail half-way: `check` loads the
    state into a twin of the object, and `load` moves the twin's content into the object."""
    checked: list[Callable[[], None]] = []

    def check(value: Any) -> None:
        new, become = twin(part)
        checked.append(become)
        new.load_state_dict(value, **options)

    return SavedPart(part.state_dict, check, lambda _: checked.pop()())


def check_state(state: State, expected: State, parts: Mapping[str, SavedPart]) -> None:
    """ValueError unless `state` is complete, has all entries of `expected` with equal values, and
    fits the parts."""
    missing = [key for key in (*expected, *parts, "resharded_from") if key not in state]
    if missing:
        raise ValueError(
            f"state: {', '.join(missing)} missing; is it the result of a compressor's state_dict()?"
        )
    for what, wanted in expected.items():
        if what != "parameters" and state[what] != wanted:
            problem = f"state: {what} is {state[what]!r}, expected {wanted!r}"
            ways = [way for way in AUTO_WAYS for sync in (state[what], wanted) if way in str(sync)]
            advised = what != "synchronisation" or {*ways} == {*AUTO_WAYS}
            raise ValueError(problem + HINTS.get(what, "") * advised)
    _check_parameters(read(state, "parameters", Mapping), expected["parameters"])
    for name, part in parts.items():
        part.check(read(state, name, part.kind))


def flat_tensors(parameters: Iterable[ModelParameter]) -> dict[str, Tensor]:
    """By name, a flat tensor without values for each parameter, to compare with in `check_like`. It
    has the size and dtype of the state that is kept for the parameter."""
    return {p.name: torch.empty(p.local.numel(), dtype=p.dtype, device="meta") for p in parameters}


def check_like(
    what: str, value: Any, like: Any, finite: bool = True, complete: bool = False
) -> None:
    """ValueError unless `value` fits `like`. A mapping must have no other keys than `like`. A
    tensor must have the shape and dtype of `like`. Another value must have the type `like`. finite:
    tensors must be finite. complete: a mapping must have all keys of `like`. what: the name of
    `value` in errors."""
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


def _check_parameters(state: State, expected: Mapping[str, list[int]]) -> None:
    """ValueError, naming the parameters, unless the state has the model's parameters."""
    given = {str(name): read(state, name, list[int]) for name in state}
    problems = {
        "it has parameters that the model has not": [n for n in given if n not in expected],
        "it lacks the parameters": [n for n in expected if n not in given],
        "its parameters have other shapes": [
            f"{name} {tuple(given[name])}, here {tuple(shape)}"
            for name, shape in expected.items()
            if given.get(name, shape) != shape
        ],
    }
    listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items() if names)
    require(not listed, f"of another model: {listed}")


def reshard_states(states: Sequence[State], world_size: int) -> list[dict[str, Any]]:
    """Convert the states of all ranks (`AdaptiveCompressor.state_dict()`, saved at the same step)
    into states for `world_size` ranks: rank k loads the k-th. No collective, and the given states
    do not change; the results may share tensors with them. ValueError if the states are not those
    of all ranks of one run, or damaged.

    Unsent parts keep their size: a rank's payload has weight 1 / world_size in the mean, so the sum
    of the new ranks' residuals (and velocities) is new / old times the old sum. Every new rank gets
    a weighted mean of the residuals of neighbouring old ranks. If every rank got the mean of all
    old ranks, all would select the same elements, and deliver the rest more slowly. Step times, the
    network's cost and sums of gradients are dropped and measured again, and the policy drops what
    it has learned from them (`Policy.rescale`).
    With local steps or a delay, new rank k must load model and optimizer of old rank k * old // new
    (rounded down), whose exchanges under way its state has.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number >= 1, got {world_size!r}")
    if not isinstance(states, list | tuple) or not states:
        raise ValueError(f"states: must be a list of all ranks' states, got {states!r:.80}")
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
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"states: they cannot be resharded, {cause}") from error


def shares(old: int, rank: int, new: int) -> dict[int, float]:
    """The weights above 0 of old ranks in one new rank's memory, by old rank. The old ranks cut a
    line into equal parts, and so do the new ranks. A weight is the overlap of an old rank's part
    and the new rank's part."""
    overlaps = {
        i: min((rank + 1) * old, (i + 1) * new) - max(rank * old, i * new) for i in range(old)
    }
    return {i: overlap / old for i, overlap in overlaps.items() if overlap > 0}


def _by_rank(states: Sequence[State]) -> list[State]:
    """The states in the order of ranks. ValueError unless they are those of all ranks of one run at
    one step."""
    ordered = sorted(states, key=lambda state: read(state, "rank", int))
    ranks = [state["rank"] for state in ordered]
    whole = read(ordered[0], "world_size", int)
    if ranks != list(range(whole)):
        raise ValueError(f"states: must be those of all {whole} ranks, got those of {ranks}")
    for rank, state in enumerate(ordered):
        for what in (*EQUAL_ENTRIES, "step"):
            first, here = (
                read(read(each, "controller", Mapping) if what == "step" else each, what, object)
                for each in (ordered[0], state)
            )
            found = f"states: {what} is {first!r:.80} on rank 0 and {here!r:.80} on rank {rank}"
            if here != first:
                raise ValueError(f"{found}: they are not of one run at one step")
    return ordered


def _state(states: Sequence[State], rank: int, new: int) -> dict[str, Any]:
    """The state of one new rank, from the states of all old ranks."""
    old = len(states)
    weights = shares(old, rank, new)
    nearest = states[rank * old // new]  # for entries without a mean; rank 0's for rank 0
    return {
        **nearest,
        "world_size": new,
        "rank": rank,
        "resharded_from": old,
        "link": None,
        "server": {},
        "memory": _memory(states, weights),
        "sum": {},
        "controller": {**nearest["controller"], "times": [], "timing": None},
    }


def _memory(states: Sequence[State], weights: Mapping[int, float]) -> dict[str, Any]:
    """The memory of one new rank, by parameter. If any old rank has a velocity, all new ranks get
    one, as the optimizer's momentum would be on all ranks."""
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
        if any("stepped" in each for each in kept):  # the same on all ranks
            shared["stepped"] = True
        if shared:
            found[name] = shared
    return found


def _mean(weights: Mapping[int, float], tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The weighted mean, where missing tensors count as 0; None if all are missing."""
    present = [(weight, t) for i, weight in weights.items() if (t := tensors[i]) is not None]
    if not present:
        return None
    mean = torch.zeros_like(present[0][1])
    for weight, tensor in present:
        mean.add_(tensor, alpha=weight)
    return mean
