"""A compressor written for GRACE, as the base of `AdaptiveCompressor`.

    torchrun --standalone --nproc-per-node 2 examples/grace.py

Xu and others, "GRACE: A Compressed Communication Framework for Distributed Machine Learning"
(ICDCS 2021): `compress(tensor, name) -> (tensors, ctx)` and `decompress(tensors, ctx) -> tensor`.
The tensors travel. ctx does not: here it has to follow from the size of the tensor.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Compressor, Fixed
from compressors import Payload, check_cf
from compressors.base import Spec, check_flat, check_out, split_rows

Forms = list[tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each tensor that travels."""


class GraceCompressor(Compressor):
    """Wraps a compressor written for GRACE as a `Compressor`.

    inner: the GRACE compressor. The sizes of its tensors, and its ctx, must depend on the number of
        elements and the CF alone (ValueError otherwise; GRACE's random-k has indices in its ctx).
        `inner.compress` must leave its argument as it is. It is also called to measure candidates,
        and once for every size on noise; `inner.decompress` is called on another thread. What
        `inner` itself remembers is in no `state_dict`.
    ratio: name of the attribute of `inner` for the share of elements to keep, set to 1 / CF before
        each compression; None if its CF is fixed.
    cf: the CF of `inner`, if ratio is None.
    feeds_back: whether to feed the error back; False for an unbiased compressor.

    A payload has the tensors of `inner`, flat, and then one number: 1, NaN for a gradient that is
    not finite, or 0 for a payload to be ignored.
    """

    multilevel = False
    sampled = False  # not known
    keeps_zeros = False  # not known

    def __init__(
        self,
        inner: Any,
        *,
        ratio: str | None = "compress_ratio",
        cf: float | None = None,
        feeds_back: bool = True,
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
        self.feeds_back = feeds_back
        self._expected: dict[tuple[int, float, torch.dtype], tuple[Forms, Any]] = {}

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        check_flat(x, spec, add)
        tensor, spec = x.detach(), spec.at(self.nearest(spec))
        if add is not None:
            tensor.add_(add.detach())
        numel, cf = spec.numel, spec.cf
        forms, ctx = self._of_size(numel, cf, tensor.dtype)
        tensors, ctx_now = self._run(tensor, cf, spec.key.name)
        if _forms(tensors) != forms or not _is_plain(ctx_now) or ctx_now != ctx:
            raise ValueError(
                f"compressor {self.name!r} made {_forms(tensors)} with ctx {ctx_now!r} of {numel} "
                f"elements at CF {cf:g}, and {forms} with ctx {ctx!r} before: both must depend on "
                f"the number of elements and the CF alone"
            )
        sent = self._decode(tensors, ctx, numel, tensor.dtype)
        norms = [each.double().square().sum() for each in (tensor, sent, tensor - sent)]
        mark = torch.ones(1, device=tensor.device)
        parts = (*(part.contiguous().flatten() for part in tensors), mark)
        return Payload(parts, spec, torch.stack(norms))

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        check_out(out, payload)
        *parts, mark = payload.parts
        forms, ctx = self._of_size(payload.numel, payload.cf, payload.dtype)
        tensors = [part.view(shape) for part, (shape, _) in zip(parts, forms, strict=True)]
        sent = self._decode(tensors, ctx, payload.numel, payload.dtype)
        out.detach().add_(sent.masked_fill(mark != 1, 0.0).to(out.dtype), alpha=scale)

    def nbytes(self, spec: Spec) -> int:
        forms, _ = self._of_size(spec.numel, self.nearest(spec), spec.dtype)
        return sum(shape.numel() * each.itemsize for shape, each in forms) + 4

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        spec = spec.at(self.nearest(spec))
        forms, _ = self._of_size(spec.numel, spec.cf, spec.dtype)
        sizes = [(shape.numel(), each) for shape, each in forms]
        rows = split_rows(data, *sizes, (1, torch.float32))
        return [Payload(parts, spec) for parts in rows]

    def nearest(self, spec: Spec) -> float:
        return check_cf(spec.cf) if self.cf is None else self.cf

    def _run(self, tensor: Tensor, cf: float, name: str) -> tuple[list[Tensor], Any]:
        if self.ratio is not None:
            setattr(self.inner, self.ratio, 1 / cf)
        tensors, ctx = self.inner.compress(tensor, name)
        return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors], ctx

    def _of_size(self, numel: int, cf: float, dtype: torch.dtype) -> tuple[Forms, Any]:
        """Forms and ctx of this size, CF and dtype: found by compressing noise, once."""
        size = numel, cf, dtype
        if size not in self._expected:
            generator = torch.Generator().manual_seed(numel)
            noise = torch.randn(numel, generator=generator, dtype=dtype)
            tensors, ctx = self._run(noise, cf, "noise")
            self._expected[size] = _forms(tensors), ctx
        return self._expected[size]

    def _decode(self, tensors: list[Tensor], ctx: Any, numel: int, dtype: torch.dtype) -> Tensor:
        sent: Tensor = self.inner.decompress(tensors, ctx).flatten()
        if sent.numel() != numel:
            raise ValueError(
                f"compressor {self.name!r} decompressed {sent.numel()} elements, expected {numel}"
            )
        return sent.to(dtype)


def _forms(tensors: list[Tensor]) -> Forms:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _is_plain(ctx: Any) -> bool:
    """Holds numbers, text and sizes, but no tensor."""
    if isinstance(ctx, (list, tuple)):
        return all(map(_is_plain, ctx))
    return ctx is None or isinstance(ctx, (bool, int, float, str, torch.dtype))


class GraceTopK:
    """Written as GRACE's own are: values and 64-bit indices of a share of the elements."""

    def __init__(self, compress_ratio: float = 0.1) -> None:
        self.compress_ratio = compress_ratio

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        k = max(1, int(tensor.numel() * self.compress_ratio))
        indices = tensor.abs().topk(k).indices
        return [tensor[indices], indices], (tensor.numel(), tensor.shape)

    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        values, indices = tensors
        numel, shape = ctx
        return values.new_zeros(numel).scatter_(0, indices, values).view(shape)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cf", type=float, default=20.0)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    base = GraceCompressor(GraceTopK())
    compressor = AdaptiveCompressor(base, (2, 100), policy=Fixed(cf=arguments.cf)).attach(model)

    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for step in range(arguments.steps):
        inputs = torch.randn(64, 100, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}, CF {compressor.cf:g}", flush=True)
    if rank == 0:
        print(compressor.summary())
    compressor.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
