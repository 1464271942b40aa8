"""The contract of a gradient compressor: one flat tensor and a CF become a payload, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf, isfinite, nan, prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compressors.kernels import add_and_norm, kernels_for, squared_norm
from compressors.kernels.blocks import (
    Flag,
    Scalar,
    check_same_length,
    either,
    energies,
)

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


class InvalidPayload(ValueError):  # noqa: N818
    """This error says that no compressor can have sent the received bytes (size, indices)."""


@dataclass(frozen=True)
class Payload:
    """A payload is a compressed tensor as it travels, with what is known about what was lost.

    parts: contiguous tensors, sent one after the other in this order.
    numel: elements of the tensor that was compressed.
    cf: compression factor it was compressed with.
    key: the tensor and step it belongs to.
    energies: ||a||^2, ||c||^2 and ||a - c||^2, the squared norms of what was compressed, of what is
        kept and of what is lost (float64, (3,), where the data is); None if unknown, as after
        receiving.
    dtype: of the tensor that was compressed.
    invalid: on a device, whether what was received cannot have been sent by any compressor; there
        it is decoded all the same, within bounds. On the host such bytes raise InvalidPayload.
    exact: a sparsifier's values before coding, to compress them further; None after receiving.
    """

    parts: tuple[Tensor, ...]
    numel: int
    cf: float
    key: Key
    energies: Tensor | None = None
    dtype: torch.dtype = torch.float32
    invalid: Flag = False
    exact: Tensor | None = None

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
        here = self.energies
        return kernels_for(here).numbers(here)

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

    name: the registered name, with what was added to it. shown: what messages call it: the name
        that the user gave.
    linear: payloads of several ranks may be summed element by element (all-reduce); otherwise they
        are gathered. All parts of a linear payload are of one dtype.
    error_feedback: C is a contraction, so feeding its error back converges. False for unbiased
        compressors whose values are scaled up.
    multilevel: `recompress` works: what is kept at a larger CF is found in what is kept at a
        smaller one. Otherwise candidates are compressed from the full tensor.
    sampled: a strided sample of a tensor shows how well the tensor itself is compressed.
    keeps_zeros: an element that is 0 is never decoded to something else.
    masking: the CF from which on its paper sets the velocity of sent elements to zero (momentum
        factor masking); inf for never.
    known_gains: gains by CF that policies take for known. Nothing is measured at these CFs.
    """

    name: str = ""
    linear: bool = False
    error_feedback: bool = True
    multilevel: bool = True
    sampled: bool = True
    keeps_zeros: bool = True
    masking: float = inf
    known_gains: Mapping[float, float] = MappingProxyType({})

    @property
    def parts(self) -> tuple[Compressor, ...]:
        """The compressors that this one is made of: itself, unless it is a `Ladder`."""
        return (self,)

    def at(self, cf: float) -> Compressor:
        """The compressor among `parts` that works at `cf`; at inf, the one for the largest CFs."""
        return self

    def keeps_most(self, cf: float) -> bool:
        """Whether a payload at `cf` loses so little that next to nothing waits in the residual."""
        return False

    def momentum_lag(self, cf: float) -> float:
        """The share of the momentum's lag, in (0, 1], that momentum correction should keep while
        this compressor runs at `cf` > 1."""
        return 1.0

    def in_full(self) -> Compressor:
        """For sparsifiers: the same elements are kept, and any number of values travels in full."""
        return self

    _shown: str | None = None

    @property
    def shown(self) -> str:
        return self._shown or self.name

    @shown.setter
    def shown(self, name: str) -> None:
        self._shown = name

    @abstractmethod
    def compress(self, tensor: Tensor, cf: float, key: Key) -> Payload:
        """Compress `tensor` (flat, n elements) at `cf` >= 1. `tensor` is left as it is."""

    def compress_sum(self, memory: Tensor, tensor: Tensor, cf: float, key: Key) -> Payload:
        """memory += tensor in place, then compress `memory`. Override to do it in one pass."""
        check_same_length(memory, tensor)
        memory.detach().add_(tensor)
        return self.compress(memory, cf, key)

    def recompress(self, payload: Payload, factor: float) -> Payload:
        """Compress what `payload` keeps by a further `factor` >= 1 (GraVAC section III). Its error
        is against the tensor that was compressed first. NotImplementedError unless `multilevel`."""
        raise NotImplementedError(f"compressor {self.name!r} does not compress in levels")

    @abstractmethod
    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        """out += scale * decompress(payload), in place. Raises InvalidPayload, and writes nothing,
        if the payload points outside flat `out`."""

    def subtract_from(self, tensor: Tensor, payload: Payload) -> None:
        """tensor -= decompress(payload), in place: what is left is the residual."""
        self.add_to(tensor, payload, -1.0)

    @abstractmethod
    def payload_nbytes(self, numel: int, cf: float, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the payload of `numel` elements at `cf`: the same on every rank."""

    @abstractmethod
    def read(self, data: Tensor, numel: int, cf: float, dtype: torch.dtype, key: Key) -> Payload:
        """The payload whose bytes are `data` (uint8, flat), the inverse of `Payload.write`.
        InvalidPayload if the size is not `payload_nbytes(numel, cf, dtype)`."""

    def read_all(
        self, data: Tensor, numel: int, cf: float, dtype: torch.dtype, key: Key
    ) -> list[Payload]:
        """The payload of each rank, whose bytes are the rows of `data` (ranks, bytes; uint8). On a
        device their `invalid` may be one flag, which says whether any of them is."""
        return [self.read(row, numel, cf, dtype, key) for row in data]

    def write_mean(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        """out = scale * (sum of decompress(payload)), added in their order; 0 if `as_zeros` is set.
        Raises as `add_to` does."""
        out.zero_()
        for payload in payloads:
            self.add_to(out, self.as_zeros(payload, as_zeros), scale)

    def as_nonfinite(self, payload: Payload, flag: Flag = True) -> Payload:
        """`payload` with every floating-point value NaN, if `flag` is set: so a rank tells the
        others that its gradient was not finite. A compressor whose payload has no floating-point
        part overrides this, `is_nonfinite` and `as_zeros`."""
        if not any(p.is_floating_point() for p in payload.parts):
            raise NotImplementedError(
                f"{type(self).__name__} must override as_nonfinite, is_nonfinite and as_zeros"
            )
        return _filled(payload, flag, nan)

    def is_nonfinite(self, payload: Payload) -> Flag:
        """Whether the payload (or a sum it went into) was made by `as_nonfinite`."""
        flag: Flag = False
        for part in payload.parts:
            if part.is_floating_point() and part.numel():
                flag = either(flag, kernels_for(part).flag(part[0].isnan()))
        return flag

    def any_nonfinite(self, payloads: Sequence[Payload]) -> Flag:
        """Whether any of the payloads was made by `as_nonfinite`."""
        flag: Flag = False
        parts = [part for payload in payloads for part in payload.parts]
        numbers = [part[:1] for part in parts if part.is_floating_point() and part.numel()]
        own = type(self).is_nonfinite is not Compressor.is_nonfinite
        if numbers and not own:
            first = torch.cat(numbers)  # as few operations for any number of payloads
            return kernels_for(first).any_nan(first)
        for payload in payloads:
            flag = either(flag, self.is_nonfinite(payload))
        return flag

    def as_zeros(self, payload: Payload, flag: Flag = True) -> Payload:
        """`payload` with every floating-point value 0, so that it decodes to zeros, if `flag` is
        set."""
        return _filled(payload, flag, 0.0)

    def indices(self, payload: Payload) -> Tensor | None:
        """The positions of the kept elements (int64, flat); None if all elements are kept."""
        return None

    def decompress(self, payload: Payload) -> Tensor:
        """The dense tensor that `payload` stands for (flat, payload.numel elements)."""
        device = payload.parts[0].device
        out = torch.zeros(payload.numel, dtype=payload.dtype, device=device)
        self.add_to(out, payload)
        return out

    def supported(self, cf: float, numel: int) -> float:
        """The nearest CF >= 1 that this compressor can really do on `numel` elements."""
        return check_cf(cf)

    def floats(self, numel: int, cf: float) -> float:
        """Number of elements sent, indices not counted (the papers' "floats sent")."""
        return numel / cf

    def supported_for(self, cf: float, shape: tuple[int, ...]) -> float:
        """`supported` on a parameter of this shape, for compressors that see a matrix."""
        return self.supported(cf, prod(shape))

    def floats_for(self, shape: tuple[int, ...], cf: float) -> float:
        return self.floats(prod(shape), cf)

    def exchanged_nbytes(self, shape: tuple[int, ...], cf: float) -> int:
        """Bytes that a rank hands to collectives for a float32 parameter of this shape."""
        return self.payload_nbytes(prod(shape), cf)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The one dtype of a linear compressor's parts, in which they are summed."""
        return dtype

    def state_dict(self) -> dict[str, Any]:
        """The state that is carried from step to step (plain values and tensors), by parameter."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`; ValueError if it does not fit."""
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
    linear = True

    def compress(self, tensor: Tensor, cf: float, key: Key) -> Payload:
        return self._payload(tensor, squared_norm(tensor), key)

    def compress_sum(self, memory: Tensor, tensor: Tensor, cf: float, key: Key) -> Payload:
        return self._payload(memory, add_and_norm(memory, tensor), key)

    def recompress(self, payload: Payload, factor: float) -> Payload:
        return payload

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        check_out(out, payload)
        out.detach().add_(payload.parts[0], alpha=scale)

    def payload_nbytes(self, numel: int, cf: float, dtype: torch.dtype = torch.float32) -> int:
        return numel * dtype.itemsize

    def read(self, data: Tensor, numel: int, cf: float, dtype: torch.dtype, key: Key) -> Payload:
        return Payload(split_bytes(data, (numel, dtype)), numel, 1.0, key, dtype=dtype)

    def supported(self, cf: float, numel: int) -> float:
        return 1.0

    def floats(self, numel: int, cf: float) -> float:
        return float(numel)

    def _payload(self, tensor: Tensor, energy: Scalar, key: Key) -> Payload:
        of = energies(energy, energy, 0.0, tensor)
        return Payload((tensor.detach(),), tensor.numel(), 1.0, key, of, tensor.dtype)


def _filled(payload: Payload, flag: Flag, value: float) -> Payload:
    """`payload` with every floating-point value replaced, if `flag` is set."""
    if flag is False:
        return payload
    parts = []
    for part in payload.parts:
        if part.is_floating_point():
            part = part.masked_fill(torch.as_tensor(flag, device=part.device), value)
        parts.append(part)
    return payload.with_parts(*parts)


def check_flat(tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` is flat and its positions fit 32 bits."""
    if tensor.dim() != 1 or tensor.numel() > MAX_NUMEL:
        raise ValueError(
            f"tensor must be flat with at most {MAX_NUMEL} elements, got {tuple(tensor.shape)}"
        )


def check_out(out: Tensor, payload: Payload) -> None:
    """Raise InvalidPayload unless `out` has the shape of the tensor that was compressed."""
    if out.dim() != 1 or out.numel() != payload.numel:
        raise InvalidPayload(
            f"payload of {payload.numel} elements cannot be added to shape {tuple(out.shape)}"
        )


def split_bytes(data: Tensor, *parts: tuple[int, torch.dtype]) -> tuple[Tensor, ...]:
    """Cut flat uint8 `data` into tensors of (elements, dtype) each, one after the other: the
    inverse of `Payload.write`. A part is a view of `data` where its alignment allows, else a copy.

    Raises InvalidPayload unless `data` is exactly as long as the parts together."""
    wanted = sum(count * dtype.itemsize for count, dtype in parts)
    if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != wanted:
        raise InvalidPayload(
            f"payload must be {wanted} bytes (flat uint8), "
            f"got {data.dtype} of shape {tuple(data.shape)}"
        )
    tensors, start = [], 0
    for count, dtype in parts:
        size = dtype.itemsize
        raw = data[start : start + count * size]
        start += raw.numel()
        if raw.stride(0) != 1 or raw.storage_offset() % size or raw.data_ptr() % size:
            raw = torch.empty(raw.shape, dtype=torch.uint8, device=raw.device).copy_(raw)
        tensors.append(raw.view(dtype))
    return tuple(tensors)


def split_rows(data: Tensor, *parts: tuple[int, torch.dtype]) -> list[tuple[Tensor, ...]]:
    """`split_bytes` of each row of `data` (ranks, bytes; uint8). What has to be copied is copied
    for all of them at once."""
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
        columns.append(
            raw.view(dtype).unbind() if count else [data.new_empty(0).view(dtype)] * len(data)
        )
    return list(zip(*columns, strict=True))


def projection_error(total: Scalar, energy: Scalar) -> Scalar:
    """total - energy, which is what a projection loses; never below 0, nan stays nan."""
    error = total - energy
    if isinstance(error, Tensor):
        return error.clamp(min=0.0)
    return 0.0 if error < 0.0 else error
