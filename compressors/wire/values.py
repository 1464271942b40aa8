"""How values travel: in full, in half precision, or as levels with a shared scale.

A `ValueFormat` turns the values that a sparsifier keeps (`TopK(values="bf16")`), or all values of a
tensor (`compressors.quantizers`), into the parts of a payload. A `BlockFormat` does so on the host
for one block that fits the cache at a time, so that the tensor is read from memory once, and on a
device for the whole tensor, by few operations. The bytes on the wire are the same.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from hashlib import blake2b
from math import inf, isnan, nan

import numpy as np
import torch
from numpy.random import SFC64
from torch import Tensor

from compressors.base import Key, projection_error
from compressors.kernels import fuses, kernels_for, squared_norms
from compressors.kernels.blocks import (
    CODE_BLOCK,
    Coding,
    Encoded,
    block_bounds,
    energies,
    fill_up,
    fresh,
    numbers_of_rows,
    reduce_rows,
    rows,
    scratch_like,
    widened,
)
from compressors.kernels.host import block_norm, block_square, checked_norm
from compressors.wire.packing import codes_nbytes, pack_codes, unpack_codes

STEP = 2.0**-16
"""Times this, the numbers of `fill_random16` are in [0, 1)."""

WIDER = 1 + 2.0**-20
"""Scales are larger by this factor: rounding errors must not put a value past the last level."""

_BUCKETS = [8 << i for i in range(CODE_BLOCK.bit_length() - 3)]
_ODD = np.uint16(40503)  # 2**16 over the golden ratio
_WIDE = (torch.float32, torch.float64)
_USES = 4  # elements that a random word serves

_FUSED_BUCKET = 4096  # elements of the largest bucket that a program of a Triton kernel holds

_local = threading.local()

Layout = tuple[tuple[int, torch.dtype], ...]
"""(elements, dtype) of each part of a payload."""

Parts = tuple[Tensor, ...]
"""The parts of a payload: flat contiguous tensors."""


class ValueFormat(ABC):
    """A value format writes the values of a flat tensor as the parts of a payload.

    Any pattern of bytes decodes to something. At least one part holds floating-point numbers: if
    these are all NaN, all values decode to NaN, and if all are 0, to 0.

    name: the registered name, or that of the compressor.
    lossless: decodes to exactly what was encoded.
    coding: how Triton's kernels decode it; None if they do not know it.
    """

    name: str = ""
    lossless: bool = False
    coding: Coding | None = None

    @abstractmethod
    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        """The layout for `count` values of a tensor of `dtype`."""

    @abstractmethod
    def encode(self, values: Tensor, key: Key) -> tuple[Parts, Tensor]:
        """The parts, contiguous, as `layout` says, and what they decode to. `values` (flat) are
        left as they are."""

    @abstractmethod
    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> Tensor:
        """The values that `parts` stand for: bit by bit the same wherever it is called."""

    def fused(self, x: Tensor, add: Tensor | None, key: Key, decode: bool = True) -> Encoded | None:
        """x += add in place (if given), then `encode` x (flat) by Triton's kernels, with squared
        norms; what it decodes to only if `decode`. None where they cannot, and nothing is done."""
        return None

    def nbytes(self, count: int, dtype: torch.dtype) -> int:
        """Bytes of all the parts together."""
        return sum(elements * part.itemsize for elements, part in self.layout(count, dtype))


class Blocks:
    """This iterates over the blocks of `x` on the host (float32 or float64), and where they start.
    The first time round, `add` is added to each in place, and then `total` is ||x||^2."""

    def __init__(self, x: Tensor, add: Tensor | None) -> None:
        self.x = x.detach()
        self._add = None if add is None else add.detach()
        self.total = nan

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        total, add, self._add = 0.0, self._add, None
        for start, stop in block_bounds(self.x):
            x = self.x[start:stop]
            if add is not None:
                x.add_(add[start:stop])
            x = x.to(widened(x.dtype))
            if isnan(self.total):
                total += block_square(x.numpy())
            yield x, start
        if isnan(self.total):
            self.total = checked_norm(total, self.x.numpy()) if self.x.dtype in _WIDE else total


class BlockFormat(ValueFormat):
    """A block format is a value format that encodes block by block (on a device: all at once).

    Its `layout` grows evenly with every CODE_BLOCK elements.

    shared: number of leading parts that hold for the whole tensor, such as a common scale;
        `fill_shared` computes them.
    projection: what is lost is orthogonal to what is kept, so that error = total - energy.
    """

    shared: int = 0
    projection: bool = False

    def fill_shared(self, blocks: Blocks, shared: Parts) -> None:
        """Go through `blocks` (at least one) and fill the `shared` parts, if there are any."""

    @abstractmethod
    def encode_block(self, x: Tensor, start: int, key: Key, parts: Parts) -> tuple[float, float]:
        """Encode the block `x`, from `start` on, on the host into its slices of the parts. Returns
        the squared norms of what is kept and of what is lost (not looked at if `projection`)."""

    @abstractmethod
    def encode_whole(self, x: Tensor, key: Key) -> tuple[Parts, Tensor]:
        """Encode flat `x` (not empty, float32 or float64) on a device. Returns the parts, and what
        they decode to (to rounding)."""

    @abstractmethod
    def decode_block(self, parts: Parts, out: Tensor) -> None:
        """Decode a block, on a device the whole tensor, into `out` (float32 or float64) from its
        slices of the parts."""

    def encode(self, values: Tensor, key: Key) -> tuple[Parts, Tensor]:
        if kernels_for(values).by_blocks:
            parts, _ = encode_sum(self, values, None, key)
            return parts, self.decode(parts, values.numel(), values.dtype)
        parts, decoded = _encode_on_device(self, values.detach(), key)
        return parts, decoded.to(values.dtype)

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> Tensor:
        out = fresh(count, widened(dtype), parts[0].device)
        for start, stop in block_bounds(out):
            self.decode_block(self.slices(parts, start, stop - start, dtype), out[start:stop])
        return out.to(dtype)

    def slices(self, parts: Parts, start: int, count: int, dtype: torch.dtype) -> Parts:
        """The slices of `parts` for `count` elements from `start` (a multiple of CODE_BLOCK) on."""
        ends = zip(parts, self.layout(start, dtype), self.layout(count, dtype), strict=True)
        own = [part[first : first + size] for part, (first, _), (size, _) in ends]
        return (*parts[: self.shared], *own[self.shared :])


def encode_sum(form: BlockFormat, x: Tensor, add: Tensor | None, key: Key) -> tuple[Parts, Tensor]:
    """x += add in place (if given), then encode x. Returns the parts and `Payload.energies`."""
    fused = form.fused(x.detach(), None if add is None else add.detach(), key, decode=False)
    if fused is not None:
        return fused.parts, fused.norms.sum(0)
    if not kernels_for(x).by_blocks:
        x = x.detach() if add is None else x.detach().add_(add.detach())
        parts, kept = _encode_on_device(form, x, key)
        return parts, squared_norms([x, kept, x - kept])
    parts = _empty(form, x)
    blocks = Blocks(x, add)
    energy = error = 0.0
    with np.errstate(all="ignore"):
        if form.shared and x.numel():
            form.fill_shared(blocks, parts[: form.shared])
        for block, start in blocks:
            slices = form.slices(parts, start, block.numel(), x.dtype)
            kept_here, lost_here = form.encode_block(block, start, key, slices)
            energy, error = energy + kept_here, error + lost_here
    lost = projection_error(blocks.total, energy) if form.projection else error
    return parts, energies(blocks.total, energy, lost, x)


def _encode_on_device(form: BlockFormat, x: Tensor, key: Key) -> tuple[Parts, Tensor]:
    return form.encode_whole(x.to(widened(x.dtype)), key) if x.numel() else (_empty(form, x), x)


def _empty(form: BlockFormat, x: Tensor) -> Parts:
    """Memory for the parts that `x` becomes."""
    return tuple(fresh(size, dtype, x.device) for size, dtype in form.layout(x.numel(), x.dtype))


class Full(ValueFormat):
    """This value format changes nothing: it sends the values in their own dtype, not copied."""

    name = "fp32"
    lossless = True
    coding = Coding("floats")

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((count, dtype),)

    def encode(self, values: Tensor, key: Key) -> tuple[Parts, Tensor]:
        values = values.detach().contiguous()
        return (values,), values

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> Tensor:
        return parts[0]

    def fused(self, x: Tensor, add: Tensor | None, key: Key, decode: bool = True) -> Encoded | None:
        if not fuses(x, add):
            return None
        from compressors.kernels.triton import codec as triton_codec

        return triton_codec.encode_floats(x, add, x.dtype, inf, decode)


class Half(BlockFormat):
    """This value format rounds each value to the nearest number of 16 bits.

    headroom: how many values must be able to be summed: they are cut to the largest such number
        divided by this. What is cut off is part of the error, and fed back with it.
    parts: values (float16 or bfloat16).
    """

    coding = Coding("floats")

    def __init__(self, name: str, half: torch.dtype, headroom: float = 1.0) -> None:
        self.name, self.half = name, half
        self.limit = torch.finfo(half).max / headroom

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((count, self.half),)

    def encode_block(self, x: Tensor, start: int, key: Key, parts: Parts) -> tuple[float, float]:
        (values,) = parts
        work = torch.clamp(x, -self.limit, self.limit, out=scratch_like("work", x))
        values.copy_(work)
        work.copy_(values)
        energy = block_norm(work)
        return energy, block_norm(torch.sub(x, work, out=work))

    def encode_whole(self, x: Tensor, key: Key) -> tuple[Parts, Tensor]:
        values = x.clamp(-self.limit, self.limit).to(self.half)
        return (values,), values.to(x.dtype)

    def decode_block(self, parts: Parts, out: Tensor) -> None:
        out.copy_(parts[0])

    def fused(self, x: Tensor, add: Tensor | None, key: Key, decode: bool = True) -> Encoded | None:
        if not fuses(x, add):
            return None
        from compressors.kernels.triton import codec as triton_codec

        return triton_codec.encode_floats(x, add, self.half, self.limit, decode)


class Levels(BlockFormat):
    """This value format decodes x to scale * q, with a scale for each bucket of values.

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
        self.coding = Coding("levels", bits, bucket)
        self._steps = self.levels if seed is None else self.levels / WIDER  # in the largest value

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        size = count if self.bits == 8 else codes_nbytes(count, 1 << self.bits)
        return ((-(-count // self.bucket), widened(dtype)), (size, torch.uint8))

    def encode_block(self, x: Tensor, start: int, key: Key, parts: Parts) -> tuple[float, float]:
        scales, packed = parts
        steps, q = scratch_like("work", x), scratch_like("levels", x)
        columns = numbers_of_rows(scales, x, self.bucket)
        matrices = rows(x, self.bucket), columns, rows(steps, self.bucket)
        for matrix, scale, work in zip(*matrices, strict=True):
            self._scale(matrix, scale, work)
            torch.div(matrix, scale, out=work)
        if self.seed is None:
            torch.round(steps, out=q)
        else:
            fill_random16(q, self.seed, key, start)
            torch.add(steps, q, alpha=STEP, out=q).floor_()
        squares = scales.double().square()
        energy = _weighted(squares, q, self.bucket)
        if self.bits == 8:
            packed.view(torch.int8).copy_(q)
        else:
            pack_codes(q, 1 << self.bits, self.levels, packed)
        return energy, _weighted(squares, steps.sub_(q), self.bucket)

    def encode_whole(self, x: Tensor, key: Key) -> tuple[Parts, Tensor]:
        count = x.numel()
        buckets = fill_up(x, -(-count // self.bucket) * self.bucket).view(-1, self.bucket)
        order, wide = (inf, x.dtype) if self.norm == "max" else (2, torch.float64)  # no overflow
        scale = torch.linalg.vector_norm(buckets, order, dim=1, keepdim=True, dtype=wide)
        scale = scale.to(x.dtype).div_(self._steps).clamp_(min=torch.finfo(x.dtype).tiny)
        if self.seed is None:
            q = (buckets / scale).round_()
        else:
            q = torch.addcdiv(uniform(buckets, self.seed, key), buckets, scale).floor_()
        flat = q.view(-1)[:count]
        if self.bits == 8:
            packed = flat.to(torch.int8).view(torch.uint8)
        else:
            packed = pack_codes(flat, 1 << self.bits, self.levels)
        return (scale.view(-1), packed), q.mul_(scale).view(-1)[:count]

    def decode_block(self, parts: Parts, out: Tensor) -> None:
        scales, packed = parts
        if self.bits == 8:
            out.copy_(packed.view(torch.int8))
        else:
            unpack_codes(packed, 1 << self.bits, self.levels, out)
        columns = numbers_of_rows(scales, out, self.bucket)
        for values, scale in zip(rows(out, self.bucket), columns, strict=True):
            values.mul_(scale)

    def fused(self, x: Tensor, add: Tensor | None, key: Key, decode: bool = True) -> Encoded | None:
        if self.norm != "max" or self.bucket > _FUSED_BUCKET or not fuses(x, add):
            return None
        from compressors.kernels.triton import codec as triton_codec

        random = None
        if self.seed is not None:  # as many as in `encode_whole`
            random = uniform(x.new_empty(-(-x.numel() // self.bucket), self.bucket), self.seed, key)
        (_, _), (nbytes, _) = self.layout(x.numel(), x.dtype)
        return triton_codec.encode_levels(
            x, add, self.bits, self.bucket, float(self._steps), nbytes, random, decode
        )

    def _scale(self, x: Tensor, scale: Tensor, work: Tensor) -> None:
        """Fill `scale`, a column, for the rows of `x`."""
        torch.abs(x, out=work)
        torch.amax(work, dim=1, keepdim=True, out=scale)
        if self.norm == "l2":  # of x / max|x|, which neither overflows nor vanishes
            torch.div(x, scale.clamp(min=torch.finfo(x.dtype).tiny), out=work)
            scale.mul_(work.square_().sum(dim=1, keepdim=True).sqrt_())
        scale.div_(self._steps).clamp_(min=torch.finfo(x.dtype).tiny)


def check_bucket(bucket: int) -> None:
    """Raise ValueError unless so many values can share a scale."""
    if isinstance(bucket, bool) or not isinstance(bucket, int) or bucket not in _BUCKETS:
        raise ValueError(f"bucket must be a power of two from 8 to {CODE_BLOCK}, got {bucket!r}")


def _weighted(squares: Tensor, x: Tensor, bucket: int) -> float:
    """Sum of ||bucket of x||^2 times the bucket's squared scale, on the host."""
    if x.numel() % bucket:
        wide = reduce_rows(x, bucket, lambda row: row.double().square().sum(dim=1))
        return float(torch.dot(wide, squares))
    array = x.numpy().reshape(-1, bucket)
    norms = np.matmul(array[:, None, :], array[:, :, None]).reshape(-1)
    return float(np.dot(norms.astype(np.float64), squares.numpy()))


def fill_random16(out: Tensor, seed: int, key: Key, start: int) -> None:
    """Fill a block on the host with whole numbers, uniform from 0 to 65535: a function of `seed`,
    `key` and `start`. As drawing is slow, each random word serves four elements, a quarter of the
    length of `out` apart: as it is, and times powers of an odd number, which permute the words."""
    each = -(-out.numel() // _USES)
    drawn = np.asarray(_seeded(_digest(seed, key, start)).random_raw(-(-each // 4)))
    words, array = drawn.view(np.uint16)[:each], out.numpy()
    for at in range(0, array.size, each or 1):
        piece = array[at : at + each]
        np.copyto(piece, words[: piece.size])
        np.multiply(words, _ODD, out=words)


def generator(device: torch.device, seed: int, key: Key) -> torch.Generator | None:
    """A generator on a device with the seeds of `fill_random16`; None for meta tensors."""
    if device.type == "meta":
        return None
    bits = int.from_bytes(_digest(seed, key, 0)[:8], "little", signed=True)
    return torch.Generator(device).manual_seed(bits)


def uniform(like: Tensor, seed: int, key: Key) -> Tensor:
    """Random numbers from 0 to below 1, with the shape, dtype and device of `like`."""
    made_by = generator(like.device, seed, key)
    return torch.rand(like.shape, generator=made_by, dtype=like.dtype, device=like.device)


def _digest(seed: int, key: Key, start: int) -> bytes:
    of = (seed, key.name, key.step, key.rank, start)
    return blake2b(repr(of).encode(), digest_size=24).digest()


def _seeded(digest: bytes) -> SFC64:
    """This thread's generator, set to the state `digest`. (A new one takes as long as drawing.)"""
    if not hasattr(_local, "bits"):
        _local.bits = SFC64(0)
    bits: SFC64 = _local.bits
    words = np.append(np.frombuffer(digest, np.uint64), np.uint64(1))  # the last one is a counter
    bits.state = {
        "bit_generator": "SFC64", "state": {"state": words}, "has_uint32": 0, "uinteger": 0,
    }  # fmt: skip
    return bits


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
