"""Compressors written for GRACE, used as compressors of this library.

Xu and others, "GRACE: A Compressed Communication Framework for Distributed Machine Learning"
(ICDCS 2021): `compress(tensor, name) -> (tensors, ctx)` and `decompress(tensors, ctx) -> tensor`.
The tensors travel; ctx does not, so each rank decodes with its own ctx, as GRACE does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressors.base import Compressor, Key, Payload, check_cf, check_flat, check_out, split_bytes
from compressors.kernels import squared_norm
from compressors.kernels.blocks import Flag, energies, is_host

Forms = list[tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each tensor that travels."""


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
        inner: Any,
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
        self._forms: dict[tuple[int, float, torch.dtype], Forms] = {}
        self._contexts: dict[tuple[str, int, float], Any] = {}

    def compress(self, tensor: Tensor, cf: float, key: Key) -> Payload:
        check_flat(tensor)
        tensor, cf, numel = tensor.detach(), self.supported(cf, tensor.numel()), tensor.numel()
        expected = self._expected(numel, cf, tensor.dtype)
        tensors, ctx = self._run(tensor, cf, key.name)
        if _forms(tensors) != expected:
            raise ValueError(
                f"compressor {self.name!r} made {_forms(tensors)} for {numel} elements at CF "
                f"{cf:g} and {expected} before: sizes must depend on the number of elements and "
                f"the CF alone"
            )
        self._contexts[key.name, numel, cf] = ctx
        sent = self._decode(tensors, ctx, numel, tensor.dtype)
        norms = squared_norm(tensor), squared_norm(sent), squared_norm(tensor - sent)
        flag = torch.zeros(1, dtype=torch.uint8, device=tensor.device)
        parts = (*(part.contiguous().flatten() for part in tensors), flag)
        of = energies(*norms, tensor)
        return GracePayload(parts, numel, cf, key, of, tensor.dtype, ctx=ctx)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        check_out(out, payload)
        assert isinstance(payload, GracePayload)
        *parts, flag = payload.parts
        expected = self._expected(payload.numel, payload.cf, payload.dtype)
        tensors = [part.view(shape) for part, (shape, _) in zip(parts, expected, strict=True)]
        sent = self._decode(tensors, payload.ctx, payload.numel, payload.dtype)
        out.detach().add_(sent.masked_fill(flag != 0, 0.0).to(out.dtype), alpha=scale)

    def payload_nbytes(self, numel: int, cf: float, dtype: torch.dtype = torch.float32) -> int:
        expected = self._expected(numel, self.supported(cf, numel), dtype)
        return sum(shape.numel() * each.itemsize for shape, each in expected) + 1

    def read(self, data: Tensor, numel: int, cf: float, dtype: torch.dtype, key: Key) -> Payload:
        cf = self.supported(cf, numel)
        sizes = [(shape.numel(), each) for shape, each in self._expected(numel, cf, dtype)]
        parts = split_bytes(data, *sizes, (1, torch.uint8))
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
        return self.poison(payload, flag)  # what is marked decodes to zeros

    def supported(self, cf: float, numel: int) -> float:
        return check_cf(cf) if self.cf is None else self.cf

    def _run(self, tensor: Tensor, cf: float, name: str) -> tuple[list[Tensor], Any]:
        if self.ratio is not None:
            setattr(self.inner, self.ratio, 1 / cf)
        tensors, ctx = self.inner.compress(tensor, name)
        return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors], ctx

    def _expected(self, numel: int, cf: float, dtype: torch.dtype) -> Forms:
        """What is made for this size, CF and dtype: found by compressing noise, once."""
        if (numel, cf, dtype) not in self._forms:
            generator = torch.Generator().manual_seed(numel)
            noise = torch.randn(numel, generator=generator, dtype=dtype)
            self._forms[numel, cf, dtype] = _forms(self._run(noise, cf, "trial")[0])
        return self._forms[numel, cf, dtype]

    def _decode(self, tensors: list[Tensor], ctx: Any, numel: int, dtype: torch.dtype) -> Tensor:
        sent: Tensor = self.inner.decompress(tensors, ctx).flatten()
        if sent.numel() != numel:
            raise ValueError(
                f"compressor {self.name!r} decompressed {sent.numel()} elements, expected {numel}"
            )
        return sent.to(dtype)


def _forms(tensors: list[Tensor]) -> Forms:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]
