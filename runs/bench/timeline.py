"""What the TensorBoard sink costs a training step at its default interval, in real processes."""

from __future__ import annotations

import tempfile
import time
from statistics import median

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, MemoryTimeline, TensorBoardTimeline, Timeline
from runs.bench.timing import Row, in_processes, median_ratio

BATCHES = {64: 160, 512: 40}
"""By the layers' width, steps timed as one: about a second, since ten records a second are written.
(Shorter batches, with another contender's between them, would each begin with a record.)"""

WARMUP = 3
PACED_SECONDS = 5.0


def _times(rank: int, width: int, rounds: int, folder: str) -> tuple[dict[str, list[float]], float]:
    """Seconds of each batch of steps by contender; and the sink's processor seconds a second."""
    kept = MemoryTimeline()
    contenders = {}
    for name, sink in (("without", kept), ("TensorBoard", TensorBoardTimeline(f"{folder}/steps"))):
        torch.manual_seed(rank)
        model = DDP(torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))))
        AdaptiveCompressor("topk", (10, 1000), policy=Fixed(cf=10), timeline=sink).attach(model)
        contenders[name] = model
    x = torch.randn(64, width)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(WARMUP + rounds):
        for name, model in contenders.items():
            began = time.perf_counter()
            for _ in range(BATCHES[width]):
                model.zero_grad()
                model(x).square().mean().backward()
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
            times, share = in_processes(2, _times, width, rounds, folder)
        per_step = f"{1e3 * median(times['without']) / batch:.2f} ms without"
        name = "TensorBoard sink, time of a step with / without"
        ratio = median_ratio(times["TensorBoard"], times["without"])
        rows.append(Row(f"{name}, as measured", ratio, "<= 1.01", per_step))
        rows.append(Row(f"{name}, by its processor time", 1 + share, "<= 1.01", per_step))
    return rows
