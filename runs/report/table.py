"""What each run comes down to, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan

from rich.console import RenderableType

from adaptive import LinkSpec
from runs.compare.network import modelled_seconds
from runs.compare.options import BANDWIDTHS
from runs.progress import number_text
from runs.report.run import Run
from runs.report.target import Target
from runs.tables import table

UNKNOWN, NEVER, TARGET = "-", "never", "to target"


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

    @property
    def networks(self) -> range:
        return range(len(self.modelled))

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


def head(rows: Sequence[Row], networks: Sequence[LinkSpec]) -> list[tuple[str, str]]:
    """Columns, as (what they belong to, name)."""
    runs = [row.run for row in rows]
    names = {run.quality_name for run in runs if run.task} or {"quality"}
    quality = names.pop() if len(names) == 1 else "quality"
    columns = [("", "run"), ("", quality), *(("", name) for name in _beside(rows))]
    columns += [("", "steps"), ("", "MB sent"), ("", "wire factor")]
    columns += [("", "steps/s")] + ([("", "scaling eff.")] if _scaling(rows) else [])
    columns += [(TARGET, "steps"), (TARGET, "MB")] if _targets(rows) else []
    for group in (*(f"{network}: modelled s" for network in networks), "measured s"):
        columns += [(group, "all"), (group, TARGET)] if _targets(rows) else [(group, "all")]
    return columns


def _beside(rows: Sequence[Row]) -> list[str]:
    """Names of what was measured of some of the runs beside their quality."""
    return list(dict.fromkeys(name for row in rows for name in row.run.beside))


def _scaling(rows: Sequence[Row]) -> bool:
    """Whether the scaling efficiency of any run is known, and so has a column."""
    return any(isfinite(row.run.scaling_efficiency) for row in rows)


def _targets(rows: Sequence[Row]) -> bool:
    """Whether there is a quality to be reached, which then has columns."""
    return any(row.has_target for row in rows)


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """A row's, as text, in the order of `head`. rows: all of the table's."""
    run, reached = row.run, row.reached
    steps = f"{run.trained}"
    if not run.finished and run.config is not None:
        steps += f" of {run.config.steps}"
    texts = [
        run.name,
        _text(run.quality, 4),
        *(_text(run.beside.get(name, nan), 4) for name in _beside(rows)),
        steps,
        _text(run.bytes_sent / 1e6, 4),
        _text(run.wire_factor, 3),
        _text(run.steps_per_second, 3),
        *([_text(run.scaling_efficiency, 3)] if _scaling(rows) else []),
    ]
    seconds = [(row.in_all(i), reached.modelled[i] if reached else nan) for i in row.networks]
    seconds += [(run.seconds_by(run.trained), reached.seconds if reached else nan)]
    if not _targets(rows):
        return [*texts, *(_text(whole, 4) for whole, _ in seconds)]
    texts += [
        str(reached.steps) if reached else _target(row, nan, 4),
        _target(row, reached.bytes_sent / 1e6 if reached else nan, 4),
    ]
    return [*texts, *(text for a, b in seconds for text in (_text(a, 4), _target(row, b, 4)))]


def make_text(rows: Sequence[Row], networks: Sequence[LinkSpec]) -> list[RenderableType]:
    """The table for a terminal, in two parts: what came out, and seconds."""
    columns = head(rows, networks)
    lines = [cells(row, rows) for row in rows]
    first = next(i for i, (group, _) in enumerate(columns) if group.endswith(" s"))
    above = [group for group, _ in columns]
    names = [
        f"{group}\n{name}".replace(": ", ":\n") if group and group != before else name
        for (group, name), before in zip(columns, ["", *above], strict=False)
    ]
    return [
        table(names[:first], [line[:first] for line in lines]),
        "",
        table([names[0], *names[first:]], [[line[0], *line[first:]] for line in lines]),
    ]


def _target(row: Row, value: float, digits: int) -> str:
    """Of a column that is about the target."""
    if row.has_target and row.reached is None:
        return NEVER
    return _text(value, digits)


def _text(value: float, digits: int) -> str:
    return number_text(value, digits) if isfinite(value) else UNKNOWN
