"""Policies decide when to switch to another CF: pure state machines on statistics that all ranks
share (no torch, no I/O, no clock).

base.py is the contract between a policy and the controller. The policies: goodput.py, gravac.py
(with send_rule.py and candidates.py), accordion.py, and simple.py (fixed, schedule, warm-up).
They share ladder.py, step_time.py, checks.py (of settings), state.py (saved states) and words.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, Literal

from policies import checks
from policies.accordion import Accordion
from policies.base import DENSE, Context, GainKind, Measurement, Plan, Policy, StepReport
from policies.goodput import Goodput
from policies.gravac import GraVAC
from policies.simple import Fixed, Schedule, Warmup

__all__ = [
    "DENSE",
    "LIBRARY",
    "Accordion",
    "Context",
    "Fixed",
    "GainKind",
    "Goodput",
    "GraVAC",
    "Measurement",
    "Plan",
    "Policy",
    "PolicyName",
    "Schedule",
    "StepReport",
    "Warmup",
    "make_policy",
    "policy_names",
    "register",
]

PolicyName = Literal[
    "accordion",
    "accordion-paper",
    "dgc-paper",
    "fixed",
    "goodput",
    "gravac",
    "gravac-paper",
    "schedule",
    "warmup",
]
"""Names of the library's own policies. `make_policy` also knows registered names."""

LIBRARY: Mapping[str, Callable[..., Policy]] = {
    "accordion": Accordion,
    "accordion-paper": Accordion.paper,
    "dgc-paper": Warmup.paper,
    "fixed": Fixed,
    "goodput": Goodput,
    "gravac": GraVAC,
    "gravac-paper": GraVAC.paper,
    "schedule": Schedule,
    "warmup": Warmup,
}
"""The factories of the library's own policies, by name."""

_registry = dict(LIBRARY)


def register(name: str, factory: Callable[..., Policy]) -> None:
    """Make `name` usable wherever a policy is chosen by name. ValueError if it is already taken.

    factory: makes the policy from the given settings. A policy's class is one."""
    if name in _registry:
        raise ValueError(f"name must not be registered yet, got {name!r}")
    _registry[name] = factory


def policy_names() -> tuple[str, ...]:
    """The registered names, in alphabetical order."""
    return tuple(sorted(_registry))


def make_policy(policy: str | Policy, **settings: Any) -> Policy:
    """The policy called `policy` with these settings, or `policy` itself if it already is one.

    ValueError for an unknown name. TypeError for settings that are not accepted. The policy's own
    checks raise ValueError or TypeError, too."""
    if isinstance(policy, Policy):
        if settings:
            raise TypeError(f"policy={policy!r} is an object already: {sorted(settings)} go to it")
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"policy must be a name or a Policy object, got {policy!r}")
    if policy not in _registry:
        names = policy_names()
        near = checks.nearest(policy, names)
        raise ValueError(f"policy must be one of {', '.join(names)}; got {policy!r}{near}")
    factory = _registry[policy]
    accepted = signature(factory)
    try:
        accepted.bind(**settings)
    except TypeError as error:
        raise TypeError(
            f"policy={policy!r}, settings {settings}: {error}; accepted: a Policy object, as made "
            f"by {getattr(factory, '__qualname__', policy)}({', '.join(accepted.parameters)}), or "
            f"the name with these settings"
        ) from None
    return factory(**settings)
