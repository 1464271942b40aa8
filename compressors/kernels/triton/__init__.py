"""The kernels for CUDA devices, if Triton is installed.

This file decides which tensors the kernels support. The other files of this folder import Triton,
and are imported only when a kernel is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compressors.kernels.blocks import Flag, Scalar, Selected, ThresholdSearch, takes_triton
from compressors.kernels.reference import Kernels


def fits(x: Tensor, *others: Tensor | None) -> bool:
    """Whether Triton's kernels can work on float32 x together with `others`."""
    return x.numel() > 0 and all(
        takes_triton(each)
        and each.dtype == torch.float32
        and each.device == x.device
        and each.is_contiguous()
        for each in (x, *others)
        if each is not None
    )


class Triton(Kernels):
    """Norms and selections with fewer passes over a tensor, in Triton. Tensors that the kernels do
    not support, and tensors of a single element, are left to the reference."""

    def fused(self, *tensors: Tensor | None) -> Any:
        given = [x for x in tensors if x is not None]
        floats = [x for x in given if x.is_floating_point()]
        if not all(map(takes_triton, given)) or (floats and not fits(*floats)):
            return None
        from compressors.kernels.triton import fused

        return fused

    def any_nan(self, x: Tensor) -> Flag:
        if not fits(x):
            return super().any_nan(x)
        from compressors.kernels.triton import flags

        return flags.any_nan(x)

    def squared_norm(self, x: Tensor) -> Scalar:
        kernels: Any = _selection(x) or super()
        return kernels.squared_norm(x)

    def add_and_norm(self, memory: Tensor, tensor: Tensor) -> Scalar:
        kernels: Any = _selection(memory, tensor) or super()
        return kernels.add_and_norm(memory, tensor)

    def largest(self, x: Tensor, k: int) -> Tensor:
        kernels: Any = _selection(x) or super()
        return kernels.largest(x, k)

    def select(self, x: Tensor, k: int, add: Tensor | None) -> Selected:
        kernels: Any = _selection(x, add) or super()
        return kernels.select(x, k, add)

    def select_rows(self, x: Tensor, rows: int, k: int, add: Tensor | None) -> Selected | None:
        kernels: Any = _selection(x, add, least=2 * rows) or super()
        return kernels.select_rows(x, rows, k, add)

    def select_segments(
        self, x: Tensor, lengths: tuple[int, ...], counts: tuple[int, ...], add: Tensor | None
    ) -> Selected:
        if x.numel() < 2 or not fits(x, add):
            return super().select_segments(x, lengths, counts, add)
        from compressors.kernels.triton import segments

        return segments.select_segments(x, lengths, counts, add)

    def select_above(self, x: Tensor, threshold: Scalar, k: int, add: Tensor | None) -> Selected:
        kernels: Any = _selection(x, add) or super()
        return kernels.select_above(x, threshold, k, add)

    def select_by_count(
        self, x: Tensor, k: int, add: Tensor | None, search: ThresholdSearch
    ) -> Selected:
        kernels: Any = _selection(x, add) or super()
        return kernels.select_by_count(x, k, add, search)


def _selection(x: Tensor, *others: Tensor | None, least: int = 2) -> Any:
    """The module of the kernels for norms and selections, if it supports these tensors, and x has
    at least so many elements; else None."""
    if x.numel() < least or not fits(x, *others):
        return None
    from compressors.kernels.triton import select

    return select
