"""Training under a network that is late and poisons what it has yet to fill.

    CUDA_LAUNCH_BLOCKING=1 python -m tests.gpu.late_network serial FILE [CASE ...]
    python -m tests.gpu.late_network late FILE [CASE ...]

The first run, in which nothing overlaps, makes what is right; the second must come to the same
bits, or there is a race. Ranks are made by torch's fake process group. Its collectives are replaced
by copies on a stream of their own: what is received is poisoned (NaN, 0xFF), the stream sleeps, and
only then is the result there. Callbacks are late, too, and the allocator is stirred with garbage on
each stream, so that memory that was given back too early is overwritten. Without a GPU the same
runs on CPU tensors that take the device's path.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore

from adaptive import AdaptiveCompressor, Delayed, LocalSteps
from adaptive.network import pipeline
from adaptive.network.collectives import Exchange
from adaptive.sync import every_step
from compressors.kernels import blocks
from tests.distributed.test_device_path import ByStep
from tests.gpu.compiling import share_compiling

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
RANKS, STEPS = 4, 14
WIDTH = 300 if CUDA else 60
BUCKET, PIECE = (0.3, 0.7) if CUDA else (0.01, 0.025)
"""MiB: a layer by itself, and two that are exchanged as one."""
DELAY = 2_500_000
"""Cycles that a collective takes: more than a millisecond."""
GARBAGE = 1e30


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.05),
    "momentum": lambda ps: torch.optim.SGD(
        ps, 0.05, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "adamw": lambda ps: torch.optim.AdamW(ps, 1e-2),
    "fused": lambda ps: torch.optim.AdamW(ps, 1e-2, fused=True),
    "capturable": lambda ps: torch.optim.AdamW(
        ps, torch.tensor(1e-2, device=DEVICE), capturable=CUDA
    ),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 1e-3),
}
CFS = (10.0, 100.0, 1.0, 3.0, 3.0, 50.0)


@dataclass(frozen=True)
class Case:
    """A way to train. cfs: sent in turn; none: by the default policy, which measures times, so that
    bits differ. bad, remote: the step in which this rank's gradients are not finite, or another's.
    apart: the first parameters, which are in the last bucket, are those of an optimizer that was
    not handed over. loaded: the step before which states are loaded, to new memory."""

    base: str = "topk"
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    cfs: tuple[float, ...] = CFS
    scaler: bool = False
    bad: int | None = None
    remote: int | None = None
    apart: bool = False
    loaded: int | None = None
    dtype: torch.dtype = torch.float32
    ddp: dict[str, Any] = field(default_factory=dict)


GATHERED, SHARDED = {"exchange": "all_gather"}, {"exchange": "sharded"}
VOTED = {"exchange": "voted_indices"}
LEVELS = (4.0, 4.0, 1.0)
# Run side by side, each begins with other kernels to compile.
# (An exchange that is chosen by measured times may be another one in each of the two runs.)
FAMILIES: dict[str, dict[str, Case]] = {
    "gradients": {
        "gathered": Case(options=GATHERED),
        "sharded": Case(options=SHARDED),
        "voted": Case(options=VOTED),
        "randomk, summed": Case("randomk", {"exchange": "all_reduce"}),
    },
    "momentum": {
        "voted, 8 bits": Case("topk+int8", VOTED, "momentum"),
        "dgc by layer": Case("dgc", {"granularity": "layer", **GATHERED}, "momentum"),
        "unused parameters": Case(
            options=GATHERED, optimizer="momentum", ddp={"find_unused_parameters": True}
        ),
        "scaler, a bad step": Case(options=GATHERED, optimizer="momentum", scaler=True, bad=4),
        "loaded": Case(options=GATHERED, optimizer="momentum", loaded=3),
    },
    "quantizers": {
        "int8 gathered": Case("int8", GATHERED, "momentum", LEVELS),
        "int8 sharded": Case("int8", SHARDED, "momentum", LEVELS),
        "qsgd": Case("qsgd", GATHERED, cfs=(8.0, 4.0, 1.0)),
        "bf16": Case("bf16", cfs=(2.0, 1.0)),
        "signsgd": Case("signsgd", GATHERED, cfs=(32.0, 1.0)),
    },
    "rounds": {
        "powersgd": Case("powersgd", cfs=(10.0, 30.0, 1.0)),
        "sketch": Case("sketch", cfs=(10.0, 30.0, 1.0)),
        "emulated link": Case(options={"network": "10gbit,1ms", **SHARDED}, optimizer="momentum"),
    },
    "updates": {
        "sharded": Case(options=SHARDED, optimizer="adamw"),
        "gathered": Case(options=GATHERED, optimizer="adamw"),
        "voted, 8 bits": Case("topk+int8", VOTED, "adamw"),
        "int8": Case("int8", SHARDED, "adamw", LEVELS),
        "loaded before a dense step": Case(options=GATHERED, optimizer="adamw", loaded=2),
    },
    "optimizers": {
        "fused": Case(options=GATHERED, optimizer="fused"),
        "capturable, its rate a tensor": Case(options=GATHERED, optimizer="capturable"),
        "rmsprop": Case(options=GATHERED, optimizer="rmsprop"),
        "parameters in bf16": Case(options=GATHERED, optimizer="fused", dtype=torch.bfloat16),
        "parameters apart": Case(options=GATHERED, optimizer="adamw", cfs=(10.0,), apart=True),
    },
    "scalers": {
        "a bad step": Case(options=GATHERED, optimizer="adamw", cfs=(10.0,), scaler=True, bad=4),
        "fused, a bad step": Case(
            options=GATHERED, optimizer="fused", cfs=(10.0,), scaler=True, bad=4
        ),
        "another rank's bad step": Case(
            options=GATHERED, optimizer="adamw", cfs=(10.0,), scaler=True, remote=4
        ),
        "fused, another rank's bad step": Case(
            options=GATHERED, optimizer="fused", cfs=(10.0,), scaler=True, remote=4
        ),
    },
    "schedules": {
        "the default policy": Case("auto", optimizer="adamw", cfs=()),
        "emulated link": Case(
            options={"network": "10gbit,1ms", **GATHERED}, optimizer="adamw", cfs=(10.0, 100.0, 1.0)
        ),
        "local steps": Case(
            options={"sync": LocalSteps(3), **GATHERED}, optimizer="momentum", cfs=(10.0, 1.0)
        ),
        "delayed": Case(
            options={"sync": Delayed(2), **GATHERED}, optimizer="adamw", cfs=(10.0, 30.0)
        ),
    },
}


class _Work(dist.Work):
    """A collective under way."""

    def __init__(self, future: Future[list[Tensor]]) -> None:
        super().__init__()
        self._future = future

    def get_future(self) -> Future[list[Tensor]]:
        return self._future

    def wait(self, timeout: Any = None) -> bool:
        self._future.wait()
        return True


class LateNetwork:
    """The collectives of `RANKS` ranks that all have this one's tensors. late: they and callbacks
    are, and memory is stirred."""

    def __init__(self, late: bool) -> None:
        self.late = late and CUDA
        self.another_is_bad = False  # whose gradients are not finite, as a flag tells
        self._gathers_means = False  # of which the other ranks send zeros
        self._stream = torch.cuda.Stream(DEVICE) if CUDA else None
        self._held: deque[Any] = deque()  # until the device has passed, as NCCL does
        self._generator = torch.Generator().manual_seed(0)

    def sleep(self, share: float = 1.0) -> None:
        if self.late:
            torch.cuda._sleep(int(DELAY * share))

    def stir(self) -> None:
        """Garbage in whatever memory the current stream may have."""
        if self.late:
            sizes = torch.randint(10, 21, (12,), generator=self._generator).tolist()
            garbage = [torch.full((1 << size,), GARBAGE, device=DEVICE) for size in sizes]
            del garbage

    def _arrives(self, out: Tensor, make: Callable[[], Tensor], used: Tensor) -> _Work:
        """`out` is filled by `make` on the network's stream."""
        if self._stream is None:
            out.copy_(make().view(out.shape))
            here: Future[list[Tensor]] = Future()
            here.set_result([out])
            return _Work(here)
        while self._held and self._held[0][0].query():
            self._held.popleft()
        self._stream.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(self._stream):
            result = make()
            if self.late:
                poison = {torch.uint8: 255}.get(out.dtype, -1)
                out.fill_(float("nan") if out.is_floating_point() else poison)
            self.sleep()
            out.copy_(result.view(out.shape))
            done: Future[list[Tensor]] = Future(devices=[DEVICE])
            done.set_result([out])
            passed = torch.cuda.Event()
            passed.record()
        self._held.append((passed, out, used))
        return _Work(done)

    def all_reduce(
        self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        flag = tensor.numel() == 1 and tensor.dtype == torch.float32
        more = float(flag and self.another_is_bad)
        return _issued(self._arrives(tensor, lambda: tensor * RANKS + more, tensor), async_op)

    def all_gather(
        self, out: Tensor, own: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        flat, means = own.reshape(-1), self._gathers_means

        def make() -> Tensor:
            others = flat.numel() * (RANKS - 1)
            return torch.cat([flat, flat.new_zeros(others)]) if means else flat.repeat(RANKS)

        return _issued(self._arrives(out, make, own), async_op)

    def all_to_all(
        self,
        out: Tensor,
        own: Tensor,
        out_sizes: Any = None,
        in_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        first = in_sizes[0] if in_sizes else own.numel() // RANKS  # this is rank 0
        make = own.reshape(-1)[:first].repeat
        return _issued(self._arrives(out, lambda: make(RANKS), own), async_op)

    def install(self) -> None:
        """In the place of torch's, and around callbacks and hook calls. For good."""
        of: Any = dist
        of.all_reduce, of.all_to_all_single = self.all_reduce, self.all_to_all
        of.all_gather_into_tensor = self.all_gather
        if hasattr(dist, "all_gather_single"):
            of.all_gather_single = self.all_gather
        network, exchange, gather = self, Exchange, Exchange.all_gather
        run, hook_call = pipeline.Pipeline.run, pipeline.HookStream.hook_call

        def all_gather(own: Exchange, payload: Tensor, means: bool = False) -> Future[Tensor]:
            network._gathers_means = means
            try:
                return gather(own, payload, means)
            finally:
                network._gathers_means = False

        def run_late(own: Any, rounds: Any, collectives: int, decode: Any, device: Any) -> Any:
            def decode_late(received: Any) -> Any:
                network.sleep(0.5)
                return decode(received)

            return run(own, rounds, collectives, decode_late, device)

        @contextmanager
        def stirred(own: Any, last: bool) -> Iterator[None]:
            with hook_call(own, last):
                network.stir()
                yield
                network.stir()

        put: Any = setattr
        put(exchange, "all_gather", all_gather)
        put(exchange, "gather_objects", lambda own, mine: [mine] * RANKS)
        # Shards of other ranks are read from this rank's bytes, which fit them but by chance.
        put(exchange, "count_invalid", lambda own, flag: None)
        put(pipeline.Pipeline, "run", run_late)
        put(pipeline.HookStream, "hook_call", stirred)


def _issued(work: _Work, async_op: bool) -> _Work | None:
    if async_op:
        return work
    work.wait()
    return None


def train(case: Case, network: LateNetwork) -> list[Any]:
    """What a script sees on the way: parameters after each step, and what it reads of gradients."""
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    net = nn.Sequential(*layers, nn.Linear(WIDTH, 7)).to(DEVICE, case.dtype)
    model = DDP(net, bucket_cap_mb=BUCKET, **case.ddp)
    every_step.joined_nbytes = lambda device: int(PIECE * 2**20)
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[case.optimizer](parameters[2:] if case.apart else parameters)
    apart = torch.optim.SGD(parameters[:2], 0.05) if case.apart else None
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10) if case.scaler else None
    options = {**case.options, **({"policy": ByStep([*case.cfs])} if case.cfs else {})}
    base = {} if case.base == "auto" else {"base": case.base}
    compressor = AdaptiveCompressor(**base, cf_range=(1, 1000), **options)
    compressor.attach(model, optimizer=optimizer, **({"scaler": scaler} if scaler else {}))
    found: list[Any] = []
    for step in range(STEPS):
        if step == case.loaded:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
            compressor.load_state_dict(compressor.state_dict())
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))
        network.stir()
        loss = model(x.to(DEVICE, case.dtype)).float().square().mean()
        network.another_is_bad = step == case.remote
        loss = loss * float("inf") if step == case.bad else loss
        (scaler.scale(loss) if scaler else loss).backward()
        network.stir()
        # No look at gradients where a memory would take it for a change of them.
        if step in (case.bad, case.remote):
            found.append([bool(p.grad.isfinite().all()) for p in parameters])
        if scaler:
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale())
        else:
            optimizer.step()
        if apart is not None:
            found.append(torch.cat([p.grad.flatten() for p in parameters[:2]]).clone())
            apart.step()
            apart.zero_grad()
        network.stir()
        found.append(torch.cat([p.detach().flatten() for p in parameters]).clone())
        optimizer.zero_grad()
    compressor.detach()
    found.append(torch.cat([p.detach().flatten() for p in parameters]).clone())
    return [each.cpu() if isinstance(each, Tensor) else each for each in found]


def difference(found: Sequence[Any], right: Sequence[Any]) -> str:
    """Where what was found first differs from what is right; "" if nowhere."""
    if len(found) != len(right):
        return f"{len(found)} entries instead of {len(right)}"
    for i, (a, b) in enumerate(zip(found, right, strict=True)):
        if isinstance(a, Tensor):
            wrong = (a != b) & ~(a.isnan() & b.isnan())
            if wrong.any():
                by, at = float((a.float() - b.float()).abs().max()), int(wrong.nonzero()[0])
                count = f"{int(wrong.sum())} of {len(a)} elements, the first at {at}"
                return f"differs from entry {i} of {len(found)} on: {count}, by {by:.3g}"
        elif a != b:
            return f"differs from entry {i} of {len(found)} on: {str(a)[:99]}, not {str(b)[:99]}"
    return ""


def main(mode: str, path: str, names: Sequence[str]) -> int:
    """Returns how many cases are wrong. names: "FAMILY" or "FAMILY: CASE"; none: all of them."""
    logging.getLogger("adaptive").setLevel(logging.ERROR)
    if CUDA:
        torch.cuda.set_device(0)
        share_compiling()
    else:
        blocks.force_device_path = True
        torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    network = LateNetwork(mode == "late")
    network.install()
    right = torch.load(path, weights_only=False) if mode == "late" else {}
    made, wrong = {}, 0
    for family, cases in FAMILIES.items():
        for each, case in cases.items():
            name, began = f"{family}: {each}", time.perf_counter()
            if names and not {family, name} & {*names}:
                continue
            try:
                made[name] = train(case, network)
                compare = mode == "late" and case.cfs
                told = difference(made[name], right[name]) if compare else ""
            except Exception:
                told = traceback.format_exc(limit=-8)
            wrong += bool(told)
            print(f"{told or 'ok'} | {name}, {time.perf_counter() - began:.1f} s", flush=True)
    if mode == "serial":
        torch.save(made, path)
    return wrong


if __name__ == "__main__":
    failed = main(sys.argv[1], sys.argv[2], sys.argv[3:])
    sys.stdout.flush()
    os._exit(min(failed, 1))  # the process group that is no real one need not be taken down
