"""The arithmetic of the shadow ladder, on samples of gradients; and of signal gain.

A matrix of samples is (CFs, elements). Its columns lie in sections, and each section is compressed
as one. Everything is a fixed number of torch operations, whatever the number of elements, sections
and CFs, and reads no value. Only the selection has another body on the host, where it is faster.

Signal gain is the share of the true gradient that gets through compression:
E<c_t, g_{t+1}> / E<g_t, g_{t+1}>. Both are inner products with a second gradient, whose noise
is independent. g is the gradient on the shadow ladder's sample. c is what *plain* error feedback
would send there, whatever memory is in use (momentum overshoots). shadow.py computes these
products. Each rank multiplies its own c_t and g_{t+1}, and the ranks sum the products. If the
ranks' data are alike, the expected sum is the number of ranks times the expected product of the
ranks' means. If not, differences between ranks count as signal, too.

The second gradient may also be another rank's in the same step: E<c_t of rank i, g_t of rank j>.
Unlike g_{t+1} it was not computed after a step along the noise of g_t. This file computes these
products from sketches, because a rank does not have the other ranks' gradients. A sketch is a
gradient's elements times random signs, added up in WIDTH places. The ranks sum their sketches with
their statistics. The signs are the same on every rank, and others in the next step. Products of
sketches are unbiased. Their standard deviation is about 1 / sqrt(WIDTH) of the product of the norms
(Charikar, Chen and Farach-Colton, 2002). This is less than the noise of a step's product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from adaptive.model.parameters import ModelParameter
from adaptive.statistics.vector import Tally
from compressors.kernels import kernels_for
from compressors.kernels.blocks import Array, on_host

BELOW = 0.8
"""The host looks first above this share of the last step's smallest kept magnitude: few elements
are there, and nearly always enough."""

WIDTH = 256
"""Numbers in a sketch: 2 kB in the all-reduce of the statistics."""


class Sections:
    """The division of the columns of a matrix of samples into sections.

    sizes: columns of each section. wanted: for each section, how many elements each CF keeps of it.
    weights: for each section, how many gradient elements a sampled one stands for.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        wanted: Sequence[Sequence[int]],
        weights: Sequence[float],
        device: torch.device,
    ) -> None:
        self.sizes, self.wanted = sizes, wanted
        self.one = len(sizes) == 1

        def there(numbers: Array) -> Tensor:
            return torch.from_numpy(numbers).to(device, non_blocking=True)

        self.weights = there(np.array(weights, np.float64))
        self.longest = max(sizes)
        self.ends = there(np.cumsum([0, *sizes]))
        kept = np.array(wanted).T  # (CFs, sections)
        self.kept = there(kept.astype(np.int32, order="C"))
        # Where the smallest kept magnitude is: in one section among a row's descending magnitudes,
        # in several among those that ascend section by section.
        self.kth = there(kept - 1 if self.one else np.cumsum(sizes) - kept)
        if not self.one:
            self._of_column = there(np.repeat(np.arange(len(sizes)), sizes))
            self._row_ends = there(np.cumsum([0, *(len(kept) * [*sizes])]))
            self.keys = self._of_column << 32  # above the bits of any magnitude
        self.column_weights = self.spread(self.weights)
        self.column_roots = self.column_weights.sqrt().float()

    def spread(self, numbers: Tensor) -> Tensor:
        """(..., sections) to (..., columns); of one section (..., 1), which broadcasts."""
        return numbers if self.one else numbers.index_select(-1, self._of_column)

    def sums(self, rows: Tensor) -> Tensor:
        """(rows, columns) added up within each section: (rows, sections)."""
        flat = rows.view(-1)  # one dimension, for which CUDA has a fast kernel
        return torch.segment_reduce(
            flat, "sum", offsets=self._row_ends, unsafe=True, initial=0
        ).view(len(rows), -1)


def sampled(grads: Sequence[Tensor], strides: Sequence[int]) -> Tensor:
    """Every stride-th element of each gradient (flat), one sample after the other: perhaps a view
    of a gradient."""
    samples = [grad.detach()[::stride] for grad, stride in zip(grads, strides, strict=True)]
    return samples[0] if len(samples) == 1 else torch.cat(samples)


def largest(a: Tensor, sections: Sections, above: Array) -> Tensor:
    """A mask of the elements of largest magnitude in each row and section: as many as are wanted,
    and all that equal the smallest of them.

    above: (sections, rows), magnitudes above which the host looks first, updated for the next step.
    They save time and change no result.
    """
    if on_host(a):
        pieces = np.split(a.numpy(), np.cumsum(sections.sizes)[:-1], axis=1)
        masks = map(_partitioned, pieces, sections.wanted, above)
        return torch.from_numpy(np.concatenate([*masks], axis=1))
    magnitude = a.abs().float()
    if sections.one:
        most = max(sections.wanted[0])
        smallest = magnitude.topk(most, dim=1).values.gather(1, sections.kth)
        return magnitude >= smallest
    # The bits of nonnegative floats, read as integers, have the order of the floats.
    ascending = (magnitude.view(torch.int32) + sections.keys).sort(dim=1).values
    smallest = ascending.gather(1, sections.kth).view(torch.int32)[:, ::2]  # without the keys
    return magnitude >= sections.spread(smallest.view(torch.float32))


def split_at_once(a: Tensor, sections: Sections) -> tuple[Tensor, Tensor] | None:
    """`largest`, and the energies of all elements but these and of all elements, (2, rows,
    sections), in one launch of a Triton kernel; None without Triton or for long sections."""
    fused = kernels_for(a).fused(a)
    if fused is None or sections.longest > fused.LONGEST:
        return None
    split: tuple[Tensor, Tensor] = fused.split_largest(a, sections.ends, sections.kept)
    return split


def _partitioned(a: Array, wanted: Sequence[int], above: Array) -> Array:
    """`largest` in one section."""
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


def energies(rows: Tensor, sections: Sections) -> Tensor:
    """Squared norm of each row's sections, in double: (rows, sections)."""
    if sections.one:
        return torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64).square_()
    return sections.sums(rows.to(torch.float64, copy=True).square_())


def products(rows: Tensor, x: Tensor, sections: Sections) -> Tensor:
    """Inner product of each row with `x`, each section times its weight: (rows,), in double."""
    return rows.double() @ (x * sections.column_weights)


def sketched(rows: Tensor, signs: Tensor, shift: int, sections: Sections) -> Tensor:
    """The sketches of rows: elements times signs and the root of their weight, those WIDTH apart
    added up, rotated by `shift`; (rows, WIDTH)."""
    signed = rows * (signs * sections.column_roots)
    padded = torch.nn.functional.pad(signed, (0, -signed.shape[-1] % WIDTH))
    return padded.unflatten(-1, (-1, WIDTH)).sum(-2).roll(shift, -1)


SHIFTS = 1009
"""Number of sets of signs; a prime. Set i is one row of random signs, from its i-th sign on."""

STRIDE = 389
"""Places between the sets of two consecutive steps; a prime."""


class Peers:
    """Inner products of what each CF keeps of this rank's gradient with the other ranks' gradients.

    The sketches of a step are (1 + CFs, WIDTH). The first row is the sketch of the gradient. The
    other rows are the sketches of what each CF keeps of it."""

    def __init__(self, cfs: int) -> None:
        self._signs: dict[ModelParameter, Tensor] = {}
        self._sketches = torch.zeros(1 + cfs, WIDTH, dtype=torch.float64)  # of the running step
        # For the next tally: ||g||^2, then <g, the other ranks' g>, then <c, the other ranks' g>.
        self._found = torch.zeros(2 + cfs, dtype=torch.float64)

    def add(self, parameter: ModelParameter, step: int, rows: Tensor, sections: Sections) -> None:
        """Add the sketches of a group of parameters.

        parameter: the group's first. rows: the group's sample of the gradient, and what each CF
        keeps of it, (1 + CFs, elements)."""
        numel = rows.shape[1] + SHIFTS
        signs = self._signs.get(parameter)
        if signs is None or signs.numel() != numel or signs.device != rows.device:
            draw = np.random.default_rng(crc32(f"{parameter.name}{parameter.shard}".encode()))
            drawn = torch.from_numpy(draw.integers(0, 2, numel, dtype=np.int8) * 2 - 1)
            signs = self._signs[parameter] = drawn.to(rows.device, non_blocking=True)
        shift = step * STRIDE % SHIFTS
        now = signs[shift : shift + rows.shape[1]]
        self._sketches = self._sketches.to(rows.device, non_blocking=True)
        self._sketches.add_(sketched(rows, now, shift, sections))

    def end_step(self, tally: Tally) -> Tensor:
        """Copy the gradient's sketch to the tally. Returns all sketches, for `receive`."""
        sketches, self._sketches = self._sketches, torch.zeros_like(self._sketches)
        tally.at("sketch").copy_(sketches[0])
        return sketches

    def receive(self, own: Tensor, total: Tensor) -> None:
        """Compute the products of a step. own: the result of the step's `end_step`,
        (1 + CFs, WIDTH). total: the sum of the ranks' sketches of the gradient, (WIDTH,)."""
        self._found = torch.cat([own[:1] @ own[0], own @ (total - own[0])])

    def begin_step(self, tally: Tally) -> None:
        """Move the products of the latest `receive` to the tally."""
        found = self._found.to(
            tally.vector.device, non_blocking=True
        )  # a loaded state may be on another
        if tally.drift:
            tally.at("peers_energy").add_(found[:1])
        tally.at("peers_total").add_(found[1:2])
        tally.at("peers").add_(found[2:])
        self._found = torch.zeros_like(found)
        self._sketches.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """The products for the next tally. Between two steps there is no other state."""
        return {"found": self._found.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._found = state["found"].clone()
        self._sketches = torch.zeros_like(self._sketches)
