"""The wire formats of values: full precision, half precision, or levels with a shared scale.

A `ValueFormat` turns the values that a sparsifier keeps (`TopK(values="bf16")`), or all values of a
tensor (`compressors.quantizers`), into the parts of a payload. A `BlockFormat` does so block by
block on the host, where a block stays in the cache. On a device the whole tensor is one block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from math import floor, inf, log2
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compressors.base import Key, Payload, RowsPayload, Spec
from compressors.kernels import kernels_for, squared_norms
from compressors.kernels.blocks import (
    CACHE_BLOCK,
    CODE_BLOCK,
    Array,
    Coding,
    Encoded,
    Flag,
    Scalar,
    block_bounds,
    fill_up,
    numbers_of_rows,
    rows,
    scratch,
    scratch_like,
    uninitialized,
    widened,
)
from compressors.kernels.blocks import energies as sum_of
from compressors.kernels.reference import seeded
from compressors.wire.packing import codes_nbytes, pack_codes, unpack_codes

STEP = 2.0**-16
"""The factor that brings the numbers of `fill_random16`, plus a half, into (0, 1). Without the half
tiny negative values would be rounded to -1 now and then, and tiny positive ones never to 1."""

WIDER = 1 + 2.0**-20
"""Scales are larger by this factor: rounding errors must not put a value past the last level."""

_BUCKETS = [8 << i for i in range(CODE_BLOCK.bit_length() - 3)]

_FUSED_BUCKET = 4096  # elements of the largest bucket that a program of a Triton kernel holds

Layout = tuple[tuple[int, torch.dtype], ...]
"""(elements, dtype) of each part of a payload."""

Parts = tuple[Tensor, ...]
"""The parts of a payload: flat contiguous tensors."""


class ValueFormat(ABC):
    """A value format writes the values of a flat tensor as the parts of a payload.

    Any bytes can be decoded. At least one part holds floating-point numbers: if these are all NaN,
    all values decode to NaN, and if all are 0, to 0.

    name: the registered name, or that of the compressor.
    lossless: decoded values are exactly the encoded ones.
    coding: how Triton's kernels decode the format; None if they cannot. fuses: they also encode it.
    """

    name: str = ""
    lossless: bool = False
    coding: Coding | None = None
    fuses: bool = False

    @abstractmethod
    def layout(self, count: int, dtype: torch.dtype, segments: tuple[int, ...] = ()) -> Layout:
        """The layout for `count` values of a tensor of `dtype` and these segments, or one."""

    @abstractmethod
    def encode(self, values: Tensor, key: Key) -> tuple[Parts, Tensor]:
        """(parts, decoded values). The parts are contiguous, with the sizes of `layout`. `values`
        (flat) do not change."""

    @abstractmethod
    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> Tensor:
        """The decoded values: the same bit by bit on every rank and device."""

    def fused(
        self, x: Tensor, add: Tensor | None, key: Key, decode: bool = True, rows: int = 1
    ) -> Encoded | None:
        """x += add in place (if given), then `encode` x (flat) by Triton's kernels, with squared
        norms; decoded values only if `decode`. None, and nothing is done, if they cannot. rows:
        number of tensors of equal length in x, each coded separately; each part holds those of the
        tensors in turn."""
        return None

    def size(self, count: int, dtype: torch.dtype) -> int:
        """Bytes of all the parts together."""
        return sum(elements * part.itemsize for elements, part in self.layout(count, dtype))


class Pieces:
    """Pieces are runs of elements of a flat tensor, each with its own scale.

    lengths: of the pieces, at least 1 (int64). width: the longest piece that a segment is cut into;
        None: pieces are the segments."""

    def __init__(self, segments: Sequence[int], width: int | None = None) -> None:
        whole = np.asarray(segments, np.int64)
        if width is not None:
            counts = -(-whole // width)
            lengths = np.full(counts.sum(), width, np.int64)
            lengths[counts.cumsum() - 1] = whole - (counts - 1) * width
            whole = lengths
        self.lengths, self._ends = whole, whole.cumsum()

    def __len__(self) -> int:
        return len(self.lengths)

    def within(self, start: int, stop: int) -> Cut:
        """The pieces of elements [start, stop)."""
        first, last = np.searchsorted(self._ends, (start, stop - 1), side="right")
        if first == last:
            return Cut(slice(first, first + 1), np.array([stop - start]))
        ends = np.minimum(self._ends[first : last + 1], stop)
        return Cut(slice(first, last + 1), np.diff(ends, prepend=start))


class Cut(NamedTuple):
    """The pieces of a block.

    which: slice of the pieces. counts: for each piece, its number of elements in the block. rows:
    number of tensors of equal length in the block, whose codes are packed separately."""

    which: slice
    counts: Array
    rows: int = 1


NO_CUT = Cut(slice(0), np.empty(0, np.int64))
"""The cut for a format without `shared` parts."""


@lru_cache(maxsize=256)
def pieces(segments: tuple[int, ...], width: int | None = None) -> Pieces:
    """`Pieces`, made once."""
    return Pieces(segments, width)


class BlockFormat(ValueFormat):
    """A block format is a value format that codes block by block (on a device: all at once).

    shared: number of leading parts that hold a number for each of `pieces_of`. They are known only
        after a first pass over all blocks (`look_at`). The other parts are cut into blocks.
    """

    shared: int = 0
    codes_rows: bool = False
    """The format codes tensors of equal length at once (`Cut.rows`) by torch's operations."""
    block: int = CODE_BLOCK
    """Elements of a block on the host: a multiple of CODE_BLOCK, unless each element has whole
    bytes, and nothing is random."""

    def pieces_of(self, segments: tuple[int, ...]) -> Pieces | None:
        """The pieces that have numbers in the `shared` parts."""
        return None

    @abstractmethod
    def block_layout(self, count: int, dtype: torch.dtype) -> Layout:
        """The layout of the parts after the `shared` ones, which grows evenly with every CODE_BLOCK
        elements."""

    def layout(self, count: int, dtype: torch.dtype, segments: tuple[int, ...] = ()) -> Layout:
        of = self.pieces_of(segments or (count,)) if count else None
        numbers = ((len(of) if of else 0, widened(dtype)),) * self.shared
        return (*numbers, *self.block_layout(count, dtype))

    def look_at(self, x: Tensor, cut: Cut, sums: Tensor) -> None:
        """Add a block's part of the scales of its pieces to `sums` (3, pieces; float64)."""

    def share(self, sums: Tensor, lengths: Tensor, shared: Parts) -> None:
        """Fill the `shared` parts, from `sums` over all blocks and the lengths of the pieces."""

    @abstractmethod
    def code(self, x: Tensor, start: int, key: Key, parts: Parts, cut: Cut) -> Tensor:
        """Code the block `x` (not empty, float32 or float64), from `start` on, into its slices of
        the parts. Returns the decoded values, in working memory."""

    @abstractmethod
    def decode_block(self, parts: Parts, out: Tensor, cut: Cut) -> None:
        """Decode a block into `out` (float32 or float64) from its slices of the parts."""

    def encode(self, values: Tensor, key: Key) -> tuple[Parts, Tensor]:
        decoded = uninitialized(values.numel(), values.dtype, values.device)
        parts, _ = encode_sum(self, values, None, Spec.of(values, key=key), decoded)
        return parts, decoded

    def _empty(self, x: Tensor, spec: Spec) -> Parts:
        """Uninitialized memory for the parts of `x`."""
        layout = self.layout(x.numel(), x.dtype, spec.segments)
        return tuple(uninitialized(size, dtype, x.device) for size, dtype in layout)

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> Tensor:
        out = uninitialized(count, widened(dtype), parts[0].device)
        for start, stop in block_bounds(out, self.block):
            self.decode_from(parts, (count,), start, out[start:stop], dtype)
        return out.to(dtype)

    def decode_from(
        self,
        parts: Parts,
        segments: tuple[int, ...],
        start: int,
        out: Tensor,
        dtype: torch.dtype,
        rows: int = 1,
    ) -> None:
        """Decode a block of elements, from `start` on, into `out`. rows: above 1, `out` is the
        whole, and consists of this many tensors of equal length, each coded separately."""
        if rows > 1:
            of = self.pieces_of(segments)
            cut = NO_CUT if of is None else of.within(0, out.numel())
            self.decode_block(parts, out, cut._replace(rows=rows))
        elif out.numel():
            slices, cut = self._slices(parts, segments, start, out.numel(), dtype)
            self.decode_block(slices, out, cut)

    def _slices(
        self,
        parts: Parts,
        segments: tuple[int, ...],
        start: int,
        count: int,
        dtype: torch.dtype,
    ) -> tuple[Parts, Cut]:
        """The slices of `parts` for `count` elements from `start` (a multiple of `block`) on."""
        sizes = zip(
            parts[self.shared :],
            self.block_layout(start, dtype),
            self.block_layout(count, dtype),
            strict=True,
        )
        own = [part[first : first + size] for part, (first, _), (size, _) in sizes]
        of = self.pieces_of(segments)
        if of is None:
            return tuple(own), NO_CUT
        cut = of.within(start, start + count)
        return (*(part[cut.which] for part in parts[: self.shared]), *own), cut


def encode_sum(
    form: BlockFormat, x: Tensor, add: Tensor | None, spec: Spec, decoded: Tensor | None = None
) -> tuple[Parts, Tensor | None]:
    """x += add in place (if given), then encode x. Returns (parts, `Payload.energies`); energies
    are None if `spec` does not ask for them, or with `decoded`, which then gets the decoded values.
    """
    x, add = x.detach(), None if add is None else add.detach()
    fused = None if decoded is not None else form.fused(x, add, spec.key, decode=False)
    if fused is not None:
        return fused.parts, fused.norms.sum(0)
    parts = form._empty(x, spec)
    norms: list[tuple[Scalar, ...]] = []
    norm = kernels_for(x).squared_norm
    with np.errstate(all="ignore"):
        of = form.pieces_of(spec.segments) if x.numel() else None
        if of is not None:
            sums = torch.zeros(3, len(of), dtype=torch.float64, device=x.device)
            for start, stop in block_bounds(x, form.block):
                block = x[start:stop] if add is None else x[start:stop].add_(add[start:stop])
                form.look_at(block.to(widened(x.dtype)), cut := of.within(start, stop), sums)
            lengths = torch.from_numpy(of.lengths).to(x.device, non_blocking=True)
            form.share(sums, lengths, parts[: form.shared])
            add = None
        for start, stop in block_bounds(x, form.block) if x.numel() else ():
            block = x[start:stop] if add is None else x[start:stop].add_(add[start:stop])
            block = block.to(widened(x.dtype))
            slices, cut = form._slices(parts, spec.segments, start, stop - start, x.dtype)
            sent = form.code(block, start, spec.key, slices, cut)
            if decoded is not None:
                decoded[start:stop] = sent
                continue
            if not spec.measured:
                continue
            kept = norm(sent)  # before it is overwritten
            norms.append((norm(block), kept, norm(torch.sub(block, sent, out=sent))))
    if decoded is not None or not spec.measured:
        return parts, None
    total, kept, lost = map(sum_scalars, zip(*norms, strict=True)) if norms else (0.0, 0.0, 0.0)
    return parts, sum_of(total, kept, lost, x)


def encode_rows(
    form: BlockFormat, x: Tensor, add: Tensor | None, spec: Spec, rows: int
) -> tuple[Parts, Tensor] | None:
    """`encode_sum`, on a device, of `rows` consecutive tensors of equal length, each coded
    separately: each part holds those of the tensors in turn. None if this format cannot."""
    fused = form.fused(x, add, spec.key, False, rows)
    if fused is not None:
        return fused.parts, fused.norms.sum(0)
    if not form.codes_rows:
        return None
    if add is not None:
        x.add_(add)
    wide, of, parts = x.to(widened(x.dtype)), form.pieces_of(spec.segments), list[Tensor]()
    cut = NO_CUT
    if of is not None:
        cut = of.within(0, x.numel())
        sums = torch.zeros(3, len(of), dtype=torch.float64, device=x.device)
        form.look_at(wide, cut, sums)
        parts += (wide.new_empty(len(of)) for _ in range(form.shared))
        form.share(sums, torch.from_numpy(of.lengths).to(x.device, non_blocking=True), (*parts,))
    layout = form.block_layout(x.numel() // rows, x.dtype)
    parts += (uninitialized(rows * size, dtype, x.device) for size, dtype in layout)
    sent = form.code(wide, 0, spec.key, (*parts,), cut._replace(rows=rows))
    norms = squared_norms([wide, sent, wide - sent])
    return tuple(parts), norms


def decodes_rows(form: BlockFormat, like: Tensor) -> bool:
    """Whether the result of `encode_rows` can be decoded at once."""
    return form.codes_rows or (
        form.coding is not None and kernels_for(like).fused(like) is not None
    )


def decode_by_kernel(
    coding: Coding | None,
    out: Tensor,
    payloads: Sequence[Payload],
    scale: float,
    add: bool,
    as_zeros: Flag = False,
) -> bool:
    """Decode any number of payloads of one coding by one of Triton's kernels: out = scale * (their
    sum); add: `out` += instead of `out` =. False, and nothing is done, if there is no such kernel.
    """
    fused = kernels_for(out).fused(out)
    if coding is None or as_zeros is True or fused is None or not payloads:
        return False
    if any(payload.dtype != out.dtype for payload in payloads):
        return False
    first, rows = payloads[0], 1
    if isinstance(first, RowsPayload):
        rows = len(first.layouts)
        coded = fused.coded_rows(first.parts, out.numel() // rows, coding, rows)
    else:
        coded = fused.coded([payload.parts for payload in payloads], out.numel(), coding)
    fused.write_values(out, coded, scale, add, as_zeros, rows > 1)
    return True


def sum_scalars(numbers: Sequence[Scalar]) -> Scalar:
    """The sum of numbers; no operation on a device if there is only one."""
    first, *others = numbers
    return sum(others, first)


class Full(ValueFormat):
    """The lossless value format: sends the values in their own dtype, without a copy."""

    name = "fp32"
    lossless = True
    coding = Coding("floats")
    fuses = True

    def layout(self, count: int, dtype: torch.dtype, segments: tuple[int, ...] = ()) -> Layout:
        return ((count, dtype),)

    def encode(self, values: Tensor, key: Key) -> tuple[Parts, Tensor]:
        values = values.detach().contiguous()
        return (values,), values

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> Tensor:
        return parts[0]

    def fused(
        self, x: Tensor, add: Tensor | None, key: Key, decode: bool = True, rows: int = 1
    ) -> Encoded | None:
        fused = kernels_for(x).fused(x, add)
        return fused and fused.encode_floats(x, add, x.dtype, inf, decode)


class Half(BlockFormat):
    """The value format that rounds each value to the nearest number of 16 bits.

    headroom: number of values that can be summed without overflow: if there are several, values
        are clipped to the highest power of two up to the largest number / headroom. Sums of this
        power are exact, so that no sum is rounded up to infinity. The clipped part belongs to
        the compression error.
    parts: values (float16 or bfloat16).
    """

    coding = Coding("floats")
    codes_rows = fuses = True
    block = CACHE_BLOCK

    def __init__(self, name: str, half: torch.dtype, headroom: float = 1.0) -> None:
        self.name, self.half = name, half
        most = torch.finfo(half).max / headroom
        self.limit = most if headroom == 1 else 2.0 ** floor(log2(most))

    def block_layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((count, self.half),)

    def code(self, x: Tensor, start: int, key: Key, parts: Parts, cut: Cut) -> Tensor:
        (values,) = parts
        work = torch.clamp(x, -self.limit, self.limit, out=scratch_like("work", x))
        values.copy_(work)
        return work.copy_(values)

    def decode_block(self, parts: Parts, out: Tensor, cut: Cut) -> None:
        out.copy_(parts[0])

    def fused(
        self, x: Tensor, add: Tensor | None, key: Key, decode: bool = True, rows: int = 1
    ) -> Encoded | None:
        fused = kernels_for(x).fused(x, add)
        return fused and fused.encode_floats(x, add, self.half, self.limit, decode)


class Levels(BlockFormat):
    """The value format that decodes x to scale * q, with a scale for each bucket of values.

    q is a whole number from -levels to levels, levels = 2**(bits - 1) - 1.

    bits: 2 to 8 for each value.
    bucket: number of values that share a scale, a power of two.
    norm: "max": scale = max|x| / levels over the bucket; "l2": scale = ||x|| / levels.
    seed: x / scale is rounded up or down at random so that E[scale * q] = x; None: it is rounded to
        the nearest.

    A scale is never below the smallest normal number, so that a bucket of zeros is no special case.

    parts: scales (float64 for float64, else float32), codes (uint8): q in 8 bits of two's
    complement, or q + levels packed.
    """

    def __init__(
        self, name: str, bits: int, bucket: int, norm: str = "max", seed: int | None = None
    ) -> None:
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
            raise ValueError(f"bits must be a whole number from 2 to 8, got {bits!r}")
        check_bucket(bucket)
        if norm not in ("max", "l2"):
            raise ValueError(f"norm must be one of max, l2; got {norm!r}")
        self.name, self.bits, self.bucket, self.norm, self.seed = name, bits, bucket, norm, seed
        self.levels = 2 ** (bits - 1) - 1
        if bits == 8 and seed is None:
            self.block = max(CACHE_BLOCK, bucket)
        self.coding = Coding("levels", bits, bucket)
        self.fuses = norm == "max" and bucket <= _FUSED_BUCKET
        self._steps = self.levels if seed is None else self.levels / WIDER  # in the largest value

    def block_layout(self, count: int, dtype: torch.dtype) -> Layout:
        size = codes_nbytes(count, 1 << self.bits)
        return ((-(-count // self.bucket), widened(dtype)), (size, torch.uint8))

    def code(self, x: Tensor, start: int, key: Key, parts: Parts, cut: Cut) -> Tensor:
        scales, packed = parts
        count, scale = x.numel(), scales.view(-1, 1)
        matrix = fill_up(x, len(scales) * self.bucket).view(-1, self.bucket)
        work = scratch("work", matrix.numel(), x.dtype, x.device)
        q, levels = work.view_as(matrix), work[:count]
        torch.abs(matrix, out=q)
        torch.amax(q, dim=1, keepdim=True, out=scale)
        if self.norm == "l2":  # of x / max|x|, which neither overflows nor vanishes
            torch.div(matrix, scale.clamp(min=torch.finfo(x.dtype).tiny), out=q)
            scale.mul_(q.square_().sum(dim=1, keepdim=True).sqrt_())
        scale.div_(self._steps).clamp_(min=torch.finfo(x.dtype).tiny)
        torch.div(matrix, scale, out=q)
        if self.seed is None:
            q.round_()
        else:
            round_at_random(levels, self.seed, key, start)
        pack_codes(levels, 1 << self.bits, self.levels, packed)
        q.mul_(scale)
        return levels

    def decode_block(self, parts: Parts, out: Tensor, cut: Cut) -> None:
        scales, packed = parts
        unpack_codes(packed, 1 << self.bits, self.levels, out)
        columns = numbers_of_rows(scales, out, self.bucket)
        for values, scale in zip(rows(out, self.bucket), columns, strict=True):
            values.mul_(scale)

    def fused(
        self, x: Tensor, add: Tensor | None, key: Key, decode: bool = True, rows: int = 1
    ) -> Encoded | None:
        fused = kernels_for(x).fused(x, add)
        if not self.fuses or fused is None:
            return None
        random = None
        if self.seed is not None:
            random = torch.empty_like(x)
            fill_random16(random, self.seed, key, 0)
            random.add_(0.5).mul_(STEP)
        _, (nbytes, _) = self.layout(x.numel() // rows, x.dtype)
        return fused.encode_levels(
            x, add, self.bits, self.bucket, float(self._steps), nbytes, random, decode, rows
        )


def add_squares(x: Tensor, cut: Cut, sums: Tensor) -> None:
    """Add ||x||^2 of each piece to `sums`. On a device each piece is a norm of its own: a
    difference of two running sums (`Kernels.sum_pieces`) loses a small piece after a large one."""
    kernels = kernels_for(x)
    if kernels.may_read and len(cut.counts) > 1:
        sums[cut.which] += kernels.sum_pieces(x.double().square(), cut.counts)
    else:
        sums[cut.which] += squared_norms(x.split(cut.counts.tolist()))


def add_largest(x: Tensor, cut: Cut, largest: Tensor) -> None:
    """Raise `largest` to the largest magnitude of each piece."""
    magnitude = torch.abs(x, out=scratch_like("work", x))
    found = kernels_for(x).max_pieces(magnitude, cut.counts)
    torch.maximum(largest[cut.which], found, out=largest[cut.which])


class ScaledCodes(BlockFormat):
    """The base of value formats that decode x to scale * q, with a scale for each segment of the
    spec (a whole tensor).

    q is a whole number, and q + offset a code from 0 to codes - 1.
    parts: scales (one for each segment), packed codes.
    """

    shared = 1
    codes_rows = True
    codes: int
    offset: int = 1

    def pieces_of(self, segments: tuple[int, ...]) -> Pieces:
        return pieces(segments)

    def block_layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((codes_nbytes(count, self.codes), torch.uint8),)

    @abstractmethod
    def round(self, q: Tensor, start: int, key: Key) -> None:
        """Round a block of values in units of their scales to whole numbers, in place."""

    def code(self, x: Tensor, start: int, key: Key, parts: Parts, cut: Cut) -> Tensor:
        scale, packed = parts
        scale = kernels_for(x).spread(scale, cut.counts)
        q = torch.div(x, scale, out=scratch_like("work", x))
        self.round(q, start, key)
        pack_codes(q, self.codes, self.offset, packed, cut.rows)
        return q.mul_(scale)

    def decode_block(self, parts: Parts, out: Tensor, cut: Cut) -> None:
        scale, packed = parts
        unpack_codes(packed, self.codes, self.offset, out, cut.rows)
        out.mul_(kernels_for(out).spread(scale, cut.counts))


class TensorLevels(ScaledCodes):
    """The value format `Levels` with a scale for each segment of the spec (a whole tensor).

    bits, norm, seed: see `Levels`; always rounded at random. With "l2" the norm is at level
        2**(bits - 1), one level more than in `Levels`. The positive value of this level has no
        code, and becomes the level below. Only an element with nearly the norm of the whole tensor
        comes near it.
    """

    def __init__(self, name: str, bits: int, norm: str = "l2", seed: int = 0) -> None:
        of_buckets = Levels(name, bits, CODE_BLOCK, norm, seed)  # checks the arguments
        self.name, self.bits, self.norm, self.seed = name, bits, norm, seed
        self._largest = of_buckets.levels  # code
        self.levels = of_buckets.levels + (norm == "l2")
        self.codes, self.offset = 1 << bits, self.levels

    def look_at(self, x: Tensor, cut: Cut, sums: Tensor) -> None:
        look = add_squares if self.norm == "l2" else add_largest
        look(x, cut, sums[0])

    def share(self, sums: Tensor, lengths: Tensor, shared: Parts) -> None:
        (scale,) = shared
        norm = sums[0].sqrt() if self.norm == "l2" else sums[0]
        scale.copy_(norm.mul_(WIDER / self.levels)).clamp_(min=torch.finfo(scale.dtype).tiny)

    def round(self, q: Tensor, start: int, key: Key) -> None:
        round_at_random(q, self.seed, key, start)
        q.clamp_(max=self._largest)


def check_bucket(bucket: int) -> None:
    """ValueError unless `bucket` values can share a scale."""
    if isinstance(bucket, bool) or not isinstance(bucket, int) or bucket not in _BUCKETS:
        raise ValueError(f"bucket must be a power of two from 8 to {CODE_BLOCK}, got {bucket!r}")


def round_at_random(q: Tensor, seed: int, key: Key, start: int) -> None:
    """Round a block to whole numbers, up or down at random so that the mean error is zero (to
    2**-17, and as often above as below), in place."""
    noise = scratch_like("noise", q)
    fill_random16(noise, seed, key, start)
    q.add_(noise.add_(0.5), alpha=STEP).floor_()


def fill_random16(out: Tensor, seed: int, key: Key, start: int) -> None:
    """Fill a block with whole numbers, uniform from 0 to 65535: a function of `seed`, `key` and
    `start`."""
    kernels_for(out).fill_random16(out, _digest(seed, key, start))


def generator(device: torch.device, seed: int, key: Key) -> torch.Generator | None:
    """A generator on a device with the seeds of `fill_random16`; None for meta tensors."""
    return seeded(device, _digest(seed, key, 0))


def _digest(seed: int, key: Key, start: int) -> bytes:
    of = (seed, key.name, key.step, key.rank, start)
    return blake2b(repr(of).encode(), digest_size=24).digest()


_formats: dict[str, ValueFormat] = {
    form.name: form
    for form in (
        Full(),
        Half("fp16", torch.float16),
        Half("bf16", torch.bfloat16),
        Levels("int8", bits=8, bucket=256),
        Levels("int4", bits=4, bucket=64),
        Levels("qsgd", bits=4, bucket=512, seed=0),
    )
}


def value_names() -> tuple[str, ...]:
    """The registered names, in alphabetical order."""
    return tuple(sorted(_formats))


def make_values(values: str | ValueFormat) -> ValueFormat:
    """The format called `values`, or `values` itself if it already is one.

    ValueError for an unknown name, TypeError for anything else."""
    if isinstance(values, ValueFormat):
        return values
    if not isinstance(values, str):
        raise TypeError(f"values must be a name or a ValueFormat object, got {values!r}")
    if values not in _formats:
        raise ValueError(f"values must be one of {', '.join(value_names())}; got {values!r}")
    return _formats[values]
