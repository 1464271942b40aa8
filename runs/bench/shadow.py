"""What the shadow ladder costs a training step, on the language model, in real gloo processes."""

from __future__ import annotations

import time
from statistics import median
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed
from adaptive.bucket import Bucket
from adaptive.statistics.shadow import ShadowLadder
from adaptive.statistics.vector import Tally
from runs.bench.timing import Row, describe, in_processes, interleaved, median_ratio
from runs.tasks import make_task

LADDER = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1000.0)


class _Shadowed(Fixed):
    """Sends the same, and keeps a shadow ladder."""

    shadow = True

    def candidates(self) -> tuple[float, ...]:
        return LADDER


def _times(rank: int, model_name: str, rounds: int) -> tuple[dict[str, list[float]], float]:
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
        "shadow": _Shadowed(cf=10),
        "signal": _Shadowed(cf=10, gain="signal"),
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
        times, ladder = in_processes(2, _times, model, rounds)
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
