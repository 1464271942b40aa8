"""Models written for the tasks, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from runs.models.gpt import ByteGPT
from runs.models.lstm import ByteLSTM
from runs.needs import left_out, of_papers

MODELS: dict[str, Callable[..., nn.Module]] = {
    # Of bytes.
    "lstm": ByteLSTM,  # 0.99 million parameters
    "gpt": ByteGPT,  # 1.0 million
    "gpt-10m": partial(ByteGPT, width=384, layers=6, heads=6),  # 10.9 million
    "gpt-121m": partial(ByteGPT, width=768, layers=17, heads=12),  # 120.9 million
    **of_papers("models", "MODELS"),
}


def make_model(name: str, **shape: Any) -> nn.Module:
    """Build a registered model.

    `shape` is `vocab` for the language models, `in_channels` and `classes` for the image models,
    and each model's own widths and depths. Weights come from torch's global RNG.
    Raises ValueError for an unknown name, TypeError for a shape that the model does not have.
    """
    if name not in MODELS:
        raise ValueError(f"model={name!r} is unknown; accepted: {', '.join(MODELS)}{left_out()}")
    return MODELS[name](**shape)


__all__ = ["MODELS", "make_model"]
