"""Orthonormal bases that survive anything finite: zeros, dependent vectors, tiny and huge values.

PowerSGD (Vogels and others 2019, Algorithm 1) orthogonalises with Gram-Schmidt, which divides by
zero for a zero gradient and loses orthogonality for nearly dependent columns. Householder
reflections do neither.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WIDE = 8  # rows up to which the work is done in double; beyond, that would cost too much


def orthonormal_rows(rows: Tensor) -> Tensor:
    """Orthonormal rows (r, n) whose first j span what the first j of `rows` span, for every j.

    rows: (r, n) with r <= n. A row that is zero, or depends on the ones before it, becomes some
    unit vector orthogonal to the others (always the same for the same `rows`), so the result
    always is a basis of r dimensions. NaN only if `rows` is not finite.

    Vectors are rows, not columns, because that is how they lie in memory."""
    wide = rows.double() if len(rows) <= _WIDE else rows
    if wide.dtype == rows.dtype and rows.numel():  # then squares could overflow or vanish
        largest = wide.abs().amax(1, keepdim=True)
        wide = wide / torch.where(largest > 0, largest, 1.0)
    columns = torch.linalg.qr(wide.t()).Q
    return columns.t().to(rows.dtype).contiguous()
