"""Whether compression was worth it, also beside a dense run that was made to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan, sqrt
from statistics import mean, stdev

from adaptive.headline import DenseStep, headline
from policies import DENSE
from policies.words import percent
from runs.report.rows import Row


def headlines(rows: Sequence[Row]) -> dict[str, str]:
    """Whether compression was worth it, by label: beside the dense row of the same task on the same
    link, if there is one, else as the run's own record tells."""
    found = {}
    for row in rows:
        of = row.run.task, row.run.link
        alike = [r for r in rows if r.run.is_dense and (r.run.task, r.run.link) == of]
        if row.run.is_dense and (row in alike[:1] or row.run.records):
            told = ""
        elif alike and row.run.config is not None:
            told = verdict(row, alike[0])
        else:
            told = row.run.headline
        if told:
            found[row.label] = told
    return found


def headline_lines(rows: Sequence[Row]) -> list[str]:
    """Those, each with its label where there are several."""
    return [f"{n}: {told}" if len(rows) > 1 else told for n, told in headlines(rows).items()]


def verdict(row: Row, dense: Row) -> str:
    """The headline of runs beside dense ones: means over the seeds."""
    run = row.run
    ours, theirs = (one.of(lambda each: each.quality).values for one in (row, dense))
    quality = beside(ours, theirs, run.quality_name, run.higher_is_better)
    if quality and run.trained != dense.run.trained:
        quality += f" after {run.trained} steps instead of {dense.run.trained}"
    shares = [each.shares.get(DENSE, 0.0) for each in row.runs if each.records]
    clock = dense.run.config.fixed_clock if dense.run.config is not None else None
    saved = row.of(lambda each: 1 - 1 / each.wire_factor if each.wire_factor else nan)
    return headline(
        _step_seconds(row),
        DenseStep(_step_seconds(dense), measured=clock is None),
        saved.mean,
        dense_share=min(mean(shares or [0.0]), 0.999),  # what it is called, its twin is dense, too
        network=run.link,
        quality=quality,
    )


def _step_seconds(row: Row) -> float:
    rate = row.of(lambda run: run.steps_per_second).mean
    return 1 / rate if rate > 0 else nan


def beside(ours: Sequence[float], dense: Sequence[float], name: str, higher: bool) -> str:
    """How a quality compares with dense's: in per cent, of an accuracy in its own points. "" if
    one of them is not known. A difference within the spread over seeds is none."""
    ours, dense = [[q for q in each if isfinite(q)] for each in (ours, dense)]
    if not ours or not dense:
        return ""
    a, b = mean(ours), mean(dense)
    numbers = f"{a:.4g} against {b:.4g}"
    few = min(len(ours), len(dense)) < 2
    spread = 0.0 if few else sqrt((stdev(ours) ** 2 + stdev(dense) ** 2) / 2)
    seeds = "one seed" if few else f"{min(len(ours), len(dense))} seeds"
    alike = f"{a:.4g}" == f"{b:.4g}"
    if alike or (spread and abs(a - b) <= spread):
        within = "" if alike else ", within the spread"
        return f"{name} as dense's ({numbers}, {seeds}{within})"
    how = "better" if (a > b) == higher else "worse"
    by = f"{abs(a - b):.2g} points" if higher or not b else percent(a / b - 1)
    return f"{name} {by} {how} than dense's ({numbers}, {seeds})"
