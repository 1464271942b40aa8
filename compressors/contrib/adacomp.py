"""AdaComp: in each small bin of neighbours, a threshold near the maximum of that bin."""

from __future__ import annotations

from math import ceil

from torch import Tensor

from compressors.base import Key
from compressors.kernels import kernels_for
from compressors.kernels.blocks import CACHE_BLOCK, Selected
from compressors.sparsifier import Sparsifier
from compressors.wire.values import ValueFormat


class AdaComp(Sparsifier):
    """AdaComp sends from each small bin of neighbours the elements that come near its maximum.

    Chen, Choi, Brand, Agrawal, Zhang and Gopalakrishnan, "AdaComp: Adaptive Residual Gradient
    Compression for Data-Parallel Distributed Training" (AAAI 2018), its pack():

        G = residual + latest gradient
        H = G + latest gradient          (the soft threshold: what G is about to become)
        an element is sent if |H| >= the maximum of |G| over its bin

    Zeros are not sent, and at most the k elements with the largest |G|. The latest gradient is the
    argument `add` of `compress`, or without `add` the tensor itself.

    bin_size: elements of a bin (the paper: 50 in convolutions, 500 elsewhere); None: numel / k.
    """

    name = "adacomp"
    comparable = False

    def __init__(self, bin_size: int | None = None, values: str | ValueFormat = "fp32") -> None:
        super().__init__(values)
        if not (bin_size is None or (isinstance(bin_size, int) and 1 <= bin_size <= CACHE_BLOCK)):
            raise ValueError(
                f"bin_size must be an integer from 1 to {CACHE_BLOCK} or None, got {bin_size!r}"
            )
        self.bin_size = bin_size

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        numel = tensor.numel()
        size = self.bin_size or min(CACHE_BLOCK, ceil(numel / max(k, 1)), numel) or 1
        return kernels_for(tensor).select_bins(tensor, size, k, add)
