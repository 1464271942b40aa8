"""What a study has found so far: tune.json, table.txt, the pictures and report.html."""

from __future__ import annotations

import json
import warnings
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState
from rich.table import Table

from runs.build import build_policy, compressor_settings
from runs.config import TrainConfig, write_text
from runs.pages import render
from runs.policy_expression import in_python, literal
from runs.result import title
from runs.style import BLUE, GREY, ORANGE, legend, log_axis, picture
from runs.tables import table, text_of
from runs.tune.study import (
    COMMAND,
    HEADLINE,
    REASON,
    SETTINGS,
    outcome_text,
    settings_text,
    trials_that_count,
)
from runs.tune.tuning import Objective, Tuning

RESULT_FILE, TABLE_FILE, PAGE_FILE = "tune.json", "table.txt", "report.html"
SUMMARY_FILE = "settings.txt"
SHOWN = 5
"""Best trials in the table of a study with one objective, and failed ones in the notes."""

LEAST = 8
"""Finished trials without which an importance means nothing."""

ENOUGH = 10
"""Trials for each searched setting: with fewer, another search may well end elsewhere."""


# -- findings ------------------------------------------------------------------------------------


def pareto_front(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that no other one beats, by the first value, best first; of equals the first. With
    one objective the best alone."""
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        return []
    by_values = {tuple(trial.values): trial for trial in reversed(study.best_trials)}
    upward = study.directions[0] == optuna.study.StudyDirection.MAXIMIZE
    return sorted(by_values.values(), key=lambda trial: trial.values[0], reverse=upward)


def knee(front: list[FrozenTrial]) -> FrozenTrial | None:
    """The trial nearest to having the best of everything: each value is scaled to 0 at the front's
    best and 1 at its worst, by logarithms where all are positive, since bytes and seconds range
    over powers of ten."""
    if not front:
        return None
    values = np.array([trial.values for trial in front])
    values = np.where((values > 0).all(axis=0), np.log(np.where(values > 0, values, 1)), values)
    # The front runs from the best first value to the worst, so the other way in the second.
    best = values[[0, -1][: values.shape[1]], range(values.shape[1])]
    widths = np.ptp(values, axis=0)
    distances = (((values - best) / np.where(widths > 0, widths, 1)) ** 2).sum(axis=1)
    return front[int(distances.argmin())]


def importances(study: optuna.Study, direction: str, i: int) -> dict[str, float]:
    """How much of an objective each parameter decided, sum 1; empty where too little is known."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < LEAST or len({trial.values[i] for trial in complete}) < 2:
        return {}
    sign = 1 if direction == "minimize" else -1  # the smaller is the better to the evaluator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return get_param_importances(
                study,
                evaluator=PedAnovaImportanceEvaluator(),
                target=lambda trial: sign * trial.values[i],
            )
        except (ValueError, RuntimeError):  # too few different values
            return {}


# -- the report ----------------------------------------------------------------------------------


def make_report(tuning: Tuning, study: optuna.Study) -> tuple[dict[str, Any], str]:
    """Write the files; returns the result as JSON-like values, and the text to be read."""
    objective, trials, front = tuning.objective, trials_that_count(study), pareto_front(study)
    pick, folder = knee(front), tuning.folder
    notes = _notes(tuning, trials)
    try:
        pictures = draw_all(tuning, trials, front)
    except ImportError:
        pictures = []
        notes.append("no pictures: matplotlib is not installed")
    snippet = command = None
    if pick is not None:
        chosen = tuning.config(pick.user_attrs[SETTINGS], pick.number, tuning.seeds[0])
        snippet, command = make_snippet(chosen), pick.user_attrs[COMMAND]
    running = any(trial.state == TrialState.RUNNING for trial in trials)
    shares = [importances(study, each, i) for i, each in enumerate(objective.directions)]
    result: dict[str, Any] = {
        "title": f"{title(tuning.config())}, {tuning.config().steps} steps",
        "answer": _answer(tuning, trials, pick),
        "finished": len(trials) >= tuning.trials and not running,
        "options": tuning.signature,
        "objectives": objective.labels,
        "pick": None if pick is None else pick.number,
        "snippet": snippet,
        "command": command,
        "front": [trial.number for trial in front],
        "importances": shares,
        "trials": [_trial(tuning, trial) for trial in trials],
        "notes": notes,
        "log_dir": str(folder),
    }
    for label, parts in zip(objective.labels, shares, strict=True):
        told = ", ".join(f"{name} {part:.0%}" for name, part in parts.items())
        result["answer"] += [f"what mattered for {label}: {told}"] if parts else []
    head = ["trial", *objective.labels, *(parameter.name for parameter in tuning.space)]
    rows = [
        (_cells(tuning, t), "" if t.values else outcome_text(objective, t), t in front)
        for t in trials
    ]
    images = [(path.stem, b64encode(path.read_bytes()).decode()) for path in pictures]
    text = _text(result, table(head, _best(tuning, trials, front), left=(), indent=2))
    write_text(folder / RESULT_FILE, json.dumps(result, indent=2, allow_nan=False) + "\n")
    write_text(folder / TABLE_FILE, text + "\n")
    page = render("tune.html", **result, pictures=images, head=head, rows=rows)
    write_text(folder / PAGE_FILE, page)
    return result, text


def nothing_found(result: dict[str, Any]) -> str:
    """Of a finished study without a complete trial, that it is so, and why; of another, ""."""
    if result["pick"] is not None or not result["finished"] or not result["trials"]:
        return ""
    last = result["trials"][-1]
    none, count = result["answer"]
    why = " ".join((last["reason"] or last["state"]).split())
    return f"{none}, {count}; trial {last['number']}: {why}"


def _answer(tuning: Tuning, trials: list[FrozenTrial], pick: FrozenTrial | None) -> list[str]:
    """Which settings, what they gain, and how sure that is."""
    objective, searched = tuning.objective, len(tuning.space)
    states = Counter(trial.state.name.lower() for trial in trials)
    names = {"complete": "complete", "pruned": "pruned", "fail": "failed", "running": "running"}
    parts = [f"{states[state]} {name}" for state, name in names.items() if states[state]]
    count = f"{len(trials)} of {tuning.trials} trials: {', '.join(parts) or 'none yet'}"
    if pick is None:
        return ["no trial is complete", count]
    complete = [trial.values for trial in trials if trial.state == TrialState.COMPLETE]
    medians = [median(column) for column in zip(*complete, strict=True)]
    seeds = len(tuning.seeds)
    sure = f"{count}; {'one seed' if seeds == 1 else f'means over {seeds} seeds'} each"
    if states["complete"] + states["pruned"] < ENOUGH * searched:
        sure += f"; few for {searched} searched settings: another search may well end elsewhere"
    return [
        f"{settings_text(pick.user_attrs[SETTINGS])} (trial {pick.number}): "
        f"{objective.told(pick.values)}",
        f"the median of all trials: {objective.told(medians)}",
        *([f"its run: {pick.user_attrs[HEADLINE]}"] if pick.user_attrs.get(HEADLINE) else []),
        sure,
    ]


def _text(result: dict[str, Any], best: Table) -> str:
    lines = [result["title"], *result["answer"]]
    if result["snippet"] is not None:
        both = len(result["objectives"]) == 2
        lines += ["", "Pareto front" if both else "best", text_of(best)]
        lines += ["", f"settings of trial {result['pick']}:", "", result["snippet"]]
        lines += ["", result["command"]]
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])


def _best(tuning: Tuning, trials: list[FrozenTrial], front: list[FrozenTrial]) -> list[list[str]]:
    """Rows of the Pareto front, or of the best few."""
    if len(tuning.objective.names) == 1:
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        upward = tuning.objective.directions[0] == "maximize"
        front = sorted(complete, key=lambda t: t.values[0], reverse=upward)[:SHOWN]
    return [_cells(tuning, trial) for trial in front]


def _cells(tuning: Tuning, trial: FrozenTrial) -> list[str]:
    """A trial's row: its number, values and settings."""
    known = trial.state == TrialState.COMPLETE
    values = [f"{value:.4g}" for value in tuning.objective.shown(trial.values)] if known else []
    settings = trial.user_attrs.get(SETTINGS, {})
    chosen = [settings.get(parameter.name, "") for parameter in tuning.space]
    words = [f"{value:g}" if isinstance(value, float) else str(value) for value in chosen]
    return [str(trial.number), *(values or ["-"] * len(tuning.objective.names)), *words]


def _notes(tuning: Tuning, trials: list[FrozenTrial]) -> list[str]:
    objective, notes = tuning.objective, []
    if len(objective.names) == 2:
        notes.append(
            "of the trials that no other beats in both, the one shown lies nearest to the best of "
            "both; with two objectives nothing is pruned"
        )
    if "seconds" in objective.names:
        notes.append(
            "seconds: measured, without evaluations"
            if objective.network is None
            else "modelled seconds: compute + compression (measured) + latency + bytes x 8 / rate, "
            "no overlap"
        )
    ended = [t for t in trials if t.state in (TrialState.FAIL, TrialState.PRUNED)]
    failed = [t for t in ended if t.state == TrialState.FAIL]
    told = failed[:SHOWN] if len(ended) < len(trials) else ended[-1:]  # why none is complete
    notes += [f"trial {t.number}: {outcome_text(objective, t)}" for t in told]
    if len(failed) > SHOWN:
        notes.append(f"more failed; they are in {RESULT_FILE}")
    return notes


def _trial(tuning: Tuning, trial: FrozenTrial) -> dict[str, Any]:
    """null for what is not known."""
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "reason": trial.user_attrs.get(REASON) or None,
        "values": list(trial.values) if trial.state == TrialState.COMPLETE else None,
        "settings": trial.user_attrs.get(SETTINGS),
        "command": trial.user_attrs.get(COMMAND),
        "log_dirs": [str(tuning.config({}, trial.number, seed).folder) for seed in tuning.seeds],
    }


# -- pictures ------------------------------------------------------------------------------------


def draw_all(tuning: Tuning, trials: list[FrozenTrial], front: list[FrozenTrial]) -> list[Path]:
    """Write the pictures that there is something to show in; their files. front: blue in all of
    them. ImportError without matplotlib."""
    others = [t for t in trials if t.state == TrialState.COMPLETE and t not in front]
    if not front:
        return []
    drawn = [_draw_settings(tuning, others, front)]
    if len(tuning.objective.names) == 2:
        drawn.insert(0, _draw_front(tuning, others, front))
    elif any(trial.intermediate_values for trial in trials):
        drawn.insert(0, _draw_curves(tuning, trials, front))
    return drawn


def _draw_front(tuning: Tuning, others: list[FrozenTrial], front: list[FrozenTrial]) -> Path:
    """Quality upwards, and what it costs to the right."""
    path, objective = tuning.folder / "front.png", tuning.objective
    quality, cost = objective.labels
    with picture(path, "trials that no other beats in both", across=cost) as (axes,):
        ys, xs = _columns(objective, others)
        axes.plot(xs, ys, "o", color=GREY, label="other trials")
        ys, xs = _columns(objective, front)
        axes.plot(xs, ys, "o--", linewidth=1, color=BLUE, label="Pareto front, with their numbers")
        for i, (x, y, trial) in enumerate(zip(xs, ys, front, strict=True)):
            beside = (-12, -10) if i % 2 else (5, 5)
            axes.annotate(str(trial.number), (x, y), beside, textcoords="offset points", size=8)
        ys, xs = _columns(objective, [*others, *front])
        _scale(axes, xs, ys)
        axes.set_ylabel(quality)
        legend(axes)
    return path


def _draw_curves(tuning: Tuning, trials: list[FrozenTrial], front: list[FrozenTrial]) -> Path:
    """What the pruner has seen."""
    path, objective = tuning.folder / "curves.png", tuning.objective
    labels = {GREY: "complete", ORANGE: "pruned", BLUE: "the best"}
    with picture(path, "each trial's quality, step by step") as (axes,):
        known = []
        for trial in sorted(trials, key=lambda trial: trial in front):
            pruned = trial.state == TrialState.PRUNED
            colour = BLUE if trial in front else ORANGE if pruned else GREY
            curve = sorted(trial.intermediate_values.items())
            ys = [objective.intermediate(value) for _, value in curve]  # which turns it back
            known += ys
            how = {"color": colour, "label": labels.pop(colour, None)}
            axes.plot([step for step, _ in curve], ys, ".-", linewidth=1, **how)
        log_axis(axes.yaxis, known)
        axes.set_ylabel(f"held-out {objective.quality_name}")
        legend(axes)
    return path


def _draw_settings(tuning: Tuning, others: list[FrozenTrial], front: list[FrozenTrial]) -> Path:
    """Each value over each searched setting."""
    path, objective, space = tuning.folder / "settings.png", tuning.objective, tuning.space
    rows, columns = len(objective.names), len(space)
    size = (1 + max(1.6 * columns, 4), 0.7 + 2.4 * rows)
    title = "each setting against what came of it; blue: the best"
    with picture(path, title, heights=[1] * rows, size=size, columns=columns) as cells:
        for i, axes in enumerate(cells):
            row, parameter = i // columns, space[i % columns]
            for shown, colour in ((others, GREY), (front, BLUE)):
                xs = [trial.user_attrs[SETTINGS][parameter.name] for trial in shown]
                axes.plot(xs, _columns(objective, shown)[row], "o", color=colour)
            one = parameter.distribution
            ends = []
            if not isinstance(one, CategoricalDistribution) and one.log:
                ends = [one.low, one.high]
            _scale(axes, ends, _columns(objective, [*others, *front])[row])
            if i % columns == 0:
                axes.set_ylabel(objective.labels[row])
            if row == rows - 1:
                axes.set_xlabel(parameter.name)
                axes.tick_params(axis="x", rotation=30)
    return path


def _columns(objective: Objective, trials: Sequence[FrozenTrial]) -> list[list[float]]:
    """The trials' values, by objective."""
    shown = [objective.shown(trial.values) for trial in trials]
    return [[values[i] for values in shown] for i in range(len(objective.names))]


def _scale(axes: Any, xs: Sequence[float], ys: Sequence[float]) -> None:
    """Logarithmic where values spread, and no point on the frame."""
    axes.margins(x=0.08, y=0.1)
    log_axis(axes.xaxis, xs)
    log_axis(axes.yaxis, ys)


# -- the settings to paste -----------------------------------------------------------------------

NOT_PASTED = ("link", "cf_range")
"""Settings of the emulation; and what comes first anyway."""
WIDTH = 88


def make_snippet(config: TrainConfig) -> str:
    """Imports and an `AdaptiveCompressor`; the learning rate as a comment, if it was searched."""
    policy, names = in_python(config.policy)
    settings = compressor_settings(config, build_policy(config))
    given: dict[str, Any] = {"base": config.base}
    if "cf_range" in settings:
        given["cf_range"] = settings["cf_range"]
    later = {name: value for name, value in settings.items() if name not in NOT_PASTED}
    parts = [*_assignments(given), f"policy={policy}", *_assignments(later)]
    text = [f"from adaptive import {', '.join(sorted(['AdaptiveCompressor', *names]))}", ""]
    if config.lr is not None:
        text.append(f"# with a learning rate of {config.lr:g}")
    joined = f"compressor = AdaptiveCompressor({', '.join(parts)})"
    if len(joined) > WIDTH:
        joined = "\n".join(
            ["compressor = AdaptiveCompressor(", *(f"    {part}," for part in parts), ")"]
        )
    return "\n".join([*text, joined])


def _assignments(values: Mapping[str, Any]) -> list[str]:
    written = {k: json.dumps(v) if isinstance(v, str) else literal(v) for k, v in values.items()}
    return [f"{name}={value}" for name, value in written.items()]


# -- several compression settings ----------------------------------------------------------------


def make_summary(
    tunings: Mapping[str, Tuning], results: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, Any], str]:
    """The best of each compression setting, side by side: writes the table beside the studies;
    the result as JSON-like values, and the table.

    results: of `make_report`, for the settings that have been searched so far.
    """
    first = next(iter(tunings.values()))
    folder = first.folder.parent
    names, rows = ["setting", *first.objective.labels, "trials", "with"], []
    for name, result in results.items():
        best = next((t for t in result["trials"] if t["number"] == result["pick"]), None)
        cells, chosen = ["-"] * len(first.objective.names), "no trial is complete"
        if best is not None:
            cells = [f"{value:.4g}" for value in first.objective.shown(best["values"])]
            chosen = settings_text(best["settings"])
        rows.append([name, *cells, str(len(result["trials"])), chosen])
    lines = [f"the best of each setting, over {first.plan} searches of {first.trials} trials"]
    lines.append(text_of(table(names, rows, left=(0, len(names) - 1), indent=2)))
    missing = [name for name in tunings if name not in results]
    if missing:
        lines.append(f"note: not begun yet: {', '.join(missing)}")
    text = "\n".join([*lines, f"files in {folder}"])
    summary = {"settings": dict(results), "missing": missing, "log_dir": str(folder)}
    write_text(folder / SUMMARY_FILE, text + "\n")
    return summary, text
