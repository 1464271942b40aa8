"""The contract of a gradient compressor: one flat tensor and a CF become a payload, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import floor, inf, isfinite, nan, prod
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
"""Elements of the largest tensor: its positions fit 32 bits."""


class Key(NamedTuple):
    """A key names one tensor in one step, the same on every rank, and seeds random numbers.

    name: of the parameter or bucket. shape: of the parameter; () if it is not known.
    rank: the one thing that differs between ranks: it seeds what ranks should draw independently.
    """

    name: str
    step: int = 0
    shape: tuple[int, ...] = ()
    rank: int = 0


NO_KEY = Key("")


class Spec(NamedTuple):
    """A spec is all that the size of a payload may depend on: the same on every rank.

    segments: lengths of the tensors that lie one behind the other in the flat tensor; (numel,) if
        they are compressed as one. cf: the compression factor, 1 or more. dtype: of the tensor.
    """

    segments: tuple[int, ...]
    cf: float = 1.0
    dtype: torch.dtype = torch.float32
    key: Key = NO_KEY

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
        """Elements that a sparsifier keeps."""
        return kept(self.numel, self.cf)

    def at(self, cf: float) -> Spec:
        """The spec with another compression factor."""
        return self._replace(cf=cf)


@dataclass(frozen=True)
class Payload:
    """A payload is a compressed tensor as it travels, with what is known about what was lost.

    parts: contiguous tensors, sent one after the other in this order.
    spec: of the tensor that was compressed.
    energies: ||a||^2, ||c||^2 and ||a - c||^2, the squared norms of what was compressed, of what is
        kept and of what is lost (float64, (3,), where the data is); None if unknown, as after
        receiving.
    invalid: on a device, whether what was received cannot have been sent by any compressor; there
        it is decoded all the same, within bounds. On the host such bytes raise InvalidPayload.
    indices: positions of the kept elements (flat whole numbers; on a device `numel` in an empty
        slot); None if all elements are kept.
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
        """The three `energies`, to go on reckoning with; nan if unknown."""
        if self.energies is None:
            return nan, nan, nan
        return kernels_for(self.energies).numbers(self.energies)

    @property
    def marks(self) -> list[Tensor]:
        """Floating-point numbers that are NaN once `as_nonfinite` has made the payload."""
        return [part[:1] for part in self.parts if part.is_floating_point() and part.numel()]

    def positions(self) -> Tensor | None:
        """`indices`, of the whole tensor."""
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
            # as_strided: a stride of 1 also if it is empty
            raw = part.contiguous().as_strided((part.numel(),), (1,)).view(torch.uint8)
            out[start : start + raw.numel()].copy_(raw)
            start += raw.numel()

    def with_parts(self, *parts: Tensor) -> Payload:
        """The same payload with other contents."""
        return replace(self, parts=parts)

    def as_nonfinite(self, flag: Flag = True) -> Payload:
        """This payload with every floating-point value NaN, if `flag` is set: so a rank tells the
        others that its gradient was not finite."""
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
    """The payload of tensors of equal length, one behind the other, each compressed by itself.

    parts: each consists of those of the tensors. layouts: of each tensor's payload: (elements,
    dtype) of its parts."""

    layouts: tuple[tuple[tuple[int, torch.dtype], ...], ...] = ()

    @property
    def marks(self) -> list[Tensor]:
        rows, found = len(self.layouts), list[Tensor]()
        for part in self.parts:
            if part.is_floating_point() and part.numel():
                values = part.numel() == self.numel  # one of each tensor is enough
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
        """data: (tensors, bytes; uint8), of which each row begins with a tensor's payload."""
        sizes = []
        for layout in layouts:
            own = [n * of.itemsize for n, of in layout]
            sizes += [*own, data.shape[1] - sum(own)]
        pieces, step = data.reshape(-1).split(sizes), len(layouts[0]) + 1
        parts = (torch.cat(pieces[i::step]).view(of) for i, (_, of) in enumerate(layouts[0]))
        return RowsPayload(tuple(parts), spec, layouts=tuple(layouts))


def joined(specs: Sequence[Spec]) -> Spec:
    """The spec of tensors that lie one behind the other."""
    return specs[0]._replace(segments=tuple(chain.from_iterable(s.segments for s in specs)))


def any_nonfinite(payloads: Sequence[Payload]) -> Flag:
    """Whether any of the payloads, or a sum that it went into, was made by `as_nonfinite`. As few
    operations for any number of payloads of one dtype."""
    firsts: dict[torch.dtype, list[Tensor]] = {}
    for mark in (mark for payload in payloads for mark in payload.marks):
        firsts.setdefault(mark.dtype, []).append(mark)
    flag: Flag = False
    for first in firsts.values():
        numbers = torch.cat(first) if len(first) > 1 else first[0]
        flag = either(flag, kernels_for(numbers).any_nan(numbers))
    return flag


def kept(numel: int, cf: float) -> int:
    """Elements a sparsifier keeps of `numel` at `cf`: max(1, floor(numel / cf)), 0 of nothing."""
    # The tolerance makes 10 * (24 / 10) the same CF as 24, whatever the last bit says.
    return min(numel, max(1, floor(numel / cf * (1 + 1e-12))))


def check_cf(cf: float) -> float:
    """Return `cf` as a float; ValueError unless it is a finite number >= 1."""
    if isinstance(cf, bool) or not isinstance(cf, (int, float)) or not isfinite(cf) or cf < 1:
        raise ValueError(f"cf must be a finite number >= 1, got {cf!r}")
    return float(cf)


def combined_cf(cf: float, factor: float) -> float:
    """The CF of what was compressed at `cf` and then by a further `factor` >= 1."""
    if not factor >= 1:
        raise ValueError(f"factor must be >= 1, got {factor!r}")
    return check_cf(cf * factor)


class Compressor(ABC):
    """A compressor maps one flat tensor and a compression factor (CF) to a `Payload`, and back.

    It carries nothing from call to call unless `state_dict` says otherwise. Tensors are flat (1-d),
    contiguous, float32 or float64; half-precision gradients are widened before.

    name: the registered name, with what was added to it.
    sums: payloads of several ranks may be summed element by element (all-reduce); otherwise they
        are gathered. All parts of such a payload are of one dtype.
    sum_dtype: the dtype of such parts; None for that of the tensor.
    feeds_back: C is a contraction, so feeding its error back converges. False for unbiased
        compressors whose values are scaled up.
    selects: it keeps some elements and not others.
    multilevel: `smaller` works: what is kept at a larger CF is found in what is kept at a
        smaller one. Otherwise candidates are compressed from the full tensor.
    sampled: a strided sample of a tensor shows how well the tensor itself is compressed.
    keeps_zeros: an element that is 0 is never decoded to something else.
    keeps_most_to: the largest CF at which so little is lost that next to nothing waits in the
        residual.
    momentum_lag: momentum correction keeps the share momentum_lag / cf^(1/3) of the momentum's lag,
        at most all of it.
    masking: the CF from which on its paper sets the velocity of sent elements to zero (momentum
        factor masking); inf for never.
    rungs: other compressors, by the CFs at which they work in this one's place.
    known_gains: gains of rungs that policies take for known. Nothing is measured at rungs.
    sent_as_dense: a step is a dense step that is summed in `sum_dtype`. Nothing of it is
        compressed, measured or fed back: what rounding loses is in no rank's residual.
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
    momentum_lag: float = inf
    masking: float = inf
    rungs: Mapping[float, Compressor] = MappingProxyType({})
    known_gains: Mapping[float, float] = MappingProxyType({})
    sent_as_dense: bool = False

    def at(self, cf: float) -> Compressor:
        """The compressor that works at `cf`: a rung, or this one. At inf, the one for the largest
        CFs."""
        return self.rungs.get(cf, self)

    @property
    def rung_names(self) -> dict[float, str]:
        """Names of the compressors at the CFs of `known_gains`."""
        return {cf: self.at(cf).name for cf in self.known_gains}

    @abstractmethod
    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        """x += add in place, if given, then the payload of flat `x`. `add` has the dtype, length
        and device of `x`."""

    def smaller(self, payload: Payload, factor: float) -> Payload:
        """Compress what `payload` keeps by a further `factor` >= 1 (GraVAC section III). Its error
        is against the tensor that was compressed first. NotImplementedError unless `multilevel`."""
        raise NotImplementedError(f"compressor {self.name!r} does not compress in levels")

    @abstractmethod
    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        """out += scale * (what `payload` stands for), in place. Raises InvalidPayload, and writes
        nothing, if the payload points outside flat `out`."""

    @abstractmethod
    def nbytes(self, spec: Spec) -> int:
        """Bytes of a payload that a rank hands to collectives: the same on every rank."""

    @abstractmethod
    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        """The payload of each rank, whose bytes are the rows of `data` (ranks, bytes; uint8): the
        inverse of `Payload.write`. On a device their `invalid` may be one flag, which says whether
        any of them is. InvalidPayload if rows are not of `nbytes(spec)`."""

    def compress_rows(self, x: Tensor, specs: Sequence[Spec], add: Tensor | None) -> Payload | None:
        """`compress` of tensors of equal length, two or more, that lie one behind the other in flat
        x, on a device by as many operations as for two of them: a payload whose bytes are those of
        the tensors' payloads, one after the other. None where this compressor cannot, and nothing
        is done. specs: of each tensor."""
        return None

    def read_rows(self, data: Tensor, specs: Sequence[Spec]) -> Payload | None:
        """The payload that `compress_rows` has made. data: (tensors, bytes; uint8), of which each
        row begins with the payload of a tensor. None where this compressor cannot."""
        return None

    def mean_of(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        """out = scale * (sum of what `payloads` stand for), added in their order; 0 if `as_zeros`
        is set. Raises as `add_to` does."""
        out.zero_()
        self.add_all(out, payloads, scale, as_zeros)

    def add_all(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        """out += scale * (what each of `payloads` stands for), one after the other; nothing if
        `as_zeros` is set. Raises as `add_to` does."""
        for payload in payloads:
            self.add_to(out, payload.as_zeros(as_zeros), scale)

    def nearest(self, spec: Spec) -> float:
        """The nearest CF >= 1 that this compressor can really do."""
        return check_cf(spec.cf)

    def floats(self, spec: Spec) -> float:
        """Number of elements sent, indices not counted (the papers' "floats sent")."""
        return spec.numel / spec.cf

    def state_dict(self) -> dict[str, Any]:
        """The state that is carried from step to step (plain values and tensors), by parameter."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`; ValueError if it does not fit. It is called on a copy: what
        the compressor holds must be replaced, and not changed in place."""
        if state:
            raise ValueError(f"state: compressor {self.name!r} has none, got {sorted(state)}")

    def __repr__(self) -> str:
        """Its class and its settings: what must be alike on all ranks."""
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
    """This sends the dense gradient, as DDP itself would. The payload is the tensor, not a copy."""

    name = "none"
    sums = True

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        energy = squared_norm(x) if add is None else add_and_norm(x, add)
        return Payload((x.detach(),), spec.at(1.0), energies(energy, energy, 0.0, x))

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
    """Raise ValueError unless `x` is flat, fits `spec` and `add`, and its positions fit 32 bits."""
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
    """Raise InvalidPayload unless `out` has the shape of the tensor that was compressed."""
    if out.dim() != 1 or out.numel() != payload.numel:
        raise InvalidPayload(
            f"payload of {payload.numel} elements cannot be added to shape {tuple(out.shape)}"
        )


def split_rows(data: Tensor, *parts: tuple[int, torch.dtype]) -> list[tuple[Tensor, ...]]:
    """Cut each row of `data` (ranks, bytes; uint8) into tensors of (elements, dtype) each, one
    after the other: the inverse of `Payload.write`. A part is a view of `data` where its alignment
    allows, else a copy, made for all rows at once.

    InvalidPayload unless a row is exactly as long as the parts together."""
    wanted = sum(count * dtype.itemsize for count, dtype in parts)
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] != wanted:
        raise InvalidPayload(
            f"payloads must be of {wanted} bytes (uint8), "
            f"got {data.dtype} of shape {tuple(data.shape)}"
        )
    columns = columns_of(data, parts)
    return list(zip(*map(torch.unbind, columns), strict=True)) if parts else [()] * len(data)


def columns_of(data: Tensor, parts: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """What `split_rows` finds of each part: (ranks, elements)."""
    columns, start = [], 0
    for count, dtype in parts:
        size = dtype.itemsize
        raw = data[:, start : start + count * size]
        start += raw.shape[1]
        if raw.stride(1) != 1 or any(
            at % size for at in (raw.storage_offset(), raw.data_ptr(), raw.stride(0))
        ):
            raw = torch.empty(raw.shape, dtype=torch.uint8, device=raw.device).copy_(raw)
        columns.append(
            raw.view(dtype) if count else data.new_empty(0).view(dtype).expand(len(data), 0)
        )
    return columns


def projection_error(total: Scalar, energy: Scalar) -> Scalar:
    """total - energy, which is what a projection loses; never below 0, nan stays nan."""
    error = total - energy
    if isinstance(error, Tensor):
        return error.clamp(min=0.0)
    return 0.0 if error < 0.0 else error
