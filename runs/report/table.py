"""What each run comes down to, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan

from adaptive import LinkSpec
from runs.compare.network import modelled_seconds
from runs.compare.options import BANDWIDTHS
from runs.progress import number_text
from runs.report.run import Run
from runs.report.target import Target

UNKNOWN, NEVER = "-", "never"


@dataclass(frozen=True)
class Reached:
    """When the target was reached: steps done, bytes a worker had sent, seconds measured, and
    modelled by network; nan where that is not known."""

    steps: int
    bytes_sent: float
    seconds: float
    modelled: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """A row of the report's table: one run.

    reached: None if the target never was, or there is none (`has_target`). modelled: seconds
    at the end of each step, by network; empty for a run without records.
    """

    run: Run
    has_target: bool
    reached: Reached | None
    modelled: tuple[tuple[float, ...], ...]

    def in_all(self, network: int) -> float:
        """Modelled seconds of the whole run; nan if not known."""
        return self.modelled[network][-1] if self.modelled[network] else nan


def own_networks(runs: Sequence[Run]) -> tuple[LinkSpec, ...]:
    """Of the modelled seconds: the links that the runs had, and others after them."""
    links = [run.config.link for run in runs if run.config is not None and run.config.link]
    return tuple(dict.fromkeys(map(LinkSpec.parse, (*links, *BANDWIDTHS))))


def link_notes(runs: Sequence[Run]) -> list[str]:
    """What runs on different links have in common, and what not."""
    links: dict[str, list[str]] = {}
    for run in runs:
        links.setdefault(run.link or "no emulated link", []).append(run.name)
    if len(links) < 2:
        return []
    told = "; ".join(f"{link}: {', '.join(names)}" for link, names in links.items())
    return [
        f"the runs had different links ({told}): their steps/s and measured seconds do not "
        f"compare, the modelled ones do"
    ]


def make_rows(
    runs: Sequence[Run], targets: Mapping[str, Target], networks: Sequence[LinkSpec]
) -> list[Row]:
    """One for each run, in order."""
    return [_make_row(run, targets.get(run.task), networks) for run in runs]


def _make_row(run: Run, target: Target | None, networks: Sequence[LinkSpec]) -> Row:
    modelled = tuple(
        tuple(modelled_seconds(run.records, network)) if run.records else () for network in networks
    )
    has_target = target is not None and bool(run.evaluations)
    done = target.first(run) if target is not None else None
    if done is None:
        return Row(run, has_target, None, modelled)
    reached = Reached(
        done,
        run.sent_by(done),
        run.seconds_by(done),
        tuple(run.at(ends, done) for ends in modelled),
    )
    return Row(run, has_target, reached, modelled)


def head(runs: Sequence[Run], networks: Sequence[LinkSpec]) -> list[tuple[str, str]]:
    """Columns, as (what they belong to, name)."""
    names = {run.quality_name for run in runs if run.task} or {"quality"}
    quality = names.pop() if len(names) == 1 else "quality"
    columns = [("", "run"), ("", quality), *(("", name) for name in _beside(runs))]
    columns += [("", "steps"), ("", "MB sent"), ("", "wire factor")]
    columns += [("", "steps/s")] + ([("", "scaling eff.")] if _scaling(runs) else [])
    columns += [("to target", "steps"), ("to target", "MB")]
    for group in (*(f"{network}: modelled s" for network in networks), "measured s"):
        columns += [(group, "all"), (group, "to target")]
    return columns


def _beside(runs: Sequence[Run]) -> list[str]:
    """Names of what was measured of some of the runs beside their quality."""
    return list(dict.fromkeys(name for run in runs for name in run.beside))


def _scaling(runs: Sequence[Run]) -> bool:
    """Whether the scaling efficiency of any run is known, and so has a column."""
    return any(isfinite(run.scaling_efficiency) for run in runs)


def cells(row: Row, runs: Sequence[Run]) -> list[str]:
    """A row's, as text, in the order of `head`. runs: all of the table's."""
    run, reached = row.run, row.reached
    steps = f"{run.trained}"
    if not run.finished and run.config is not None:
        steps += f" of {run.config.steps}"
    texts = [
        run.name,
        _text(run.quality, 4),
        *(_text(run.beside.get(name, nan), 4) for name in _beside(runs)),
        steps,
        _text(run.bytes_sent / 1e6, 4),
        _text(run.wire_factor, 3),
        _text(run.steps_per_second, 3),
        *([_text(run.scaling_efficiency, 3)] if _scaling(runs) else []),
        str(reached.steps) if reached else _target(row, nan, 4),
        _target(row, reached.bytes_sent / 1e6 if reached else nan, 4),
    ]
    for i in range(len(row.modelled)):
        texts += [_text(row.in_all(i), 4), _target(row, reached.modelled[i] if reached else nan, 4)]
    measured = _target(row, reached.seconds if reached else nan, 4)
    return [*texts, _text(run.seconds_by(run.trained), 4), measured]


def make_text(rows: Sequence[Row], networks: Sequence[LinkSpec]) -> str:
    """The table for a terminal, under two lines of head."""
    runs = [row.run for row in rows]
    columns = head(runs, networks)
    groups = [group for group, _ in columns]
    above = [group if i == 0 or group != groups[i - 1] else "" for i, group in enumerate(groups)]
    lines = [above, [name for _, name in columns], *(cells(row, runs) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    texts = []
    for line in lines:
        padded = [line[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        texts.append("  ".join(padded).rstrip())
    return "\n".join(texts)


def _target(row: Row, value: float, digits: int) -> str:
    """Of a column that is about the target."""
    if row.has_target and row.reached is None:
        return NEVER
    return _text(value, digits)


def _text(value: float, digits: int) -> str:
    return number_text(value, digits) if isfinite(value) else UNKNOWN
