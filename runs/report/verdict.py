"""Whether compression was worth it, also beside a dense run that was made to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite, log, sqrt
from statistics import mean, stdev

from adaptive.network.pace import Pace
from adaptive.timeline.summary import headline, headline_of
from policies import DENSE
from policies.words import percent
from runs.report.rows import Row
from runs.report.run import Run

EQUAL = "in equal steps"


def headlines(rows: Sequence[Row]) -> dict[str, str]:
    """Whether compression was worth it, by label: with the quality of the dense row of the same
    task on the same link with as many workers, if there is one. In a report, where each run has a
    row, of several dense ones that of the same seed counts."""
    found = {}
    for row in rows:
        of = _setting(row.run)
        alike = [r for r in rows if r.run.is_dense and _setting(r.run) == of]
        if row.run.is_dense and (row in alike[:1] or row.run.records):
            told = ""
        elif alike and row.run.config is not None:
            told = verdict(row, next((r for r in alike if r.run.seed == row.run.seed), alike[0]))
        else:
            told = headline_of_runs(row.runs)
        if told:
            diverged = sum(bool(run.ending.diverged) for run in row.runs)
            unknown = sum(run.ends_unknown for run in row.runs)
            for lost, how in ((diverged, "diverged"), (unknown, "ended in no finite quality")):
                which = "the run" if len(row.runs) == 1 else f"{lost} of {len(row.runs)} runs"
                told += f", {which} {how}" if lost else ""
            found[row.label] = told
    return found


def _setting(run: Run) -> tuple[str, str, int]:
    """What a run must have in common with the dense one that it is compared with."""
    return run.task, run.link, run.workers


def headline_lines(rows: Sequence[Row]) -> list[str]:
    """Those, each with its label where there are several."""
    return [f"{n}: {told}" if len(rows) > 1 else told for n, told in headlines(rows).items()]


def verdict(row: Row, dense: Row) -> str:
    """The headline of runs beside dense ones."""
    run = row.run
    ours, theirs = ({each.seed: each.quality for each in one.runs} for one in (row, dense))
    # Not of a run that has diverged, and so ended early.
    steps, others = (
        next((each.trained for each in one.runs if isfinite(each.quality)), one.run.trained)
        for one in (row, dense)
    )
    after = EQUAL if steps == others else f"after {steps} steps instead of {others}"
    quality = beside(ours, theirs, run.quality_name, run.higher_is_better, after)
    return headline_of_runs(row.runs, pace_beside(row, dense), quality)


def headline_of_runs(runs: Sequence[Run], pace: Pace | None = None, quality: str = "") -> str:
    """Whether compression was worth it, as their own records tell: means over the seeds; "" if
    these do not tell. pace: what a comparison with dense runs has found; None: the longest run's
    own. quality: see `headline`."""
    run = runs[0]
    if not all(each.records for each in runs):  # plain DDP, perhaps with a hook
        ending = run.ending
        if not (ending.dense_bytes > 0 and isfinite(ending.bytes_sent)):
            return ""
        saved = 1 - ending.bytes_sent / ending.dense_bytes
        return headline(pace or ending.pace, saved, network=run.link, quality=quality)
    last = [each.records[-1] for each in runs]
    longest = max(last, key=lambda one: one.report.step)
    share = mean(one.dense_steps / (one.report.step + 1) for one in last)
    dense = all(one.verdict and one.report.cf == DENSE for one in last)
    record = replace(
        longest,
        sent=mean(one.sent for one in last),
        dense=mean(one.dense for one in last),
        dense_steps=round(share * (longest.report.step + 1)),
        pace=pace or longest.pace,
        verdict=longest.verdict if dense else "",
    )
    return headline_of(record, run.recorded.header, run.link, quality)


def pace_beside(row: Row, dense: Row) -> Pace | None:
    """How fast runs were beside dense ones. Turns of one comparison are compared, seed by seed,
    since they are of the same stretch of time; else runs by one modelled clock. None for runs that
    were made at different times."""
    rate = row.of(lambda run: run.steps_per_second).mean
    pairs = [pair for run in row.runs for each in dense.runs for pair in _turns(run, each)]
    if not pairs or not rate > 0:
        return None
    steps = sum(run.pace.steps for run in row.runs)
    both = Pace(steps=steps, seconds=steps / rate)
    both.compared = sum(ours.seconds for ours, _ in pairs)
    both.dense = sum(ours.steps * theirs.step_seconds for ours, theirs in pairs)
    ratios = [log(theirs.step_seconds / ours.step_seconds) for ours, theirs in pairs]
    both.doubt = both.dense * (2 * stdev(ratios) / sqrt(len(ratios)) if len(ratios) > 1 else 0)
    both.measured = 0.0 if _clock(row.run) else both.dense
    return both


def _turns(run: Run, dense: Run) -> list[tuple[Pace, Pace]]:
    """The paces of both in each turn in which both were timed; in all, by one modelled clock."""
    if run.seed != dense.seed:
        return []
    pairs = []
    if _clock(run) and _clock(run) == _clock(dense):
        pairs = [(run.pace, dense.pace)]
    elif not _clock(run) and run.folder.parent == dense.folder.parent:
        theirs = {turn.first: turn.pace for turn in dense.slices}
        pairs = [(turn.pace, theirs[turn.first]) for turn in run.slices if turn.first in theirs]
    return [(ours, other) for ours, other in pairs if ours.seconds > 0 and other.seconds > 0]


def _clock(run: Run) -> float | None:
    """Seconds of a step's work by a modelled clock; None: steps were measured."""
    return None if run.config is None else run.config.fixed_clock


def beside(
    ours: Mapping[int, float],
    dense: Mapping[int, float],
    name: str,
    higher: bool,
    after: str = EQUAL,
) -> str:
    """How a quality by seed compares with dense's: the same if they differ by what is `allowed`,
    else by how much. Seeds that both know count, if there are any. "" if one of them knows none.
    after: how many steps, in words."""
    ours_known, dense_known = (
        {seed: q for seed, q in each.items() if isfinite(q)} for each in (ours, dense)
    )
    if not ours_known or not dense_known:
        return ""
    both, everyone = ours_known.keys() & dense_known.keys(), {*ours, *dense}
    a_of, b_of = ([known[seed] for seed in both or known] for known in (ours_known, dense_known))
    seeds = "one seed" if len(both) == 1 else f"{len(both)} seeds"
    if not both:
        seeds = "of different seeds"
    elif len(both) < len(everyone):
        seeds = f"{len(both)} of {len(everyone)} seeds"
    a, b = mean(a_of), mean(b_of)
    points = name.endswith("%")
    limit = allowed(b_of, points)
    numbers = f"{name} {a:.4g} against {b:.4g}, {seeds}"
    if abs(a - b) <= limit:
        spread = limit > allowed([b], points)
        within = "the spread" if spread else "1 point" if points else "1%"
        return f"the same quality {after} ({numbers}, within {within})"
    by = f"{abs(a - b):.2g} points" if points or not b else percent(a / b - 1)
    return f"{by} {'ahead of' if (a > b) == higher else 'behind'} dense {after} ({numbers})"


def allowed(dense: Sequence[float], points: bool) -> float:
    """How far a mean quality may be from dense's and still be the same: dense's standard deviation
    over seeds, or 1 point (points: of a quality in per cent) or 1% of dense's, whichever is more.
    This is the margin of what the default promises (docs/research/defaults.md)."""
    least = 1.0 if points else 0.01 * abs(mean(dense))
    return max(least, stdev(dense) if len(dense) > 1 else 0.0)
