"""DDP with and without the hook: step time and peak memory, in real gloo processes."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed
from runs.bench.timing import Row, in_processes, interleaved, median_ratio

WIDTH = 1024


def _model(layers: int) -> nn.Module:
    """`layers` linear layers of about a million parameters each."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


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
