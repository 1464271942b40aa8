"""Compressors written for GRACE, used as compressors of this library.

Xu and others, "GRACE: A Compressed Communication Framework for Distributed Machine Learning"
(ICDCS 2021): `compress(tensor, name) -> (tensors, ctx)` and `decompress(tensors, ctx) -> tensor`.
The tensors travel; ctx does not, so each rank decodes what it receives with its own ctx of the
same tensor and step, as GRACE does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from compressors.base import Compressor, Key, Payload, check_cf, check_flat, check_out, split_bytes
from compressors.kernels import squared_norm
from compressors.kernels.blocks import Flag, energies, is_host


class GraceObject(Protocol):
    """This is the interface of a compressor written for GRACE."""

    def compress(self, tensor: Tensor, name: str) -> tuple[Any, Any]: ...

    def decompress(self, tensors: Any, ctx: Any) -> Tensor: ...


class _Form(NamedTuple):
    """This holds the shapes and dtypes of the tensors that travel."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def nbytes(self) -> int:
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in pairs)


@dataclass(frozen=True)
class GracePayload(Payload):
    """A GRACE payload holds the tensors that a GRACE compressor made.

    parts: its tensors, flat; then one byte, not 0 if the payload is poisoned.
    ctx: what its `decompress` wants beside the tensors; does not travel.
    """

    ctx: Any = None


class GraceCompressor(Compressor):
    """This wraps a compressor written for GRACE as a `Compressor`.

    inner: the GRACE compressor.
    ratio: name of the attribute of `inner` that is the share of elements to keep, set to 1 / CF
        before each compression; None if its CF is fixed.
    cf: the CF of `inner`, if ratio is None.
    error_feedback: whether to feed the error back; False for an unbiased compressor.

    The sizes of the tensors must depend on the number of elements and the CF alone (ValueError
    otherwise), and `inner.compress` must leave its argument as it is. It is also called to measure
    candidates and, once for every size, on noise; `inner.decompress` is called on a thread of the
    process group. What `inner` itself remembers is in no `state_dict`.
    """

    multilevel = False
    sampled = False  # compressing a sample as well would replace the ctx of the tensor
    keeps_zeros = False  # not known

    def __init__(
        self,
        inner: GraceObject,
        *,
        ratio: str | None = "compress_ratio",
        cf: float | None = None,
        error_feedback: bool = True,
    ) -> None:
        for method in ("compress", "decompress"):
            if not callable(getattr(inner, method, None)):
                raise TypeError(f"inner must have a method {method}(), got {inner!r}")
        if ratio is not None and not hasattr(inner, ratio):
            raise ValueError(
                f"ratio must name an attribute of inner ({type(inner).__name__}), or be None with "
                f"cf= given; got {ratio!r}"
            )
        if (ratio is None) != (cf is not None):
            raise ValueError(
                f"cf goes with ratio=None, and only with it; got ratio={ratio!r}, cf={cf!r}"
            )
        self.name = f"grace:{type(inner).__name__}"
        self.inner = inner
        self.ratio = ratio
        self.cf = None if cf is None else check_cf(cf)
        self.error_feedback = error_feedback
        self._forms: dict[tuple[int, float, torch.dtype], _Form] = {}
        self._contexts: dict[tuple[str, int, float], Any] = {}

    def compress(self, tensor: Tensor, cf: float, key: Key) -> Payload:
        check_flat(tensor)
        cf, numel = self.supported(cf, tensor.numel()), tensor.numel()
        form = self._form(numel, cf, tensor.dtype)
        tensors, ctx = self._run(tensor.detach(), cf, key.name)
        made = _form_of(tensors)
        if made != form:
            raise ValueError(
                f"compressor {self.name!r} made {made} for {numel} elements at CF {cf:g} and "
                f"{form} before: sizes must depend on the number of elements and the CF alone"
            )
        self._contexts[key.name, numel, cf] = ctx
        parts = [part.contiguous().flatten() for part in tensors]
        sent = self._decode(tensors, ctx, numel, tensor.dtype)
        energy, error = squared_norm(sent), squared_norm(tensor.detach() - sent)
        flag = torch.zeros(1, dtype=torch.uint8, device=tensor.device)
        total = squared_norm(tensor)
        of = energies(total, energy, error, tensor)
        return GracePayload((*parts, flag), numel, cf, key, of, tensor.dtype, ctx=ctx)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        check_out(out, payload)
        out.detach().add_(self._decoded(payload).to(out.dtype), alpha=scale)

    def subtract_from(self, tensor: Tensor, payload: Payload) -> None:
        self.add_to(tensor, payload, -1.0)

    def payload_nbytes(self, numel: int, cf: float, dtype: torch.dtype = torch.float32) -> int:
        return self._form(numel, self.supported(cf, numel), dtype).nbytes + 1

    def read(self, data: Tensor, numel: int, cf: float, dtype: torch.dtype, key: Key) -> Payload:
        cf = self.supported(cf, numel)
        form = self._form(numel, cf, dtype)
        sizes = [torch.Size(shape).numel() for shape in form.shapes]
        parts = split_bytes(data, *zip(sizes, form.dtypes, strict=True), (1, torch.uint8))
        ctx = self._contexts.get((key.name, numel, cf))
        return GracePayload(parts, numel, cf, key, dtype=dtype, ctx=ctx)

    def poison(self, payload: Payload, flag: Flag = True) -> Payload:
        mark = payload.parts[-1]
        marked = mark.masked_fill(torch.as_tensor(flag, device=mark.device), 1)
        return payload.with_parts(*payload.parts[:-1], marked)

    def is_poisoned(self, payload: Payload) -> Flag:
        marked = payload.parts[-1][0] != 0
        return bool(marked) if is_host(marked.device) else marked

    def void(self, payload: Payload, flag: Flag = True) -> Payload:
        """A payload that is marked decodes to zeros."""
        return self.poison(payload, flag)

    def supported(self, cf: float, numel: int) -> float:
        return check_cf(cf) if self.cf is None else self.cf

    def _run(self, tensor: Tensor, cf: float, name: str) -> tuple[list[Tensor], Any]:
        if self.ratio is not None:
            setattr(self.inner, self.ratio, 1 / cf)
        tensors, ctx = self.inner.compress(tensor, name)
        return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors], ctx

    def _form(self, numel: int, cf: float, dtype: torch.dtype) -> _Form:
        """The form for this size, CF and dtype: found by compressing noise, once."""
        form = self._forms.get((numel, cf, dtype))
        if form is None:
            generator = torch.Generator().manual_seed(numel)
            noise = torch.randn(numel, generator=generator, dtype=dtype)
            form = _form_of(self._run(noise, cf, "trial")[0])
            self._forms[numel, cf, dtype] = form
        return form

    def _decoded(self, payload: Payload) -> Tensor:
        assert isinstance(payload, GracePayload)
        form = self._form(payload.numel, payload.cf, payload.dtype)
        tensors = [
            part.view(shape) for part, shape in zip(payload.parts[:-1], form.shapes, strict=True)
        ]
        sent = self._decode(tensors, payload.ctx, payload.numel, payload.dtype)
        return sent.masked_fill(payload.parts[-1] != 0, 0.0)

    def _decode(self, tensors: list[Tensor], ctx: Any, numel: int, dtype: torch.dtype) -> Tensor:
        sent = self.inner.decompress(tensors, ctx).flatten()
        if sent.numel() != numel:
            raise ValueError(
                f"compressor {self.name!r} decompressed {sent.numel()} elements, expected {numel}"
            )
        return sent.to(dtype)


def _form_of(tensors: list[Tensor]) -> _Form:
    return _Form(tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors))
