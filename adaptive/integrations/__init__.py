"""Adapters for training frameworks. Users of a framework import its file; nothing else does.

    from adaptive.integrations.lightning import AdaptiveCompressionCallback  # Lightning's Trainer
    from adaptive.integrations.hf import AdaptiveCompressionCallback  # Hugging Face's Trainer

`AdaptiveCompressor.attach` takes models and optimizers that Accelerate or Fabric have wrapped.
docs/frameworks.md says what is saved where.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptive.session.compressor import AdaptiveCompressor
from adaptive.step.config import require_type

LEFT_OUT = (
    "the compressor's state in this checkpoint is left out, because one process exchanges nothing: "
    "what the ranks had not sent yet is lost, and so is the momentum of SGD, which the compressor "
    "keeps. With DistributedDataParallel on one rank (Lightning: strategy='ddp'), or on as many "
    "ranks as before, training goes on from it"
)


def metrics(compressor: AdaptiveCompressor, prefix: str = "compression/") -> dict[str, float]:
    """By name, the CF in use, the mean gain at that CF (if it is known) and the wire factor of all
    steps so far: `accelerator.log(metrics(compressor), step=step)`."""
    summary = compressor.summary()
    found = {"cf": summary.cf, "wire_factor": summary.wire_factor}
    if summary.cf in summary.mean_gain:
        found["gain"] = summary.mean_gain[summary.cf]
    return {f"{prefix}{name}": float(number) for name, number in found.items()}


def made(given: AdaptiveCompressor | None, arguments: Mapping[str, Any]) -> AdaptiveCompressor:
    """The compressor that a callback was given, or a new one made with these arguments. TypeError
    if there are both, or if `given` is no compressor."""
    if given is not None and arguments:
        raise TypeError("give a compressor or the arguments of one, not both")
    fits = given is None or isinstance(given, AdaptiveCompressor)
    accepted = "an AdaptiveCompressor or None (give its arguments by name: base=...)"
    require_type(fits, "compressor", given, accepted)
    return given or AdaptiveCompressor(**arguments)
