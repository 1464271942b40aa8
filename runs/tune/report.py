"""What a study has found so far: tune.json, table.txt, the pictures and report.html."""

from __future__ import annotations

import json
import warnings
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState

from runs.build import build_policy, compressor_settings
from runs.config import TrainConfig, write_text
from runs.pages import render
from runs.policy_expression import in_python, literal
from runs.result import title
from runs.style import log_axis
from runs.tables import table, text_of
from runs.tune.screen import SCREENED
from runs.tune.storage import shown_url
from runs.tune.study import (
    COMMAND,
    SETTINGS,
    given_up,
    outcome_text,
    reason,
    settings_text,
)
from runs.tune.tuning import Objective, Tuning

RESULT_FILE, TABLE_FILE, PAGE_FILE = "tune.json", "table.txt", "report.html"
SUMMARY_FILE = "settings.txt"
SHOWN = 5
"""Best trials in the table of a study with one objective."""

LEAST = 8
"""Finished trials without which an importance means nothing."""


# -- findings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Findings:
    """What a study has found so far.

    trials: all but those that were given up, in order. front: the trials that no other beats in
    everything, best first value first; with one objective the best alone. pick: of those the one
    whose settings are shown; None before a trial is complete. importances: by objective, then by
    parameter, sum 1; empty where too little is known.
    """

    trials: tuple[FrozenTrial, ...]
    front: tuple[FrozenTrial, ...]
    pick: FrozenTrial | None
    importances: tuple[dict[str, float], ...]

    def of(self, state: TrialState) -> list[FrozenTrial]:
        return [trial for trial in self.trials if trial.state == state]


def find(study: optuna.Study, objective: Objective) -> Findings:
    trials = study.get_trials(deepcopy=False)
    shown = [t for t in trials if t.state != TrialState.WAITING and not given_up(t)]
    front = pareto_front(study)
    found = tuple(_importances(study, objective, i) for i in range(len(objective.names)))
    return Findings(tuple(shown), tuple(front), knee(front), found)


def pareto_front(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that no other one beats, by the first value, best first; of equals the first."""
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        return []
    by_values = {tuple(trial.values): trial for trial in reversed(study.best_trials)}
    upward = study.directions[0] == optuna.study.StudyDirection.MAXIMIZE
    return sorted(by_values.values(), key=lambda trial: trial.values[0], reverse=upward)


def knee(front: list[FrozenTrial]) -> FrozenTrial | None:
    """The trial nearest to having the best of everything.

    Each value is scaled to 0 at the front's best and 1 at its worst; logarithms, where all are
    positive, since bytes and seconds range over powers of ten.
    """
    if not front:
        return None
    distances = [0.0] * len(front)
    # The front runs from the best first value to the worst, so the other way in the second.
    for column, best_at in zip(zip(*(t.values for t in front), strict=True), (0, -1), strict=False):
        scaled = [log(v) for v in column] if min(column) > 0 else list(column)
        width = max(scaled) - min(scaled) or 1.0
        for i, value in enumerate(scaled):
            distances[i] += ((value - scaled[best_at]) / width) ** 2
    return front[min(range(len(front)), key=distances.__getitem__)]


def _by_importance(objective: Objective, i: int) -> dict[str, Any]:
    """How Optuna is to find what mattered for an objective; its evaluator takes the smaller for the
    better."""
    sign = 1 if objective.directions[i] == "minimize" else -1
    return {
        "evaluator": PedAnovaImportanceEvaluator(),
        "target": lambda trial: sign * trial.values[i],
    }


def _importances(study: optuna.Study, objective: Objective, i: int) -> dict[str, float]:
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < LEAST or len({trial.values[i] for trial in complete}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return get_param_importances(study, **_by_importance(objective, i))
        except (ValueError, RuntimeError):  # too few different values
            return {}


# -- the report ----------------------------------------------------------------------------------


def make_report(tuning: Tuning, study: optuna.Study) -> tuple[dict[str, Any], str]:
    """Write the files; returns the result as JSON-like values, and the text to be read."""
    found, folder = find(study, tuning.objective), tuning.folder
    config = tuning.config()
    heading = f"{title(config)}, {config.steps} steps"
    snippet = None
    if found.pick is not None:
        chosen = tuning.config(found.pick.user_attrs[SETTINGS], found.pick.number, tuning.seeds[0])
        snippet = make_snippet(chosen)
    notes = _notes(tuning, found)
    try:
        pictures = draw_all(tuning.objective, study, found, folder)
    except ImportError:
        pictures = []
        notes.append("no pictures: matplotlib is not installed")
    text = _text(tuning, found, heading, snippet, notes)
    result = {
        "title": heading,
        "study": tuning.name,
        "storage": shown_url(tuning.url),
        "options": tuning.signature,
        "plan": tuning.plan,
        "pruner": tuning.pruner,
        "command": tuning.command,
        "finished": len(found.trials) >= tuning.trials and not found.of(TrialState.RUNNING),
        "objectives": tuning.objective.labels,
        "directions": tuning.objective.directions,
        "pick": None if found.pick is None else found.pick.number,
        "snippet": snippet,
        "front": [trial.number for trial in found.front],
        "importances": list(found.importances),
        "trials": [_trial(tuning, trial) for trial in found.trials],
        "notes": notes,
        "log_dir": str(folder),
    }
    write_text(folder / RESULT_FILE, json.dumps(result, indent=2, allow_nan=False) + "\n")
    write_text(folder / TABLE_FILE, text + "\n")
    page = make_page(tuning.objective, found, heading, text, snippet, pictures)
    write_text(folder / PAGE_FILE, page)
    return result, text


def _text(
    tuning: Tuning, found: Findings, heading: str, snippet: str | None, notes: list[str]
) -> str:
    states = {
        TrialState.COMPLETE: "complete",
        TrialState.PRUNED: "pruned",
        TrialState.FAIL: "failed",
        TrialState.RUNNING: "running elsewhere",
    }
    parts = [f"{len(found.of(state))} {name}" for state, name in states.items() if found.of(state)]
    count = f"{len(found.trials)} of {tuning.trials} trials: {', '.join(parts) or 'none yet'}"
    lines = [heading, count]
    if found.front:
        lines += ["", *_table(tuning, found)]
    for label, shares in zip(tuning.objective.labels, found.importances, strict=True):
        if shares:
            listed = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
            lines.append(f"what mattered for {label}: {listed}")
    if snippet is not None and found.pick is not None:
        command = found.pick.user_attrs[COMMAND]
        lines += ["", f"settings of trial {found.pick.number}:", "", snippet, "", command]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _table(tuning: Tuning, found: Findings) -> list[str]:
    """The Pareto front, or the best few."""
    objective = tuning.objective
    complete = found.of(TrialState.COMPLETE)
    if len(objective.names) == 2:
        shown = list(found.front)
        head = f"Pareto front, {len(shown)} of {len(complete)} complete"
    else:
        upward = objective.directions[0] == "maximize"
        shown = sorted(complete, key=lambda t: t.values[0], reverse=upward)[:SHOWN]
        head = "best"
    rows = []
    for trial in shown:
        mark = "*" if found.pick is not None and trial.number == found.pick.number else " "
        cells = [f"{value:.4g}" for value in objective.shown(trial.values)]
        settings = settings_text(trial.user_attrs[SETTINGS])
        rows.append([f"{mark}{trial.number:>5}", *cells, settings])
    names = ["trial", *objective.labels, "settings"]
    return [head, text_of(table(names, rows, left=[len(names) - 1], indent=2))]


def _notes(tuning: Tuning, found: Findings) -> list[str]:
    objective, notes = tuning.objective, []
    if len(objective.names) == 2:
        notes.append("* lies nearest to the best of both; with two objectives nothing is pruned")
    if "seconds" in objective.names:
        notes.append(
            "seconds: measured, without the first step and without evaluations"
            if objective.network is None
            else "modelled seconds: compute + compression (measured) + latency + bytes x 8 / rate, "
            "no overlap"
        )
    if not found.front and found.of(TrialState.PRUNED):
        notes.append("no trial is complete: " + str(reason(found.of(TrialState.PRUNED)[-1])))
    failed = found.of(TrialState.FAIL)
    notes += [f"trial {t.number}: {outcome_text(objective, t)}" for t in failed[:SHOWN]]
    if len(failed) > SHOWN:
        notes.append(f"more failed; they are in {RESULT_FILE}")
    if len(tuning.seeds) > 1:
        notes.append(f"values are means over seeds {' '.join(map(str, tuning.seeds))}")
    return notes


def _trial(tuning: Tuning, trial: FrozenTrial) -> dict[str, Any]:
    """null for what is not known."""
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "reason": reason(trial),
        "values": list(trial.values) if trial.state == TrialState.COMPLETE else None,
        "settings": trial.user_attrs.get(SETTINGS),
        "intermediate": [list(pair) for pair in sorted(trial.intermediate_values.items())],
        "promised": trial.user_attrs.get(SCREENED),
        "command": trial.user_attrs.get(COMMAND),
        "log_dirs": [str(tuning.config({}, trial.number, seed).folder) for seed in tuning.seeds],
    }


# -- pictures and the page -----------------------------------------------------------------------


def draw_all(
    objective: Objective, study: optuna.Study, found: Findings, folder: Path
) -> list[Path]:
    """Write Optuna's own pictures that there is something to show in; their files.

    ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are experimental
        for name, axes in _pictures(objective, study, found):
            drawn.append(folder / f"{name}.png")
            axes.figure.set_size_inches(8, 5)
            axes.figure.savefig(drawn[-1], dpi=130, bbox_inches="tight")
            pyplot.close(axes.figure)
    return drawn


def _pictures(
    objective: Objective, study: optuna.Study, found: Findings
) -> Iterator[tuple[str, Any]]:
    from optuna.visualization import matplotlib as plots

    labels, names = objective.labels, objective.names
    if not found.front:
        return
    if len(names) == 2:
        # Quality upwards, and what it costs to the right.
        front = plots.plot_pareto_front(
            study, targets=lambda t: objective.shown(t.values)[::-1], target_names=labels[::-1]
        )
        log_axis(front.xaxis, [trial.values[1] for trial in found.of(TrialState.COMPLETE)])
        yield "pareto", front
    elif any(trial.intermediate_values for trial in found.trials):
        curves = plots.plot_intermediate_values(study)
        log_axis(curves.yaxis, [v for t in found.trials for v in t.intermediate_values.values()])
        yield "intermediate", curves
    for i, (name, label) in enumerate(zip(names, labels, strict=True)):
        of = f"-{name}" if len(names) > 1 else ""

        def shown(trial: FrozenTrial, i: int = i) -> float:
            return objective.shown(trial.values)[i]

        # Without a target Optuna draws the best so far, too.
        target = shown if len(names) > 1 or name == "bytes" else None
        history = plots.plot_optimization_history(study, target=target, target_name=label)
        log_axis(history.yaxis, [shown(trial) for trial in found.of(TrialState.COMPLETE)])
        yield f"history{of}", history
        if found.importances[i]:
            how = _by_importance(objective, i)
            yield f"importance{of}", plots.plot_param_importances(study, target_name=label, **how)


def make_page(
    objective: Objective,
    found: Findings,
    heading: str,
    text: str,
    snippet: str | None,
    pictures: Sequence[Path],
) -> str:
    """The study as one HTML file that needs no other. text: as printed. snippet: of the settings
    shown. pictures: PNG files."""
    front = {trial.number for trial in found.front}
    trials = [
        (
            trial.number,
            outcome_text(objective, trial),
            settings_text(trial.user_attrs.get(SETTINGS, {})),
            trial.number in front,
        )
        for trial in found.trials
    ]
    images = [(path.stem, b64encode(path.read_bytes()).decode()) for path in pictures]
    values = {"title": heading, "text": text, "snippet": snippet}
    return render("tune.html", pictures=images, trials=trials, **values)


# -- the settings to paste -----------------------------------------------------------------------

NOT_PASTED = ("link", "cf_range")
"""Settings of the emulation; and what comes first anyway."""
WIDTH = 88


def make_snippet(config: TrainConfig) -> str:
    """Imports and an `AdaptiveCompressor`; the learning rate as a comment, if it was searched."""
    policy, names = in_python(config.policy, bool(config.layerwise))
    settings = compressor_settings(config, build_policy(config))
    given: dict[str, Any] = {"base": config.base}
    if "cf_range" in settings:
        given["cf_range"] = settings["cf_range"]
    lines = _assignments(given)
    lines.append(f"policy={policy}")
    lines += _assignments({k: v for k, v in settings.items() if k not in NOT_PASTED})
    text = [f"from adaptive import {', '.join(sorted(['AdaptiveCompressor', *names]))}", ""]
    if config.lr is not None:
        text.append(f"# with a learning rate of {config.lr:g}")
    joined = f"compressor = AdaptiveCompressor({', '.join(lines)})"
    if len(joined) > WIDTH:
        joined = "\n".join(
            ["compressor = AdaptiveCompressor(", *(f"    {line}," for line in lines), ")"]
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
            cells = [f"{value:.4g}" for value in tunings[name].objective.shown(best["values"])]
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
