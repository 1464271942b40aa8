"""Top-k sparsification: the k elements that are largest in magnitude.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017), with exact
selection; GraVAC's compressor. The error is fed back, so C(a) is a contraction:
||a - C(a)||^2 <= (1 - k/n) ||a||^2 (Stich et al., "Sparsified SGD with Memory", 2018).
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.base import Key
from compressors.norms import on_numpy, squared_norm
from compressors.ranking import largest_of
from compressors.selection import select
from compressors.sparse import take
from compressors.sparsifier import Selected, Sparsifier


class TopK(Sparsifier):
    """Keeps k = max(1, floor(numel / cf)) elements.

    On a CPU the lower index wins among equal magnitudes; on another device any may.
    """

    name = "topk"
    exact_count = True

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        if on_numpy(tensor):
            found = select(tensor.numpy(), k, None if add is None else add.numpy())
            return Selected(
                torch.from_numpy(found.indices), torch.from_numpy(found.values), found.total
            )
        if add is not None:
            tensor.add_(add)
        indices = largest_of(tensor, k)
        return Selected(indices, take(tensor, indices), squared_norm(tensor))
