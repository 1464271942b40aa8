"""A paper's table, with what came out here beside its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

from rich.table import Table

from runs.compare.digest import Digest
from runs.compare.standing import Spread, Standing
from runs.compare.suites import Column, Entry, Figure, Plan
from runs.progress import number_text
from runs.tables import table


def suite_rows(
    plan: Plan, standings: Sequence[Standing], quality_name: str
) -> list[dict[str, Any]]:
    """A row for each contender that is finished, as JSON-like values: those of the suite and those
    that were added."""
    known = {standing.label: standing for standing in standings}
    entries = {entry.name: entry for entry in plan.suite.entries}
    return [
        {
            "contender": label,
            "spec": plan.spec(entries[label]) if label in entries else label,
            "columns": [
                {
                    "name": column.name.format(quality=_quality_name(plan, quality_name)),
                    "paper": _figure(entries.get(label), plan, i),
                    "here": _measured(column, plan, standing, known).as_json(),
                }
                for i, column in enumerate(plan.suite.columns)
            ],
        }
        for label, standing in known.items()
    ]


def suite_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows, with the paper's figure and what came out here side by side."""
    names = [column["name"] for column in rows[0]["columns"]] if rows else []
    head = ["contender", *(word for name in names for word in (f"{name}:\npaper", "here"))]
    lines = []
    for row in rows:
        pairs = [(_shown(c["paper"]), _spread(c["here"])) for c in row["columns"]]
        lines.append([row["contender"], *(cell for pair in pairs for cell in pair)])
    return table(head, lines)


def suite_notes(plan: Plan) -> list[str]:
    """What a reader of the table must know."""
    options, part = plan.options, plan.part
    return [
        f"paper: {plan.suite.paper}",
        f"here: scale {plan.scale:g}, {plan.steps} of {part.steps} steps, {options['model']} "
        f"for {part.model}",
        *plan.suite.differs,
    ]


def _quality_name(plan: Plan, quality_name: str) -> str:
    return "top-5 accuracy %" if plan.part.top5 else quality_name


def _figure(entry: Entry | None, plan: Plan, column: int) -> Figure:
    figures = entry.figures.get(plan.part.task, ()) if entry is not None else ()
    return figures[column] if column < len(figures) else None


def _measured(
    column: Column, plan: Plan, standing: Standing, known: Mapping[str, Standing]
) -> Spread:
    """Seed by seed; nan where something is not known."""
    if column.only not in standing.label:
        return Spread.of(())
    own = {run.seed: _value(column, plan, run) for run in standing.runs}
    if column.over is None:
        return Spread.of(own.values())
    other = known.get(column.over)
    theirs = {run.seed: _value(column, plan, run) for run in other.runs} if other else {}
    pairs = [(value, theirs.get(seed, nan)) for seed, value in own.items()]
    if column.worse:
        return Spread.of(100 * (mine / other - 1) if other else nan for mine, other in pairs)
    return Spread.of(other / mine if mine else nan for mine, other in pairs)


def _value(column: Column, plan: Plan, run: Digest) -> float:
    seconds = run.ends[0][-1] if run.ends and run.ends[0] else nan
    return {
        "quality": lambda: next(iter(run.beside.values()), nan) if plan.part.top5 else run.quality,
        "test": lambda: run.test,
        "seconds": lambda: seconds,
        "epoch": lambda: seconds / len(run.sent) * plan.part.epoch if run.sent else nan,
        "bytes": lambda: run.bytes_sent,
        "floats": lambda: run.floats_sent,
    }[column.measure]()


def _shown(figure: Figure) -> str:
    if figure is None:
        return "-"
    return figure if isinstance(figure, str) else f"{figure:.4g}"


def _spread(value: Mapping[str, Any]) -> str:
    mean, deviation = value["mean"], value["deviation"]
    if mean is None:
        return "-"
    text = number_text(mean, 4) if abs(mean) >= 0.001 else "0"
    return f"{text} ± {deviation:.2g}" if deviation else text
