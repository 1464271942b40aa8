"""The value formats by name: of what sparsifiers keep, as in `TopK(values="bf16")`."""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.base import Key
from compressors.formats import Layout, Parts, ValueFormat
from compressors.half import Half
from compressors.levels import Levels

__all__ = ["Full", "ValueFormat", "make_values", "value_names"]


class Full(ValueFormat):
    """The values as they are, in the tensor's own dtype; not copied."""

    name = "fp32"
    lossless = True

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((count, dtype),)

    def encode(self, values: Tensor, key: Key) -> Parts:
        return (values.detach().contiguous(),)

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> Tensor:
        return parts[0]


_formats: dict[str, ValueFormat] = {
    form.name: form
    for form in (
        Full(),
        Half("fp16", torch.float16),
        Half("bf16", torch.bfloat16),
        Levels("int8", bits=8, bucket=256),
        Levels("int4", bits=4, bucket=64),
        Levels("qsgd", bits=4, bucket=512, seed=0),
    )
}


def value_names() -> tuple[str, ...]:
    """The registered names, in alphabetical order."""
    return tuple(sorted(_formats))


def make_values(values: str | ValueFormat) -> ValueFormat:
    """The format called `values`, or `values` itself if it already is one.

    ValueError for an unknown name, TypeError for anything else."""
    if isinstance(values, ValueFormat):
        return values
    if not isinstance(values, str):
        raise TypeError(f"values must be a name or a ValueFormat object, got {values!r}")
    if values not in _formats:
        raise ValueError(f"values must be one of {', '.join(value_names())}; got {values!r}")
    return _formats[values]
