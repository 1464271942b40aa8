"""Quantizers: every element is sent, in fewer bits.

    FP16, BF16  half precision
    Int8, Int4  even levels, rounded to the nearest, with a scale for each bucket of values
    QSGD        a few even levels, rounded at random

Quantizers that send hardly more than signs are in `compressors.signs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from compressors import base
from compressors.base import Compressor, Payload, Spec, check_seed
from compressors.kernels import blocks, kernels_for
from compressors.kernels.blocks import (
    Flag,
    scratch,
    widened,
    zeros_if,
)
from compressors.wire import values
from compressors.wire.values import BlockFormat, Half, Layout, Levels, TensorLevels

AT_ONCE = 1 << 26
"""The largest number of elements of all ranks that are decoded at once: 256 MB in float32."""


class Quantizer(Compressor):
    """A quantizer sends every element of a tensor, in a value format that the CF chooses.

    The CF is fp32 bits / bits of an element; scales are not counted in it.

    forms: the value format at each possible CF. Any other CF means the nearest possible CF (the
        smaller of two equally near ones), which is then the CF of the payload. TypeError for a
        format that is no `BlockFormat`.

    Not multilevel: quantizing quantized values would add a second error, and be no cheaper.

    one_by_one: the quantizer needs the shape of each tensor, so tensors are compressed one by one.
    """

    multilevel = False
    keeps_most_to = 8.0
    one_by_one: bool = False

    def __init__(self, forms: Mapping[float, BlockFormat]) -> None:
        for cf, form in forms.items():
            if not isinstance(form, BlockFormat):
                raise TypeError(
                    f"forms[{cf}] must be a format that codes block by block, like Levels; got "
                    f"{form!r} (other formats code the values of a sparsifier)"
                )
        self.forms = dict(sorted(forms.items()))

    def form(self, cf: float) -> BlockFormat:
        """The value format used at `cf`."""
        return self.forms[self._nearest(cf)]

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        base.check_flat(x, spec, add)
        spec = spec.at(self._nearest(spec.cf))
        parts, energies = values.encode_sum(self.forms[spec.cf], x, add, spec)
        return Payload(parts, spec, energies)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        base.check_out(out, payload)
        out = out.detach()
        if values.decode_by_kernel(self.form(payload.cf).coding, out, [payload], scale, add=True):
            return
        for start, stop in self._bounds(out, [payload]):
            self._add_block(out[start:stop], payload, start, scale)

    def nbytes(self, spec: Spec) -> int:
        layout = self.form(spec.cf).layout(spec.numel, spec.dtype, spec.segments)
        return sum(count * dtype.itemsize for count, dtype in layout)

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        spec = spec.at(self._nearest(spec.cf))
        layout = self.forms[spec.cf].layout(spec.numel, spec.dtype, spec.segments)
        return [Payload(parts, spec) for parts in base.split_rows(data, *layout)]

    def compress_rows(self, x: Tensor, specs: Sequence[Spec], add: Tensor | None) -> Payload | None:
        spec = base.joined(specs)
        base.check_flat(x, spec, add)
        spec = spec.at(self._nearest(spec.cf))
        form = self.forms[spec.cf]
        made = values.encode_rows(form, x.detach(), add, spec, len(specs))
        return made and base.RowsPayload(*made[:1], spec, made[1], layouts=self._layouts(specs))

    def read_rows(self, data: Tensor, specs: Sequence[Spec]) -> Payload | None:
        spec = base.joined(specs)
        form = self.form(spec.cf)
        if not values.decodes_rows(form, data):
            return None
        return base.RowsPayload.read(data, self._layouts(specs), spec.at(self._nearest(spec.cf)))

    def _layouts(self, specs: Sequence[Spec]) -> tuple[Layout, ...]:
        form, dtype = self.form(specs[0].cf), specs[0].dtype
        known = {of: form.layout(sum(of), dtype, of) for of in {spec.segments for spec in specs}}
        return tuple(known[spec.segments] for spec in specs)

    def mean_of(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        for payload in payloads:
            base.check_out(out, payload)
        out = out.detach()
        coding = self.form(payloads[0].cf).coding if payloads else None
        if values.decode_by_kernel(coding, out, payloads, scale, False, as_zeros):
            return
        if self._decode_at_once(out, payloads, scale, as_zeros):
            return
        payloads = [payload.as_zeros(as_zeros) for payload in payloads]
        wide = [each for each in payloads[:1] if each.dtype == out.dtype == widened(out.dtype)]
        for start, stop in self._bounds(out, payloads):
            block = out[start:stop]
            for payload in wide:
                self._decode(payload, start, block).mul_(scale)
            if not wide:
                block.zero_()
            for payload in payloads[len(wide) :]:
                self._add_block(block, payload, start, scale)

    def _decode_at_once(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag
    ) -> bool:
        """`mean_of` by a number of torch's operations that does not grow with the number of
        payloads. False, and nothing is done, on the host, if it is impossible, or if it would take
        too much memory."""
        count, first = len(payloads), payloads[0] if payloads else None
        if kernels_for(out).may_read or first is None or not 0 < count * out.numel() <= AT_ONCE:
            return False
        form, spec = self.form(first.cf), first.spec
        alike = all(each.spec.segments == spec.segments for each in payloads)
        if not form.codes_rows or count == 1 or not alike or isinstance(first, base.RowsPayload):
            return False
        parts = tuple(map(torch.cat, zip(*(each.parts for each in payloads), strict=True)))
        decoded = torch.empty(count * out.numel(), dtype=widened(spec.dtype), device=out.device)
        form.decode_from(parts, spec.segments * count, 0, decoded, spec.dtype, count)
        decoded = decoded.mul_(scale).view(count, -1).sum(0)
        out.copy_(zeros_if(as_zeros, decoded))
        return True

    def _add_block(self, out: Tensor, payload: Payload, start: int, scale: float) -> None:
        """out += scale * decoded, for a block of elements from `start` on."""
        dtype = payload.spec.dtype
        decoded = scratch("decoded", out.numel(), widened(dtype), out.device)
        out.add_(self._decode(payload, start, decoded).to(dtype), alpha=scale)

    def _decode(self, payload: Payload, start: int, out: Tensor) -> Tensor:
        """The elements of `payload` from `start` on, a block of them, in `out`."""
        spec, form = payload.spec, self.form(payload.cf)
        rows = len(payload.layouts) if isinstance(payload, base.RowsPayload) else 1
        form.decode_from(payload.parts, spec.segments, start, out, spec.dtype, rows)
        return out

    def _bounds(self, out: Tensor, payloads: Sequence[Payload]) -> Iterator[tuple[int, int]]:
        """(start, stop) of each block of `out` in which these payloads are decoded."""
        sizes = [self.form(payload.cf).block for payload in payloads]
        return blocks.block_bounds(out, max(sizes, default=blocks.CODE_BLOCK))

    def nearest(self, spec: Spec) -> float:
        return self._nearest(spec.cf)

    def floats(self, spec: Spec) -> float:
        """The number of fp32 numbers with the same number of bits."""
        return spec.numel / self._nearest(spec.cf)

    def _nearest(self, cf: float) -> float:
        cf = base.check_cf(cf)
        return cf if cf in self.forms else min(self.forms, key=lambda can: (abs(can - cf), can))


class OneFormat(Quantizer, BlockFormat):
    """The base of quantizers with a single CF, which are their own value format."""

    only_cf: ClassVar[float]

    def __init__(self) -> None:
        super().__init__({self.only_cf: self})


class HalfPrecision(Quantizer):
    """Half precision (CF 2) sends values of 16 bits, which an all-reduce can sum.

    Micikevicius et al., "Mixed Precision Training" (ICLR 2018), and PyTorch's `fp16_compress_hook`
    and `bf16_compress_hook`. Rounding errors of the sum on the wire are in no rank's residual.

    peers: number of ranks whose values can be summed without overflow. Values are clipped to a
        power of two, at most the largest number / peers (fp16: 512 for 64), and the rest is sent in
        later steps.
    """

    sums = True
    sum_dtype: torch.dtype

    def __init__(self, peers: int = 64) -> None:
        if isinstance(peers, bool) or not isinstance(peers, int) or peers < 1:
            raise ValueError(f"peers must be a whole number >= 1, got {peers!r}")
        self.peers = peers
        super().__init__({2.0: Half(self.name, self.sum_dtype, peers)})


class FP16(HalfPrecision):
    """FP16 sends IEEE half precision: 10 bits of mantissa and magnitudes from 6e-8 to 65504.

    Smaller magnitudes stay in the residual."""

    name = "fp16"
    sum_dtype = torch.float16


class BF16(HalfPrecision):
    """BF16 sends bfloat16: 7 bits of mantissa (2 to 3 decimal digits), the range of fp32."""

    name = "bf16"
    sum_dtype = torch.bfloat16


class Int8(Quantizer):
    """Int8 sends 8 bits a value (CF 4): x / scale rounded, scale = max|x| / 127 over a bucket.

    Block-wise quantization as by Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
    (ICLR 2022), with even levels. A contraction, used with error feedback.

    bucket: number of consecutive values that share a scale, a power of two.
    """

    name = "int8"
    bits = 8

    def __init__(self, bucket: int = 256) -> None:
        self.bucket = bucket
        super().__init__({32 / self.bits: Levels(self.name, self.bits, bucket)})


class Int4(Int8):
    """Int4 sends 4 bits a value (CF 8), with scale = max|x| / 7 over a bucket.

    With error feedback it trains as well as fp32: Jia et al., "SDP4Bit" (NeurIPS 2024); Xie et al.,
    "LoCo" (2024)."""

    name = "int4"
    bits = 4

    def __init__(self, bucket: int = 64) -> None:
        super().__init__(bucket)


class QSGD(Quantizer):
    """QSGD (CF 16, 32/3, 8, ..., 4) rounds to a few levels at random.

    Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding"
    (NeurIPS 2017), with codes of a fixed length: the length of the paper's Elias codes depends on
    the data. A value takes b = 2 to 8 bits: a sign and 2**(b - 1) - 1 levels.

    norm: a bucket is scaled by "max", its largest magnitude (section 4, used in all experiments
        there), or "l2", its norm (section 3.1; larger steps, for the theory).
    bucket: number of consecutive values that share a scale, a power of two. None: all values of a
        tensor share one; QSGD(norm="l2", bucket=None) is exactly the paper's section 3.1, with
        2**(b - 1) levels. Its errors are far larger, because an element is small compared with the
        norm of a whole tensor.
    seed: of the random numbers, which also depend on the tensor's name, the step and the rank.
    feeds_back: error feedback. The mean error is zero, so the default is False. True: only numbers
        of bits are used for which error feedback converges: 5 and more for buckets of 512, 3 and
        more for 64.
    """

    name = "qsgd"

    def __init__(
        self,
        norm: str = "max",
        bucket: int | None = 512,
        seed: int = 0,
        feeds_back: bool = False,
    ) -> None:
        self.norm, self.bucket, self.seed = norm, bucket, check_seed(seed)
        self.feeds_back = feeds_back
        if bucket is None:
            if feeds_back:
                raise ValueError("bucket must be a number for feeds_back=True, got None")
            forms = {32 / b: TensorLevels(self.name, b, norm, seed) for b in range(2, 9)}
            super().__init__(forms)
            return
        of_buckets = [Levels(self.name, bits, bucket, norm, seed) for bits in range(2, 9)]
        if feeds_back:
            of_buckets = [form for form in of_buckets if contracts(form)]
        if not of_buckets:
            raise ValueError(f"bucket must be smaller for feeds_back=True, got {bucket}")
        super().__init__({32 / form.bits: form for form in of_buckets})


def contracts(form: Levels) -> bool:
    """Whether C with this format is a contraction: E||x - C(x)||^2 < ||x||^2 for every x.

    In units of the scale, a value e < 1 has energy e^2 and the mean squared error e - e^2. At worst
    (e = 1/4) the error is 1/8 larger than the energy. The largest value of a bucket has energy
    levels^2 and no error. For "l2" this is Lemma 3.1.
    """
    worst = form.bucket if form.norm == "l2" else (form.bucket - 1) / 8
    return form.levels**2 > worst
