"""What the rules of docs/studies/rules.py make of tensors before they send them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = list[Tensor]
"""Of one rank: one for each parameter, in the model's order."""


class Residual:
    """Error feedback: what was not sent is added to what is sent next. tensors: what waits."""

    def __init__(self, like: Tensors) -> None:
        self.tensors = [torch.zeros_like(tensor) for tensor in like]

    def send(
        self, values: Tensors, compress: Callable[[Tensors], Tensors], decay: float = 1.0
    ) -> Tensors:
        """What arrives of these values. decay: of what has waited."""
        whole = [decay * e + x for e, x in zip(self.tensors, values, strict=True)]
        sent = compress(whole)
        self.tensors = [x - s for x, s in zip(whole, sent, strict=True)]
        return sent


def one_bit(x: Tensor, mask: Tensor) -> Tensor:
    """The signs of x times its root mean square; 0 where the mask is 0, as x is."""
    scale = x.norm() / sqrt(max(1.0, mask.sum().item()))
    return torch.where(x < 0, -scale, scale) * mask


def two_bits(x: Tensor) -> Tensor:
    """x, sparse, its values as signs and one of two magnitudes; what is 0 stays 0."""
    size, there = x.abs(), x != 0
    large = there & (size > size.sum() / there.sum().clamp(min=1))
    small = there & ~large
    means = [(size * part).sum() / part.sum().clamp(min=1) for part in (small, large)]
    return x.sign() * (means[0] * small + means[1] * large)


CHUNK = 4096
"""Elements: of SparseLoCo's chunks."""


def largest(rows: Tensor, k: int) -> Tensor:
    """The k largest elements by magnitude of each row (all, if it has less); the others 0."""
    places = rows.abs().topk(min(k, rows.shape[1])).indices
    return torch.zeros_like(rows).scatter(1, places, rows.gather(1, places))


def largest_of_chunks(x: Tensor, k: int) -> Tensor:
    """`largest` of the consecutive chunks of a tensor; its shape."""
    rows = F.pad(x.flatten(), (0, -x.numel() % CHUNK)).view(-1, CHUNK)
    return largest(rows, k).flatten()[: x.numel()].view_as(x)


def mean_of_sent(ranks: Sequence[Tensor]) -> Tensor:
    """Of each element, over the ranks that have sent it, where it is not 0."""
    stacked = torch.stack(list(ranks))
    return stacked.sum(dim=0) / stacked.count_nonzero(dim=0).clamp(min=1)


def elements_sent(numel: int, k: int) -> int:
    """Of a tensor of so many elements, by `largest_of_chunks`."""
    return numel // CHUNK * min(k, CHUNK) + min(k, numel % CHUNK)


SIDE = 64
"""Elements: no side of a chunk of DeMo's is longer."""


def to_chunks(x: Tensor) -> Tensor:
    """A tensor as chunks (chunks, height, width). Vectors are matrices of one row; what has more
    than two dimensions has all but the first as one."""
    matrix = x.reshape(1, -1) if x.dim() < 2 else x.flatten(1)
    height, width = map(_side, matrix.shape)
    blocks = matrix.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2)
    return blocks.reshape(-1, height, width)


def from_chunks(chunks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `to_chunks`. shape: of the tensor."""
    _, height, width = chunks.shape
    rows = (1 if len(shape) < 2 else shape[0]) // height
    return chunks.view(rows, -1, height, width).transpose(1, 2).reshape(shape)


def _side(length: int) -> int:
    return max(side for side in range(1, min(length, SIDE) + 1) if length % side == 0)


def dct(chunks: Tensor) -> Tensor:
    """The orthonormal discrete cosine transform (type II) of chunks (chunks, height, width), along
    both sides."""
    _, height, width = chunks.shape
    return _cosines(height) @ chunks @ _cosines(width).T


def idct(coefficients: Tensor) -> Tensor:
    """The inverse of `dct`."""
    _, height, width = coefficients.shape
    return _cosines(height).T @ coefficients @ _cosines(width)


def _cosines(n: int) -> Tensor:
    """The matrix (n, n) of the transform: a frequency a row."""
    place = torch.arange(n, dtype=torch.float64)
    frequency = place.unsqueeze(1)
    matrix = sqrt(2 / n) * torch.cos(pi / n * (place + 0.5) * frequency)
    matrix[0] /= sqrt(2)
    return matrix.float()  # the cosines of large angles are exact only in float64
