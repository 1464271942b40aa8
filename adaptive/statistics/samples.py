"""The arithmetic of the shadow ladder and of signal gain, on samples of gradients.

A matrix of samples is (CFs, elements). Its columns lie in sections, each of which is compressed as
one. On the host there is one section, and sums are NumPy's, in an order that recorded runs depend
on. On a device it is a fixed number of operations, whatever the number of elements, of sections and
of CFs, and no value is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compressors.kernels.blocks import Array, on_host, takes_triton

BELOW = 0.8
"""Of the last step's smallest magnitude: what is above it is few, and nearly always enough."""

WIDTH = 256
"""Numbers in a sketch: 2 kB in the all-reduce of the statistics."""


class Sections:
    """The division of the columns of a matrix of samples into sections.

    sizes: columns of each section. wanted: for each section, how many elements each CF keeps of it.
    weights: for each section, how many elements of the gradient a sampled one stands for.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        wanted: Sequence[Sequence[int]],
        weights: Sequence[float],
        device: torch.device,
    ) -> None:
        self.one = len(sizes) == 1
        self.wanted = wanted
        self.weights = torch.tensor(weights, dtype=torch.float64, device=device)
        self.longest = max(sizes)
        self.ends = torch.from_numpy(np.cumsum([0, *sizes])).to(device)
        # Where the smallest magnitude that each CF keeps is: among the descending ones of a row if
        # there is one section, among those that ascend section by section if there are several.
        kept = np.array(wanted).T
        self.kept = torch.from_numpy(kept.astype(np.int32, order="C")).to(device)
        if self.one:
            kth = kept - 1
        else:
            kth = np.cumsum(sizes) - kept
            self._of_column = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(device)
            self._row_ends = torch.from_numpy(np.cumsum([0, *(len(kept) * [*sizes])])).to(device)
            self.keys = self._of_column << 32  # above the bits of any magnitude
        self.kth = torch.from_numpy(kth).to(device)
        self.column_weights = self.spread(self.weights)
        self.column_roots = self.column_weights.sqrt().float()

    def spread(self, numbers: Tensor) -> Tensor:
        """Numbers of the sections, (..., sections), as those of the columns."""
        return numbers if self.one else numbers.index_select(-1, self._of_column)

    def sums(self, rows: Tensor) -> Tensor:
        """(rows, columns) added up within each section: (rows, sections)."""
        flat = rows.view(-1)  # of one dimension, for which CUDA has a fast kernel
        return torch.segment_reduce(
            flat, "sum", offsets=self._row_ends, unsafe=True, initial=0
        ).view(len(rows), -1)


def sampled(grads: Sequence[Tensor], strides: Sequence[int]) -> Tensor:
    """Every stride-th element of each gradient (flat), one sample after the other: perhaps a view
    of a gradient; on a device in single precision."""
    samples = [grad.detach()[::stride] for grad, stride in zip(grads, strides, strict=True)]
    sample = samples[0] if len(samples) == 1 else torch.cat(samples)
    return sample if on_host(sample) else sample.float()


def largest(a: Tensor, sections: Sections, above: Array) -> Tensor:
    """In each row and section the elements of largest magnitude, as a mask; as many as are wanted
    there, and all that equal the smallest of them.

    above: (rows,), magnitudes above which to look first, updated for the next step: on the host
    they save time, and never change what is found.
    """
    if on_host(a):
        return torch.from_numpy(_partitioned(a.numpy(), sections.wanted[0], above))
    magnitude = a.abs()
    if sections.one:
        most = max(sections.wanted[0])
        smallest = magnitude.topk(most, dim=1).values.gather(1, sections.kth)
        return magnitude >= smallest
    # The bits of numbers that are not negative, taken for integers, have the order of the numbers.
    ascending = (magnitude.view(torch.int32) + sections.keys).sort(dim=1).values
    smallest = ascending.gather(1, sections.kth).view(torch.int32)[:, ::2]  # without the keys
    return magnitude >= sections.spread(smallest.view(torch.float32))


def split_at_once(a: Tensor, sections: Sections) -> tuple[Tensor, Tensor] | None:
    """`largest`, and the energies of the elements that are not among those and of all elements,
    (2, rows, sections), in one launch for all CFs; None where that cannot be."""
    if not takes_triton(a) or a.dtype != torch.float32 or not a.is_contiguous():
        return None
    from compressors.kernels.triton import (
        rows as triton_rows,  # here, as Triton need not be installed
    )

    if sections.longest > triton_rows.LONGEST:
        return None
    return triton_rows.split_largest(a, sections.ends, sections.longest, sections.kept)


def _partitioned(a: Array, wanted: Sequence[int], above: Array) -> Array:
    magnitude = np.abs(a)
    smallest = np.empty(len(wanted), a.dtype)
    for i, (row, k) in enumerate(zip(magnitude, wanted, strict=True)):
        few = row[row >= float(above[i])]
        if few.size < k:
            few = row.copy()
        few.partition(few.size - k)
        smallest[i] = few[few.size - k]
    np.multiply(smallest, BELOW, out=above)
    return np.asarray(magnitude >= smallest[:, None])


def clear(rows: Tensor, mask: Tensor) -> None:
    """Set the elements where `mask` is set to zero, in place."""
    if on_host(rows):
        np.copyto(rows.numpy(), 0, where=mask.numpy())  # several times as fast as torch's
    else:
        rows.masked_fill_(mask, 0)


def energies(rows: Tensor, sections: Sections) -> Tensor:
    """Squared norm of each row's sections, in double: (rows, sections)."""
    if on_host(rows):
        x = rows.numpy()
        return torch.from_numpy(np.einsum("ij,ij->i", x, x, dtype=np.float64))[:, None]
    if sections.one:
        return torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64).square_()
    return sections.sums(rows.double().square_())


def inner(rows: Tensor, x: Tensor) -> Tensor:
    """Inner product of each row with `x`. On the host of the first one by itself: BLAS adds up a
    matrix's in another order, and runs are repeated to the bit."""
    if not on_host(rows):
        return rows @ x
    matrix, vector = rows.numpy(), x.numpy()
    return torch.from_numpy(np.concatenate(([matrix[0] @ vector], matrix[1:] @ vector)))


def products(rows: Tensor, x: Tensor, sections: Sections) -> Tensor:
    """As `inner`, in double, each section times its weight."""
    if on_host(rows):
        return inner(rows, x).double() * sections.weights
    return inner(rows.double(), x * sections.column_weights)


def sketched(rows: Tensor, signs: Tensor, shift: int, sections: Sections) -> Tensor:
    """The sketches of rows: elements times signs and the root of their weight, those WIDTH apart
    added up, turned by `shift`; (rows, WIDTH), in double."""
    if not on_host(rows):
        signed = rows * (signs * sections.column_roots)
        padded = torch.nn.functional.pad(signed, (0, -signed.shape[-1] % WIDTH))
        return padded.unflatten(-1, (-1, WIDTH)).sum(-2, dtype=torch.float64).roll(shift, -1)
    array = rows.numpy()
    factors = signs.numpy().astype(array.dtype)
    factors *= float(sections.weights) ** 0.5  # both factors of a product have it
    signed = array * factors
    whole = signed.shape[-1] // WIDTH * WIDTH
    folded = signed[:, :whole].reshape(len(rows), -1, WIDTH).sum(axis=-2, dtype=np.float64)
    tail = signed[:, whole:]
    folded[:, : tail.shape[-1]] += tail
    return torch.from_numpy(folded).roll(shift, -1)
