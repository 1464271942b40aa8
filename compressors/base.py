"""The contract of a gradient compressor: it compresses a flat tensor at a CF to a payload, and
decodes payloads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import floor, inf, isfinite, nan, prod
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compressors.kernels import add_and_norm, kernels_for, squared_norm
from compressors.kernels.blocks import (
    Flag,
    Scalar,
    either,
    energies,
)
from compressors.kernels.blocks import InvalidPayload as InvalidPayload

MAX_NUMEL = 2**31 - 1
"""The largest number of elements of a tensor, so that positions fit 32 bits."""


class Key(NamedTuple):
    """A key names one tensor in one step, and seeds the random numbers for it.

    name: of the parameter or bucket. shape: of the parameter; () if unknown. All fields but `rank`
    are the same on every rank; `rank` seeds random numbers that must be independent between ranks.
    """

    name: str
    step: int = 0
    shape: tuple[int, ...] = ()
    rank: int = 0


NO_KEY = Key("")


class Spec(NamedTuple):
    """A spec holds all that the size of a payload may depend on. It is the same on every rank.

    segments: lengths of the consecutive tensors in the flat tensor, none of them empty; (numel,) if
        they are compressed as one. cf: the compression factor, 1 or more. dtype: of the flat
        tensor. measured: the energies of the payload are asked for; a quantizer on a host leaves
        them out otherwise.
    """

    segments: tuple[int, ...]
    cf: float = 1.0
    dtype: torch.dtype = torch.float32
    key: Key = NO_KEY
    measured: bool = True

    @staticmethod
    def of(x: Tensor, cf: float = 1.0, key: Key = NO_KEY) -> Spec:
        """The spec for flat `x` as one segment."""
        return Spec((x.numel(),), cf, x.dtype, key)

    @staticmethod
    def shaped(shape: tuple[int, ...], cf: float) -> Spec:
        """The spec for a float32 parameter of this shape."""
        return Spec((prod(shape),), cf, key=Key("", shape=tuple(shape)))

    @property
    def numel(self) -> int:
        return sum(self.segments)

    @property
    def num_kept(self) -> int:
        """Elements that a sparsifier keeps, in all segments."""
        return sum(self.counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements that a sparsifier keeps in each segment."""
        return _counts(self.segments, self.cf)

    def at(self, cf: float) -> Spec:
        """The spec with another compression factor."""
        return self._replace(cf=cf)


@dataclass(frozen=True)
class Payload:
    """A payload is a compressed tensor as it is sent, with the energies that compression keeps.

    parts: contiguous tensors, sent one after the other in this order.
    spec: of the tensor that was compressed.
    energies: ||a||^2, ||c||^2 and ||a - c||^2, the squared norms of the compressed tensor, of the
        decoded payload and of the error (float64, (3,), on the tensor's device); None if unknown,
        as in a received payload.
    invalid: on a device, whether the received bytes are none that a compressor makes. A device
        decodes them all the same, within bounds; the host raises InvalidPayload.
    indices: positions of the kept elements (flat integers; on a device `numel` in an empty slot);
        None if all elements are kept.
    """

    parts: tuple[Tensor, ...]
    spec: Spec
    energies: Tensor | None = None
    invalid: Flag = False
    indices: Tensor | None = None

    @property
    def numel(self) -> int:
        return self.spec.numel

    @property
    def cf(self) -> float:
        return self.spec.cf

    @property
    def key(self) -> Key:
        return self.spec.key

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def total(self) -> Tensor:
        """||a||^2 (0-dim)."""
        return torch.tensor(nan) if self.energies is None else self.energies[0]

    @property
    def energy(self) -> Tensor:
        """||c||^2 (0-dim)."""
        return torch.tensor(nan) if self.energies is None else self.energies[1]

    @property
    def error(self) -> Tensor:
        """||a - c||^2 (0-dim)."""
        return torch.tensor(nan) if self.energies is None else self.energies[2]

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The three `energies`: Python numbers on the host, 0-dim tensors on a device; nan if
        unknown."""
        if self.energies is None:
            return nan, nan, nan
        return kernels_for(self.energies).numbers(self.energies)

    @property
    def marks(self) -> list[Tensor]:
        """Floating-point numbers of this payload that are NaN if `as_nonfinite` has made it."""
        return [part[:1] for part in self.parts if part.is_floating_point() and part.numel()]

    def positions(self) -> Tensor | None:
        """Positions of the kept elements in the whole flat tensor; None if all are kept."""
        return self.indices

    @property
    def nbytes(self) -> int:
        """Bytes that this payload takes on the wire."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def write(self, out: Tensor) -> None:
        """Copy the parts into `out`, a contiguous uint8 tensor of exactly `nbytes` elements."""
        if out.dtype != torch.uint8 or out.numel() != self.nbytes:
            raise ValueError(
                f"out must be uint8 of {self.nbytes} elements, got {out.dtype} of {out.numel()}"
            )
        start = 0
        for part in self.parts:
            # `view` needs a stride of 1, which an empty tensor may lack without `as_strided`.
            raw = part.contiguous().as_strided((part.numel(),), (1,)).view(torch.uint8)
            out[start : start + raw.numel()].copy_(raw)
            start += raw.numel()

    def with_parts(self, *parts: Tensor) -> Payload:
        """The same payload with other parts."""
        return replace(self, parts=parts)

    def as_nonfinite(self, flag: Flag = True) -> Payload:
        """This payload with every floating-point value NaN, if `flag` is set. It tells the other
        ranks that this rank's gradient was not finite."""
        if not any(part.is_floating_point() for part in self.parts):
            raise NotImplementedError("parts: one must hold floating-point numbers, got none")
        return self._filled(flag, nan)

    def as_zeros(self, flag: Flag = True) -> Payload:
        """This payload with every floating-point value 0, if `flag` is set: it decodes to zeros."""
        return self._filled(flag, 0.0)

    def _filled(self, flag: Flag, value: float) -> Payload:
        if flag is False:
            return self
        parts = []
        for part in self.parts:
            if part.is_floating_point():
                part = part.masked_fill(torch.as_tensor(flag, device=part.device), value)
            parts.append(part)
        return self.with_parts(*parts)


@dataclass(frozen=True)
class RowsPayload(Payload):
    """The payload of consecutive tensors of equal length, each compressed separately.

    parts: part i is the concatenation of part i of all tensors' payloads. layouts: for each tensor,
    (elements, dtype) of each part of its payload."""

    layouts: tuple[tuple[tuple[int, torch.dtype], ...], ...] = ()

    @property
    def marks(self) -> list[Tensor]:
        rows, found = len(self.layouts), list[Tensor]()
        for part in self.parts:
            if part.is_floating_point() and part.numel():
                values = part.numel() == self.numel  # then one value of each tensor is enough
                found.append(part.view(rows, -1)[:, 0].clone() if values else part)
        return found

    def write(self, out: Tensor) -> None:
        columns = []
        for part, own in zip(self.parts, zip(*self.layouts, strict=True), strict=True):
            columns.append(part.view(torch.uint8).split([n * of.itemsize for n, of in own]))
        torch.cat([*chain(*zip(*columns, strict=True))], out=out)

    @staticmethod
    def read(
        data: Tensor, layouts: Sequence[tuple[tuple[int, torch.dtype], ...]], spec: Spec
    ) -> RowsPayload:
        """The payload in data (tensors, bytes; uint8). Each row begins with a tensor's payload."""
        sizes = []
        for layout in layouts:
            own = [n * of.itemsize for n, of in layout]
            sizes += [*own, data.shape[1] - sum(own)]
        pieces, step = data.reshape(-1).split(sizes), len(layouts[0]) + 1
        parts = (torch.cat(pieces[i::step]).view(of) for i, (_, of) in enumerate(layouts[0]))
        return RowsPayload(tuple(parts), spec, layouts=tuple(layouts))


def joined(specs: Sequence[Spec]) -> Spec:
    """The spec of the concatenation of tensors."""
    return specs[0]._replace(segments=tuple(chain.from_iterable(s.segments for s in specs)))


def any_nonfinite(payloads: Sequence[Payload]) -> Flag:
    """Whether `as_nonfinite` has made any of these payloads, or a payload that was added to one of
    them. The number of operations does not grow with the number of payloads."""
    firsts: dict[torch.dtype, list[Tensor]] = {}
    for mark in (mark for payload in payloads for mark in payload.marks):
        firsts.setdefault(mark.dtype, []).append(mark)
    flag: Flag = False
    for first in firsts.values():
        numbers = torch.cat(first) if len(first) > 1 else first[0]
        flag = either(flag, kernels_for(numbers).any_nan(numbers))
    return flag


def kept(numel: int, cf: float) -> int:
    """Elements a sparsifier keeps of `numel` at `cf`: max(1, floor(numel / cf)), 0 of none."""
    # The tolerance makes 10 * (24 / 10) the same CF as 24 in spite of rounding.
    return min(numel, max(1, floor(numel / cf * (1 + 1e-12))))


@lru_cache(maxsize=1024)
def _counts(lengths: tuple[int, ...], cf: float) -> tuple[int, ...]:
    return tuple(kept(length, cf) for length in lengths)


def check_cf(cf: float) -> float:
    """Return `cf` as a float; ValueError unless it is a finite number >= 1."""
    if isinstance(cf, bool) or not isinstance(cf, (int, float)) or not isfinite(cf) or cf < 1:
        raise ValueError(f"cf must be a finite number >= 1, got {cf!r}")
    return float(cf)


def check_seed(seed: int) -> int:
    """Return `seed`; TypeError unless it is a whole number: a share of elements is none."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed must be a whole number, got {seed!r}")
    return int(seed)


def check_above_0(name: str, value: float | None) -> float | None:
    """Return `value`; ValueError, naming the argument, unless it is None or a finite number > 0."""
    known = isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < inf
    if value is not None and not known:
        raise ValueError(f"{name} must be a finite number > 0 or None, got {value!r}")
    return value


def combined_cf(cf: float, factor: float) -> float:
    """The CF of a payload that was compressed at `cf`, and then by a further `factor` >= 1."""
    if not factor >= 1:
        raise ValueError(f"factor must be >= 1, got {factor!r}")
    return check_cf(cf * factor)


class Compressor(ABC):
    """A compressor maps one flat tensor and a compression factor (CF) to a `Payload`, and back.

    A compressor has no state between calls, unless `state_dict` returns one. Tensors are flat
    (1-d), contiguous, float32 or float64; half-precision gradients are converted before.

    name: the registered name, plus suffixes such as "+int8".
    sums: payloads of several ranks may be summed element by element (all-reduce); False: they are
        gathered. All parts of a payload that is summed have one dtype.
    sum_dtype: the dtype of these parts; None: the dtype of the tensor.
    feeds_back: C is a contraction, so that error feedback converges. False for unbiased compressors
        whose values are scaled up.
    selects: it sends some elements and leaves out the others.
    multilevel: `smaller` works: a payload at a larger CF can be made from one at a smaller CF.
        False: the payload at each CF is made from the full tensor.
    sampled: a strided sample of a tensor is compressed about as well as the tensor itself.
    keeps_zeros: an element that is 0 is decoded to 0.
    keeps_most_to: the largest CF at which so little is lost that the residual stays next to empty.
    momentum_factor: momentum correction keeps the share min(1, momentum_factor / cf^(1/3)) of the
        mean delay of momentum (`Momentum`).
    masking: the smallest CF with momentum factor masking: the velocity of sent elements is set to
        zero; inf for never.
    rungs: other compressors, by the CFs at which they work in this one's place.
    known_gains: gains of rungs that policies assume. Rungs are measured for the record only.
    sent_as_dense: a step with this compressor is a dense step that is summed in `sum_dtype`.
        Nothing is compressed, measured or fed back: rounding errors are in no rank's residual.
    """

    name: str = ""
    sums: bool = False
    sum_dtype: torch.dtype | None = None
    feeds_back: bool = True
    selects: bool = False
    multilevel: bool = True
    sampled: bool = True
    keeps_zeros: bool = True
    keeps_most_to: float = 1.0
    momentum_factor: float = inf
    masking: float = inf
    rungs: Mapping[float, Compressor] = MappingProxyType({})
    known_gains: Mapping[float, float] = MappingProxyType({})
    sent_as_dense: bool = False

    def at(self, cf: float) -> Compressor:
        """The compressor that works at `cf`: a rung or this one. `at(inf)` is the compressor for
        the largest CFs."""
        return self.rungs.get(cf, self)

    @property
    def rung_names(self) -> dict[float, str]:
        """Names of the compressors at the CFs of `known_gains`."""
        return {cf: self.at(cf).name for cf in self.known_gains}

    @abstractmethod
    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        """x += add in place, if `add` is given; then the payload of flat `x`. add: has the dtype,
        length and device of `x`."""

    def smaller(self, payload: Payload, factor: float) -> Payload:
        """Compress the decoded `payload` by a further `factor` >= 1 (GraVAC section III). The error
        in `energies` is that against the full tensor. NotImplementedError unless `multilevel`."""
        raise NotImplementedError(
            f"compressor {self.name!r} does not compress in levels: it must define `smaller`, or "
            f"say multilevel = False"
        )

    @abstractmethod
    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        """out += scale * (decoded `payload`), in place. InvalidPayload, and nothing is written, if
        the payload has positions outside flat `out`."""

    @abstractmethod
    def nbytes(self, spec: Spec) -> int:
        """Bytes of the payload of a tensor with this spec: the same on every rank."""

    @abstractmethod
    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        """The payload of each rank, from the rows of `data` (ranks, bytes; uint8): the inverse of
        `Payload.write`. On a device all payloads may share one `invalid` flag: some payload is
        invalid. InvalidPayload if a row has not `nbytes(spec)` bytes."""

    def compress_rows(self, x: Tensor, specs: Sequence[Spec], add: Tensor | None) -> Payload | None:
        """`compress` for two or more tensors of equal length, which flat x is the concatenation of.
        On a device the number of operations does not grow with the number of tensors. The bytes of
        the payload are those of the tensors' payloads, one after the other. None, and nothing is
        done, if this compressor cannot. specs: of each tensor."""
        return None

    def read_rows(self, data: Tensor, specs: Sequence[Spec]) -> Payload | None:
        """The inverse of `compress_rows`; None if this compressor cannot. data: (tensors, bytes;
        uint8); each row begins with the payload of a tensor."""
        return None

    def mean_of(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        """out = scale * (sum of the decoded `payloads`), in their order; 0 if `as_zeros` is set.
        Raises as `add_to` does."""
        out.zero_()
        self.add_all(out, payloads, scale, as_zeros)

    def add_all(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        """out += scale * (each decoded payload), one after the other; nothing is added if
        `as_zeros` is set. Raises as `add_to` does."""
        for payload in payloads:
            self.add_to(out, payload.as_zeros(as_zeros), scale)

    def nearest(self, spec: Spec) -> float:
        """The CF >= 1 nearest to `spec.cf` at which this compressor can work."""
        return check_cf(spec.cf)

    def floats(self, spec: Spec) -> float:
        """Number of elements sent, indices not counted (the papers' "floats sent")."""
        return spec.numel / spec.cf

    def state_dict(self) -> dict[str, Any]:
        """The state between steps (plain values and tensors), by parameter name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict()`; ValueError if it does not fit. It is called on a shallow copy of
        the compressor: replace attributes, and do not change them in place."""
        if state:
            raise ValueError(f"state: compressor {self.name!r} has none, got {sorted(state)}")

    def __repr__(self) -> str:
        """The class and the settings, which must be the same on all ranks."""
        plain = (bool, int, float, str, type(None))
        settings = {
            name: value if isinstance(value, plain) else value.name
            for name, value in sorted(vars(self).items())
            if not name.startswith("_")
            and (isinstance(value, plain) or isinstance(getattr(value, "name", None), str))
        }
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{type(self).__name__}({given})"


class NoCompression(Compressor):
    """No compression: sends the dense gradient, as DDP does. The payload is the tensor itself."""

    name = "none"
    sums = True

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        x = x.detach()
        energy = squared_norm(x) if add is None else add_and_norm(x, add.detach())
        return Payload((x,), spec.at(1.0), energies(energy, energy, 0.0, x))

    def smaller(self, payload: Payload, factor: float) -> Payload:
        return payload

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        check_out(out, payload)
        out.detach().add_(payload.parts[0], alpha=scale)

    def nbytes(self, spec: Spec) -> int:
        return spec.numel * spec.dtype.itemsize

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        spec = spec.at(1.0)
        return [Payload(parts, spec) for parts in split_rows(data, (spec.numel, spec.dtype))]

    def compress_rows(self, x: Tensor, specs: Sequence[Spec], add: Tensor | None) -> Payload | None:
        whole = self.compress(x, joined(specs), add)
        layouts = tuple(((spec.numel, spec.dtype),) for spec in specs)
        return RowsPayload(whole.parts, whole.spec, whole.energies, layouts=layouts)

    def read_rows(self, data: Tensor, specs: Sequence[Spec]) -> Payload | None:
        layouts = [((spec.numel, spec.dtype),) for spec in specs]
        return RowsPayload.read(data, layouts, joined(specs).at(1.0))

    def nearest(self, spec: Spec) -> float:
        return 1.0

    def floats(self, spec: Spec) -> float:
        return float(spec.numel)


def check_flat(x: Tensor, spec: Spec, add: Tensor | None = None) -> None:
    """ValueError unless `x` is flat, fits `spec` and `add`, and has at most MAX_NUMEL elements."""
    if x.dim() != 1 or x.numel() > MAX_NUMEL or x.numel() != spec.numel:
        raise ValueError(
            f"x must be flat, with the {spec.numel} elements of its spec and at most {MAX_NUMEL}, "
            f"got {tuple(x.shape)}"
        )
    if add is not None and (add.shape, add.dtype, add.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"add and x must be flat, equally long and of one kind, {tuple(x.shape)} of {x.dtype} "
            f"on {x.device}; got {tuple(add.shape)} of {add.dtype} on {add.device}"
        )


def check_out(out: Tensor, payload: Payload) -> None:
    """InvalidPayload unless `out` has the shape of the tensor that was compressed."""
    if out.dim() != 1 or out.numel() != payload.numel:
        raise InvalidPayload(
            f"payload of {payload.numel} elements cannot be added to shape {tuple(out.shape)}"
        )


def split_rows(data: Tensor, *parts: tuple[int, torch.dtype]) -> list[tuple[Tensor, ...]]:
    """For each row of `data` (ranks, bytes; uint8), the parts of a payload: the inverse of
    `Payload.write`. parts: (elements, dtype) of each part. A part is a view of `data` if its
    alignment allows that, else a copy (one copy for all rows).

    InvalidPayload unless a row has exactly the bytes of all parts."""
    columns = columns_of(data, parts)
    return list(zip(*map(torch.unbind, columns), strict=True)) if parts else [()] * len(data)


def columns_of(data: Tensor, parts: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """For each part of `split_rows`, the part of all rows: (ranks, elements)."""
    wanted = sum(count * dtype.itemsize for count, dtype in parts)
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] != wanted:
        raise InvalidPayload(
            f"payloads must be of {wanted} bytes (uint8), "
            f"got {data.dtype} of shape {tuple(data.shape)}"
        )
    columns, start = [], 0
    for count, dtype in parts:
        size = dtype.itemsize
        raw = data[:, start : start + count * size]
        start += raw.shape[1]
        if raw.stride(1) != 1 or any(
            at % size for at in (raw.storage_offset(), raw.data_ptr(), raw.stride(0))
        ):
            raw = torch.empty(raw.shape, dtype=torch.uint8, device=raw.device).copy_(raw)
        if not count:
            raw = data.new_empty(0).view(dtype).expand(len(data), 0)
        columns.append(raw if raw.dtype == dtype else raw.view(dtype))
    return columns


def projection_error(total: Scalar, energy: Scalar) -> Scalar:
    """||a - c||^2 = total - energy of a projection, at least 0; nan stays nan."""
    error = total - energy
    if isinstance(error, Tensor):
        return error.clamp(min=0.0)
    return 0.0 if error < 0.0 else error
