"""The table of runs beside one another: its columns, and how they are to be read, for terminals,
pages and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite, isnan, nan
from typing import Any

from rich.console import RenderableType

from adaptive import LinkSpec
from runs.files import known
from runs.report.rows import Row
from runs.report.run import Run
from runs.tables import table

TARGET = "to target"
"""What was spent until the quality was reached that is asked for."""

MEGA = 1e-6

READING = {
    "MB sent": "by a worker",
    "MB interf.": "what the network interface of rank 0 has sent, TCP's headers included",
    "wire factor": "bytes of a dense all-reduce, in the parameters' precision / bytes sent",
    "steps/s": "each step counts as the median of the last 32 at its CF, so without evaluations "
    "and checkpoints; its seconds and the verdict are made of the same",
    "scaling eff.": "T_N / (N T_1), T in samples/s, by the time of one worker that was given "
    "(--one-worker-seconds) or is modelled",
    TARGET: "until the first evaluation that is at least as good; never: none was",
    "modelled s": "compute + compression (measured) + hops x latency + bytes x 8 / rate, nothing "
    "overlaps; all: the whole run",
}
"""What columns mean that have this in their heads."""


@dataclass(frozen=True)
class Column:
    """A column is one number of each run.

    keys: where it is in JSON. name: its head, below the group that it belongs to, if to one. value:
    see `Spread`. digits, scale: of its text.
    """

    keys: tuple[str, ...]
    name: str
    value: Callable[[Run], float]
    digits: int = 4
    scale: float = 1.0
    group: str = ""

    def text(self, row: Row) -> str:
        return row.of(self.value).text(self.digits, self.scale)


def columns(rows: Sequence[Row], networks: Sequence[LinkSpec]) -> list[Column]:
    """All that there may be."""
    runs = [run for row in rows for run in row.runs]
    names = {run.quality_name for run in runs if run.task}
    quality = names.pop() if len(names) == 1 else "quality"
    beside = dict.fromkeys(name for run in runs for name in run.beside)
    modelled = all(run.config and run.config.fixed_clock is not None for run in runs)
    timed = "fixed clock s" if modelled else "measured s"
    return [
        Column(("quality",), quality, lambda run: run.quality),
        *(Column(("beside", name), name, _beside(name)) for name in beside),
        Column(("steps",), "steps", lambda run: run.trained, 1),
        Column(("bytes_sent",), "MB sent", lambda run: run.bytes_sent, 4, MEGA),
        Column(("interface_bytes",), "MB interf.", lambda run: run.interface_bytes, 4, MEGA),
        Column(("wire_factor",), "wire factor", lambda run: run.wire_factor, 3),
        Column(("steps_per_second",), "steps/s", lambda run: run.steps_per_second, 3),
        Column(("scaling_efficiency",), "scaling eff.", lambda run: run.scaling_efficiency, 3),
        Column(("to_target", "steps"), "steps", lambda run: run.steps_to_goal, 1, group=TARGET),
        Column(("to_target", "bytes_sent"), "MB", _at_goal(Run.sent_by), 4, MEGA, TARGET),
        *(column for network in networks for column in _modelled(network)),
        Column(("seconds",), "all", lambda run: run.seconds_by(run.trained), group=timed),
        Column(("to_target", "seconds"), TARGET, _at_goal(Run.seconds_by), group=timed),
    ]


def _modelled(network: LinkSpec) -> list[Column]:
    name, group = str(network), f"{network}: modelled s"
    to_target = _at_goal(partial(Run.modelled_by, network=network))
    return [
        Column(
            ("modelled_seconds", name), "all", lambda run: run.modelled_in_all(network), group=group
        ),
        Column(("to_target", "modelled_seconds", name), TARGET, to_target, group=group),
    ]


def _beside(name: str) -> Callable[[Run], float]:
    return lambda run: run.beside.get(name, nan)


def _at_goal(spent: Callable[[Run, int], float]) -> Callable[[Run], float]:
    """What had been spent after the steps that it took to the goal."""

    def value(run: Run) -> float:
        done = run.steps_to_goal
        return spent(run, int(done)) if isfinite(done) else done

    return value


def shown(found: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Columns of which something is known of one of the rows."""
    return [
        column
        for column in found
        if any(not isnan(value) for row in rows for value in row.of(column.value).values)
    ]


def reading(found: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """How the table is to be read."""
    sizes: dict[int, list[str]] = {}
    for row in rows:
        if (header := row.run.recorded.header) is not None:
            sizes.setdefault(header.numel, []).append(row.label)
    scripts = {row.run.name for row in rows if row.run.config and row.run.config.script}
    runs = [row.run for row in rows if row.run.task]
    runs = [run for run in runs if run.evaluations or run.name not in scripts]
    better = {run.quality_name: run.higher_is_better for run in runs}
    script = any(run.name in scripts for run in runs)
    of = "as the script reports it" if script else "held-out"
    heads = [f"{column.group} {column.name}" for column in found]
    nodes = [row.label for row in rows if any(run.sent_by_node for run in row.runs)]
    told = dict(READING)
    if nodes:
        told["MB sent"] += f"; of {', '.join(nodes)}, which exchanges on two levels, by a node"
    return [
        *(
            f"{name}: {of}, at the end; {'higher' if higher else 'lower'} is better"
            for name, higher in better.items()
        ),
        *(
            f"model{'' if len(sizes) == 1 else ' of ' + ', '.join(labels)}: {numel / 1e6:.3g} "
            f"million parameters, {4 * numel / 1e6:.3g} MB of gradients in fp32"
            for numel, labels in sizes.items()
        ),
        *(f"{name}: {is_}" for name, is_ in told.items() if any(name in head for head in heads)),
    ]


def make_text(
    found: Sequence[Column], rows: Sequence[Row], label: str = "run"
) -> list[RenderableType]:
    """The table for a terminal, in two parts: what came out, and seconds. label: of the rows."""
    names, before = [], ""
    for column in found:
        above = f"{column.group}\n".replace(": ", ":\n") if column.group != before else ""
        names.append(above.lstrip("\n") + column.name)
        before = column.group
    parts: list[RenderableType] = []
    timed = [column.group.endswith(" s") for column in found]
    for seconds in (False, True):
        chosen = [i for i, is_ in enumerate(timed) if is_ == seconds]
        lines = [[row.label, *(found[i].text(row) for i in chosen)] for row in rows]
        if chosen:
            parts += [*([""] if parts else []), table([label, *(names[i] for i in chosen)], lines)]
    return parts


def row_as_json(found: Sequence[Column], row: Row) -> dict[str, Any]:
    """A row, null for what is not known. Each number has a mean, a deviation, and values in the
    order of the runs."""
    made: dict[str, Any] = {"name": row.label}
    for column in found:
        *above, last = column.keys
        place = made
        for key in above:
            place = place.setdefault(key, {})
        place[last] = row.of(column.value).as_json()
    return {**made, "runs": [_run(run) for run in row.runs]}


def _run(run: Run) -> dict[str, Any]:
    config = run.config
    return {
        "name": run.name,
        "folder": str(run.folder),
        "title": run.title,
        "command": config.command if config is not None else None,
        "config": config.as_json() if config is not None else None,
        "finished": run.finished,
        "quality_name": run.quality_name,
        "higher_is_better": run.higher_is_better,
        "evaluations": [[done, known(quality)] for done, quality in run.evaluations],
        "link": run.link or None,
        "share_at_cf": [[cf, share] for cf, share in run.shares.items()],
        "cf_history": [asdict(part) for part in run.history],
        "notes": run.notes,
    }
