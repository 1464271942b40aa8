"""How to compress one flat gradient tensor, and back. Knows nothing of processes or policies."""

from __future__ import annotations

from collections.abc import Callable

from compressors.base import Compressor, CorruptPayload, Key, Payload, check_cf, kept
from compressors.none import NoCompression
from compressors.randomk import RandomK
from compressors.topk import TopK

__all__ = [
    "Compressor",
    "CorruptPayload",
    "Key",
    "NoCompression",
    "Payload",
    "RandomK",
    "TopK",
    "check_cf",
    "compressor_names",
    "kept",
    "make_compressor",
    "register",
]

_registry: dict[str, Callable[[], Compressor]] = {
    "none": NoCompression,
    "randomk": RandomK,
    "topk": TopK,
}


def register(name: str, factory: Callable[[], Compressor]) -> None:
    """Make `name` usable wherever a compressor is chosen by name.

    factory: called without arguments, e.g. the class. ValueError if the name is already taken.
    """
    if name in _registry:
        raise ValueError(f"name must not be registered yet, got {name!r}")
    _registry[name] = factory


def compressor_names() -> tuple[str, ...]:
    """The registered names, in alphabetical order."""
    return tuple(sorted(_registry))


def make_compressor(base: str | Compressor) -> Compressor:
    """The compressor called `base`, or `base` itself if it already is one.

    ValueError for an unknown name, TypeError for anything else."""
    if isinstance(base, Compressor):
        return base
    if not isinstance(base, str):
        raise TypeError(f"base must be a name or a Compressor object, got {base!r}")
    if base not in _registry:
        raise ValueError(f"base must be one of {', '.join(compressor_names())}; got {base!r}")
    return _registry[base]()
