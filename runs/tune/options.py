"""The options of `python -m runs tune`, and the study that they make."""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptive import LinkSpec
from runs.config import TrainConfig
from runs.options import (
    add_clock_argument,
    add_eval_argument,
    add_hook_arguments,
    add_policy_arguments,
    add_task_arguments,
    make_config,
    option,
)
from runs.parser import UsageError, number, whole
from runs.tasks import TASKS
from runs.tune.objective import ACCEPTED, Objective
from runs.tune.parameter import Parameter
from runs.tune.space import BY_POLICY, GRAMMAR, HARRIS, search
from runs.tune.tuning import STUDY_FILE, Screen, Tuning, make_signature

PLANS = ("tpe", "random")
PRUNERS = ("median", "hyperband", "none")
TRIALS = 30
EVALUATIONS = 10
"""In a trial, unless --eval-every says otherwise."""
SETTINGS, KEPT = 1000, 8
"""Screened on a record, and handed to real runs, unless the command says otherwise."""

HELP = f"""\
Search for the settings that train best, with Optuna. Every trial is a real run of all workers.

{GRAMMAR}

examples:
  python -m runs tune --link 100mbit --trials 20
      GraVAC's settings: the Pareto front of final quality and bytes sent
  python -m runs tune --objective quality seconds --bandwidth 1gbit --also base lr
  python -m runs tune --target 8.5 --objective seconds --link 100mbit --pruner hyperband
      the least time to perplexity 8.5; poor trials are stopped early
  python -m runs tune --plan random --trials 60 --policy fixed --base topk --cf 100
      a random search over the learning rate for one compression setting (Harris, 2020), to be
      repeated for each that is to be compared: --cf 1000, --base dgc --cf 100, --base none
  python -m runs train --policy goodput --link 100mbit --log-dir logs/recorded
  python -m runs tune --proxy replay --timeline logs/recorded --link 100mbit --trials 8
      {SETTINGS} settings on the record first, then the best of them for real
  torchrun --nproc-per-node 4 -m runs tune --trials 20

The same options find the same study: Ctrl-C gives up the trial under way (exit code 130), the same
command goes on, and several can run at the same time, on other machines with --storage URL. Trials
that fail are recorded and do not stop the study. Optuna does not prune with two objectives.

files in the log folder: {STUDY_FILE}, tune.json, table.txt, report.html, the plots, and each
trial's own in runs/; tensorboard --logdir LOGDIR shows them under HParams."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options; what is not given is not in the namespace."""
    parser.argument_default = argparse.SUPPRESS
    _add_study_arguments(parser)
    _add_screen_arguments(parser)
    add_task_arguments(parser, seed=False)
    add_hook_arguments(parser)
    add_policy_arguments(parser)
    output = parser.add_argument_group("what is kept")
    output.add_argument(
        "--log-dir", metavar="DIR", help="where the files go (logs/tune-TASK-OPTIONS)"
    )
    output.add_argument(
        "--storage",
        metavar="URL",
        help=f"Optuna's storage, e.g. mysql://... (sqlite:///LOGDIR/{STUDY_FILE})",
    )
    add_eval_argument(output, f"a {EVALUATIONS}th of the steps")
    output.add_argument(
        "--json", action="store_true", help="print the result as JSON on stdout, all else on stderr"
    )
    add_clock_argument(output)


def _add_study_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to search for")
    what.add_argument(
        "--trials", type=whole(1), metavar="N", help=f"in all, by all processes ({TRIALS})"
    )
    what.add_argument(
        "--objective",
        nargs="+",
        metavar="WHAT",
        help=f"{_accepted()} (quality bytes; with --target seconds)",
    )
    what.add_argument(
        "--target",
        type=number,
        metavar="QUALITY",
        help="count bytes or seconds until held-out quality is as good as this",
    )
    what.add_argument(
        "--bandwidth",
        metavar="RATE[,LATENCY]",
        help="seconds modelled on this network, as compare does (as measured)",
    )
    what.add_argument("--search", nargs="+", metavar="S", help="search exactly these, see above")
    what.add_argument("--also", nargs="+", metavar="S", help="search these too")
    what.add_argument(
        "--plan", choices=PLANS, help="random: for one setting after another, see below (tpe)"
    )
    what.add_argument("--plan-seed", type=whole(0), metavar="N", help="of the plan (0)")
    what.add_argument(
        "--pruner",
        choices=PRUNERS,
        help="stop trials whose quality falls behind (median; none with two objectives or "
        "--plan random)",
    )
    what.add_argument(
        "--seeds", type=whole(0), nargs="+", metavar="N", help="training seeds of a trial (0)"
    )


def _add_screen_arguments(parser: argparse.ArgumentParser) -> None:
    screen = parser.add_argument_group("screening on a recorded timeline")
    screen.add_argument(
        "--proxy",
        choices=("replay",),
        help="replay many settings of the policy on --timeline first, by modelled compression "
        "throughput: a proxy, a replay has no quality",
    )
    screen.add_argument("--timeline", metavar="LOGDIR", help="log folder or timeline.jsonl")
    screen.add_argument("--settings", type=whole(1), metavar="N", help=f"to replay ({SETTINGS})")
    screen.add_argument("--keep", type=whole(1), metavar="N", help=f"for real runs ({KEPT})")


def make_tuning(given: dict[str, Any]) -> Tuning:
    """UsageError names the option, its value and what is accepted."""
    given, command = dict(given), _command(given)
    plan = given.pop("plan", "tpe")
    trials, plan_seed = given.pop("trials", TRIALS), given.pop("plan_seed", 0)
    seeds = tuple(dict.fromkeys(given.pop("seeds", (0,))))
    as_json, folder = given.pop("json", False), given.pop("log_dir", None)
    url, screen = given.pop("storage", None), _screen(given)
    wanted, also = given.pop("search", None), given.pop("also", ())
    harris = plan == "random"
    if harris and wanted is None:
        given.setdefault("policy", "fixed")
    objective = _objective(given, quality_alone=harris)
    pruner = given.pop("pruner", None)
    if pruner not in (None, "none") and len(objective.names) > 1:
        raise UsageError(
            f"--pruner {pruner}: Optuna prunes with one objective only, got --objective "
            f"{' '.join(objective.names)}; accepted: none"
        )
    if pruner is None:
        pruner = "none" if harris or len(objective.names) > 1 else "median"
    steps = given.setdefault("steps", TrainConfig.steps)
    given.setdefault("eval_every", max(1, steps // EVALUATIONS))
    config = make_config({**given, "log_dir": "."})
    if config.policy not in BY_POLICY:
        raise UsageError(
            f"--policy {config.policy}: has nothing to search; accepted: {', '.join(BY_POLICY)}"
            + (" (for a dense run --base none)" if config.policy == "off" else "")
        )
    space = _space(config, given, HARRIS if harris and wanted is None else wanted, also)
    path = Path(folder) if folder is not None else _folder(config, seeds, objective, space)
    return Tuning(
        common=given,
        seeds=seeds,
        objective=objective,
        space=space,
        trials=trials,
        plan=plan,
        plan_seed=plan_seed,
        pruner=pruner,
        folder=path,
        url=url or f"sqlite:///{path / STUDY_FILE}",
        name=path.name or "tune",
        screen=screen,
        json=as_json,
        command=command,
    )


def _space(
    config: TrainConfig, given: dict[str, Any], wanted: Sequence[str] | None, also: Sequence[str]
) -> tuple[Parameter, ...]:
    own = () if config.base == "none" else BY_POLICY[config.policy]
    specs = [name for name in own if name not in given] if wanted is None else list(wanted)
    task = TASKS.get(config.task)
    rates = {} if task is None else task.learning_rates
    lr = rates.get(config.model or "", next(iter(rates.values()), 1.0))
    space = search([*specs, *also], config.policy, config.steps, lr, tuple(given))
    if not space:
        raise UsageError("--search: nothing is left to search; accepted: lr, for one")
    return space


def _objective(given: dict[str, Any], quality_alone: bool) -> Objective:
    target, bandwidth = given.pop("target", None), given.pop("bandwidth", None)
    default = ["quality"] if quality_alone else ["quality", "bytes"]
    names = tuple(given.pop("objective", default if target is None else ["seconds"]))
    shown = " ".join(names)
    if names not in ACCEPTED:
        raise UsageError(f"--objective {shown}: must be one of: {_accepted()}")
    if ACCEPTED[names] and target is None:
        raise UsageError(f"--objective {shown}: needs --target, the quality to count to")
    if target is not None and not ACCEPTED[names]:
        raise UsageError(f"--target {target:g}: is for --objective bytes or seconds, got {shown}")
    if bandwidth is not None and "seconds" not in names:
        raise UsageError(f"--bandwidth {bandwidth}: is for an objective with seconds, got {shown}")
    try:
        network = None if bandwidth is None else LinkSpec.parse(bandwidth)
    except ValueError as error:
        raise UsageError(f"--bandwidth {bandwidth}: {error}") from error
    name = given.get("task", TrainConfig.task)
    if name not in TASKS:
        raise UsageError(f"--task {name!r} is unknown; accepted: {', '.join(TASKS)}")
    task = TASKS[name]
    return Objective(names, target, network, task.quality_name, task.higher_is_better)


def _screen(given: dict[str, Any]) -> Screen | None:
    proxy, timeline = given.pop("proxy", None), given.pop("timeline", None)
    settings, keep = given.pop("settings", None), given.pop("keep", None)
    if proxy is None:
        for name, value in (("timeline", timeline), ("settings", settings), ("keep", keep)):
            if value is not None:
                raise UsageError(f"--{name} {value}: needs --proxy replay")
        return None
    if timeline is None:
        raise UsageError(
            "--proxy replay: needs --timeline, the log folder of a run; one with gains of all CFs "
            "is made by: python -m runs train --policy goodput"
        )
    return Screen(timeline, settings or SETTINGS, keep or KEPT)


def _command(given: dict[str, Any]) -> str:
    """The command line that starts the same study again."""
    words = ["python", "-m", "runs", "tune"]
    for name, value in given.items():
        if name == "json":
            continue
        if isinstance(value, bool):
            value = "on" if value else "off"
        values = value if isinstance(value, list) else [value]
        words += [option(name), *(f"{v:g}" if isinstance(v, float) else str(v) for v in values)]
    return shlex.join(words)


def _folder(
    config: TrainConfig, seeds: tuple[int, ...], objective: Objective, space: tuple[Parameter, ...]
) -> Path:
    """The same options find the same folder, so that the same command goes on."""
    signature = make_signature(config, seeds, objective, space)
    digest = hashlib.sha256(json.dumps(signature, sort_keys=True).encode()).hexdigest()
    return Path("logs", f"tune-{config.task}-{digest[:8]}")


def _accepted() -> str:
    return ", ".join(" ".join(names) for names in ACCEPTED)
