"""The contract of the kernels, and their reference: torch operations for every device and dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from compressors.kernels.blocks import (
    Array,
    Flag,
    Numbers,
    Scalar,
    Selected,
    ThresholdSearch,
    fill_up,
)
from compressors.kernels.segments import positions_by_sorting, segments_of

Found = TypeVar("Found")

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_TO_TOP_BYTE = 0x0102040810204080  # the product with it has bit 8 i of an int64 as bit 56 + i


class Kernels:
    """The loops over the elements of a tensor. This class works on any device; `Host` and `Triton`
    override methods that they do faster, and `kernels_for` picks one of the three.

    No method here reads a value, and the number of operations does not depend on the number of
    elements. So results always have the requested number of places (see `Selected`). Among equal
    magnitudes any element may be chosen. NaN counts as larger than every threshold, so that it is
    not hidden.

    All tensors are flat. `add`, if it is not None, has the dtype and length of `x`, and is first
    added to `x` in place. Counts satisfy 1 <= k <= numel < 2**31, or k = 0 if numel is 0.

    may_read: values of tensors may be read, because no device has to finish first. Then invalid
        bytes raise an error at once, and results have no empty places.
    xp: the module of the functions for native numbers.
    """

    may_read = False
    xp: ModuleType = torch

    def fused(self, *tensors: Tensor | None) -> Any:
        """The kernels that write and read whole payloads in a few launches
        (`compressors.kernels.triton.fused`), if they know all these tensors; else None."""
        return None

    # Numbers of a few elements

    def numbers(self, x: Tensor) -> tuple[Scalar, ...]:
        """The elements of a short tensor."""
        return x.unbind()

    def flag(self, x: Tensor) -> Flag:
        """A truth value (0-dim, bool) as a `Flag`."""
        return x

    def look(self, at: Callable[[], Found], otherwise: Found) -> Found:
        """The result of `at`, which reads values of a tensor; `otherwise` if the host would have to
        wait for a device."""
        return otherwise

    def scalar(self, number: Any) -> Scalar:
        """A native number as a `Scalar`."""
        return number

    def any_nan(self, x: Tensor) -> Flag:
        """Whether an element is NaN."""
        return self.flag(x.isnan().any())

    # Native numbers: a tensor, or on the host a NumPy array of its memory, with which operations on
    # a few elements start five times as fast

    def native(self, x: Tensor) -> Numbers:
        """`x` as native numbers, for arithmetic on whole numbers."""
        return x.detach()

    def wide(self, numbers: Numbers) -> Numbers:
        """The numbers as int32."""
        return numbers.int()

    def ranks(self, numbers: Numbers, below: int) -> Numbers:
        """0, 1, ..., one for each of the numbers. below: all results of arithmetic with them are
        smaller."""
        return torch.arange(numbers.numel(), device=numbers.device)

    def fold(self, digits: Numbers, base: int, runs: int, out: Numbers) -> None:
        """out (..., length; uint8) = sum over i of base**i * the i-th run of `length` digits (...,
        at most runs * length), after which there are zeros."""
        digits = fill_up(digits.to(torch.uint8), runs * out.shape[-1]).unflatten(-1, (runs, -1))
        if runs > 1:
            digits = digits * _powers(base, runs, digits.device)
        torch.sum(digits, -2, dtype=torch.uint8, out=out)

    def unfold(self, folded: Numbers, base: int, runs: int, use: str) -> Numbers:
        """The digits (..., runs * length; uint8) in `folded`: the inverse of `fold`. On the host
        they are valid until the next call for the same `use`."""
        if runs == 1:
            return folded
        return (folded.unsqueeze(-2) // _powers(base, runs, folded.device) % base).flatten(-2)

    def received(
        self, indices: Numbers, numel: int, exact: bool, invalid: Flag
    ) -> tuple[Tensor, Flag]:
        """Decoded indices (int32), and whether they are invalid. exact: no place is empty. The host
        raises InvalidPayload for invalid indices, and removes empty places."""
        return indices.clip(max=numel - exact).int(), invalid

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which many numbers of `dtype` are added up in a fixed order."""
        return dtype

    def fill_random16(self, out: Tensor, digest: bytes) -> None:
        """Fill `out` with whole numbers, uniform from 0 to 65535: a function of the digest (24
        bytes)."""
        out.random_(0, 1 << 16, generator=seeded(out.device, digest))

    # Norms

    def orthonormal_rows(self, rows: Tensor) -> Tensor:
        """Orthonormal rows (r, n) whose first j span what the first j of `rows` span, for every j,
        by Householder reflections. r <= n. NaN only if `rows` is not finite."""
        return by_householder(rows.double(), rows.dtype)

    def squared_norm(self, x: Tensor) -> Scalar:
        """||x||^2."""
        return torch.linalg.vector_norm(x.detach(), dtype=torch.float64).square()

    def add_and_norm(self, memory: Tensor, tensor: Tensor) -> Scalar:
        """memory += tensor in place; ||memory||^2."""
        memory = memory.detach().add_(tensor)
        return self.squared_norm(memory)

    # Pieces: consecutive runs of elements, with lengths `counts`, that make up the whole tensor

    def sum_pieces(self, x: Tensor, counts: Array) -> Tensor:
        """The sum of each piece (float64)."""
        if len(counts) == 1:
            return x.sum(dtype=torch.float64).view(1)
        last = torch.from_numpy(counts.cumsum() - 1).to(x.device, non_blocking=True)
        sums = x.cumsum(0, dtype=torch.float64).index_select(0, last)
        return torch.diff(sums, prepend=sums.new_zeros(1))

    def max_pieces(self, x: Tensor, counts: Array) -> Tensor:
        """The largest element of each piece (float64); all are 0 or more."""
        if len(counts) == 1:
            return x.amax(0, keepdim=True).double()
        of = self.spread(torch.arange(len(counts), device=x.device), counts)
        return x.new_zeros(len(counts)).scatter_reduce_(0, of, x, "amax").double()

    def spread(self, numbers: Tensor, counts: Array) -> Tensor:
        """For each element the number of its piece; one number for all if there is one piece."""
        if len(counts) == 1:
            return numbers
        # `repeat_interleave` has a single warp write a whole piece: 6 ms for 38 million elements.
        ends = torch.from_numpy(counts.cumsum()).to(numbers.device, non_blocking=True)
        at = torch.arange(int(counts.sum()), device=numbers.device)
        return numbers.index_select(0, torch.bucketize(at, ends, out_int32=True, right=True))

    # Selection

    def largest(self, x: Tensor, k: int) -> Tensor:
        """Ascending positions (int32) of the `k` elements of largest magnitude."""
        return x.detach().abs().topk(k, sorted=False).indices.sort().values.to(torch.int32)

    def kth_largest(self, x: Tensor, k: int) -> Scalar:
        """The k-th largest element of `x`; NaN counts as the largest."""
        return x.topk(k).values[-1]

    def select(self, x: Tensor, k: int, add: Tensor | None) -> Selected:
        """The `k` elements of largest magnitude."""
        total = self._added(x, add)
        indices = self.largest(x, k)
        return Selected(indices, x.index_select(0, indices), total)

    def select_rows(self, x: Tensor, rows: int, k: int, add: Tensor | None) -> Selected | None:
        """`select` in each of `rows` consecutive tensors of equal length in x. Positions count from
        the start of their tensor; total: of all. None, and nothing is done, if it is impossible to
        select in all at once."""
        return None

    def select_segments(
        self, x: Tensor, lengths: tuple[int, ...], counts: tuple[int, ...], add: Tensor | None
    ) -> Selected:
        """`select` of counts[i] elements in segment i of x, whose length is lengths[i]. Positions
        count from the start of x. The number of operations does not grow with that of segments."""
        total, segments = self._added(x, add), segments_of(lengths, counts)
        numbers = torch.arange(len(lengths), device=x.device)
        of = self.spread(numbers, segments.lengths).expand(x.numel())
        # Sorted, the selected elements of a segment are its first ones.
        ahead = torch.from_numpy(segments.starts - segments.firsts)
        ahead = self.spread(ahead.to(x.device, non_blocking=True), segments.counts)
        ranks = torch.arange(int(segments.counts.sum()), device=x.device) + ahead
        indices = positions_by_sorting(x.abs(), of, ranks)
        return Selected(indices, x.index_select(0, indices), total)

    def select_above(self, x: Tensor, threshold: Scalar, k: int, add: Tensor | None) -> Selected:
        """The elements whose magnitude reaches `threshold` (rounded to the dtype of `x`).

        If there are more than `k` of them, the `k` largest; if there are none, the largest of all
        elements."""
        total, magnitude = self._added(x, add), x.abs()
        return self._largest_except(x, magnitude, magnitude < threshold, k, total)

    def select_by_count(
        self, x: Tensor, k: int, add: Tensor | None, search: ThresholdSearch
    ) -> Selected:
        """As `select_above`, with the threshold that `search` finds by counting; k < numel.

        The search counts among the k + 1 largest elements or somewhat more, where counts up to k
        are the same as in the whole tensor."""
        total, magnitude = self._added(x, add), x.abs()
        most = magnitude.topk(min(k + 1, x.numel())).values
        threshold = search.at_once(most, magnitude.mean(dtype=torch.float64), k)
        return self._largest_except(x, magnitude, magnitude < threshold, k, total)

    def select_bins(self, x: Tensor, bin_size: int, k: int, add: Tensor | None) -> Selected:
        """The elements x_i != 0 with |x_i + latest_i| at or above the maximum of |x| over their bin
        of `bin_size` neighbours (1 to CACHE_BLOCK); latest is `add`, or `x` if that is None.

        If there are more than `k` of them, the `k` largest; if there are none, the largest of
        all."""
        latest = x if add is None else add
        total = self._added(x, add)
        numel, bins = x.numel(), ceil(x.numel() / bin_size)
        magnitude = x.abs()
        padded = magnitude.new_zeros(bins, bin_size)
        padded.view(-1)[:numel] = magnitude
        peaks = padded.amax(1, keepdim=True).expand(-1, bin_size).reshape(-1)[:numel]
        return self._largest_except(x, magnitude, ((x + latest).abs() < peaks) | (x == 0), k, total)

    def _added(self, x: Tensor, add: Tensor | None) -> Scalar:
        """x += add, in place; ||x||^2."""
        return self.squared_norm(x) if add is None else self.add_and_norm(x, add)

    def _largest_except(
        self, x: Tensor, magnitude: Tensor, excepted: Tensor, k: int, total: Scalar
    ) -> Selected:
        """The `k` largest elements that are not `excepted`; if all are, the largest one.

        The bits of nonnegative numbers, read as integers, have the order of the numbers. With the
        sign bit set they are negative integers, still in this order."""
        bits = magnitude.view(_INTEGERS[x.element_size()])
        sign = torch.iinfo(bits.dtype).min
        best = bits.add(excepted, alpha=sign).topk(k)
        empty = best.values < 0
        empty[:1].fill_(False)
        indices = best.indices.masked_fill(empty, x.numel()).sort().values.to(torch.int32)
        return Selected(indices, self.take_present(x, indices), total)

    def heaviest(self, estimates: Callable[[int, int], Tensor], k: int, numel: int) -> Tensor:
        """Positions (int32) of the `k` largest of `numel` estimates, in descending order of the
        estimates; among equal ones the lower position. estimates: (start, stop) -> the estimates
        between; all are finite and >= 0."""
        return estimates(0, numel).sort(descending=True, stable=True).indices[:k].int()

    # Lists of ascending indices. On a device empty places come last, with index `numel`

    def take_present(self, x: Tensor, indices: Tensor) -> Tensor:
        """The elements of `x` at `indices`, and 0 for every index beyond the last element."""
        values = x.index_select(0, indices.clamp(max=x.numel() - 1))
        return values.masked_fill_(indices >= x.numel(), 0)

    def in_bounds(self, indices: Tensor, numel: int) -> Tensor:
        """The indices, with some index within [0, numel) in the empty places."""
        return indices.clamp(max=numel - 1)

    def without_empty(self, values: Tensor, indices: Tensor, numel: int) -> Tensor:
        """The values, one for each place of `indices`, with 0 for an empty place."""
        return values.masked_fill(indices >= numel, 0)

    def filled(self, indices: Tensor, numel: int) -> Tensor | None:
        """Which places are not empty; None: no place is empty."""
        return indices < numel

    def union(self, indices: Tensor, least: int, numel: int) -> Tensor:
        """The distinct indices among `indices` (given in any order), ascending. On a device there
        are empty places for repeated indices, and at least `least` places in all."""
        indices = indices.sort().values
        again = torch.zeros_like(indices, dtype=torch.bool)
        again[1:] = indices[1:] == indices[:-1]
        indices = indices.masked_fill(again, numel).sort().values
        missing = max(0, least - indices.numel())
        return torch.cat([indices, indices.new_full((missing,), numel)])

    def progression(
        self, k: int, start: int, stride: int, numel: int, device: torch.device
    ) -> Tensor:
        """(start + i * stride) mod numel for i = 0 to k - 1; k >= 1, stride * k below 2**63."""
        return torch.arange(k, device=device).mul_(stride).add_(start).remainder_(numel)

    def slots(self, positions: Tensor, factor: int, offset: int, columns: int) -> Tensor:
        """The upper half of (factor * position + offset) mod 2^64, scaled to range(2 * columns),
        for each of the positions (int64). Signed integers wrap around as unsigned ones do."""
        hashed = torch.rsub(positions, offset, alpha=-factor)
        upper = hashed.bitwise_right_shift_(32).bitwise_and_(2**32 - 1)
        return upper.mul_(columns).bitwise_right_shift_(31)  # no product reaches 2^63

    # Single bits

    def set_bits(self, positions: Tensor, present: Tensor | None, out: Tensor) -> None:
        """Fill `out` (uint8) with a bit map that has the bits at `positions` set.

        positions: ascending. present: which of them count; None for all."""
        bits = torch.zeros(8 * out.numel() + 8, dtype=torch.bool, device=out.device)
        at = positions.long()
        if present is None:
            bits.index_fill_(0, at, True)
        else:
            bits.index_copy_(0, at, present)
        out.copy_(self.pack_bits(bits)[:-1])

    def find_bits(self, data: Tensor, count: int) -> Tensor:
        """Ascending positions of the first `count` bits that are set in `data` (uint8). Empty
        places hold 8 * len(data)."""
        rank = torch.arange(count, dtype=torch.int32, device=data.device)
        found = _bits(data).cumsum(0, dtype=torch.int32)
        return torch.searchsorted(found, rank, right=True, out_int32=8 * data.numel() < 2**31)

    def not_negative(self, x: Tensor) -> Tensor:
        """Which elements are 0 or more (bool), in working memory."""
        return x >= 0

    def pack_bits(self, bits: Tensor) -> Tensor:
        """Flat `bits` (uint8, 0 or 1, or bool), eight to a byte, the first one lowest."""
        missing = -bits.numel() % 8
        whole = torch.constant_pad_nd(bits, (0, missing)) if missing else bits
        return (whole.view(torch.int64) * _TO_TOP_BYTE).view(torch.uint8)[7::8]

    def unpack_bits(self, packed: Tensor, out: Tensor) -> None:
        """Fill flat `out` (floating point) with the bits, as 1 and 0."""
        out.copy_(_bits(packed)[: out.numel()])


def by_householder(rows: Tensor, dtype: torch.dtype) -> Tensor:
    if rows.dtype == dtype:  # without a wider dtype, squares could overflow or vanish
        largest = rows.abs().amax(1, keepdim=True)
        rows = rows / torch.where(largest > 0, largest, 1.0)
    columns = torch.linalg.qr(rows.t()).Q
    return columns.t().to(dtype, memory_format=torch.contiguous_format)


def seeded(device: torch.device, digest: bytes) -> torch.Generator | None:
    """A generator on a device, seeded by a digest; None for meta tensors."""
    if device.type == "meta":
        return None
    bits = int.from_bytes(digest[:8], "little", signed=True)
    return torch.Generator(device).manual_seed(bits)


@cache
def _powers(base: int, runs: int, device: torch.device) -> Tensor:
    """The factors of a byte's digits: (runs, 1), uint8."""
    powers = [[base**i] for i in range(runs)]
    on_host = torch.tensor(powers, dtype=torch.uint8, device="cpu")
    return on_host.to(device, non_blocking=True)


def _bits(packed: Tensor) -> Tensor:
    """The bits of each byte, as uint8."""
    return ((packed[:, None] >> _shifts(packed.device)) & 1).view(-1)


@cache
def _shifts(device: torch.device) -> Tensor:
    """0 to 7."""
    return torch.arange(8, dtype=torch.uint8, device=device)
