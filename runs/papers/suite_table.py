"""A paper's table, with what came out here beside its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite, nan
from typing import Any

from rich.table import Table

from runs.config import TrainConfig
from runs.logbook import emulated
from runs.papers.suites import Column, Figure, Plan, label
from runs.report.rows import UNKNOWN, Row, Spread
from runs.report.run import Run
from runs.tables import table

Pair = tuple[Figure, Spread]
"""The paper's figure, and what came out here."""


def at_best_rates(plan: Plan, rows: Sequence[Row]) -> tuple[list[Row], dict[str, float]]:
    """The rows under their entries' names, each with the learning rate that is best on validation
    data, and these rates by name. Rows that are no entry's follow."""
    best: list[Row] = []
    rates: dict[str, float] = {}
    by_label = {row.label: row for row in rows}
    for entry in plan.suite.entries if plan.suite.lrs else ():
        tried = {lr: by_label.pop(label(entry.name, lr), None) for lr in plan.suite.lrs}
        scores = {lr: _score(row) for lr, row in tried.items() if row is not None}
        if scores:
            rates[entry.name] = max(scores, key=lambda lr: scores[lr])
            found = tried[rates[entry.name]]
            assert found is not None
            best.append(replace(found, label=entry.name))
    return [*best, *by_label.values()], rates


def _score(row: Row) -> float:
    """Its quality, larger is better; of a run that has diverged none is worse."""
    quality = row.of(lambda run: run.quality).mean
    better = quality if row.run.higher_is_better else -quality
    return better if isfinite(better) else -inf


def suite_pairs(plan: Plan, rows: Sequence[Row]) -> list[list[Pair]]:
    """Of each row, the contenders of the suite and those that were added, one for each column."""
    pairs = []
    for row in rows:
        theirs = dict(enumerate(plan.figures(row.label)))
        here = [_measured(column, plan, row, rows) for column in plan.suite.columns]
        pairs.append([(theirs.get(i), ours) for i, ours in enumerate(here)])
    return pairs


def suite_table(plan: Plan, rows: Sequence[Row]) -> Table:
    """The paper's figures and what came out here, side by side."""
    rows, rates = at_best_rates(plan, rows)
    head = [
        "contender",
        *(["learning\nrate"] if rates else []),
        *(word for name in _names(plan, rows) for word in (f"{name}:\npaper", "here")),
    ]
    lines = [
        [
            row.label,
            *([f"{rates[row.label]:g}" if row.label in rates else UNKNOWN] if rates else []),
            *(text for theirs, ours in pairs for text in (_shown(theirs), ours.text(4))),
        ]
        for row, pairs in zip(rows, suite_pairs(plan, rows), strict=True)
    ]
    return table(head, lines)


def suite_json(plan: Plan, rows: Sequence[Row]) -> dict[str, Any]:
    """The same, and what it is of."""
    rows, rates = at_best_rates(plan, rows)
    specs = {entry.name: plan.spec(entry, rates.get(entry.name)) for entry in plan.suite.entries}
    return {
        "name": plan.suite.name,
        "paper": plan.suite.paper,
        "scale": plan.scale,
        "rows": [
            {
                "contender": row.label,
                "spec": specs.get(row.label, row.label),
                "columns": [
                    {"name": name, "paper": theirs, "here": ours.as_json()}
                    for name, (theirs, ours) in zip(_names(plan, rows), pairs, strict=True)
                ],
            }
            for row, pairs in zip(rows, suite_pairs(plan, rows), strict=True)
        ],
    }


def suite_notes(plan: Plan) -> list[str]:
    """What a reader of the table must know."""
    options, part, missing = plan.options, plan.part, dict[str, list[str]]()
    for column in plan.suite.columns:
        if column.over not in (None, *plan.names):
            missing.setdefault(str(column.over), []).append(column.name)
    return [
        f"paper: {plan.suite.paper}",
        f"here: scale {plan.scale:g}, {plan.steps} of {part.steps} steps, {options['model']} "
        f"for {part.model}",
        *plan.suite.differs,
        *(
            f"{', '.join(names)}: not known without the contender {over!r}; --only has to name it"
            for over, names in missing.items()
        ),
    ]


def _names(plan: Plan, rows: Sequence[Row]) -> list[str]:
    quality = rows[0].run.quality_name if rows else "quality"
    quality = "top-5 accuracy %" if plan.part.top5 else quality
    return [column.name.format(quality=quality) for column in plan.suite.columns]


def _measured(column: Column, plan: Plan, row: Row, rows: Sequence[Row]) -> Spread:
    """Seed by seed; nan where something is not known."""
    if column.only not in row.label:
        return Spread.of(())
    if column.over is None:
        return row.of(lambda run: _value(column, plan, run))
    theirs = {
        run.seed: _value(column, plan, run)
        for other in rows
        if other.label == column.over
        for run in other.runs
    }

    def compared(run: Run) -> float:
        mine, other = _value(column, plan, run), theirs.get(run.seed, nan)
        if column.worse:
            return 100 * (mine / other - 1) if other else nan
        return other / mine if mine else nan

    return row.of(compared)


def _value(column: Column, plan: Plan, run: Run) -> float:
    seconds = run.modelled_in_all(next(iter(run.modelled))) if run.modelled else nan
    return {
        "quality": lambda: next(iter(run.beside.values()), nan) if plan.part.top5 else run.quality,
        "test": lambda: run.ending.test,
        "seconds": lambda: seconds,
        "stopped": lambda: run.trained / plan.part.epoch if run.ending.best_step else nan,
        "epoch": lambda: seconds / run.trained * plan.part.epoch,
        "bytes": lambda: run.bytes_sent,
        "floats": lambda: run.ending.floats_sent,
    }[column.measure]()


def _shown(figure: Figure) -> str:
    if figure is None:
        return UNKNOWN
    return figure if isinstance(figure, str) else f"{figure:.4g}"


def speeds(config: TrainConfig) -> str:
    """What the seconds of a suite are made of."""
    if config.fixed_clock is None:
        return "speeds are modelled from measured times of computing and compression"
    size = f", gradients as large as {config.model_mb:g} MB" if config.model_mb else ""
    return (
        f"speeds are modelled, {config.fixed_clock:g} s of computing a step, each contender's "
        f"nanoseconds of coding, {emulated(config) or 'no link'}{size}"
    )
