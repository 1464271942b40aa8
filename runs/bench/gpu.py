"""On a GPU: what compression takes of it, in copies of a tensor, launches and a GPT's steps.

Times are of the device's own events, in turn with a peer; launches are counted by torch's profiler.
Nothing is said of a network, which a single machine has not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

from adaptive import AdaptiveCompressor, Fixed
from adaptive.exchange.pipeline import done_with
from compressors import Compressor, make_compressor
from compressors.base import Spec
from runs.bench.compressors import KEY, our_step
from runs.bench.timing import Row, describe, group, interleaved, median_ratio
from runs.models.gpt import ByteGPT
from runs.parser import UsageError

if TYPE_CHECKING:
    from runs.bench.command import Benching

CF = 100.0
RANKS = 8
LAUNCHES = 40
"""The goal for a bucket in the hook."""

TENSORS = {"topk": "<= 4", "topk+int4": "<= 4", "int8": "<= 3", "qsgd": "<= 3", "bf16": "<= 3"}
"""Compressors, and the goal of a whole step of one tensor, in copies of it."""

HOOKS = {"none": 1.0, "int8": 4.0, "topk+int4": CF}
"""Compressors, and their CFs, in the hook."""


@dataclass(frozen=True)
class Sizes:
    """How large what is measured is: the tensors' elements, the inputs and outputs of a linear
    layer that is one bucket, and the GPT of the steps."""

    tensors: tuple[int, ...] = (100_000_000, 1_000_000_000)
    bucket: int = 2560
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50_257
    length: int = 1024
    batch: int = 8


def bench_gpu(asked: Benching, device: str = "cuda", sizes: Sizes = Sizes()) -> list[Row]:
    """The rows, of `device`. UsageError if torch sees no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("BENCH gpu needs a CUDA device, and torch sees none")
    where = torch.device(device)
    rows = [_tensor_row(name, numel, asked, where) for numel in sizes.tensors for name in TENSORS]
    return [*rows, *_launch_rows(where, sizes), *_step_rows(asked.rounds, where, sizes)]


def _tensor_row(name: str, numel: int, asked: Benching, device: torch.device) -> Row:
    """A whole step of one tensor: accumulate, select or quantize, write, residual, read, decode."""
    generator = torch.Generator(device).manual_seed(asked.seed)
    grad = torch.randn(numel, generator=generator, device=device)
    residual, mean = torch.zeros_like(grad), torch.empty_like(grad)
    compressor = make_compressor(name)
    cf = compressor.nearest(Spec((numel,), CF))
    contenders: dict[str, Callable[[], object]] = {
        "it": partial(_tensor_step, compressor, residual, grad, mean, cf),
        "copy": lambda: mean.copy_(grad),
    }
    times = interleaved(contenders, asked.rounds, warmup=3, device=device)
    what = f"{name} CF {cf:g}, {numel / 1e6:g} M elements: it / copy"
    return Row(what, median_ratio(times["it"], times["copy"]), TENSORS[name], describe(times))


def _tensor_step(
    compressor: Compressor, residual: Tensor, grad: Tensor, mean: Tensor, cf: float
) -> None:
    numel = grad.numel()
    nbytes = compressor.nbytes(Spec((numel,), cf))
    wire = torch.empty(nbytes, dtype=torch.uint8, device=grad.device)
    our_step(compressor, wire, residual, grad, cf)
    (received,) = compressor.read(wire[None], Spec((numel,), cf, grad.dtype, KEY))
    compressor.add_to(mean.zero_(), received)


def _launch_rows(device: torch.device, sizes: Sizes) -> list[Row]:
    """Launches of the hook for a bucket, beyond an idle hook's, among eight ranks. Seven
    are made by torch's fake process group: what they send is this rank's own over again."""
    rows = []
    with group("fake", RANKS):
        plain = _launches(device, _bucket_step(device, sizes.bucket, None))
        for base, cf in HOOKS.items():
            count = _launches(device, _bucket_step(device, sizes.bucket, base)) - plain
            of = f"a bucket of {sizes.bucket**2 / 1e6:.1f} M elements, {RANKS} ranks"
            what = f"{base} CF {cf:g}, {of}: launches / {LAUNCHES}"
            rows.append(Row(what, count / LAUNCHES, "<= 1", f"{count} launches"))
    return rows


def _bucket_step(device: torch.device, width: int, base: str | None) -> Callable[[], None]:
    """A step of a model that is one bucket, with a hook that does nothing if there is no base."""
    model = DDP(nn.Linear(width, width, device=device))
    if base is None:
        model.register_comm_hook(None, lambda _, bucket: done_with(bucket.buffer()))
    else:
        AdaptiveCompressor(base, (1, 1000), policy=Fixed(cf=HOOKS[base])).attach(model)
    x = torch.randn(8, width, device=device)
    return lambda: model(x).square().mean().backward()


def _launches(device: torch.device, step: Callable[[], None]) -> int:
    """Kernels and copies of one step, after some; on a CPU the operations that torch calls."""
    for _ in range(5):
        step()
    on_device = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]) as seen:
        step()
        if on_device:
            torch.cuda.synchronize(device)
    kind = torch.autograd.DeviceType.CUDA if on_device else torch.autograd.DeviceType.CPU
    return sum(1 for event in seen.events() or () if event.device_type == kind)


def _step_rows(rounds: int, device: torch.device, sizes: Sizes) -> list[Row]:
    """A step of a GPT in bf16 with AdamW on one rank, with each hook / without one."""
    with group("nccl" if device.type == "cuda" else "gloo"):
        steps = {"no hook": _gpt_step(device, sizes, None)}
        steps |= {base: _gpt_step(device, sizes, base) for base in HOOKS}
        times = interleaved(steps, rounds, warmup=3, device=device)
    return [
        Row(
            f"GPT step in bf16, {base} CF {cf:g}: with / without a hook",
            median_ratio(times[base], times["no hook"]),
            "<= 1.03" if base == "none" else "",
            describe({name: times[name] for name in (base, "no hook")}),
        )
        for base, cf in HOOKS.items()
    ]


def _gpt_step(device: torch.device, sizes: Sizes, base: str | None) -> Callable[[], None]:
    torch.manual_seed(0)
    with device:
        gpt = ByteGPT(sizes.vocab, sizes.length, sizes.width, sizes.layers, sizes.heads)
    model = DDP(gpt.to(torch.bfloat16), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if base is not None:
        compressor = AdaptiveCompressor(base, (1, 1000), policy=Fixed(cf=HOOKS[base]))
        compressor.attach(model, optimizer=optimizer)
    tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.length), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        logits = model(tokens).flatten(0, 1)
        F.cross_entropy(logits.float(), tokens.flatten()).backward()
        optimizer.step()

    return step
