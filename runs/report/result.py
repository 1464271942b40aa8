"""What a report shows, as JSON-like values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from adaptive import LinkSpec
from runs.report.run import Run
from runs.report.table import Row
from runs.report.target import Target
from runs.verdict import verdict


def headlines(runs: Sequence[Run]) -> dict[str, str]:
    """Whether compression was worth it, by name of the run: beside the dense run of the same task
    on the same link, if there is one, else as the run's own record tells."""
    found = {}
    for run in runs:
        alike = [r for r in runs if r.is_dense and (r.task, r.link) == (run.task, run.link)]
        if run.is_dense or not run.records:
            told = ""
        elif alike and run.config is not None:
            how = run.quality_name, run.higher_is_better, run.link
            told = verdict(run.ended, alike[0].ended, *how)
        else:
            told = run.headline
        if told:
            found[run.name] = told
    return found


def headline_lines(runs: Sequence[Run]) -> list[str]:
    """Those, each with the name of its run where there are several."""
    return [f"{n}: {text}" if len(runs) > 1 else text for n, text in headlines(runs).items()]


def make_result(
    rows: Sequence[Row],
    targets: Mapping[str, Target],
    networks: Sequence[LinkSpec],
    title: str,
    notes: Sequence[str],
) -> dict[str, Any]:
    """null stands for numbers that are not known."""
    return {
        "title": title,
        "headlines": headlines([row.run for row in rows]),
        "targets": [{"task": task, **asdict(target)} for task, target in targets.items()],
        "networks": list(map(str, networks)),
        "runs": [_run(row, networks) for row in rows],
        "notes": list(notes),
    }


def _run(row: Row, networks: Sequence[LinkSpec]) -> dict[str, Any]:
    run, reached = row.run, row.reached
    return {
        "name": run.name,
        "folder": str(run.folder),
        "title": run.title,
        "command": run.config.command if run.config is not None else None,
        "config": run.config.as_json() if run.config is not None else None,
        "steps": run.trained,
        "finished": run.finished,
        "quality_name": run.quality_name,
        "higher_is_better": run.higher_is_better,
        "quality": _known(run.quality),
        "beside": {name: _known(value) for name, value in run.beside.items()},
        "evaluations": [[done, _known(quality)] for done, quality in run.evaluations],
        "bytes_sent": _known(run.bytes_sent),
        "wire_factor": _known(run.wire_factor),
        "steps_per_second": _known(run.steps_per_second),
        "scaling_efficiency": _known(run.scaling_efficiency),
        "emulated_link": run.link or None,
        "seconds": _known(run.seconds_by(run.trained)),
        "modelled_seconds": {
            str(network): _known(row.in_all(i)) for i, network in enumerate(networks)
        },
        "to_target": _to_target(row, networks) if reached else "never" if row.has_target else None,
        "share_at_cf": [[cf, share] for cf, share in run.shares.items()],
        "switches": [asdict(part) for part in run.history[1:]],
        "notes": run_notes(run),
    }


def _to_target(row: Row, networks: Sequence[LinkSpec]) -> dict[str, Any]:
    reached = row.reached
    assert reached is not None
    return {
        "steps": reached.steps,
        "bytes_sent": _known(reached.bytes_sent),
        "seconds": _known(reached.seconds),
        "modelled_seconds": {
            str(network): _known(seconds)
            for network, seconds in zip(networks, reached.modelled, strict=True)
        },
    }


def run_notes(run: Run) -> list[str]:
    """What a reader should know of one run's data."""
    notes = list(run.damage)
    if run.config is None:
        unknown = "command and quality" if run.recorded.header else "settings, command and quality"
        notes.append(f"no config.json: {unknown} are not known")
    elif not run.finished:
        notes.append(f"not finished: {run.trained} of {run.config.steps} steps")
    if run.unknown_policy:
        notes.append(
            "its policy is not one of the library's and was not imported: gains are shown as "
            "measured on the gradient, whatever it decides on"
        )
    if run.config is not None and run.config.policy == "off":
        notes.append(
            "plain DDP keeps no timeline: bytes and seconds are spread evenly over the steps"
        )
    elif not run.records:
        notes.append("no timeline: CFs, gains and step times are not known")
    if run.config is not None and run.config.fixed_clock is not None:
        option = "step-seconds" if run.config.simulated else "fixed-clock"
        notes.append(
            f"--{option} {run.config.fixed_clock:g}: its step times are modelled, not measured"
        )
    if run.config is not None and not run.evaluations:
        notes.append("never evaluated: quality is not known")
    elif run.evaluations and not isfinite(run.quality):
        notes.append("its last evaluation was not finite")
    return notes


def _known(value: float) -> float | None:
    return value if isfinite(value) else None
