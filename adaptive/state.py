"""Whether a saved state fits and is whole; and that a state that is refused changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from adaptive.residual import Slot
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
    by_name: Mapping[str, Slot],
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


def shapes(by_name: Mapping[str, Slot]) -> dict[str, list[int]]:
    """Of the parameters, by name."""
    return {name: list(slot.param.shape) for name, slot in by_name.items()}


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


def _check_memory(name: str, kept: Mapping[str, Any], slot: Slot, kind: str) -> None:
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
            _check_tensor(what, name, kept[what], _flat(slot), slot.dtype)
    if "velocity" in kept:
        lag = saved.number(kept, "lag", above=0)
        saved.number(kept, "to_full_lag", above=0)
        saved.together(lag <= 1, f"'lag' of {name!r} must be in (0, 1], got {lag!r}")


def _check_shadow(name: str, kept: Mapping[str, Any], slot: Slot, ladder: int) -> None:
    """What the shadow ladder keeps of one parameter: see `ShadowGroup`."""
    stride = saved.count(kept, "stride", least=1)
    size = -(-slot.param.numel() // stride)
    wanted = {
        "residual": (ladder, size),
        "velocity": (ladder, size),
        "sent": (ladder, size),
        "grad": (size,),
    }
    saved.together("residual" in kept, f"the shadow of {name!r} has no residual")
    both = ("sent" in kept) == ("grad" in kept)
    saved.together(both, f"the shadow of {name!r} has only one of 'sent' and 'grad'")
    dtype = getattr(kept["residual"], "dtype", None)
    saved.together(dtype in FLOATING, f"the shadow of {name!r} must be float32 or float64 tensors")
    for what in kept:
        if what != "stride":
            saved.together(what in wanted, f"a shadow has no {what!r}, as of {name!r}")
            _check_tensor(f"shadow {what}", name, kept[what], wanted[what], dtype)


def _flat(slot: Slot) -> tuple[int, ...]:
    return (slot.param.numel(),)


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
