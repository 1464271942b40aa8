"""What a step costs a processor beyond plain DDP's, with the tensors of real models.

The gradients are ready at once: forward and backward compute nothing, so that a ratio is of what
DDP, its hook and the optimizer do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

from adaptive import AdaptiveCompressor, Fixed, Goodput
from adaptive.step.config import RUNGS
from compressors.ladder import Ladder
from policies import Plan, Policy
from runs.bench.timing import Row, in_processes, median_ratio

if TYPE_CHECKING:
    from runs.bench.command import Benching

Shapes = list[tuple[int, ...]]


def _gpt(vocabulary: int, context: int, width: int, layers: int, biases: bool) -> Shapes:
    """A GPT whose output layer has the weights of its embedding."""
    shapes: Shapes = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        for out, into in ((3, 1), (1, 1), (4, 1), (1, 4)):
            shapes.append((out * width, into * width))
            shapes += [(out * width,)] if biases else []
        shapes += [(width,)] * 4
    return [*shapes, (width,), (width,)]


def _resnet50() -> Shapes:
    """Of ImageNet: convolutions and their batch norms, in four stages of bottlenecks."""
    convolutions: Shapes = [(64, 3, 7, 7)]
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions += [(width, into, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            convolutions += [(4 * width, into, 1, 1)] if block == 0 else []
            into = 4 * width
    shapes: Shapes = []
    for shape in convolutions:
        shapes += [shape, (shape[0],), (shape[0],)]
    return [*shapes, (1000, 2048), (1000,)]


MODELS: Mapping[str, Callable[[], Shapes]] = {
    "GPT 1 M": partial(_gpt, 256, 128, 144, 4, biases=False),
    "GPT 10 M": partial(_gpt, 256, 256, 304, 9, biases=True),
    "ResNet-50": _resnet50,
    "GPT-2": partial(_gpt, 50257, 1024, 768, 12, biases=True),
}
"""Parameter tensors by model, from 1.0 M to 124 M elements."""

GOALS = {
    "bf16 hook": "",
    "PowerSGD hook": "",
    "CF 10": "",
    "CF 100": "<= 1.6",
    "CF 100 by layer": "",
    "goodput at CF 100": "<= 1.6",
    "bf16 rung": "<= 1.1",
    "int8 rung": "<= 1.5",
    "int4 rung": "<= 1.5",
    "dense": "<= 1.03",
}
"""The contenders, and the ratio of processor time that each is held to."""

CFS = {
    "CF 10": 10.0,
    "CF 100": 100.0,
    "CF 100 by layer": 100.0,
    "goodput at CF 100": 100.0,
    "bf16 rung": 2.0,
    "int8 rung": 4.0,
    "int4 rung": 8.0,
    "dense": 1.0,
}

WARMUP = 12
"""Steps: DDP cuts buckets anew in the first, and SGD gets its momentum back in the ninth dense one.
"""

OPTIMIZERS: Mapping[str, Callable[[Any], Optimizer]] = {
    "AdamW": partial(AdamW, lr=1e-3),
    "SGD": partial(SGD, lr=1e-3, momentum=0.9),
}


class Held(Goodput):
    """The default policy at a fixed CF: it measures and decides as ever, and is not heeded."""

    cf = 1.0

    def plan(self) -> Plan:
        return replace(super().plan(), send=self.cf)


class _Ready(torch.autograd.Function):
    """A loss of 0 whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


class ReadyModel(nn.Module):
    """Parameters of these shapes, and gradients for them that cost nothing."""

    def __init__(self, shapes: Shapes, rank: int) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(0)
        own = torch.Generator().manual_seed(1 + rank)
        made = [torch.randn(shape, generator=values).mul_(0.02) for shape in shapes]
        self.tensors = nn.ParameterList(map(nn.Parameter, made))
        self.gradients = [torch.randn(shape, generator=own).mul_(1e-3) for shape in shapes]

    def forward(self) -> Tensor:
        loss: Tensor = _Ready.apply(self.gradients, *self.tensors)
        return loss


def _contender(name: str, shapes: Shapes, rank: int, optimizer_name: str) -> Callable[[], None]:
    """A training step."""
    # PowerSGD issues collectives in callbacks. Those of two buckets come in another order on other
    # ranks, which gloo does not bear, so it gets one bucket.
    cap = 1000 if name == "PowerSGD hook" else None
    model = DDP(ReadyModel(shapes, rank), bucket_cap_mb=cap)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    if name == "bf16 hook":
        # Not as itself: DDP refuses that name on gloo.
        hook: Any = partial(default_hooks.bf16_compress_hook, None)  # type: ignore[arg-type]
        model.register_comm_hook(None, lambda _, bucket: hook(bucket))
    elif name == "PowerSGD hook":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name != "plain DDP":
        cf = CFS[name]
        rungs: dict[float, Any] = {cf: RUNGS[cf]} if cf in RUNGS else {}
        policy: Policy = Fixed(cf)
        if name.startswith("goodput"):
            policy = Held()
            policy.cf = cf
        compressor = AdaptiveCompressor(
            Ladder(rungs, above="topk"),
            policy=policy,
            granularity="layer" if name.endswith("by layer") else "auto",
        )
        compressor.attach(model, optimizer=optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return step


def _step_times(
    rank: int, name: str, model: str, optimizer_name: str, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """(processor, wall) seconds of a step of plain DDP and of a contender, in turns."""
    shapes = MODELS[model]()
    names = ("plain DDP", name)
    steps = {each: _contender(each, shapes, rank, optimizer_name) for each in names}
    times: dict[str, list[tuple[float, float]]] = {each: [] for each in names}
    for index in range(WARMUP + rounds):
        for each, step in steps.items():
            used, began = time.process_time(), time.perf_counter()
            step()
            took = time.process_time() - used, time.perf_counter() - began
            if index >= WARMUP:
                times[each].append(took)
    return times


def bench_step(asked: Benching) -> list[Row]:
    """A step of each contender / one of plain DDP, by this rank's processor time."""
    rows = []
    for model, shapes in MODELS.items():
        numel = sum(map(prod, shapes()))
        rounds = max(5, min(5 * asked.rounds, round(asked.rounds * 2e7 / numel)))
        for optimizer_name in OPTIMIZERS:
            for name, goal in GOALS.items():
                times = in_processes(
                    asked.workers, _step_times, name, model, optimizer_name, rounds
                )
                plain, own = ([used for used, _ in times[each]] for each in times)
                walls = [[wall for _, wall in times[each]] for each in times]
                detail = (
                    f"{1e3 * median(own):.4g} ms instead of {1e3 * median(plain):.4g} ms; "
                    f"wall time {median_ratio(walls[1], walls[0]):.2f}"
                )
                of = f"{model}, {len(shapes())} tensors, {optimizer_name}"
                what = f"step of {of}: {name} / plain DDP"
                rows.append(Row(what, median_ratio(own, plain), goal, detail))
    return rows
