"""DDP's step in real gloo processes: what the hook, the shadow ladder and the TensorBoard sink cost
it, and the memory beyond DDP's own."""

from __future__ import annotations

import tempfile
import time
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, MemoryTimeline, TensorBoardTimeline, Timeline
from adaptive.bucket import Bucket
from adaptive.statistics.shadow import ShadowLadder
from adaptive.statistics.vector import Tally
from runs.bench.timing import Row, describe, in_processes, interleaved, median_ratio
from runs.tasks import make_task

if TYPE_CHECKING:
    from runs.bench.command import Benching

# -- the hook, and its memory --------------------------------------------------------------------

WIDTH = 1024


def _model(layers: int, width: int = WIDTH) -> nn.Module:
    """Linear layers, of about a million parameters each."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _step(model: DDP, x: Tensor) -> None:
    model.zero_grad(set_to_none=False)
    model(x).square().mean().backward()


def _hook_times(rank: int, layers: int, rounds: int) -> dict[str, list[float]]:
    torch.manual_seed(rank)
    x = torch.randn(256, WIDTH)
    plain, hooked = DDP(_model(layers)), DDP(_model(layers))
    AdaptiveCompressor("none", policy="fixed").attach(hooked)
    return interleaved(
        {"no hook": lambda: _step(plain, x), "hook": lambda: _step(hooked, x)}, rounds, warmup=3
    )


def bench_hook(asked: Benching) -> list[Row]:
    """What the hook costs when it compresses nothing."""
    times = in_processes(asked.workers, _hook_times, asked.layers, 3 * asked.rounds)
    ratio = median_ratio(times["hook"], times["no hook"])
    what = "DDP step, base none, policy fixed: hook / no hook"
    return [Row(what, ratio, "<= 1.03", describe(times))]


def _peak(rank: int, layers: int, cf: float, momentum: bool) -> int:
    """Peak resident bytes of this process after a few steps; CF 0 is DDP without a hook."""
    torch.manual_seed(0)
    model = DDP(_model(layers), gradient_as_bucket_view=True)
    if cf:
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9) if momentum else None
        compressor = AdaptiveCompressor("topk", (min(cf, 10), 1000), policy=Fixed(cf=cf))
        compressor.attach(model, optimizer=optimizer)
    x = torch.randn(16, WIDTH)
    for _ in range(5):
        _step(model, x)
    # Of this program alone: getrusage's figure would include the parent's at the fork.
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmHWM"))


def bench_memory(asked: Benching) -> list[Row]:
    """Peak memory beyond DDP's own, in units of what is allowed."""
    nbytes = 4 * sum(p.numel() for p in _model(asked.layers).parameters())
    bucket = 25 * 1024**2
    without = in_processes(asked.workers, _peak, asked.layers, 0.0, False)
    rows = []
    for cf in (10.0, 100.0, 1000.0):
        for momentum in (False, True):
            extra = in_processes(asked.workers, _peak, asked.layers, cf, momentum) - without
            allowed = nbytes * (2 if momentum else 1) + 1.5 * bucket
            what = f"memory at CF {cf:g}, {'momentum' if momentum else 'residual'}: extra / allowed"
            detail = f"{extra / 2**20:.0f} MiB, model {nbytes / 2**20:.0f} MiB"
            rows.append(Row(what, extra / allowed, "<= 1", detail))
    return rows


# -- the shadow ladder, on a language model ------------------------------------------------------

LADDER = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1000.0)


class Shadowed(Fixed):
    """Sends the same, and keeps a shadow ladder."""

    shadow = True

    def candidates(self) -> tuple[float, ...]:
        return LADDER


def _ladder_times(rank: int, model_name: str, rounds: int) -> tuple[float, float]:
    """Seconds of a step, and those of it that the ladder with signal gain took."""
    spent: list[float] = []
    take_in = ShadowLadder.step

    def watched(ladder: ShadowLadder, bucket: Bucket, tally: Tally) -> None:
        began = time.perf_counter()
        take_in(ladder, bucket, tally)
        if ladder.peers is not None:
            spent[-1] += time.perf_counter() - began

    torch.manual_seed(rank)
    task = make_task("text", model=model_name)
    model = DDP(task.build_model())
    optimizer = task.optimizer(model)
    policy = Shadowed(cf=10, gain="signal")
    AdaptiveCompressor("topk", (10, 1000), policy=policy).attach(model, optimizer=optimizer)
    batch = task.batch(0, rank, 2)

    def step() -> None:
        spent.append(0.0)
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()

    with patch.object(ShadowLadder, "step", watched):
        times = interleaved({"step": step}, rounds, warmup=3)["step"]
    return median(times), median(filter(None, spent))


def bench_shadow(asked: Benching) -> list[Row]:
    """Step with a ladder of eight CFs and signal gain / without, by its own time (a difference of
    whole steps drowns in noise); CF 10 in use, momentum correction."""
    rows = []
    for model in ("lstm", "gpt"):
        step, ladder = in_processes(2, _ladder_times, model, 5 * asked.rounds)
        what = f"shadow ladder of {len(LADDER)} CFs and signal gain, {model}: step with / without"
        detail = f"{1e3 * ladder:.1f} ms of {1e3 * step:.1f} ms"
        rows.append(Row(what, step / (step - ladder), "<= 1.03", detail))
    return rows


# -- the TensorBoard sink at its default interval ------------------------------------------------

STEPS = {64: 800, 512: 200}
"""By the layers' width: some seconds."""


def _recorded(rank: int, width: int) -> MemoryTimeline:
    """The records of so many steps."""
    torch.manual_seed(rank)
    sink, model = MemoryTimeline(), DDP(_model(4, width))
    AdaptiveCompressor("topk", (10, 1000), policy=Fixed(cf=10), timeline=sink).attach(model)
    x = torch.randn(64, width)
    for _ in range(STEPS[width]):
        _step(model, x)
    return sink


def _paced(sink: Timeline, recorded: MemoryTimeline, step: float) -> float:
    """Processor seconds a second of handing over the records, one every `step` seconds: of all
    threads, so also of the one that writes. A difference of whole steps' times drowns in noise."""
    assert recorded.header is not None
    sink.start(recorded.header)
    sink.step(recorded.steps[0])  # opens the file
    began, used = time.perf_counter(), time.process_time()
    for record in recorded.steps[1:]:
        sink.step(record)
        time.sleep(step)
    share = (time.process_time() - used) / (time.perf_counter() - began)
    sink.close()
    return share


def bench_timeline(asked: Benching) -> list[Row]:
    """Step with the sink / without by its processor time, for a short step and a longer one."""
    rows = []
    for width in STEPS:
        recorded = in_processes(2, _recorded, width)
        step = median(s for r in recorded.steps if isfinite(s := r.report.seconds))
        with tempfile.TemporaryDirectory() as folder:
            sinks = TensorBoardTimeline(folder), Timeline()
            written, nothing = (_paced(sink, recorded, step) for sink in sinks)
        what = "TensorBoard sink, time of a step with / without, by its processor time"
        detail = f"{1e3 * step:.2f} ms without"
        rows.append(Row(what, 1 + written - nothing, "<= 1.01", detail))
    return rows
