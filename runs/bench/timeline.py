"""What the TensorBoard sink costs a training step at its default interval, in real processes."""

from __future__ import annotations

import tempfile

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, TensorBoardTimeline, Timeline
from runs.bench.processes import in_processes
from runs.bench.timing import Row, describe, interleaved, median_ratio

BATCH = 20
"""Steps timed as one: not every step is written."""


def _times(rank: int, width: int, rounds: int, folder: str) -> dict[str, list[float]]:
    contenders = {}
    for name in ("without", "TensorBoard"):
        torch.manual_seed(rank)
        model = DDP(torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))))
        sink = TensorBoardTimeline(folder) if name == "TensorBoard" else Timeline()
        AdaptiveCompressor("topk", (10, 1000), policy=Fixed(cf=10), timeline=sink).attach(model)
        x = torch.randn(64, width)

        def steps(model=model, x=x) -> None:  # type: ignore[no-untyped-def]
            for _ in range(BATCH):
                model.zero_grad()
                model(x).square().mean().backward()

        contenders[name] = steps
    return interleaved(contenders, rounds, warmup=3)


def bench_timeline(rounds: int) -> list[Row]:
    """Step with the sink / without, CF 10 in use, for a short step and one as models have."""
    rows = []
    for width in (64, 512):
        with tempfile.TemporaryDirectory() as folder:
            times = in_processes(2, _times, width, rounds, folder)
        ratio = median_ratio(times["TensorBoard"], times["without"])
        what = f"TensorBoard sink, {4 * (width * width + width):,} parameters: step with / without"
        rows.append(Row(what, ratio, "<= 1.01", describe(times) + f" for {BATCH} steps"))
    return rows
