"""The bench of quality: what runs end with in equal steps, dense and compressed, on recipes that
differ (recipes.py).

Ranks are simulated (`runs simulate`). Step times are modelled: `COMPUTE` seconds, and what a link
takes for the bytes of a model with 100 MB of gradients. So a run goes the same way on any machine.
Every run that ends is kept as a line of a file, so that the same command goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from math import nan
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

from adaptive import AdaptiveCompressor, LinkSpec, MemoryTimeline, Network
from runs.bench.recipes import RECIPES, Recipe
from runs.bench.timing import Row
from runs.expression import policy_from
from runs.modelled_clock import ModelledClock, imagined_bytes
from runs.parser import UsageError
from runs.report.verdict import allowed
from runs.simulate.group import SimulatedGroup
from runs.simulate.ranks import run_ranks
from runs.tasks import DataNotFoundError, make_task

if TYPE_CHECKING:
    from runs.bench.command import Benching

COMPUTE = 0.2
"""Seconds of forward, backward and optimizer, as of a ResNet-50 on one GPU."""

MEGABYTES = 100.0
"""Of the gradients that the modelled link carries."""

FEWER = 50
"""On the slower link the default sends at least so many times fewer bytes than dense."""

SLOW, FAST = "100mbit", "1gbit"

DENSE = "dense"
CONTENDERS: Mapping[str, str] = {
    DENSE: "Fixed(1)",
    "default": "Goodput()",
    "time": "Goodput(goal='time')",
    "CF 20": "Fixed(20)",
    "CF 100": "Fixed(100)",
}
"""Policies by name. Those of `Fixed` are the same on every link."""


class Job(NamedTuple):
    """One run. link: of a rank; "" where the policy does not look at it."""

    recipe: str
    contender: str
    workers: int
    link: str
    seed: int


class Outcome(NamedTuple):
    """What a run ended with. fewer: dense bytes / bytes sent. faster: modelled time of a dense
    run / that of this one. cfs: steps by CF."""

    quality: float
    fewer: float
    faster: float
    cfs: Mapping[str, int]


def bench_quality(asked: Benching) -> list[Row]:
    """For each recipe, number of workers and link: what each contender loses beside dense, divided
    by what it may lose. UsageError without the data, or a log that cannot be kept."""
    if asked.images is None or asked.text is None:
        raise UsageError("bench quality needs --images, a folder of CIFAR-10, and --text, a text")
    recipes = [each for each in RECIPES if each.half == asked.half and asked.recipe in each.name]
    if not recipes:
        names = ", ".join(repr(each.name) for each in RECIPES if each.half == asked.half)
        raise UsageError(f"--recipe must be a part of one of {names}; got {asked.recipe!r}")
    data = {"cifar10": Path(asked.images), "text": Path(asked.text)}
    for task in {each.task for each in recipes}:
        try:
            make_task(task, data=data[task], batch_size=1)
        except (DataNotFoundError, ValueError) as error:
            name = "--text" if task == "text" else "--images"
            raise UsageError(f"{name} {data[task]}: {error}") from error
    jobs = [
        Job(recipe.name, contender, workers, link, seed)
        for seed, workers, recipe, contender in product(
            range(asked.seeds), asked.ranks, recipes, CONTENDERS
        )
        for link in ((SLOW, FAST) if "Fixed" not in CONTENDERS[contender] else ("",))
    ]
    log = Path(asked.log)
    try:
        found = read(log)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a+") as file:
            file.seek(0)
            if not f"\n{file.read()}".endswith("\n"):
                file.write("\n")  # ends a line that was cut short, so that the next one is whole
    except OSError as error:
        raise UsageError(f"--log {log}: {error.strerror}") from error
    missing = [job for job in jobs if job not in found]
    run = partial(_run, data=data)
    processes = ProcessPoolExecutor(os.cpu_count(), get_context("spawn"))
    with processes as pool, log.open("a") as lines:
        outcomes = zip(missing, pool.map(run, missing), strict=True)
        for number, (job, outcome) in enumerate(outcomes, start=1):
            found[job] = outcome
            print(json.dumps({**job._asdict(), **outcome._asdict()}), file=lines, flush=True)
            told = f"{' | '.join(map(str, job))}: {outcome.quality:.4g}"
            print(f"{number} of {len(missing)}: {told}", file=sys.stderr, flush=True)
    return rows({job: found[job] for job in jobs}, recipes)


def read(log: Path) -> dict[Job, Outcome]:
    """The runs that a log holds."""
    found = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        try:
            numbers = json.loads(line)
        except json.JSONDecodeError:  # cut short: the bench was killed, or the disk was full
            continue
        job = Job(*(numbers.pop(name) for name in Job._fields))
        found[job] = Outcome(**numbers)
    return found


# -- one run ---------------------------------------------------------------------------------------


def _run(job: Job, data: Mapping[str, Path]) -> Outcome:
    torch.set_num_threads(1)
    recipe = next(each for each in RECIPES if each.name == job.recipe)
    return train(recipe, data, CONTENDERS[job.contender], job.workers, job.link, job.seed)


def train(
    recipe: Recipe,
    data: Mapping[str, Path],
    policy: str,
    workers: int,
    link: str,
    seed: int,
    **options: Any,
) -> Outcome:
    """A run of a recipe on simulated ranks. data: its folder by name of the task. options: of
    `AdaptiveCompressor`."""
    task = make_task(recipe.task, data=data[recipe.task], batch_size=recipe.batch, seed=seed)

    def work(rank: int, group: SimulatedGroup) -> Outcome:
        torch.manual_seed(seed)
        model = recipe.model()
        numel = sum(parameter.numel() for parameter in model.parameters())
        clock = modelled_clock(link, numel)
        replica = DDP(model)
        optimizer = recipe.optimizer(replica)
        usual = [group["lr"] for group in optimizer.param_groups]
        kept = MemoryTimeline()
        compressor = AdaptiveCompressor(
            policy=policy_from(policy), network=Network(clock=clock), timeline=kept, **options
        ).attach(replica, optimizer=optimizer)
        torch.manual_seed(seed * workers + rank)
        for step in range(recipe.steps):
            for each, lr in zip(optimizer.param_groups, usual, strict=True):
                each["lr"] = lr * recipe.schedule(step / recipe.steps)
            recipe.loss(replica, *task.batch(step, rank, workers)).backward()
            if recipe.clip is not None:
                clip_grad_norm_(replica.parameters(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
        compressor.close()
        if rank:
            return Outcome(nan, nan, nan, {})
        reports = [record.report for record in kept.steps]
        sent = sum(
            imagined_bytes(report.wire_bytes, report.statistics_bytes, clock.scale)
            for report in reports
        )
        dense = [report.dense_wire_bytes for report in reports]
        seconds = sum(map(modelled_clock(link, numel).step, dense))
        return Outcome(
            quality=recipe.quality(model, task),
            fewer=clock.scale * sum(dense) / sent,
            faster=seconds / kept.steps[-1].pace.all_seconds,
            cfs={f"{cf:g}": n for cf, n in Counter(report.cf for report in reports).items()},
        )

    outcome: Outcome = run_ranks(workers, work)[0]
    return outcome


def modelled_clock(link: str, numel: int) -> ModelledClock:
    """Of a link that carries gradients of `MEGABYTES`; bytes of the model count for as many."""
    scale = MEGABYTES * 1e6 / (4 * numel)
    return ModelledClock(COMPUTE, LinkSpec.parse(link) if link else None, scale)


# -- the rows --------------------------------------------------------------------------------------


def rows(found: Mapping[Job, Outcome], recipes: Sequence[Recipe]) -> list[Row]:
    """Two rows for each recipe, contender, number of workers and link: the quality lost, divided by
    what is allowed, and the bytes. Only the default is held to goals."""
    made = []
    for recipe, workers in product(recipes, dict.fromkeys(job.workers for job in found)):
        of: dict[tuple[str, str], list[Outcome]] = {}
        for job, outcome in found.items():
            if (job.recipe, job.workers) == (recipe.name, workers):
                of.setdefault((job.contender, job.link), []).append(outcome)
        dense = [each.quality for each in of.pop((DENSE, ""))]
        limit, base = allowed(dense, recipe.measure == "accuracy %"), fmean(dense)
        for (contender, link), runs in of.items():
            quality = fmean(run.quality for run in runs)
            lost = base - quality if recipe.measure == "accuracy %" else quality - base
            name = f"{recipe.name}, {workers} workers{link and f', {link}'}: {contender}"
            told = f"{recipe.measure} {quality:.4g} beside dense's {base:.4g}"
            held = contender == "default"
            made.append(Row(f"{name}, quality lost", lost / limit, "<= 1" if held else "", told))
            fewer = len(runs) / sum(1 / run.fewer for run in runs)
            cfs = ", ".join(sorted({cf for run in runs for cf in run.cfs}, key=float))
            goal = f">= {FEWER}" if held and link == SLOW else ""
            made.append(Row(f"{name}, times fewer bytes", fewer, goal, f"CFs {cfs}"))
    return made
