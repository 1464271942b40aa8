"""Reasons in words and numbers, for the timeline."""

from __future__ import annotations

from policies.base import DENSE


def counted_steps(number: int) -> str:
    """In words: "1 step", "2 steps"."""
    return f"{number} step{'' if number == 1 else 's'}"


def change(old: float, new: float, why: str) -> str:
    """Why the CF sent goes from `old` to `new`: "scale up 10 -> 20: ...", "dense: 10 -> 1, ..."."""
    if old == new:
        return why
    if new == DENSE:
        return f"dense: {old:g} -> 1, {why}"
    return f"scale {'up' if new > old else 'down'} {old:g} -> {new:g}: {why}"
