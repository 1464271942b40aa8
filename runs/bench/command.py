"""The bench subcommand: which benches, how long, and how the rows are printed."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import torch

from runs.bench.compressors import bench_compressors
from runs.bench.ddp import bench_hook, bench_memory
from runs.bench.exchanges import bench_exchanges
from runs.bench.levels import bench_levels
from runs.bench.lowrank import bench_lowrank
from runs.bench.shadow import bench_shadow
from runs.bench.timeline import bench_timeline
from runs.bench.timing import Row
from runs.bench.wire import bench_wire

BENCHES: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "compressors": lambda args: bench_compressors(args.numel, args.rounds, args.seed),
    "levels": lambda args: bench_levels(args.numel, args.rounds, args.seed),
    "lowrank": lambda args: bench_lowrank(args.rounds, args.seed),
    "wire": lambda args: bench_wire(args.numel),
    "exchanges": lambda args: bench_exchanges(),
    "shadow": lambda args: bench_shadow(5 * args.rounds),
    "timeline": lambda args: bench_timeline(8 * args.rounds),
    "hook": lambda args: bench_hook(args.workers, args.layers, 3 * args.rounds),
    "memory": lambda args: bench_memory(args.workers, args.layers),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m runs bench`."""
    parser.add_argument(
        "benches", nargs="*", metavar="BENCH", help=f"which: {', '.join(BENCHES)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default 7)")
    parser.add_argument(
        "--numel", type=int, default=25_600_000, help="elements of the compressed tensor (25.6 M)"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes of the DDP benches (2)")
    parser.add_argument("--layers", type=int, default=24, help="layers of 1.05 M parameters (24)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def main(args: argparse.Namespace) -> int:
    """Run the benches; 0, or 2 if one is unknown."""
    wanted = args.benches or list(BENCHES)
    unknown = [name for name in wanted if name not in BENCHES]
    if unknown:
        print(f"error: BENCH must be one of {', '.join(BENCHES)}; got {unknown[0]!r}")
        return 2
    rows = [row for name in wanted for row in BENCHES[name](args)]
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {np.__version__}, seed {args.seed}"
    )
    if args.json:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}))
        return 0
    print(machine)
    print(f"{'ratio':>8}  {'goal':<8} what")
    for row in rows:
        detail = f"  ({row.detail})" if row.detail else ""
        print(f"{row.ratio:8.2f}  {row.goal:<8} {row.what}{detail}")
    return 0
