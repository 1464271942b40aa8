"""Where subspace iteration starts from: the last step's result, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from compressors.orthogonal import orthonormal_rows


class WarmStart:
    """Keeps PowerSGD's Q^T (rank x columns) by parameter name ("warm start", Vogels and others
    2019, section 4.2). What goes in comes out of a sum over the ranks, so it is alike on all ranks.

    A lower rank uses the first rows and the others wait; beyond the highest rank so far, random
    rows are added. seed: of those; the same on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rows: dict[str, Tensor] = {}

    def known(self, name: str, cols: int) -> int:
        """How many rows are kept, of this length."""
        rows = self._rows.get(name)
        return 0 if rows is None or rows.shape[1] != cols else len(rows)

    def start(self, name: str, rank: int, cols: int, like: Tensor) -> Tensor:
        """`rank` orthonormal rows, of the dtype and on the device of `like`."""
        known = min(self.known(name, cols), rank)
        rows = self._rows[name][:known].to(like) if known else like.new_empty(0, cols)
        if known < rank:
            fresh = [self._random(name, row, cols) for row in range(known, rank)]
            rows = torch.cat([orthonormal_rows(rows), torch.stack(fresh).to(like)])
        return orthonormal_rows(rows)

    def keep(self, name: str, start: Tensor, rows: Tensor) -> None:
        """Begin with `rows` next time. Where they are zero (a zero gradient) nothing was learnt:
        keep those of `start`, which is what led to them."""
        new = torch.where((rows == 0).all(1, keepdim=True), start, rows)
        if self.known(name, new.shape[1]) > len(new):
            new = torch.cat([new, self._rows[name][len(new) :].to(new)])
        self._rows[name] = new

    def state_dict(self) -> dict[str, Tensor]:
        return {name: rows.clone() for name, rows in self._rows.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ValueError, and nothing is changed, unless all are finite matrices."""
        for name, rows in state.items():
            whole = isinstance(rows, Tensor) and rows.dim() == 2 and rows.is_floating_point()
            if not whole or not bool(rows.isfinite().all()):
                raise ValueError(f"state of {name!r} must be a finite matrix (rank x columns)")
        self._rows = {name: rows.clone() for name, rows in state.items()}

    def _random(self, name: str, row: int, cols: int) -> Tensor:
        """A function of (seed, name, row, cols), whatever the other rows."""
        digest = blake2b(repr((self.seed, name, row)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.randn(cols, generator=generator, dtype=torch.float64)
