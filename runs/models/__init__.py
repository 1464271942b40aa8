"""Models written for the tasks, by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from runs.models.gpt import byte_gpt, byte_gpt_10m
from runs.models.lstm import (
    byte_lstm,
    lstm_2x1500,
    word_lstm_large,
    word_lstm_medium,
    word_lstm_small,
)
from runs.models.resnet import resnet8, resnet18, resnet20, resnet101
from runs.models.vgg import vgg11, vgg16

MODELS: dict[str, Callable[..., nn.Module]] = {
    "lstm": byte_lstm,
    "gpt": byte_gpt,
    "gpt-10m": byte_gpt_10m,
    "resnet8": resnet8,
    "resnet20": resnet20,
    "resnet18": resnet18,
    "vgg11": vgg11,
    "vgg16": vgg16,
    "resnet101": resnet101,
    "lstm-small": word_lstm_small,
    "lstm-medium": word_lstm_medium,
    "lstm-large": word_lstm_large,
    "lstm-2x1500": lstm_2x1500,
}


def make_model(name: str, **shape: int) -> nn.Module:
    """Build a registered model.

    `shape` is `vocab`, `length` for the language models, `in_channels`, `classes` for the image
    models, and each model's own widths and depths. Weights come from torch's global RNG.
    Raises ValueError for an unknown name, TypeError for a shape that the model does not have.
    """
    if name not in MODELS:
        raise ValueError(f"model={name!r} is unknown; accepted: {', '.join(MODELS)}")
    return MODELS[name](**shape)


__all__ = ["MODELS", "make_model"]
