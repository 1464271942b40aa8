"""Saved states: whether one fits and is whole, and how those of N ranks become those of M.

A state that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from adaptive.parameters import ModelParameter
from policies import state as saved

CONTENTS = ("compressor", "link", "memory", "shadow", "sum", "controller", "resharded_from")
"""What a state holds beside what must be equal."""

TENSORS = {"none": (), "residual": ("residual",), "momentum": ("residual", "velocity")}
"""What each kind of memory keeps of a parameter."""

FLOATING = (torch.float32, torch.float64)


class Stateful(Protocol):
    """A policy or a compressor, perhaps of the user's own."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@contextmanager
def undone_on_error(stateful: Sequence[Stateful], plain: Sequence[object]) -> Iterator[None]:
    """If what is loaded in this context cannot be, whatever the reason, all is as it was before,
    and the error is a ValueError.

    stateful: go back by their own `state_dict`. plain: get their attributes back, so they must
    not change in place what these hold."""
    states = [each.state_dict() for each in stateful]
    attributes = [dict(vars(each)) for each in plain]
    try:
        yield
    except Exception as error:
        for each, before in zip(stateful, states, strict=True):
            each.load_state_dict(before)
        for part, kept in zip(plain, attributes, strict=True):
            vars(part).clear()
            vars(part).update(kept)
        if isinstance(error, ValueError):
            told = str(error)
            raise ValueError(told if told.startswith("state") else f"state: {told}") from error
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"state: it cannot be loaded, {told}") from error


def check_state(
    state: Mapping[str, Any],
    expected: Mapping[str, Any],
    by_name: Mapping[str, ModelParameter],
    ladder: int,
) -> None:
    """ValueError unless `state` is complete, equals `expected` where that says something, and its
    tensors are whole and those of the parameters in `by_name`. ladder: CFs of the shadow ladder.

    What the policy, the compressor and the controller's books hold they check themselves."""
    missing = [key for key in (*expected, *CONTENTS) if key not in state]
    if missing:
        raise ValueError(f"state: {', '.join(missing)} missing; is it a state_dict() of ours?")
    for what, ours in expected.items():
        if what != "parameters" and state[what] != ours:
            hint = "; adaptive.reshard_states makes states for another number of ranks"
            told = f"state: {what} is {state[what]!r}, expected {ours!r}"
            raise ValueError(told + (hint if what == "world_size" else ""))
    memory, sums, shadow = (saved.part(state, what) for what in ("memory", "sum", "shadow"))
    _check_parameters(saved.part(state, "parameters"), expected["parameters"])
    unknown = sorted({*map(str, memory), *map(str, sums), *map(str, shadow)} - set(by_name))
    if unknown:
        raise ValueError(f"state: the model has no parameters {', '.join(unknown)}")
    for name in memory:
        _check_memory(name, saved.part(memory, name), by_name[name], expected["memory_kind"])
    for name, total in sums.items():
        # Not finite for the rest of an interval in which a gradient was not.
        _check_tensor("sum", name, total, _flat(by_name[name]), by_name[name].dtype, finite=False)
    if shadow and not ladder:
        raise ValueError("state: it has a shadow ladder, which this policy does not ask for")
    for name in shadow:
        _check_shadow(name, saved.part(shadow, name), by_name[name], ladder)
    if saved.maybe_count(state, "resharded_from", least=1) is not None:
        saved.together(state["link"] is None, "'link' must be None in a resharded state")
        return  # it was measured when the compressor was attached
    link = saved.values(state, "link")
    saved.together(len(link) == 2, f"'link' must be two numbers, got {link!r}")
    saved.number({"link": link[0]}, "link", least=0)
    if link[1] != inf:
        saved.number({"link": link[1]}, "link", above=0)


def shapes(by_name: Mapping[str, ModelParameter]) -> dict[str, list[int]]:
    """Of the parameters, by name."""
    return {name: list(parameter.tensor.shape) for name, parameter in by_name.items()}


def _check_parameters(state: Mapping[str, Any], ours: Mapping[str, list[int]]) -> None:
    """ValueError, naming the parameters, unless the state's are the model's."""
    theirs = {str(name): saved.values(state, name) for name in state}
    gone, new = [n for n in theirs if n not in ours], [n for n in ours if n not in theirs]
    other = [
        f"{n} {tuple(theirs[n])}, here {tuple(ours[n])}"
        for n in ours
        if n in theirs and theirs[n] != ours[n]
    ]
    told = {
        "it has parameters that the model has not": gone,
        "it knows nothing of the parameters": new,
        "parameters had other shapes": other,
    }
    if gone or new or other:
        listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in told.items() if names)
        raise ValueError(f"state: of another model: {listed}")


def _check_memory(name: str, kept: Mapping[str, Any], parameter: ModelParameter, kind: str) -> None:
    """What a memory keeps of one parameter."""
    known = {*TENSORS[kind], *(("lag", "to_full_lag") if "velocity" in kept else ())}
    if kind == "momentum" and "stepped" in kept:
        saved.together(
            kept["stepped"] is True, f"'stepped' of {name!r} must be True if it is there"
        )
        known.add("stepped")
    extra = sorted(map(str, kept.keys() - known))
    if extra:
        raise ValueError(f"state: memory {kind!r} keeps no {', '.join(extra)}, as of {name!r}")
    for what in TENSORS[kind]:
        if what in kept:
            _check_tensor(what, name, kept[what], _flat(parameter), parameter.dtype)
    if "velocity" in kept:
        lag = saved.number(kept, "lag", above=0)
        saved.number(kept, "to_full_lag", above=0)
        saved.together(lag <= 1, f"'lag' of {name!r} must be in (0, 1], got {lag!r}")


def _check_shadow(
    name: str, kept: Mapping[str, Any], parameter: ModelParameter, ladder: int
) -> None:
    """What the shadow ladder keeps of one parameter: see `ShadowGroup`."""
    stride = saved.count(kept, "stride", least=1)
    size = -(-parameter.tensor.numel() // stride)
    wanted = {
        "residual": (ladder, size),
        "velocity": (ladder, size),
        "sent": (1 + ladder, size),
    }
    saved.together("residual" in kept, f"the shadow of {name!r} has no residual")
    dtype = getattr(kept["residual"], "dtype", None)
    saved.together(dtype in FLOATING, f"the shadow of {name!r} must be float32 or float64 tensors")
    for what in kept:
        if what != "stride":
            saved.together(what in wanted, f"a shadow has no {what!r}, as of {name!r}")
            _check_tensor(f"shadow {what}", name, kept[what], wanted[what], dtype)


def _flat(parameter: ModelParameter) -> tuple[int, ...]:
    return (parameter.tensor.numel(),)


def _check_tensor(
    what: str, name: str, value: Any, shape: tuple[int, ...], dtype: Any, finite: bool = True
) -> None:
    """ValueError unless `value` is such a tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"state: {what} of {name!r} must be a tensor, got {value!r:.80}")
    if value.shape != shape or value.dtype != dtype:
        raise ValueError(
            f"state: {what} of {name!r} must be {dtype} of shape {shape}, got {value.dtype} of "
            f"shape {tuple(value.shape)}"
        )
    if finite and not bool(value.isfinite().all()):
        raise ValueError(f"state: {what} of {name!r} is not finite")


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
    each = [state["controller"]["layers"] for state in states]
    return {name: _mean(weights, [layers[name] for layers in each]) for name in each[0]}
