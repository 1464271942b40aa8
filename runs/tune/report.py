"""What a study has found so far: tune.json, table.txt, the pictures and report.html."""

from __future__ import annotations

import json
import platform
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial, TrialState

from runs.config import write_text
from runs.logbook import emulated
from runs.result import title
from runs.tune.describe import outcome_text, settings_text
from runs.tune.desk import COMMAND, METRICS, SETTINGS
from runs.tune.findings import Findings, find
from runs.tune.page import make_page
from runs.tune.plots import draw_all
from runs.tune.screen import promised
from runs.tune.snippet import make_snippet
from runs.tune.storage import shown_url
from runs.tune.study import reason
from runs.tune.tuning import Tuning

RESULT_FILE, TABLE_FILE, PAGE_FILE = "tune.json", "table.txt", "report.html"
SHOWN = 5
"""Best trials in the table of a study with one objective."""


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
        pictures = draw_all(tuning.objective, found, folder, heading)
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
        "emulated_link": emulated(config) or None,
        "pick": None if found.pick is None else found.pick.number,
        "snippet": snippet,
        "front": [trial.number for trial in found.front],
        "importances": list(found.importances),
        "trials": [_trial(tuning, trial) for trial in found.trials],
        "notes": notes,
        "log_dir": str(folder),
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "optuna": optuna.__version__,
            "processor": platform.machine(),
        },
    }
    write_text(folder / RESULT_FILE, json.dumps(result, indent=2, allow_nan=False) + "\n")
    write_text(folder / TABLE_FILE, text + "\n")
    page = make_page(
        tuning.objective, found, heading, text, snippet, [folder / name for name in pictures]
    )
    write_text(folder / PAGE_FILE, page)
    return result, text


def _text(
    tuning: Tuning, found: Findings, heading: str, snippet: str | None, notes: list[str]
) -> str:
    lines = [heading, _count(tuning, found)]
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


def _count(tuning: Tuning, found: Findings) -> str:
    parts = [
        f"{len(trials)} {name}"
        for state, name in (
            (TrialState.COMPLETE, "complete"),
            (TrialState.PRUNED, "pruned"),
            (TrialState.FAIL, "failed"),
            (TrialState.RUNNING, "running elsewhere"),
        )
        if (trials := found.of(state))
    ]
    return f"{len(found.trials)} of {tuning.trials} trials: {', '.join(parts) or 'none yet'}"


def _table(tuning: Tuning, found: Findings) -> list[str]:
    """The Pareto front, or the best few."""
    objective = tuning.objective
    if len(objective.names) == 2:
        shown = list(found.front)
        head = f"Pareto front, {len(shown)} of {len(found.of(TrialState.COMPLETE))} complete"
    else:
        sign = 1 if objective.directions[0] == "minimize" else -1
        ranked = sorted(found.of(TrialState.COMPLETE), key=lambda t: sign * t.values[0])
        shown, head = ranked[:SHOWN], "best"
    widths = [max(9, len(label)) for label in objective.labels]
    names = "  ".join(label.rjust(w) for label, w in zip(objective.labels, widths, strict=True))
    lines = [head, f"  trial  {names}  settings"]
    for trial in shown:
        values = zip(objective.shown(trial.values), widths, strict=True)
        cells = "  ".join(f"{value:.4g}".rjust(width) for value, width in values)
        mark = "*" if found.pick is not None and trial.number == found.pick.number else " "
        settings = settings_text(trial.user_attrs[SETTINGS])
        lines.append(f" {mark}{trial.number:>6}  {cells}  {settings}")
    return lines


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
    notes += [
        f"trial {trial.number}: {outcome_text(objective, trial)}"
        for trial in found.of(TrialState.FAIL)[:SHOWN]
    ]
    if len(found.of(TrialState.FAIL)) > SHOWN:
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
        "metrics": trial.user_attrs.get(METRICS),
        "intermediate": [list(pair) for pair in sorted(trial.intermediate_values.items())],
        "promised": promised(trial.user_attrs),
        "command": trial.user_attrs.get(COMMAND),
        "log_dirs": [str(tuning.config({}, trial.number, seed).folder) for seed in tuning.seeds],
    }
