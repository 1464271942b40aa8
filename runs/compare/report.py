"""What a comparison has found so far: compare.json, table.txt and the plot."""

from __future__ import annotations

import json
import platform
from typing import Any

import torch
from rich.console import RenderableType

from runs.compare.digest import Digest, read_digest
from runs.compare.options import Comparison
from runs.compare.plot import PLOT_FILE, TIME_FILE, draw_quality
from runs.compare.slice import is_finished
from runs.compare.standing import Standing, stand
from runs.compare.suite_table import suite_notes, suite_rows, suite_table
from runs.compare.suites import Plan
from runs.compare.table import make_tables
from runs.config import TrainConfig, write_text
from runs.logbook import emulated
from runs.netlab.lab import real_links
from runs.result import is_dense
from runs.tables import faint, strong, text_of
from runs.tasks import TASKS
from runs.verdict import verdict

COMPARE_FILE = "compare.json"
TABLE_FILE = "table.txt"


def make_report(comparison: Comparison) -> tuple[dict[str, Any], list[RenderableType]]:
    """Write the files; returns the result as JSON-like values, and what is to be read.

    Only runs that are finished count.
    """
    first = comparison.config(comparison.contenders[0], comparison.seeds[0])
    task = TASKS[first.task]
    digests, dense = _read(comparison)
    networks = [str(network) for network in comparison.networks]
    standings = stand(digests, dense, len(networks), task.higher_is_better, comparison.goal_step)
    missing = len(comparison.contenders) * len(comparison.seeds) - sum(map(len, digests.values()))
    better = "higher" if task.higher_is_better else "lower"
    heading = _title(comparison, first)
    notes = [
        f"{task.quality_name}: held-out, {better} is better; MB sent: by a worker",
        f"± is the standard deviation over {len(comparison.seeds)} seeds"
        if len(comparison.seeds) > 1
        else "one seed: no spread",
        f"steps/s: {'measured' if first.fixed_clock is None else 'by the modelled clock'}, "
        f"{_network(first)}, without evaluations and each turn's first step; "
        f"{comparison.interleaving}",
        "modelled seconds: compute + compression (measured) + latency + bytes x 8 / rate, no "
        "overlap; all: the whole run",
        f"to dense: until an evaluation (every {first.eval_every} steps) is at least as good as "
        f"{dense} {_goal(comparison)}, same seed"
        if dense
        else "to dense: not known without a dense contender",
        f"when 1st: {task.quality_name} at the last evaluation before the moment at which the "
        f"fastest contender is through, by the modelled seconds",
        "explored: steps sent while the policy was finding out, at another CF than the one that it "
        "then stayed at; MB so: what a worker sent in them",
    ]
    if first.netlab:
        notes.append(
            "MB interf.: what the network interface of rank 0 has sent, TCP's headers included"
        )
    if comparison.smooth > 1:
        notes.append(
            f"{task.quality_name}, everywhere: the mean of the last {comparison.smooth} evaluations"
        )
    if comparison.model_mb is not None:
        notes.append(
            f"modelled seconds as if the gradients were {comparison.model_mb:g} MB: their bytes "
            f"and compression in proportion, compute and statistics as they were"
        )
    if comparison.one_worker_seconds is not None:
        notes.append(
            f"scaling eff.: T_N / (N T_1), of the steps/s; a step of one worker takes "
            f"{comparison.one_worker_seconds:g} s"
        )
    notes += [
        f"{label}, seed {run.seed}, has diverged: {run.diverged}"
        for label, runs in digests.items()
        for run in runs
        if run.diverged
    ]
    if missing:
        notes.append(f"{missing} runs are not finished and not in the table")
    try:
        if digests:
            modelled = first.fixed_clock is not None
            network = emulated(first) or ("the network" if modelled else "this machine's network")
            network = real_links(first.netlab) if first.netlab else network
            seconds = f"seconds of training, {'modelled' if modelled else 'measured'}, {network}"
            how = (heading, task.quality_name, task.higher_is_better, dense or "", seconds)
            draw_quality(standings, comparison.folder, *how)
    except ImportError:
        notes.append(f"no {PLOT_FILE}, {TIME_FILE}: matplotlib is not installed")
    alone = comparison.one_worker_seconds
    tables = make_tables(standings, task.quality_name, networks, alone, bool(first.netlab))
    told = _headlines(standings, dense, first)
    plan, paper, above = comparison.plan, [], list[RenderableType]()
    if plan is not None:
        paper = suite_rows(plan, standings, task.quality_name)
        above = [f"{plan.suite.name}: {_speeds(first)}", "", suite_table(paper), ""]
        notes = [*suite_notes(plan), *notes]
    parts = [*above, strong(heading), "", *tables, ""]
    parts += [faint(f"note: {note}") for note in notes]
    parts += [f"files in {comparison.folder}"]
    parts += [strong(f"{label}: {headline}") for label, headline in told.items()]
    result = {
        "title": heading,
        "headlines": told,
        "finished": not missing,
        "quality_name": task.quality_name,
        "higher_is_better": task.higher_is_better,
        "dense": dense,
        "steps": comparison.steps,
        "goal_step": comparison.goal_step,
        "smooth": comparison.smooth,
        "seeds": list(comparison.seeds),
        "networks": networks,
        "model_mb": comparison.model_mb,
        "interleaving": comparison.interleaving,
        "emulated_link": emulated(first) or None,
        "notes": notes,
        **({} if plan is None else {"suite": _suite_json(plan, paper)}),
        "contenders": [
            {
                **standing.as_json(networks),
                "scaling_efficiency": standing.scaling_efficiency(alone).as_json(),
            }
            for standing in standings
        ],
        "log_dir": str(comparison.folder),
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "processor": platform.machine(),
        },
    }
    dumped = json.dumps(result, indent=2, allow_nan=False)
    write_text(comparison.folder / COMPARE_FILE, dumped + "\n")
    write_text(comparison.folder / TABLE_FILE, text_of(*parts) + "\n")
    return result, parts


def _speeds(config: TrainConfig) -> str:
    """What the seconds of a suite are made of."""
    if config.fixed_clock is None:
        return "speeds are modelled from measured times of computing and compression"
    size = f", gradients as large as {config.model_mb:g} MB" if config.model_mb else ""
    return (
        f"speeds are modelled, {config.fixed_clock:g} s of computing a step and none of "
        f"compression, {emulated(config) or 'no link'}{size}"
    )


def _suite_json(plan: Plan, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": plan.suite.name,
        "paper": plan.suite.paper,
        "scale": plan.scale,
        "rows": rows,
    }


def _read(comparison: Comparison) -> tuple[dict[str, list[Digest]], str | None]:
    """The finished runs by contender, and which contender is the dense one."""
    found: dict[str, list[Digest]] = {}
    dense = None
    for contender in comparison.contenders:
        configs = [comparison.config(contender, seed) for seed in comparison.seeds]
        how = comparison.networks, comparison.model_mb, comparison.smooth
        runs = [read_digest(c, *how) for c in configs if is_finished(c)]
        if runs:
            found[contender.label] = runs
        if dense is None and is_dense(configs[0]):
            dense = contender.label
    return found, dense


def _headlines(standings: list[Standing], dense: str | None, config: TrainConfig) -> dict[str, str]:
    """Whether it was worth it, by contender; none without a dense run to compare with."""
    ended = {standing.label: standing.ended() for standing in standings}
    if dense is None or dense not in ended:
        return {}
    task = TASKS[config.task]
    return {
        label: verdict(
            one, ended[dense], task.quality_name, task.higher_is_better, emulated(config)
        )
        for label, one in ended.items()
        if label != dense
    }


def _goal(comparison: Comparison) -> str:
    goal = comparison.goal_step
    return "at its end" if goal is None else f"after {goal} steps"


def _network(config: TrainConfig) -> str:
    """Where steps were timed."""
    if config.netlab:
        return real_links(config.netlab)
    return emulated(config) or "no link emulated"


def _title(comparison: Comparison, config: TrainConfig) -> str:
    model = config.model or TASKS[config.task].models[0]
    link = f", {emulated(config)}" if config.link else ""
    link += f", {real_links(config.netlab)}" if config.netlab else ""
    seeds = " ".join(map(str, comparison.seeds))
    lengths = sorted({comparison.steps_of(contender) for contender in comparison.contenders})
    steps = " or ".join(map(str, lengths))
    return (
        f"{config.task} ({model}), {config.workers} workers, {steps} steps, "
        f"seed{'s' if len(comparison.seeds) > 1 else ''} {seeds}{link}"
    )
