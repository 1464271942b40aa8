"""DDP's step in real gloo processes: what the hook, the shadow ladder and the TensorBoard sink cost
it, and the memory beyond DDP's own."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
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


def bench_hook(workers: int, layers: int, rounds: int) -> list[Row]:
    """What the hook costs when it compresses nothing."""
    times = in_processes(workers, _hook_times, layers, rounds)
    ratio = median_ratio(times["hook"], times["no hook"])
    detail = ", ".join(f"{name} {1e3 * median(t):.0f} ms" for name, t in times.items())
    return [Row("DDP step, base none, policy fixed: hook / no hook", ratio, "<= 1.03", detail)]


def _peak(rank: int, layers: int, cf: float, momentum: bool) -> int:
    """Peak resident bytes of this process after a few steps; CF 0 is DDP without a hook."""
    torch.manual_seed(0)
    model = DDP(_model(layers), gradient_as_bucket_view=True)
    if cf:
        AdaptiveCompressor(
            "topk",
            (min(cf, 10), 1000),
            policy=Fixed(cf=cf),
            memory="momentum" if momentum else "residual",
            momentum=0.9 if momentum else None,
        ).attach(model)
    x = torch.randn(16, WIDTH)
    for _ in range(5):
        _step(model, x)
    return _peak_resident()


def _peak_resident() -> int:
    """Bytes. Of this program alone: getrusage's figure would include the parent's at the fork."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmHWM"))


def bench_memory(workers: int, layers: int) -> list[Row]:
    """Peak memory beyond DDP's own, in units of what is allowed."""
    numel = sum(p.numel() for p in _model(layers).parameters())
    bucket = 25 * 1024**2
    without = in_processes(workers, _peak, layers, 0.0, False)
    rows = []
    for cf in (10.0, 100.0, 1000.0):
        for momentum in (False, True):
            extra = in_processes(workers, _peak, layers, cf, momentum) - without
            allowed = 4 * numel * (2 if momentum else 1) + 1.5 * bucket
            what = f"memory at CF {cf:g}, {'momentum' if momentum else 'residual'}: extra / allowed"
            detail = f"{extra / 2**20:.0f} MiB, model {4 * numel / 2**20:.0f} MiB"
            rows.append(Row(what, extra / allowed, "<= 1", detail))
    return rows


# -- the shadow ladder, on a language model ------------------------------------------------------

LADDER = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1000.0)


class Shadowed(Fixed):
    """Sends the same, and keeps a shadow ladder."""

    shadow = True

    def candidates(self) -> tuple[float, ...]:
        return LADDER


def _ladder_times(rank: int, model_name: str, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of each step by contender; and those of one that the ladder with signal gain took."""
    spent: list[float] = []
    take_in = ShadowLadder.step

    def watched(ladder: ShadowLadder, bucket: Bucket, tally: Tally) -> None:
        began = time.perf_counter()
        take_in(ladder, bucket, tally)
        if ladder.peers is not None:
            spent[-1] += time.perf_counter() - began

    steps = {}
    policies = {
        "without": Fixed(cf=10),
        "shadow": Shadowed(cf=10),
        "signal": Shadowed(cf=10, gain="signal"),
    }
    for name, policy in policies.items():
        torch.manual_seed(rank)
        task = make_task("text", model=model_name)
        model = DDP(task.build_model())
        optimizer = task.optimizer(model)
        compressor = AdaptiveCompressor("topk", (10, 1000), policy=policy)
        compressor.attach(model, optimizer=optimizer)
        batch = task.batch(0, rank, 2)

        def step(task=task, model=model, optimizer=optimizer, batch=batch) -> None:  # type: ignore[no-untyped-def]
            spent.append(0.0)
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()

        steps[name] = step
    with patch.object(ShadowLadder, "step", watched):
        times = interleaved(steps, rounds, warmup=3)
    return times, median(filter(None, spent))


def bench_shadow(rounds: int) -> list[Row]:
    """Step with a ladder of eight CFs / without, CF 10 in use, momentum correction."""
    rows = []
    for model in ("lstm", "gpt"):
        times, ladder = in_processes(2, _ladder_times, model, rounds)
        for name, of, bound in (
            ("shadow", "", "<= 1.03"),
            ("signal", " and signal gain", "<= 1.08"),
        ):
            ratio = median_ratio(times[name], times["without"])
            what = f"shadow ladder of {len(LADDER)} CFs{of}, {model}: step with / without"
            both = {key: times[key] for key in ("without", name)}
            rows.append(Row(what, ratio, bound, describe(both)))
        # The difference of whole steps is noisier than what it is held to.
        what = f"the same, {model}: step without it + its own time / step without"
        ratio = 1 + ladder / median(times["without"])
        rows.append(Row(what, ratio, "<= 1.03", f"ladder {1e3 * ladder:.1f} ms"))
    return rows


# -- the TensorBoard sink at its default interval ------------------------------------------------

BATCHES = {64: 160, 512: 40}
"""By the layers' width, steps timed as one: about a second, since ten records a second are written.
(Shorter batches, with another contender's between them, would each begin with a record.)"""

WARMUP = 3
PACED_SECONDS = 5.0


def _sink_times(
    rank: int, width: int, rounds: int, folder: str
) -> tuple[dict[str, list[float]], float]:
    """Seconds of each batch of steps by contender; and the sink's processor seconds a second."""
    kept = MemoryTimeline()
    contenders = {}
    for name, sink in (("without", kept), ("TensorBoard", TensorBoardTimeline(f"{folder}/steps"))):
        torch.manual_seed(rank)
        model = DDP(_model(4, width))
        AdaptiveCompressor("topk", (10, 1000), policy=Fixed(cf=10), timeline=sink).attach(model)
        contenders[name] = model
    x = torch.randn(64, width)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(WARMUP + rounds):
        for name, model in contenders.items():
            began = time.perf_counter()
            for _ in range(BATCHES[width]):
                _step(model, x)
            if index >= WARMUP:
                times[name].append(time.perf_counter() - began)
    if rank:
        return times, 0.0
    step = median(times["without"]) / BATCHES[width]
    sinks = TensorBoardTimeline(f"{folder}/paced"), Timeline()
    written, nothing = (_paced(sink, kept, step) for sink in sinks)
    return times, written - nothing


def _paced(sink: Timeline, kept: MemoryTimeline, step: float) -> float:
    """Processor seconds a second of handing over the same records, one every `step` seconds: of all
    threads, so also of the one that writes. A difference of whole steps' times drowns in noise."""
    assert kept.header is not None
    sink.start(kept.header)
    sink.step(kept.steps[0])  # opens the file
    began, used = time.perf_counter(), time.process_time()
    for record in kept.steps[1 : 1 + round(PACED_SECONDS / step)]:
        sink.step(record)
        time.sleep(step)
    share = (time.process_time() - used) / (time.perf_counter() - began)
    sink.close()
    return share


def bench_timeline(rounds: int) -> list[Row]:
    """Step with the sink / without, CF 10 in use, for a short step and a longer one."""
    rows = []
    for width, batch in BATCHES.items():
        with tempfile.TemporaryDirectory() as folder:
            times, share = in_processes(2, _sink_times, width, rounds, folder)
        per_step = f"{1e3 * median(times['without']) / batch:.2f} ms without"
        name = "TensorBoard sink, time of a step with / without"
        ratio = median_ratio(times["TensorBoard"], times["without"])
        rows.append(Row(f"{name}, as measured", ratio, "<= 1.01", per_step))
        rows.append(Row(f"{name}, by its processor time", 1 + share, "<= 1.01", per_step))
    return rows
