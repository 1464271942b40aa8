"""Top-k sparsification: the k elements that are largest in magnitude.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017), with exact
selection; GraVAC's compressor. The error is fed back, so C(a) is a contraction:
||a - C(a)||^2 <= (1 - k/n) ||a||^2 (Stich et al., "Sparsified SGD with Memory", 2018).
"""

from __future__ import annotations

from torch import Tensor

from compressors.base import Key
from compressors.kernels import Selected, kernels_for
from compressors.sparsifier import Sparsifier


class TopK(Sparsifier):
    """Top-k keeps exactly the k = max(1, floor(numel / cf)) elements of largest magnitude.

    On a CPU the lower index wins among equal magnitudes; on another device any may. How the
    elements are found in little more time than it takes to read the tensor is told in
    `compressors.kernels.host`.
    """

    name = "topk"
    exact_count = True

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        return kernels_for(tensor).select(tensor, k, add)
