"""What a comparison has found so far: compare.json, table.txt and the plots."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any

from rich.console import RenderableType

from adaptive import LinkSpec
from runs.compare.options import Comparison
from runs.compare.plot import TIME_FILE, draw_quality
from runs.compare.slice import is_finished
from runs.config import TrainConfig
from runs.files import write_json, write_text
from runs.logbook import emulated
from runs.netlab.lab import real_links
from runs.parser import UsageError
from runs.report.cfs import draw_cfs
from runs.report.rows import Row, history
from runs.report.run import Run
from runs.report.source import read_folder
from runs.report.table import columns, make_text, reading, row_as_json, shown
from runs.report.verdict import headline_lines, headlines
from runs.result import is_dense, trained
from runs.tables import faint, strong, table, text_of
from runs.times import model_bytes, modelled_seconds

COMPARE_FILE = "compare.json"
TABLE_FILE = "table.txt"


def make_report(comparison: Comparison) -> tuple[dict[str, Any], list[RenderableType]]:
    """Write the files; returns the result as JSON-like values, and what is to be read.

    Only runs that are finished count.
    """
    rows, dense = read_rows(comparison)
    first = comparison.config(comparison.contenders[0], comparison.seeds[0])
    missing = len(comparison.contenders) * len(comparison.seeds) - sum(len(r.runs) for r in rows)
    networks, heading = comparison.networks, _title(comparison, first)
    everything = columns(rows, networks)
    known = shown(everything, rows)
    notes = [*reading(known, rows), *_notes(comparison, first, rows, dense)]
    if missing:
        notes.append(f"not finished, and not in the table: {missing} of the runs")
    try:
        if rows:
            clock = "measured" if first.fixed_clock is None else "modelled"
            seconds = f"seconds of training, {clock}, {_network(first)}"
            draw_quality(rows, comparison.folder, heading, seconds)
            draw_cfs(rows, comparison.folder, heading)
            if comparison.plan is not None and comparison.plan.suite.lrs:
                from runs.papers.boxes import draw_boxes

                draw_boxes(comparison.plan, rows, comparison.folder, heading)
    except ImportError:
        notes.append(f"no {TIME_FILE}: matplotlib is not installed")
    plan, suite, above = comparison.plan, {}, list[RenderableType]()
    if plan is not None:
        from runs.papers.suite_table import speeds, suite_json, suite_notes, suite_table

        suite = {"suite": suite_json(plan, rows)}
        above = [f"{plan.suite.name}: {speeds(first)}", "", suite_table(plan, rows), ""]
        notes = [*suite_notes(plan), *notes]
    histories = [[row.label, history(row.run)] for row in rows]
    parts = [
        *above,
        strong(heading),
        "",
        *make_text(known, rows, "contender"),
        "",
        table(
            ["contender", f"CF history (CF x steps) of seed {comparison.seeds[0]}"],
            histories,
            left=(0, 1),
        ),
        "",
        *(faint(f"note: {note}") for note in notes),
        f"files in {comparison.folder}",
        *map(strong, headline_lines(rows)),
    ]
    result = {
        "title": heading,
        "headlines": headlines(rows),
        "finished": not missing,
        "dense": dense,
        "steps": comparison.steps,
        "goal_step": comparison.goal_step,
        "smooth": comparison.smooth,
        "seeds": list(comparison.seeds),
        "networks": list(map(str, networks)),
        "model_mb": comparison.model_mb,
        **suite,
        "rows": [row_as_json(everything, row) for row in rows],
        "notes": notes,
        "log_dir": str(comparison.folder),
    }
    write_json(comparison.folder / COMPARE_FILE, result)
    write_text(comparison.folder / TABLE_FILE, text_of(*parts) + "\n")
    return result, parts


# -- the runs --------------------------------------------------------------------------------------


def read_rows(comparison: Comparison) -> tuple[list[Row], str | None]:
    """A row for each contender with finished runs, and which contender is the dense one."""
    rows, dense = [], None
    for contender in comparison.contenders:
        configs = [comparison.config(contender, seed) for seed in comparison.seeds]
        runs = tuple(_read(comparison, config) for config in configs if is_finished(config))
        if runs:
            rows.append(Row(contender.label, runs))
        if dense is None and (runs[0].is_dense if runs else is_dense(configs[0])):
            dense = contender.label
    return side_by_side(rows, dense, comparison.goal_step), dense


def _read(comparison: Comparison, config: TrainConfig) -> Run:
    alone = comparison.one_worker_seconds
    try:
        run = read_folder(config.folder, f"--log-dir {comparison.folder}", comparison.smooth)
    except UsageError as error:
        raise UsageError(f"{error}; remove the run's folder, and it is trained again") from error
    own = config if alone is None else replace(config, one_worker_seconds=alone)
    return modelled(replace(run, config=own), comparison.networks, comparison.model_mb)


def modelled(run: Run, networks: Sequence[LinkSpec], model_mb: float | None = None) -> Run:
    """The run with its seconds on these networks. model_mb: as if its gradients were so large."""
    workers = run.config.workers if run.config is not None else 1
    own = model_bytes(run.records, workers)
    times = 1.0 if model_mb is None or not own else model_mb * 1e6 / own
    config, coded = run.config, times
    if config is not None and config.fixed_clock is not None and config.model_mb and own:
        coded /= config.model_mb * 1e6 / own
    ends = {one: modelled_seconds(run.records, one, times, coded) for one in networks}
    return replace(run, modelled=ends)


def side_by_side(rows: Sequence[Row], dense: str | None, goal_step: int | None) -> list[Row]:
    """The rows, each run with what it is compared by: the quality of the dense run of its own seed,
    after `goal_step` steps or at its end."""
    goals = {
        run.seed: run.quality if goal_step is None else run.quality_after(goal_step)
        for row in rows
        for run in row.runs
        if row.label == dense
    }

    def placed(run: Run) -> Run:
        return replace(run, goal=goals.get(run.seed, nan))

    return [Row(row.label, tuple(map(placed, row.runs))) for row in rows]


# -- in words --------------------------------------------------------------------------------------


def _notes(
    comparison: Comparison, first: TrainConfig, rows: Sequence[Row], dense: str | None
) -> list[str]:
    seeds, goal = len(comparison.seeds), comparison.goal_step
    by = "measured" if first.fixed_clock is None else "by the modelled clock"
    after = "at its end" if goal is None else f"after {goal} steps"
    turns = f"contenders took turns of {comparison.slice} steps, and who began went round"
    apart = f"; evaluations are {first.eval_every} steps apart"
    if first.script:
        turns, apart = "each run was made from its beginning to its end, one after the other", ""
    notes = [
        f"± is the standard deviation over {seeds} seeds" if seeds > 1 else "one seed: no spread",
        f"steps/s are {by}, {_network(first)}; {turns}",
        f"the target is the quality of {dense} {after}, same seed{apart}"
        if dense
        else "to target: not known without a dense contender",
    ]
    if comparison.smooth > 1:
        notes.append(f"quality, everywhere: the mean of the last {comparison.smooth} evaluations")
    if comparison.model_mb is not None:
        notes.append(
            f"modelled seconds as if the gradients were {comparison.model_mb:g} MB: their bytes "
            f"and compression in proportion, compute and statistics as they were"
        )
    for label, run in [(row.label, run) for row in rows for run in row.runs]:
        if run.ending.diverged:
            notes.append(f"{label}, seed {run.seed}, has diverged: {run.ending.diverged}")
        if run.ends_unknown:
            notes.append(f"{label}, seed {run.seed}: its last evaluation was not finite")
    counts = [(row.label, len(row.runs)) for row in rows]
    if len({count for _, count in counts}) > 1:
        told = ", ".join(f"{count} of {label}" for label, count in counts)
        notes.append(f"rows are of different numbers of seeds: {told}")
    return notes


def _network(config: TrainConfig) -> str:
    """Where steps were timed."""
    return real_links(config.netlab) if config.netlab else emulated(config) or "no link emulated"


def _title(comparison: Comparison, config: TrainConfig) -> str:
    link = f", {_network(config)}" if config.network or config.netlab else ""
    seeds = " ".join(map(str, comparison.seeds))
    lengths = sorted({comparison.steps_of(contender) for contender in comparison.contenders})
    steps = " or ".join(map(str, lengths))
    if config.script:
        return f"{shlex.join(comparison.common['script'])}, {config.workers} workers{link}"
    return (
        f"{trained(config)}, {config.workers} workers, {steps} steps, "
        f"seed{'s' if len(comparison.seeds) > 1 else ''} {seeds}{link}"
    )
