"""On a GPU: what compression takes of it, in copies of a tensor, launches and steps of GPT-2.

Times of tensors are of the device's own events, in turn with a peer; launches and the device's time
in a step are told by torch's profiler. Nothing is said of a network, which a single machine has
not. `python -m runs.bench.gpu` needs nothing but torch and NumPy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

from adaptive import AdaptiveCompressor, Fixed
from adaptive.network.link import done_with
from adaptive.step.config import RUNGS
from compressors import Compressor, make_compressor
from compressors.base import Spec
from compressors.ladder import Ladder
from policies import Policy
from runs.bench.step import Held
from runs.bench.timing import Row, describe, group, interleaved, median_ratio
from runs.coding import KEY, our_step
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
    layer that is one bucket, and GPT-2."""

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
    return list(_rows(asked.rounds, asked.seed, torch.device(device), sizes))


def _rows(rounds: int, seed: int, device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """One after the other, as they are measured: what matters most first."""
    yield from _step_rows(rounds, device, sizes)
    for numel in sizes.tensors:
        for name in TENSORS:
            yield _tensor_row(name, numel, rounds, seed, device)
    yield from _launch_rows(device, sizes)


def _tensor_row(name: str, numel: int, rounds: int, seed: int, device: torch.device) -> Row:
    """A whole step of one tensor: accumulate, select or quantize, write, residual, read, decode."""
    generator = torch.Generator(device).manual_seed(seed)
    grad = torch.randn(numel, generator=generator, device=device)
    residual, mean = torch.zeros_like(grad), torch.empty_like(grad)
    compressor = make_compressor(name)
    cf = compressor.nearest(Spec((numel,), CF))
    contenders: dict[str, Callable[[], object]] = {
        "it": partial(_tensor_step, compressor, residual, grad, mean, cf),
        "copy": lambda: mean.copy_(grad),
    }
    times = interleaved(contenders, rounds, warmup=3, device=device)
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


def _launches(device: torch.device, step: Callable[[], object]) -> int:
    """Kernels and copies of one step, after some; on a CPU the operations that torch calls."""
    for _ in range(5):
        step()
    return _profiled(device, step)[1]


def _profiled(device: torch.device, step: Callable[[], object]) -> tuple[float, int]:
    """Of one step, seconds and number of kernels and copies; on a CPU of torch's operations."""
    on_device = device.type == "cuda"
    _finish(device)
    with profile(activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]) as seen:
        step()
        _finish(device)
    kind = torch.autograd.DeviceType.CUDA if on_device else torch.autograd.DeviceType.CPU
    took = [e.time_range.elapsed_us() for e in seen.events() or () if e.device_type == kind]
    return sum(took) / 1e6, len(took)


def _finish(device: torch.device) -> None:
    """Wait for all that the device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# A step of GPT-2 ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A way to train GPT-2. cf: that is sent; None: DDP without a hook. measures: as the default
    policy does in every step. ranks: of more than one the others are made by torch's fake process
    group, so that the payloads of so many are decoded. hook: PyTorch's own, in the library's place
    (a lambda, since DDP refuses the bf16 hook by its name where there is no GPU)."""

    name: str
    optimizer: str = "fused AdamW"
    cf: float | None = None
    measures: bool = False
    ranks: int = 1
    hook: Callable[[Any, Any], Any] | None = None


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-4),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9),
}
CONTENDERS = (
    *(Contender("plain DDP", optimizer) for optimizer in OPTIMIZERS),
    Contender("PyTorch's bf16 hook", hook=lambda state, bucket: bf16_compress_hook(state, bucket)),
    Contender("dense", cf=1.0),
    *(Contender("CF 100", optimizer, CF) for optimizer in OPTIMIZERS),
    Contender("CF 100, measuring as by default", "AdamW", CF, measures=True),
    Contender("int8", cf=4.0),
    Contender("int4", cf=8.0),
    Contender("CF 100, 2 ranks", cf=CF, ranks=2),
    Contender("CF 100, 8 ranks", cf=CF, ranks=RANKS),
)
"""Each is compared with plain DDP and the same optimizer, of which it comes after."""

MOST_DEVICE, MOST_HOST = 3e-3, 8e-3
"""The goals for CF 100 of 124 M parameters: seconds of the device and the host beyond plain DDP."""


@dataclass(frozen=True)
class Cost:
    """Of a step: seconds by the clock on the wall, of the host and of the device, and launches.
    first: seconds of the first step. peak: GiB."""

    wall: float
    host: float
    device: float
    launches: int
    first: float
    peak: float

    def __str__(self) -> str:
        return (
            f"wall {1e3 * self.wall:.1f} ms, host {1e3 * self.host:.1f}, device "
            f"{1e3 * self.device:.1f} in {self.launches} launches, first step {self.first:.1f} s, "
            f"peak {self.peak:.1f} GiB"
        )


def _step_rows(rounds: int, device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """GPT-2 with a tied head, in float32 under autocast to bf16."""
    plain: dict[str, Cost] = {}
    launches: dict[int, int] = {}
    for each in CONTENDERS:
        cost = _cost(each, rounds, device, sizes)
        base = plain.setdefault(each.optimizer, cost)
        what = f"GPT-2 step, {each.optimizer}, {each.name}"
        yield Row(f"{what}: it / plain DDP", cost.wall / base.wall, "", str(cost))
        if each.ranks > 1:
            launches[each.ranks] = cost.launches
        elif each.name == "CF 100":
            extra, host = cost.device - base.device, cost.host - base.host
            told = f"{1e3 * extra:.2f} ms, {cost.launches - base.launches} launches"
            ratio = extra / MOST_DEVICE
            yield Row(f"{what}: device time beyond plain DDP / 3 ms", ratio, "<= 1", told)
            yield Row(
                f"{what}: host time beyond plain DDP / 8 ms",
                host / MOST_HOST,
                "<= 1",
                f"{1e3 * host:.2f} ms",
            )
    few, many = launches[2], launches[RANKS]
    told = f"{many} and {few}"
    yield Row(f"CF 100: launches among {RANKS} ranks / among 2", many / few, "<= 1", told)


def _cost(of: Contender, rounds: int, device: torch.device, sizes: Sizes) -> Cost:
    on_device = device.type == "cuda"
    if on_device:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    backend = "fake" if of.ranks > 1 else "nccl" if on_device else "gloo"
    with group(backend, of.ranks):
        step, compressor = _gpt_step(of, device, sizes)
        firsts = [_timed(step, device) for _ in range(12)]  # of a dense run the last ones rest
        _finish(device)
        hosts, began = [], time.perf_counter()
        for _ in range(rounds):
            before = time.perf_counter()
            step()
            hosts.append(time.perf_counter() - before)
        _finish(device)
        wall = (time.perf_counter() - began) / rounds
        for _ in range(3):  # with nothing to wait for
            _finish(device)
            before = time.perf_counter()
            step()
            hosts.append(time.perf_counter() - before)
        seconds, launches = _profiled(device, step)
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if on_device else 0.0
        if compressor is not None:
            compressor.detach()
    return Cost(wall, min(hosts), seconds, launches, firsts[0], peak)


def _timed(step: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    step()
    _finish(device)
    return time.perf_counter() - began


def _gpt_step(
    of: Contender, device: torch.device, sizes: Sizes
) -> tuple[Callable[[], None], AdaptiveCompressor | None]:
    torch.manual_seed(0)
    with device:
        gpt = ByteGPT(sizes.vocab, sizes.length, sizes.width, sizes.layers, sizes.heads)
    gpt.head.weight = gpt.symbols.weight  # 124 M parameters, not 163
    nn.init.normal_(gpt.head.weight, std=0.02)
    model = DDP(gpt, gradient_as_bucket_view=True)
    if of.hook is not None:
        model.register_comm_hook(None, of.hook)
    optimizer = OPTIMIZERS[of.optimizer](model.parameters())
    compressor = None
    if of.cf is not None:
        policy: Policy = Fixed(of.cf)
        if of.measures:
            policy = Held()
            policy.cf = of.cf
        rungs = {of.cf: RUNGS[of.cf]} if of.cf in RUNGS else {}
        exchange: Any = "all_gather" if of.ranks > 1 else "auto"
        base = Ladder(rungs, above="topk")
        compressor = AdaptiveCompressor(base, policy=policy, exchange=exchange)
        compressor.attach(model, optimizer=optimizer)
    tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.length), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens).flatten(0, 1)
        F.cross_entropy(logits.float(), tokens.flatten()).backward()
        optimizer.step()

    return step, compressor


if __name__ == "__main__":
    for row in _rows(5, 0, torch.device("cuda"), Sizes(tensors=(100_000_000,))):
        print(row, flush=True)
