"""Whether a saved state fits, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from adaptive.residual import Slot

CONTENTS = ("compressor", "link", "memory", "shadow", "sum", "controller")
"""What a state holds beside what must be equal."""


def check_state(
    state: Mapping[str, Any], expected: Mapping[str, Any], by_name: Mapping[str, Slot]
) -> None:
    """ValueError unless `state` is complete, equals `expected` where that says something, and
    its tensors are those of the parameters in `by_name`."""
    missing = [key for key in (*expected, *CONTENTS) if key not in state]
    if missing:
        raise ValueError(f"state: {', '.join(missing)} missing; is it a state_dict() of ours?")
    for what, ours in expected.items():
        if state[what] != ours:
            raise ValueError(f"state: {what} is {state[what]!r}, expected {ours!r}")
    unknown = sorted({*state["memory"], *state["sum"], *state["shadow"]} - set(by_name))
    if unknown:
        raise ValueError(f"state: the model has no parameters {', '.join(unknown)}")
    saved = [(n, kind, t) for n, held in state["memory"].items() for kind, t in held.items()]
    saved += [(n, "sum", t) for n, t in state["sum"].items()]
    saved = [(n, kind, t) for n, kind, t in saved if isinstance(t, Tensor)]
    for name, kind, tensor in saved:
        numel = by_name[name].param.numel()
        if tensor.numel() != numel:
            raise ValueError(
                f"state: {kind} of {name!r} has {tensor.numel()} elements, the parameter has "
                f"{numel}"
            )
