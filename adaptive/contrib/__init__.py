"""Optional features, imported when a script names them. The core does not depend on them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

MODULES = {
    "Gossip": "gossip",
    "GossipRule": "gossip",
    "HookRung": "hooks",
    "with_hooks": "hooks",
}
"""The module of each name that `load` finds."""


def load(name: str) -> Any:
    """The class or function of this name. AttributeError if there is none."""
    if name not in MODULES:
        raise AttributeError(f"module 'adaptive' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
