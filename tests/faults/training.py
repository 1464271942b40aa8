"""What a rank does in a trial of training: given gradients, a fault, and notes of every step.

The gradients are made, not found: no parameter has anything to do with them. So every step's right
result is known whatever happened before, and a value of 1e38 spoils nothing but what it is in. A
first pass without the fault tells the parameters after each step; the second has the fault.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    AdaptiveCompressor,
    Delayed,
    Fixed,
    Gossip,
    LocalSteps,
    MemoryTimeline,
    Momentum,
    Network,
    StepReport,
    Timeline,
)
from compressors import RandomK, Sketch
from runs.modelled_clock import ModelledClock
from tests.distributed.setting import Scripted, same
from tests.faults.ranks import START, Note

TIMEOUT = 6.0
"""Seconds of the process group: a peer that is so late is an error."""

STEPS = 12
SHAPES = ((30, 12), (40, 12), (40,), (14, 40), (14,), (3, 14), (3,))

SYNCHRONISERS: dict[str, dict[str, Any]] = {
    "every step": {},
    "local steps": {"sync": LocalSteps(2)},
    "local steps, overlapped": {"sync": LocalSteps(3, outer_momentum=0.5, overlap=1)},
    "delay": {"sync": Delayed(1)},
    "gossip": {"sync": Gossip()},
}
"""How the ranks keep their models together: settings by name."""

SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}


class Given(nn.Module):
    """A model whose gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, *gradients: Tensor) -> Tensor:
        return sum(
            ((p * g).sum() for p, g in zip(self.all, gradients, strict=True)), torch.zeros(())
        )


def gradients(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def enter(rank: int, ranks: int, folder: Path) -> None:
    """The process group, with its short timeout, once everybody is there."""
    (folder / f"here{rank}").touch()
    deadline = time.monotonic() + START
    while not all((folder / f"here{each}").exists() for each in range(ranks)):
        if time.monotonic() > deadline:
            raise TimeoutError("the other ranks did not start")
        time.sleep(0.01)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )


class Pass:
    """Steps on a new model with a new compressor; notes of each under `name`."""

    def __init__(self, name: str, rank: int, given: Mapping[str, Any], note: Note) -> None:
        self.name, self.rank, self.note = name, rank, note
        self.model = DDP(Given(), bucket_cap_mb=0.002)
        self.optimizer: torch.optim.Optimizer
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if given.get("memory") == "updates":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.attach(given)

    def attach(self, given: Mapping[str, Any]) -> None:
        """A new compressor."""
        options = {
            "policy": Fixed(),
            "cf_range": (8, 64),
            "memory": given.get("memory", "auto"),
            "exchange": given.get("exchange", "auto"),
            **SYNCHRONISERS[given.get("synchroniser", "every step")],
            **given.get("options", {}),
        }
        if given.get("dense"):  # the step of the fault is, and the one before
            options["policy"] = Scripted([8.0] * 3 + [1.0] * 2 + [8.0] * (STEPS - 5))
        if given.get("policy") == "default":
            options["policy"] = None
        if "timeline" in given:
            options["timeline"] = given["timeline"]
        if given.get("debug") and "debug" in inspect.signature(AdaptiveCompressor).parameters:
            options["debug"] = True
        self.compressor = AdaptiveCompressor(
            given["base"], network=Network(clock=ModelledClock(0.01)), **options
        ).attach(self.model, optimizer=self.optimizer)

    def step(self, step: int, local: list[Tensor], raising: bool = False) -> None:
        """One step, skipped if a gradient is not finite."""
        self.optimizer.zero_grad()
        loss = self.model(*local)
        if raising:
            raise OSError("a batch could not be read")
        loss.backward()
        finite = all(
            bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None
        )
        if finite:
            self.optimizer.step()
        trained = all(bool(p.isfinite().all()) for p in self.model.parameters())
        seen = {"digest": self.digest(), "finite": finite, "trained": trained}
        self.note("step", name=self.name, step=step, **seen)

    def meet(self, moment: str, local: list[Tensor], place: int) -> None:
        """A step that comes to nothing by an exception at this moment, which is caught; in the
        backward at one of the parameters."""

        def fail(_: Any = None) -> None:
            raise MemoryError

        def fail_later(_: Any) -> None:
            Variable._execution_engine.queue_callback(fail)

        parameter = self.model.module.all[place]
        handles = []
        if moment == MOMENTS[0]:
            handles.append(self.model.module.register_forward_pre_hook(lambda *_: fail()))
        elif moment != MOMENTS[3]:
            hook = fail if moment == MOMENTS[1] else fail_later
            handles.append(parameter.register_hook(hook))
        self.optimizer.zero_grad()
        with suppress(MemoryError):
            self.model(*local).backward()
        for handle in handles:
            handle.remove()

    def digest(self) -> str:
        flat = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def signalled(rank: int, ranks: int, folder: Path, given: Mapping[str, Any], note: Note) -> None:
    """One rank gets a signal, or its forward raises: at `step`, at a moment.

    moment: "between" (steps), "backward" (at some parameter's gradient) or "any" (time).
    """
    enter(rank, ranks, folder)
    right = Pass("right", rank, given, note)
    began = time.monotonic()
    for step in range(STEPS):
        right.step(step, gradients(step, rank))
    lasted = time.monotonic() - began
    run = Pass("fault", rank, given, note)
    chance = random.Random(given["seed"])
    at, moment = chance.randrange(1, STEPS - 3), given["moment"]
    victim = rank == given["victim"]

    def strike() -> None:
        note("fault")
        os.kill(os.getpid(), SIGNALS[given["signal"]])

    parameter = chance.choice(list(run.model.module.all))
    if victim and moment == "any":
        timer = threading.Timer(chance.random() * 0.4 * lasted, strike)
        timer.daemon = True
        timer.start()
    for step in range(STEPS):
        now = victim and step == at
        if now and moment == "between":
            strike()
        if now and moment == "backward":
            handle = parameter.register_hook(lambda _: strike())
        raising = now and moment == "forward"
        if raising:
            note("fault")
        run.step(step, gradients(step, rank), raising)
        if now and moment == "backward":
            handle.remove()
    dist.destroy_process_group()


MOMENTS = ("in the forward", "in the backward", "in a callback", "between backward and step")
WAYS_ON = ("go on", "load", "detach", "close", "save")
REFUSED = "refused"
"""What has become of a script that caught an exception, if it is not told in digests."""


def raised(rank: int, ranks: int, folder: Path, given: Mapping[str, Any], note: Note) -> str:
    """An exception outside the hook, on all ranks or on one, which the script catches. Then it goes
    on, loads, detaches and attaches another, closes, or saves. Another pass does the same without
    the exception. Returns what has become of it."""
    enter(rank, ranks, folder)
    right, found = (_way_on(name, rank, given, note) for name in ("right", "fault"))
    dist.destroy_process_group()
    if found == REFUSED:
        return REFUSED
    return "the same" if same(found, right) else "not the same"


def _way_on(name: str, rank: int, given: Mapping[str, Any], note: Note) -> Any:
    """What the parameters and a saved state are in the end; or REFUSED."""
    run, moment, way = Pass(name, rank, given, note), given["moment"], given["way"]
    chance = random.Random(given["seed"])
    at, place = chance.randrange(2, STEPS - 4), chance.randrange(len(SHAPES))
    for step in range(at):
        run.step(step, gradients(step, rank))
    parts = run.model.module, run.optimizer, run.compressor
    states = copy.deepcopy([part.state_dict() for part in parts])
    if name == "fault":
        note("fault")
    if given["victim"] not in (None, rank):
        run.step(at, gradients(at, rank))
    elif name == "fault" or moment == MOMENTS[3]:
        run.meet(moment, gradients(at, rank), place)
    if way == "close":
        run.compressor.close()
        return run.digest()
    if way == "save":
        try:
            return run.compressor.state_dict()["memory"], run.digest()
        except RuntimeError:
            return REFUSED
    if way == "detach":
        run.compressor.detach()
    if way in ("load", "detach"):
        if moment in MOMENTS[1:3]:  # DDP itself takes no further forward
            run = Pass(name, rank, given, note)
        elif way == "detach":
            run.attach(given)
        parts = run.model.module, run.optimizer, run.compressor
        for part, state in zip(parts[: 3 if way == "load" else 2], states, strict=False):
            part.load_state_dict(state)
        at -= 1
    for step in range(at + 1, STEPS):
        run.step(step, gradients(step, rank))
    return run.digest()


VALUES = {"NaN": math.nan, "infinity": math.inf, "1e38": 1e38, "denormal": 1e-41}


def valued(rank: int, ranks: int, folder: Path, given: Mapping[str, Any], note: Note) -> None:
    """One rank's gradient has bad values, from step 4 on, for a step or for ever; trial by trial,
    as many as go well in one process group."""
    enter(rank, ranks, folder)
    for index in range(given["first"], len(given["trials"])):
        trial = given["trials"][index]
        note("begin", index=index)
        run = Pass(str(index), rank, {**given, **trial}, note)
        chance = random.Random(given["seed"] + index)
        place = chance.randrange(len(SHAPES))
        for step in range(STEPS):
            local = gradients(step, rank)
            if rank == 1 and (step == 4 or (step > 4 and trial["ever"])):
                flat = local[place].view(-1)
                flat[: None if trial["whole"] else 1] = VALUES[trial["value"]]
            run.step(step, local)
        run.compressor.detach()
    dist.destroy_process_group()


class _Throwing(Timeline):
    """A sink that fails at its third step."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.steps = error, 0

    def step(self, record: Any) -> None:
        self.steps += 1
        if self.steps == 3:
            raise self.error


ERRORS = {
    "OSError": OSError(28, "No space left on device"),
    "ValueError": ValueError("cannot be written"),
    "MemoryError": MemoryError(),
}


def recorded(rank: int, ranks: int, folder: Path, given: Mapping[str, Any], note: Note) -> int:
    """A sink of the timeline throws; returns how many steps the other one was told."""
    enter(rank, ranks, folder)
    right = Pass("right", rank, given, note)
    for step in range(STEPS):
        right.step(step, gradients(step, rank))
    kept = MemoryTimeline()
    sinks = [_Throwing(ERRORS[given["error"]]), kept]
    run = Pass("fault", rank, {**given, "timeline": sinks if given["first"] else sinks[::-1]}, note)
    note("fault")
    for step in range(STEPS):
        run.step(step, gradients(step, rank))
    run.compressor.close()
    dist.destroy_process_group()
    return len(kept.steps)


class _Wayward(Scripted):
    """Plans another CF than the others from step 4 on."""

    def __init__(self, rank: int) -> None:
        super().__init__([8.0])
        self._own = 32.0 if rank == 1 else 8.0

    def observe(self, report: StepReport) -> None:
        super().observe(report)
        if self.step == 4:
            self.cfs = [self._own]


SEEDED = {"randomk": RandomK, "sketch": Sketch}

DISAGREEMENTS: dict[str, list[dict[str, Any]]] = {
    "base": [{"base": "topk"}, {"base": "randomk"}],
    "base of the same size": [{"base": "int8"}, {"base": "twobit"}],
    "values": [{"base": "topk+fp32"}, {"base": "topk+bf16"}],
    "policy": [{"base": "topk"}, {"base": "topk", "policy": "default"}],
    "cf_range": [{"base": "topk"}, {"base": "topk", "options": {"cf_range": (9, 64)}}],
    "exchange": [{"base": "topk", "exchange": x} for x in ("all_gather", "sharded")],
    "granularity": [{"base": "topk", "options": {"granularity": g}} for g in ("layer", "bucket")],
    "memory": [{"base": "topk", "memory": m} for m in ("residual", "momentum")],
    "dense_below": [{"base": "topk", "options": {"dense_below": n}} for n in (0, 20)],
    "clip_norm": [
        {"base": "topk", "options": {"memory": Momentum(clip_norm=n)}} for n in (None, 1.0)
    ],
    "seed of randomk": [{"base": ("randomk", 0)}, {"base": ("randomk", 1)}],
    "seed of the sketch": [{"base": ("sketch", 0)}, {"base": ("sketch", 1)}],
    "the plan of a step": [{"base": "topk", "wayward": True}],
    "the plan of a step, debug=True": [{"base": "topk", "wayward": True, "debug": True}],
}


def disagreeing(rank: int, ranks: int, folder: Path, given: Mapping[str, Any], note: Note) -> None:
    """The last rank has made its compressor otherwise than the others."""
    enter(rank, ranks, folder)
    options = DISAGREEMENTS[given["about"]]
    mine = dict(options[-1] if rank == ranks - 1 else options[0])
    if isinstance(mine["base"], tuple):
        name, seed = mine["base"]
        mine["base"] = SEEDED[name](seed=seed)
    if mine.get("wayward"):
        mine["options"] = {"policy": _Wayward(rank)}
    note("fault")
    run = Pass("fault", rank, mine, note)
    for step in range(STEPS):
        run.step(step, gradients(step, rank))
    dist.destroy_process_group()
