"""AdaComp: each small bin of neighbours sends what comes near its own maximum.

Chen, Choi, Brand, Agrawal, Zhang and Gopalakrishnan, "AdaComp: Adaptive Residual Gradient
Compression for Data-Parallel Distributed Training" (AAAI 2018), its pack():

    G = residual + latest gradient
    H = G + latest gradient          (the soft threshold: what G is about to become)
    an element is sent if |H| >= the maximum of |G| over its bin

Values are sent as they are, not as signs times a mean.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from compressors.base import Key, Payload
from compressors.bins import select_bins
from compressors.norms import BLOCK, check_same_length, on_numpy
from compressors.sparsifier import Selected, Sparsifier
from compressors.threshold_search import keep
from compressors.values import ValueFormat


class AdaComp(Sparsifier):
    """Keeps at most k = max(1, floor(numel / cf)) elements: those that the rule above sends, but no
    zeros; of more than k the k largest |G|. At least one.

    bin_size: elements a bin, up to 131,072 (the paper: 50 in convolutions, 500 elsewhere); None:
        numel / k, so that there are as many bins as slots.

    The latest gradient is what `compress_sum` adds. `compress`, which knows of none, takes the
    tensor itself for it, so the two do not keep the same elements.
    """

    name = "adacomp"
    comparable = False
    """The latest gradient, which the rule needs, is not at hand where tensors are joined."""

    def __init__(self, bin_size: int | None = None, values: str | ValueFormat = "fp32") -> None:
        super().__init__(values)
        if bin_size is not None and (not isinstance(bin_size, int) or not 1 <= bin_size <= BLOCK):
            raise ValueError(
                f"bin_size must be an integer from 1 to {BLOCK} or None, got {bin_size!r}"
            )
        self.bin_size = bin_size

    def compress_sum(self, memory: Tensor, tensor: Tensor, cf: float, key: Key) -> Payload:
        check_same_length(memory, tensor)
        return super().compress_sum(memory, tensor.to(memory.device, memory.dtype), cf, key)

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        size = self.bin_size or min(BLOCK, ceil(tensor.numel() / max(k, 1)), tensor.numel()) or 1
        if on_numpy(tensor):
            found = select_bins(tensor.numpy(), size, k, None if add is None else add.numpy())
            return Selected(
                torch.from_numpy(found.indices), torch.from_numpy(found.values), found.total
            )
        latest = tensor if add is None else add
        if add is not None:
            tensor.add_(add)
        numel = tensor.numel()
        bins = tensor.new_zeros(ceil(numel / size) * size)
        bins[:numel] = tensor.abs()
        peaks = bins.view(-1, size).amax(1) if numel else bins
        soft = (tensor + latest).abs()
        mask = (soft >= peaks.repeat_interleave(size)[:numel]) & (tensor != 0)
        return keep(tensor, mask, k)
