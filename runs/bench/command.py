"""The bench command: which benches, how long, and how the rows are printed."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from runs.option_types import Count, Whole, at_least, metavar, spec
from runs.parser import UsageError, options

if TYPE_CHECKING:
    from runs.bench.timing import Row

Half = Literal["development", "held-out", "later"]

BENCHES = ("compressors", "step", "memory", "gpu", "quality")
"""Modules of this package, each with a function `bench_NAME`."""

BY_NAME = ("quality",)
"""Run only where they are named: hours."""

HELP = f"""\
Measure speed, memory and quality of the library, as ratios against a peer in the same run.

benches: {", ".join(BENCHES)}

examples:
  python -m runs bench
      all but quality, half an hour (gpu only where torch sees a CUDA device)
  python -m runs bench step
      what a step costs a processor beyond plain DDP's, with the tensors of real models
  python -m runs bench compressors --numel 1000000 --rounds 21
  python -m runs bench memory --json
  python -m runs bench quality --images CIFAR --text WIKITEXT
      what training ends with in equal steps, dense and compressed; hours, and it goes on where
      it was stopped

A row is a ratio, the goal it is held to, and what was divided by what; rows that fall short of
their goal are listed again at the end, and the exit code is 1 then. Ratios are medians of rounds
in which both take turns; a busy machine widens them all the same."""


@dataclass(frozen=True, kw_only=True)
class Benching:
    """What to measure, and how long."""

    benches: Annotated[Positional[tuple[str, ...]], metavar("BENCH ...")] = ()
    """Which (all)."""
    rounds: Annotated[int, spec("N", at_least(1))] = 7
    """Timed rounds."""
    numel: Annotated[int, spec("N", at_least(1000))] = 25_600_000
    """Elements of the compressed tensor."""
    workers: Annotated[int, spec("N", at_least(2))] = 2
    """Processes of the DDP benches."""
    layers: Annotated[int, spec("N", at_least(1))] = 24
    """Layers of 1.05 M parameters."""
    seed: Whole = 0
    """Of what is measured."""
    images: Annotated[str | None, metavar("DIR")] = None
    """Folder of CIFAR-10, for quality."""
    text: Annotated[str | None, metavar("PATH")] = None
    """Folder of WikiText-2 or another text, for quality."""
    half: Half = "development"
    """Recipes of quality: those that the default was made with, those that it never saw, or those
    that were written later."""
    recipe: Annotated[str, metavar("TEXT")] = ""
    """Only the recipes of quality whose names have this part (all)."""
    seeds: Count = 3
    """Seeds of each run of quality."""
    ranks: Annotated[tuple[int, ...], spec("N ...", at_least(2), "*")] = (2, 4)
    """Simulated workers of quality (2 4)."""
    log: Annotated[str, metavar("FILE")] = "logs/quality.jsonl"
    """Where runs of quality are kept."""
    json: bool = False
    """Print the rows as JSON."""


OPTIONS = {"bench": options(Benching)}


def main(given: dict[str, Any]) -> int:
    """Run the benches; 0, or 1 if a row falls short of its goal."""
    asked = Benching(**given)
    unknown = [name for name in asked.benches if name not in BENCHES]
    if unknown:
        raise UsageError(f"BENCH must be one of {', '.join(BENCHES)}; got {unknown[0]!r}")
    import numpy as np
    import torch

    without = (*BY_NAME, *(() if torch.cuda.is_available() else ("gpu",)))
    wanted = asked.benches or [name for name in BENCHES if name not in without]
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {np.__version__}, seed {asked.seed}"
    )
    if not asked.json:
        print(f"{machine}\n{'ratio':>8}  {'goal':<8} what", flush=True)
    rows: list[Row] = []
    for number, name in enumerate(wanted, start=1):
        print(f"measuring {number} of {len(wanted)}: {name}", file=sys.stderr, flush=True)
        found = getattr(import_module(f"runs.bench.{name}"), f"bench_{name}")(asked)
        rows += found
        if not asked.json:
            print(*found, sep="\n", flush=True)
    if asked.json:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}))
    short = [row for row in rows if row.falls_short]
    if short and not asked.json:
        print(f"\n{len(short)} of {len(rows)} rows fall short of their goal:")
        print(*short, sep="\n", flush=True)
    return 1 if short else 0
