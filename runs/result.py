"""How a run ended: result.json, and a short table."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import Any, TextIO

import torch
from rich.console import RenderableType
from rich.table import Table

from adaptive import LinkSpec, Summary
from policies.words import named
from runs.build import sends_dense
from runs.config import TrainConfig
from runs.expression import PLAIN, policy_from, policy_name
from runs.files import known, write_json
from runs.logbook import Logbook, emulated
from runs.modelled_clock import ServerSpec
from runs.netlab.lab import real_links
from runs.netlab.place import told
from runs.progress import number_text
from runs.records import TIMELINE_FILE, Recorded, local_steps, read_records, stretches
from runs.settings import DEFAULT_CF
from runs.tables import faint, show, strong, table
from runs.tasks import task_named
from runs.times import (
    one_worker_seconds,
    scaling_efficiency,
    seconds_by_clock,
    server_bytes,
    where_time_went,
)
from runs.train import Outcome

RESULT_FILE = "result.json"

_OF_PACE = ("step_seconds", "dense_seconds", "speedup")

SHOWN = 12
"""Lines of the CF history in the table; more are abridged."""


def title(config: TrainConfig) -> str:
    """The run in one line."""
    how = f"{config.policy} over {config.base or 'its own base'}"
    if config.policy == PLAIN:
        hook = config.ddp_hook
        how = f"DDP with PyTorch's {hook} hook" if hook else "plain DDP, no hook"
        how = "as it is" if config.script else how
    elif policy_name(config.policy) == "fixed":
        cf = getattr(policy_from(config.policy), "cf", None) or DEFAULT_CF
        how = "dense" if sends_dense(config) else f"{config.base or 'its base'} at {named(cf)}"
    if config.exchange is not None:
        how += f", {config.exchange} exchange"
    how += f", {config.sync}" if config.sync is not None else ""
    link = f", {emulated(config)}" if config.network else ""
    link += f", {real_links(config.netlab)}" if config.netlab else ""
    kind = "simulated worker" if config.simulated else "worker"
    workers = f"{config.workers} {kind}{'s' if config.workers > 1 else ''}"
    return f"{trained(config)}, {workers}, {how}{link}"


def trained(config: TrainConfig) -> str:
    """What a run trains: task and model, or the script."""
    if config.script:
        return shlex.join((Path(config.script[0]).name, *config.script[1:]))
    return f"{config.task} ({config.model or task_named(config.task).models[0]})"


def is_dense(config: TrainConfig) -> bool:
    """Every step exchanges all of every gradient, and its mean moves the model: what compression is
    compared with. Not so gossip, local steps and delayed means, whatever they send."""
    alike = config.sync in (None, "EveryStep()") and config.ddp_hook is None
    alike = alike and not (config.script and config.policy == PLAIN)  # that has its own
    return alike and sends_dense(config)


def header(config: TrainConfig, first_step: int) -> str:
    """What is printed before training."""
    steps = f"{config.steps} steps"
    if first_step:
        steps = f"resumed after step {first_step}, to step {config.steps}"
    text = f"{title(config)}\n{steps}, files in {config.log_dir}"
    if config.simulated:
        text += (
            f"\nstep times are modelled: {_modelled(config)}; this process's own say nothing of a "
            f"cluster"
        )
    return text


def _modelled(config: TrainConfig) -> str:
    """What step times are made of, where they are not measured."""
    link = (
        f" and what {LinkSpec.parse(config.network)} take for its bytes" if config.network else ""
    )
    size = f", as if the gradients were {config.model_mb:g} MB" if config.model_mb else ""
    server = ""
    if config.server is not None:
        server = f", and a server at {ServerSpec.parse(config.server, config.workers)}"
    return f"{config.fixed_clock:g} s a step{link}, {coding_in_words(config)}{size}{server}"


def coding_in_words(config: TrainConfig) -> str:
    """What modelled step times charge for compressing and decoding."""
    by_cf = dict(config.coding_by_cf)
    if not any(by_cf.values()):
        return "coding free"
    if config.coding is not None:
        return f"{config.coding:g} ns of coding an element"
    times = ", ".join(f"{ns:.2g} at CF {cf:.3g}" for cf, ns in by_cf.items())
    return f"coding as measured on this machine (ns an element: {times})"


def make_report(config: TrainConfig, outcome: Outcome, logbook: Logbook, out: TextIO) -> bool:
    """Write result.json, print the table to `out` and JSON to stdout if asked; then,
    on stderr, what has gone wrong. Returns whether everything could be written."""
    result, notes, unsaved = save_result(config, outcome, logbook)
    show(out, *ending(config, outcome, result, notes))
    if config.json:
        print(json.dumps(result, allow_nan=False), flush=True)
        lost = getattr(sys.stdout, "lost", "")
        unsaved += [f"the result could not be printed: {lost}"] if lost else []
    errors = list(unsaved)
    if outcome.diverged:
        by = f"by step {outcome.steps_done} of {config.steps}"
        left = _left(config, outcome)
        errors.insert(0, f"the run has diverged {by}: {outcome.diverged}; {left}")
    for error in errors:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return not unsaved


def _left(config: TrainConfig, outcome: Outcome) -> str:
    """The checkpoint that there is."""
    if not outcome.saved_at:
        how = "" if config.checkpoint_every else " (--checkpoint-every N saves them)"
        return f"there is no checkpoint{how}"
    return f"the last checkpoint is of step {outcome.saved_at}, in {config.folder / 'checkpoint'}"


def save_result(
    config: TrainConfig, outcome: Outcome, logbook: Logbook
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Write result.json; returns the result, what the user should know, and what
    could not be saved: the last checkpoint, or the result itself."""
    notes = list(logbook.notes)
    recorded, timeline = Recorded([], []), config.folder / TIMELINE_FILE
    try:
        recorded = read_records(timeline) if timeline.exists() else recorded
    except (OSError, ValueError) as error:  # no reason to lose the result
        notes.append(f"no CF history: {error}")
    notes += [recorded.damage] if recorded.damage else []
    exchanges = outcome.summary.steps
    if config.policy != PLAIN and len(recorded.steps) < exchanges:
        notes.append(f"{TIMELINE_FILE} has {len(recorded.steps)} of {exchanges} steps")
    result = make_result(config, outcome, logbook.evaluations, recorded)
    unsaved = []
    if outcome.unsaved:
        left = _left(config, outcome)
        unsaved.append(f"the last checkpoint could not be saved: {outcome.unsaved}; {left}")
    try:
        write_json(config.folder / RESULT_FILE, result)
    except OSError as error:
        unsaved.append(f"{config.folder / RESULT_FILE} could not be written: {error.strerror}")
    return result, notes, unsaved


def make_result(
    config: TrainConfig,
    outcome: Outcome,
    evaluations: list[tuple[int, float]],
    recorded: Recorded,
) -> dict[str, Any]:
    """Everything about the run, as JSON-like values; null for numbers that are not known."""
    task = task_named(config.task)
    rate = known(outcome.summary.pace.steps_per_second)
    of_rounds = local_steps(recorded.steps)
    whole = sum(of_rounds) + max(of_rounds, default=1) > outcome.steps_done  # nothing was dropped
    modelled = seconds_by_clock(config, recorded) if whole else None
    of_some = {  # what some tasks have, and some options bring, beside the quality
        "beside": {name: known(value) for name, value in outcome.beside.items()},
        "test": known(outcome.test),
        "best_step": outcome.best_step,
        "stopped_early": outcome.stopped_early,
    }
    return {
        "title": title(config),
        "headline": None if config.policy == PLAIN else outcome.summary.headline,
        "steps": outcome.steps_done,
        "resumed_at": outcome.first_step,
        "interrupted": outcome.interrupted,
        "diverged": outcome.diverged or None,
        "quality_name": task.quality_name,
        "higher_is_better": task.higher_is_better,
        "quality": known(outcome.quality),
        **{name: value for name, value in of_some.items() if value not in (None, {}, "")},
        "evaluations": [{"step": step, "quality": known(value)} for step, value in evaluations],
        "train_loss": known(outcome.loss),
        "seconds": outcome.seconds,
        "steps_per_second": rate,
        "modelled_seconds": modelled,
        "server_bytes": server_bytes(config, recorded),
        "scaling_efficiency": scaling_efficiency(one_worker_seconds(config), rate),
        "emulated_link": emulated(config) or None,
        "netlab": outcome.netlab,
        "summary": _summary(outcome.summary),
        "cf_history": [asdict(stretch) for stretch in stretches(recorded)],
        "step_milliseconds": where_time_went(recorded.steps),
        "log_dir": config.log_dir,
        "command": config.command,
        "config": config.as_json(),
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "processor": platform.machine(),
        },
    }


def ending(
    config: TrainConfig, outcome: Outcome, result: dict[str, Any], notes: list[str]
) -> list[RenderableType]:
    """The end of the run, to be read."""
    better = "higher is better" if result["higher_is_better"] else "lower is better"
    quality = "not known" if result["quality"] is None else f"{result['quality']:.4g}"
    rows = [(f"held-out {result['quality_name']}", f"{quality} ({better})")]
    rows += [(f"held-out {name}", f"{value:.4g}") for name, value in outcome.beside.items()]
    if outcome.test is not None:
        rows.append((f"test {result['quality_name']}", f"{outcome.test:.4g}"))
    done = f"{outcome.steps_done} of {config.steps}"
    if outcome.best_step is not None:
        why = f": {outcome.stopped_early}" if outcome.stopped_early else ""
        done += f", the best model is that after {outcome.best_step}{why}"
    rows.append(("steps", done))
    rate = result["steps_per_second"]
    by = "" if config.fixed_clock is None else f" (modelled: {_modelled(config)})"
    rows.append(("steps/s", f"{number_text(rate, 3)}{by}" if rate else "not known"))
    if result["scaling_efficiency"] is not None:
        alone = f"a step of one worker: {one_worker_seconds(config):g} s"
        rows.append(("scaling efficiency", f"{result['scaling_efficiency']:.3g} ({alone})"))
    summary = outcome.summary
    in_rounds = summary.local_steps > summary.steps
    unit = "round" if in_rounds else "step"
    whose = "a node" if summary.inside_bytes else "a worker"  # with two levels
    share = f"{_bytes(summary.bytes_sent)} of {_bytes(summary.dense_bytes)} if dense, {whose}"
    rows.append(("bytes sent", f"{share} (wire factor {summary.wire_factor:.2f})"))
    if result["server_bytes"]:
        up, down = (_bytes(nbytes) for nbytes in result["server_bytes"])
        rows.append(("on the server's link", f"{up} up, {down} down"))
    if outcome.netlab is not None:
        rows.append(("the interface has sent", told(outcome.netlab)))
    spent = result["step_milliseconds"]
    if spent:
        of_exchange = {"network": "of that network"}
        told_parts = [f"{of_exchange.get(n, n)} {number_text(v, 3)}" for n, v in spent.items()]
        rows.append((f"ms of a {unit}, medians", ", ".join(told_parts)))
    parts: list[RenderableType] = ["", strong(title(config)), table(("", ""), rows, (0, 1), 2)]
    if result["cf_history"]:
        note = f" ({emulated(config)})" if config.network else ""
        of = summary.local_steps / max(1, summary.steps)
        rounds = f", in rounds of {of:.3g} steps" if in_rounds else ""
        parts += [f"  CF history{rounds}{note}", _history(result["cf_history"], summary.rungs)]
        parts += [f"  summary of one worker{note}", indent(summary.table(), "    ")]
    parts += [faint(f"  note: {note}") for note in notes]
    folder = shlex.quote(config.log_dir)
    look = f"a page of them: python -m runs report {folder}"
    if find_spec("tensorboard") is not None:
        look += f", or tensorboard --logdir {folder}"
    parts += [f"files in {config.log_dir}; {look}"]
    if outcome.interrupted and outcome.saved_at == outcome.steps_done:
        parts += [
            f"interrupted after {outcome.steps_done} of {config.steps} steps and saved; go on "
            f"with: {config.resume_command}"
        ]
    elif result["headline"]:
        parts += [strong(result["headline"])]
    return parts


def _history(history: list[dict[str, Any]], rungs: Mapping[float, str]) -> Table:
    """A line for each stretch of steps at one CF; the middle of a long history is left out. Why
    each began was told when it did."""
    rows = [
        ("steps", f"{part['first']} to", f"{part['last']}", named(part["cf"], rungs))
        for part in history
    ]
    if len(rows) > SHOWN:
        left_out = len(rows) - SHOWN + 1
        rows[3 : 3 + left_out] = [("...", "", "", f"{left_out} more, in {RESULT_FILE} ...")]
    return table([""] * 4, rows, left=(0, 3), indent=4)


def _summary(summary: Summary) -> dict[str, Any]:
    values = asdict(summary)
    del values["gains"], values["rungs"]
    values["steps_at_cf"] = [[cf, steps] for cf, steps in summary.steps_at_cf.items()]
    values["mean_gain"] = [[cf, known(gain)] for cf, gain in summary.mean_gain.items()]
    pace = {name: known(getattr(summary.pace, name)) for name in _OF_PACE}
    return {**values, **pace, "wire_factor": summary.wire_factor}


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
