"""The bench subcommand: which benches, how long, and how the rows are printed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import torch

from runs.bench.compressors import bench_compressors, bench_levels
from runs.bench.ddp import bench_hook, bench_memory, bench_shadow, bench_timeline
from runs.bench.doctor import bench_doctor
from runs.bench.gpu import bench_gpu
from runs.bench.lowrank import bench_lowrank
from runs.bench.timing import Row
from runs.bench.wire import bench_exchanges, bench_wire
from runs.parser import UsageError, fail, whole

BENCHES: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "compressors": lambda args: bench_compressors(args.numel, args.rounds, args.seed),
    "levels": lambda args: bench_levels(args.numel, args.rounds, args.seed),
    "lowrank": lambda args: bench_lowrank(args.rounds, args.seed),
    "wire": lambda args: bench_wire(args.numel),
    "exchanges": lambda args: bench_exchanges(),
    "shadow": lambda args: bench_shadow(5 * args.rounds),
    "timeline": lambda args: bench_timeline(2 * args.rounds),
    "hook": lambda args: bench_hook(args.workers, args.layers, 3 * args.rounds),
    "memory": lambda args: bench_memory(args.workers, args.layers),
    "doctor": lambda args: bench_doctor(),
    "gpu": lambda args: bench_gpu(args.rounds, args.seed),
}

HELP = f"""\
Measure speed and memory of the library, as ratios against a peer in the same run.

benches: {", ".join(BENCHES)}

examples:
  python -m runs bench
      all of them, some minutes (gpu only where torch sees a CUDA device; but doctor)
  python -m runs bench doctor
      is what `runs doctor` expects what then happens? 10 runs over real links, 15 minutes (netlab)
  python -m runs bench compressors levels --numel 1000000 --rounds 21
  python -m runs bench shadow timeline --json

A row is a ratio, the goal it is held to, and what was divided by what; rows that fall short of
their goal are listed again at the end, and the exit code is 1 then. Ratios are medians of rounds
in which both take turns; a busy machine widens them all the same."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m runs bench`."""
    parser.add_argument(
        "benches", nargs="*", metavar="BENCH", help=f"which: {', '.join(BENCHES)} (default: all)"
    )
    parser.add_argument("--rounds", type=whole(1), default=7, help="timed rounds (default 7)")
    parser.add_argument(
        "--numel",
        type=whole(1000),
        default=25_600_000,
        help="elements of the compressed tensor (25.6 M)",
    )
    parser.add_argument(
        "--workers", type=whole(2), default=2, help="processes of the DDP benches (2)"
    )
    parser.add_argument(
        "--layers", type=whole(1), default=24, help="layers of 1.05 M parameters (24)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of what is measured (0)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def main(args: argparse.Namespace) -> int:
    """Run the benches; 0, 1 if a row falls short of its goal, or 2 if a bench is unknown."""
    here = set(BENCHES) - ({"gpu"} if not torch.cuda.is_available() else set()) - {"doctor"}
    wanted = args.benches or [name for name in BENCHES if name in here]
    unknown = [name for name in wanted if name not in BENCHES]
    if unknown:
        accepted = f"BENCH must be one of {', '.join(BENCHES)}; got {unknown[0]!r}"
        return fail("python -m runs bench", UsageError(accepted))
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {np.__version__}, seed {args.seed}"
    )
    if not args.json:
        print(f"{machine}\n{'ratio':>8}  {'goal':<8} what", flush=True)
    rows: list[Row] = []
    for number, name in enumerate(wanted, start=1):
        print(f"measuring {number} of {len(wanted)}: {name}", file=sys.stderr, flush=True)
        try:
            found = BENCHES[name](args)
        except UsageError as error:
            return fail("python -m runs bench", error)
        rows += found
        if not args.json:
            print("\n".join(map(_line, found)), flush=True)
    if args.json:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}))
    short = [row for row in rows if row.falls_short]
    if short and not args.json:
        print(f"\n{len(short)} of {len(rows)} rows fall short of their goal:")
        print("\n".join(map(_line, short)), flush=True)
    return 1 if short else 0


def _line(row: Row) -> str:
    detail = f"  ({row.detail})" if row.detail else ""
    return f"{row.ratio:8.2f}  {row.goal:<8} {row.what}{detail}"
