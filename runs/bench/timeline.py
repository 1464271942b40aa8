"""What the TensorBoard sink costs a training step at its default interval, in real processes."""

from __future__ import annotations

import tempfile
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, TensorBoardTimeline, Timeline
from runs.bench.processes import in_processes
from runs.bench.timing import Row, median_ratio

BATCH = 20
"""Steps timed as one: not every step is written."""

Times = dict[str, list[float]]


def _times(rank: int, width: int, rounds: int, folder: str) -> tuple[Times, Times]:
    """Wall and processor seconds of each batch of steps; the latter of all threads, so also of the
    one that writes, and the same on a busy machine."""
    contenders = {}
    for name in ("without", "TensorBoard"):
        torch.manual_seed(rank)
        model = DDP(torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))))
        sink = TensorBoardTimeline(folder) if name == "TensorBoard" else Timeline()
        AdaptiveCompressor("topk", (10, 1000), policy=Fixed(cf=10), timeline=sink).attach(model)
        contenders[name] = model
    x = torch.randn(64, width)
    wall: Times = {name: [] for name in contenders}
    processor: Times = {name: [] for name in contenders}
    for index in range(3 + rounds):
        for name, model in contenders.items():
            began, used = time.perf_counter(), time.process_time()
            for _ in range(BATCH):
                model.zero_grad()
                model(x).square().mean().backward()
            if index >= 3:
                wall[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - used)
    return wall, processor


def bench_timeline(rounds: int) -> list[Row]:
    """Step with the sink / without, CF 10 in use, for a short step and a longer one."""
    rows = []
    for width in (64, 512):
        with tempfile.TemporaryDirectory() as folder:
            both = in_processes(2, _times, width, rounds, folder)
        for what, times in zip(("time", "processor time"), both, strict=True):
            ratio = median_ratio(times["TensorBoard"], times["without"])
            name = f"TensorBoard sink, {what} of a step with / without"
            per_step = 1e3 * sum(times["without"]) / len(times["without"]) / BATCH
            rows.append(Row(name, ratio, "<= 1.01", f"{per_step:.2f} ms without"))
    return rows
