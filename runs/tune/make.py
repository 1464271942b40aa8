"""From options to the study that they name."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptive import LinkSpec
from runs.config import TrainConfig
from runs.optimizers import learning_rate
from runs.options import make_config
from runs.parser import UsageError, option
from runs.policy_options import POLICY_OPTIONS, policy_for
from runs.tasks import TASKS
from runs.tune.objective import ACCEPTED, Objective
from runs.tune.options import EVALUATIONS, KEPT, REPLAYS, TRIALS, accepted
from runs.tune.parameter import Parameter
from runs.tune.space import BY_POLICY, HARRIS, ON_REQUEST, search, setting
from runs.tune.storage import shown_url
from runs.tune.tuning import Screen, Tuning, make_signature, study_url


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
    elif "policy" not in given:
        given["policy"] = _policy(given, [*(wanted or ()), *also])
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
    space = _space(config, given, _harris(given) if harris and wanted is None else wanted, also)
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
        url=url or study_url(path),
        name=path.name or "tune",
        screen=screen,
        json=as_json,
        command=command,
    )


def _policy(given: dict[str, Any], specs: Sequence[str]) -> str:
    """The one that is trained by default, if it has the settings that were given and those that are
    to be searched, else the first that has."""
    chosen, named = policy_for(given), set(map(setting, specs))
    own = {name for names in POLICY_OPTIONS.values() for name in names}.intersection(given)
    for policy in (chosen, *BY_POLICY):
        searched = {*BY_POLICY.get(policy, ()), *ON_REQUEST}
        if own <= {*POLICY_OPTIONS[policy]} and named <= searched:
            return policy
    return chosen


def _harris(given: dict[str, Any]) -> list[str]:
    return [name for name in HARRIS if name not in given]


def _space(
    config: TrainConfig, given: dict[str, Any], wanted: Sequence[str] | None, also: Sequence[str]
) -> tuple[Parameter, ...]:
    own = () if config.base == "none" else BY_POLICY[config.policy]
    specs = [name for name in own if name not in given] if wanted is None else list(wanted)
    task = TASKS.get(config.task)
    rates = {} if task is None else task.learning_rates
    of_task = rates.get(config.model or "", next(iter(rates.values()), 1.0))
    lr = learning_rate(config) or of_task
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
        raise UsageError(f"--objective {shown}: must be one of: {accepted()}")
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
    settings, keep = given.pop("replays", None), given.pop("keep", None)
    if proxy is None:
        for name, value in (("timeline", timeline), ("replays", settings), ("keep", keep)):
            if value is not None:
                raise UsageError(f"--{name} {value}: needs --proxy replay")
        return None
    if timeline is None:
        raise UsageError(
            "--proxy replay: needs --timeline, the log folder of a run; one with gains of all CFs "
            "is made by: python -m runs train --policy goodput"
        )
    return Screen(timeline, settings or REPLAYS, keep or KEPT)


def _command(given: dict[str, Any]) -> str:
    """The command line that starts the same study again, but for a password."""
    words = ["python", "-m", "runs", "tune"]
    for name, value in given.items():
        if name == "json":
            continue
        if isinstance(value, bool):
            value = "on" if value else "off"
        value = shown_url(value) if name == "storage" else value
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
