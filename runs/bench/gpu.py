"""On a GPU: what a step of compression takes of it, in copies of the tensor, launches and time.

Times are of the device's own events, in turn with a copy of the same tensor; launches are counted
by torch's profiler. Seven of eight ranks are made by torch's fake process group, so that one
machine shows what the hook does for eight: what they send is this rank's own over again. Nothing is
said of a network, which a single machine has not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from adaptive import AdaptiveCompressor, Fixed, Updates
from adaptive.exchange.pipeline import done_with
from adaptive.replicas import DDPReplica
from compressors import Compressor, make_compressor
from compressors.base import Spec, kept
from policies import Policy
from runs.bench.compressors import KEY, our_step
from runs.bench.ddp import LADDER, Shadowed
from runs.bench.timing import Row, describe, group, interleaved, median_ratio
from runs.models.gpt import ByteGPT
from runs.parser import UsageError

if TYPE_CHECKING:
    from runs.bench.command import Benching

CF = 100.0
RANKS = 8
GOALS = {"topk": "<= 4", "topk+int4": "<= 4", **dict.fromkeys(("int8", "qsgd", "bf16"), "<= 3")}
"""Of a whole step of one tensor, in copies of it."""
OTHERS = ("dgc", "natural", "onebit", "signsgd", "randomk")
Hook = Callable[[DDP, Optimizer], None]
"""Attaches or registers something."""

LAUNCHES, HOST_MS = 40, 0.3
"""Goals for a bucket in the hook."""


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
    where, rounds = torch.device(device), asked.rounds
    rows = []
    for numel in sizes.tensors:
        rows += _tensor_rows(numel, rounds, asked.seed, where)
    rows += _hook_rows(rounds, where, sizes.bucket)
    return rows + _step_rows(rounds, where, sizes)


# One tensor --------------------------------------------------------------------------------------


def _tensor_rows(numel: int, rounds: int, seed: int, device: torch.device) -> list[Row]:
    """A whole step of one tensor: accumulate, select or quantize, write, residual, read, decode."""
    generator = torch.Generator(device).manual_seed(seed)
    grad = torch.randn(numel, generator=generator, device=device)
    residual, mean = torch.zeros_like(grad), torch.empty_like(grad)
    runs: list[tuple[str, str, Callable[[], object]]] = []
    for name in (*GOALS, *OTHERS):
        compressor = make_compressor(name)
        cf = compressor.nearest(Spec((numel,), CF))
        step = partial(_tensor_step, compressor, residual, grad, mean, cf)
        runs.append((f"{name} CF {cf:g}", GOALS.get(name, ""), step))
    runs += [
        (f"torch.topk CF {CF:g}", "", lambda: grad.abs().topk(kept(numel, CF), sorted=False)),
        ("to bf16 and back", "", lambda: mean.copy_(grad.to(torch.bfloat16))),
    ]
    rows = []
    for name, goal, run in runs:
        residual.zero_()
        contenders = {"it": run, "copy": lambda: mean.copy_(grad)}
        times = interleaved(contenders, rounds, warmup=3, device=device)
        what = f"{name}, {numel / 1e6:g} M elements: it / copy"
        rows.append(Row(what, median_ratio(times["it"], times["copy"]), goal, describe(times)))
    return rows


def _tensor_step(
    compressor: Compressor, residual: Tensor, grad: Tensor, mean: Tensor, cf: float
) -> None:
    numel = grad.numel()
    nbytes = compressor.nbytes(Spec((numel,), cf))
    wire = torch.empty(nbytes, dtype=torch.uint8, device=grad.device)
    our_step(compressor, wire, residual, grad, cf)
    received = compressor.read(wire, Spec((numel,), cf, grad.dtype, KEY))
    compressor.add_to(mean.zero_(), received)


# One bucket in the hook --------------------------------------------------------------------------


def _hook_rows(rounds: int, device: torch.device, width: int) -> list[Row]:
    """Launches and host time of the hook for a bucket of width^2 elements, among eight ranks."""
    rows = []
    with group("fake", RANKS):
        plain = _launches(device, _bucket_step(device, width, None))
        for base, cf in (("topk+int4", CF), ("topk+int4", 1000.0), ("int8", 4.0), ("none", 1.0)):
            compressor = AdaptiveCompressor(base, (1, 1000), policy=Fixed(cf=cf))
            host: list[float] = []
            step = _bucket_step(device, width, compressor, host)
            launches = _launches(device, step) - plain
            host.clear()
            for _ in range(3 * rounds):
                step()
                _wait_for(device)
            name = f"{base} CF {cf:g}, a bucket of {width**2 / 1e6:.1f} M elements, {RANKS} ranks"
            took = 1e3 * median(host)
            told = f"{launches} launches, {took:.3f} ms of the host's time in the hook"
            ratio = launches / LAUNCHES
            rows.append(Row(f"{name}: launches / {LAUNCHES}", ratio, "<= 1", told))
            rows.append(Row(f"{name}: host ms / {HOST_MS}", took / HOST_MS, "<= 1", told))
            compressor.detach()
    return rows


def _bucket_step(
    device: torch.device,
    width: int,
    compressor: AdaptiveCompressor | None,
    host: list[float] | None = None,
) -> Callable[[], None]:
    """A step of a model that is one bucket, with a hook that does nothing if there is no
    `compressor`; the host's seconds in the hook go to `host`."""
    model = DDP(nn.Linear(width, width, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(8, width, device=device)

    if compressor is None:

        def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            return done_with(bucket.buffer())

        # DDP compares annotations with classes, and rejects the strings that are in this file.
        hook.__annotations__ = {"bucket": dist.GradBucket}
        model.register_comm_hook(None, hook)
    else:
        replica = compressor.attach(model).running().replica
        assert isinstance(replica, DDPReplica)
        reduce = replica.reduce

        def timed(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            began = time.perf_counter()
            done = reduce(bucket)
            if host is not None:
                host.append(time.perf_counter() - began)
            return done

        replica.reduce = timed  # type: ignore[method-assign]

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _launches(device: torch.device, step: Callable[[], None]) -> int:
    """Kernels and copies of one step, after some; on a CPU the operations that torch calls."""
    for _ in range(5):
        step()
    _wait_for(device)
    on_device = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]) as seen:
        step()
        _wait_for(device)
    kind = torch.autograd.DeviceType.CUDA if on_device else torch.autograd.DeviceType.CPU
    return sum(1 for event in seen.events() or () if event.device_type == kind)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# A step of a GPT ---------------------------------------------------------------------------------


def _step_rows(rounds: int, device: torch.device, sizes: Sizes) -> list[Row]:
    """A step of a GPT in bf16 with AdamW on one rank, with each hook / without one; and its peak
    memory."""
    cuda = device.type == "cuda"
    fixed = f"topk+int4 CF {CF:g}"
    ladder = f"{fixed}, shadow ladder"
    half = partial(_attach, "topk+int4", Fixed(cf=CF), memory=Updates(dtype=torch.bfloat16))
    hooks: dict[str, Hook] = {
        "no hook": lambda ddp, optimizer: None,
        "base none": partial(_attach, "none", Fixed(cf=1)),
        fixed: partial(_attach, "topk+int4", Fixed(cf=CF)),
        ladder: partial(_attach, "topk+int4", Shadowed(cf=CF, gain="signal")),
        "int8": partial(_attach, "int8", Fixed(cf=4)),
        f"{fixed}, residual in bf16": half,
    }
    if cuda:  # bf16_compress_hook needs NCCL
        state = theirs.PowerSGDState(None, 4, start_powerSGD_iter=2)
        hooks["PyTorch's bf16 hook"] = partial(_register, None, default_hooks.bf16_compress_hook)
        hooks["PyTorch's PowerSGD hook, rank 4"] = partial(_register, state, theirs.powerSGD_hook)
    with group("nccl" if cuda else "gloo"):
        made = {name: _gpt_step(device, sizes, hook) for name, hook in hooks.items()}
        steps = {name: step for name, (step, _) in made.items()}
        times = interleaved(steps, rounds, warmup=3, device=device)
    model_nbytes = 4 * sum(p.numel() for p in _gpt(torch.device("meta"), sizes).parameters())
    rows = []
    for name in list(hooks)[1:]:
        detail = describe({each: times[each] for each in (name, "no hook")})
        if cuda:
            extra = (made[name][1] - made["no hook"][1]) / model_nbytes
            detail += f", {extra:.2f} x the model's fp32 size more memory at its peak"
        ratio = median_ratio(times[name], times["no hook"])
        goal = "<= 1.03" if name == "base none" else ""
        rows.append(Row(f"GPT step in bf16, {name}: with / without a hook", ratio, goal, detail))
    shadow = median(a - b for a, b in zip(times[ladder], times[fixed], strict=True))
    share = shadow / median(times["no hook"])
    what = "shadow ladder with signal gain / GPT step"
    return [*rows, Row(what, share, "<= 0.02", f"{len(LADDER)} CFs")]


def _gpt(device: torch.device, sizes: Sizes) -> nn.Module:
    shape = sizes.vocab, sizes.length, sizes.width, sizes.layers, sizes.heads
    with device:
        return ByteGPT(*shape).to(torch.bfloat16)


def _attach(base: str, policy: Policy, model: DDP, optimizer: Optimizer, **options: Any) -> None:
    compressor = AdaptiveCompressor(base, (1, 1000), policy=policy, **options)
    compressor.attach(model, optimizer=optimizer)


def _register(state: Any, hook: Any, model: DDP, optimizer: Optimizer) -> None:
    model.register_comm_hook(state, hook)


def _gpt_step(device: torch.device, sizes: Sizes, hook: Hook) -> tuple[Callable[[], None], int]:
    """A step, and the largest number of bytes that it has held on a GPU beyond what was there."""
    cuda = device.type == "cuda"
    held = torch.cuda.memory_allocated(device) if cuda else 0
    torch.manual_seed(0)
    model = DDP(_gpt(device, sizes), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    hook(model, optimizer)
    tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.length), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        logits = model(tokens).flatten(0, 1)
        F.cross_entropy(logits.float(), tokens.flatten()).backward()
        optimizer.step()

    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        step()
    _wait_for(device)
    return step, torch.cuda.max_memory_allocated(device) - held if cuda else 0
