"""Over real links: how long a step takes at rest, and how long it takes to dense's quality.

    python -m runs.bench.links --text WIKITEXT --images CIFAR

The quality is plain DDP's after all of its steps. Whoever has not reached it by then gets three
times as many, but for the large models (`--tasks "GPT-121M, AdamW" "ResNet-50, SGD"`).

A fixed method needs the same steps to a quality on any link. So its steps are counted once, without
links, and multiplied by what its step takes on each link. The default adapts to a link: it runs
there in full, exploring included. All is done by `python -m runs compare` in folders below
--log-dir; the same command goes on where it was stopped. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import NamedTuple

from runs.compare.contender import parse_contender
from runs.report.run import Run
from runs.report.source import read_folder

DEFAULT = "goodput"
DILOCO = "diloco:sync=LocalSteps({}, outer_lr=0.7, outer_momentum=0.9, overlap=0)"


class Fixed(NamedTuple):
    """A method that does not adapt. label: as `compare` names it. steps: in which its step is
    timed. dense: so many steps at the beginning do not count, since PyTorch's PowerSGD sends the
    first of them dense."""

    label: str
    steps: int
    dense: int = 0

    def timed(self, steps: int) -> str:
        """The label of so many steps of it."""
        return f"{self.label}{',' if ':' in self.label else ':'}steps={steps}"


FIXED: Mapping[str, Fixed] = {
    "plain DDP": Fixed("ddp", 8),
    "bf16 hook": Fixed("ddp:ddp_hook=bf16", 8),
    "PowerSGD hook": Fixed("ddp:ddp_hook=powersgd", 44, dense=14),
    "DiLoCo, every 50": Fixed(DILOCO.format(50), 202),
    "DiLoCo, every 10": Fixed(DILOCO.format(10), 42),
}

AT_SIZE: Mapping[str, Fixed] = {
    "plain DDP": Fixed("ddp", 4),
    "bf16 hook": Fixed("ddp:ddp_hook=bf16", 4),
    "PowerSGD hook": Fixed("ddp:ddp_hook=powersgd", 20, dense=10),
    "DiLoCo, every 10": Fixed(DILOCO.format(10), 42),
    "CF 100": Fixed("fixed:cf=100", 12),
}
"""Of large models, whose dense step takes most of a minute."""

AT_REST = 0.5
"""The share of the default's run, at its end, over which its step is timed: longer than it measures
gains at a time."""
SMOOTH = 3
LONGER = 3
"""So many times its steps has a run that did not reach dense's quality."""


class Task(NamedTuple):
    """A training task. data: the argument with the folder of its data. options: of `compare`.
    schedule: further options of a whole run. steps, evaluations: of a whole run. methods: what the
    default is compared with. longer: see LONGER; 1: nobody trains longer."""

    data: str
    options: tuple[str, ...]
    schedule: tuple[str, ...]
    steps: int
    evaluations: int = 30
    methods: Mapping[str, Fixed] = FIXED
    longer: int = LONGER


TASKS: Mapping[str, Task] = {
    "GPT, AdamW": Task(
        "text",
        ("--model", "gpt", "--batch-size", "16", "--optimizer", "adamw", "--clip-grad", "1"),
        ("--lr", "3e-3", "--warmup", "50"),
        600,
    ),
    "VGG-11, SGD": Task(
        "images", ("--task", "cifar10", "--model", "vgg11", "--batch-size", "8"), (), 300
    ),
    "GPT-121M, AdamW": Task(
        "text",
        (
            *("--model", "gpt-121m", "--batch-size", "8", "--autocast", "on"),
            *("--optimizer", "adamw", "--clip-grad", "1"),
        ),
        ("--lr", "3e-4", "--warmup", "20"),
        150,
        evaluations=10,
        methods=AT_SIZE,
        longer=1,
    ),
    "ResNet-50, SGD": Task(
        "images",
        ("--task", "cifar10", "--model", "resnet50", "--batch-size", "16", "--autocast", "on"),
        (),
        100,
        evaluations=10,
        methods=AT_SIZE,
        longer=1,
    ),
}
USUAL = ("GPT, AdamW", "VGG-11, SGD")


@dataclass(frozen=True)
class Cell:
    """One task with so many workers on one link. per_node: workers that share a link."""

    task: str
    workers: int
    rate: str
    per_node: int = 1

    @property
    def name(self) -> str:
        shared = f" ({self.workers // self.per_node} x {self.per_node})" * (self.per_node > 1)
        return f"{self.task} | {self.workers}{shared} | {self.rate}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what has not been run yet, and print both tables."""
    asked = _arguments().parse_args(argv)
    cells = [
        Cell(task, int(workers), rate, int(per_node or 1))
        for task in asked.tasks
        for workers, _, per_node in (each.partition("/") for each in asked.workers)
        for rate in asked.rates
    ]
    rows = [_row(cell, asked) for cell in cells]
    methods = (name for cell in cells for name in TASKS[cell.task].methods)
    names = [*dict.fromkeys(methods), "default"]
    blank = (nan, nan)
    head = f"| task | workers | link | {' | '.join(names)} |\n|{' --- |' * (3 + len(names))}"
    for what, place in (("seconds a step at rest", 0), ("seconds to dense's quality", 1)):
        print(f"\n{what}\n\n{head}")
        for cell, row in zip(cells, rows, strict=True):
            found = (_text(row.get(name, blank)[place]) for name in names)
            print(f"| {cell.name} | {' | '.join(found)} |")
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runs.bench.links", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--text", required=True, help="folder of WikiText-2")
    parser.add_argument("--images", required=True, help="folder of CIFAR-10")
    parser.add_argument("--tasks", nargs="+", default=USUAL, choices=[*TASKS])
    parser.add_argument(
        "--workers", nargs="+", default=["2", "4"], help="4/2: four, two of them behind each link"
    )
    parser.add_argument("--rates", nargs="+", default=["10mbit", "100mbit", "1gbit", "none"])
    parser.add_argument("--log-dir", default="logs/links", type=Path)
    return parser


def _row(cell: Cell, asked: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """(seconds a step, seconds to the quality that plain DDP has at its end) by contender."""
    task = TASKS[cell.task]
    methods = task.methods
    common = ("--data", getattr(asked, task.data), *task.options)
    folder = asked.log_dir / f"{cell.task.partition(',')[0]}-{cell.workers}"
    here = folder / f"{cell.rate}{f'-{cell.per_node}' * (cell.per_node > 1)}"
    labels = [fixed.label for fixed in methods.values()]
    runs = _compare(folder / "quality", cell, _whole(task, common), labels, shaped=False)
    goal = runs["ddp"].quality
    slow = [label for label in labels if not isfinite(runs[label].steps_to(goal))]
    if slow and task.longer > 1:
        longer = _whole(task, common, task.longer)
        runs |= _compare(folder / "longer", cell, longer, slow, shaped=False)
    timed = [fixed.timed(n) for fixed in methods.values() for n in (fixed.dense, fixed.steps) if n]
    short = ("--steps", "8", "--eval-every", "1000")
    rest = _compare(here / "rest", cell, (*common, *short), timed)
    found = {}
    for name, fixed in methods.items():
        seconds = _seconds(fixed, rest)
        found[name] = seconds, runs[fixed.label].steps_to(goal) * seconds
    run = _compare(here / "default", cell, _whole(task, common), [DEFAULT])[DEFAULT]
    seconds = median(run.step_seconds[-round(AT_REST * len(run.step_seconds)) :])
    if task.longer > 1 and not isfinite(run.steps_to(goal)):
        longer = _whole(task, common, task.longer)
        run = _compare(here / "longer", cell, longer, [DEFAULT])[DEFAULT]
    steps = run.steps_to(goal)
    return {**found, "default": (seconds, run.seconds_by(int(steps)) if isfinite(steps) else steps)}


def _whole(task: Task, common: Sequence[str], times: int = 1) -> tuple[str, ...]:
    """The options of a run of so many times the task's steps."""
    steps = times * task.steps
    whole = ("--steps", str(steps), "--eval-every", str(steps // task.evaluations))
    return (*common, *task.schedule, *whole)


def _seconds(fixed: Fixed, runs: Mapping[str, Run]) -> float:
    """Of a step of a method, from runs of it; nan if no step was timed."""

    def all_of(steps: int) -> float:
        return steps / (runs[fixed.timed(steps)].steps_per_second or nan) if steps else 0.0

    return (all_of(fixed.steps) - all_of(fixed.dense)) / (fixed.steps - fixed.dense)


def _compare(
    folder: Path, cell: Cell, options: Sequence[str], labels: Sequence[str], shaped: bool = True
) -> dict[str, Run]:
    """The runs of a comparison, by contender; those that are finished are not made again."""
    lab: tuple[str, ...] = ()
    if shaped and cell.rate != "none":
        shared = ("--per-node", str(cell.per_node)) * (cell.per_node > 1)
        lab = ("netlab", "--network", cell.rate, "--workers", str(cell.workers), *shared, "--")
    contenders = [word for label in labels for word in ("--contender", label)]
    command = [sys.executable, "-m", "runs", *lab, "compare", "--workers", str(cell.workers)]
    command += ["--slice", "0", "--smooth", str(SMOOTH), "--log-dir", str(folder)]
    subprocess.run([*command, *options, *contenders], check=True, stdout=sys.stderr)
    runs = (path for path in (folder / "runs").iterdir() if path.is_dir())
    by_folder = {path.name: read_folder(path, str(path), SMOOTH) for path in runs}
    return {label: by_folder[f"{parse_contender(label).folder}-seed0"] for label in labels}


def _text(seconds: float) -> str:
    if isfinite(seconds):
        return f"{seconds:.3g}"
    return "never" if seconds > 0 else "-"


if __name__ == "__main__":
    sys.exit(main())
