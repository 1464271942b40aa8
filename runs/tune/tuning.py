"""A study as plain data, made from the options: what is searched, for what, and in which runs."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from adaptive import LinkSpec
from runs.build import learning_rate
from runs.compare.contender import parse_contender
from runs.config import TrainConfig
from runs.options import CONFIG_OPTIONS, make_config, policy_for
from runs.parser import UsageError, option
from runs.policy_expression import argument_names, policy_name, written_arguments
from runs.report.run import Run
from runs.tasks import TASKS
from runs.tune.options import (
    ACCEPTED,
    EVALUATIONS,
    HARRIS_SETTINGS,
    KEPT,
    OBJECTIVES,
    REPLAYS,
    STUDY_FILE,
    TRIALS,
)
from runs.tune.space import BY_POLICY, HARRIS, ON_REQUEST, Parameter, Value, search, setting
from runs.tune.storage import shown_url

OF_ONE_RUN = ("log_dir", "seed", "checkpoint_every", "json")
"""Entries of a run's configuration that are no part of what is tuned."""

HOW = ("trials", "plan", "plan_seed", "pruner", "storage", "log_dir", "json", "setting")
"""Options that may change from one command to the next without another folder."""


# -- what for ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective:
    """What a study minimises or maximises.

    names: of ACCEPTED. target: the quality that bytes or seconds are counted to. network: seconds
    are modelled on it, by compare's model; None: as measured.
    """

    names: tuple[str, ...]
    target: float | None
    network: LinkSpec | None
    quality_name: str
    higher_is_better: bool

    @property
    def directions(self) -> list[Literal["minimize", "maximize"]]:
        """In Optuna's words."""
        up = self.higher_is_better
        return ["maximize" if up and name == "quality" else "minimize" for name in self.names]

    @property
    def labels(self) -> list[str]:
        """What the values are, with units, for people."""
        to = "" if self.target is None else f" to {self.quality_name} {self.target:g}"
        how = "measured seconds" if self.network is None else f"modelled s at {self.network}"
        names = {
            "quality": f"held-out {self.quality_name}",
            "bytes": f"MB sent by a worker{to}",
            "seconds": f"{how}{to}",
        }
        return [names[name] for name in self.names]

    def shown(self, values: Sequence[float]) -> list[float]:
        """The values in the units of `labels`."""
        pairs = zip(self.names, values, strict=True)
        return [value / 1e6 if name == "bytes" else value for name, value in pairs]

    def reached(self, quality: float) -> bool:
        """Is there a target, and is this quality as good?"""
        if self.target is None or not isfinite(quality):
            return False
        return quality >= self.target if self.higher_is_better else quality <= self.target

    def intermediate(self, quality: float) -> float:
        """What the pruner compares, in the direction of the first objective."""
        same = self.names[0] == "quality" or not self.higher_is_better
        return quality if same else -quality


@dataclass(frozen=True)
class Metrics:
    """One run; nan for what is not known. bytes_sent, seconds: to the target if there is one and
    it was reached, else of the whole run."""

    quality: float
    bytes_sent: float
    seconds: float
    reached: bool


def measure(objective: Objective, run: Run, ends: Sequence[float]) -> Metrics:
    """The metrics of a finished run. ends: when each step ended, seconds."""
    sent, seconds = run.bytes_sent, ends[-1] if ends else nan
    reached = objective.target is None
    if objective.target is not None:
        done = run.steps_to(objective.target)
        if done <= len(ends):
            sent, seconds, reached = run.sent_by(int(done)), ends[int(done) - 1], True
    return Metrics(run.quality, sent, seconds, reached)


def values(objective: Objective, runs: Sequence[Metrics]) -> list[float]:
    """The objectives' values: means over the seeds; nan where one is not known."""
    attributes = {"quality": "quality", "bytes": "bytes_sent", "seconds": "seconds"}
    return [fmean(getattr(run, attributes[name]) for run in runs) for name in objective.names]


# -- the study -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Screen:
    """To be tried on a record first: so many settings, of which the best few go to real runs."""

    timeline: str
    settings: int
    keep: int


@dataclass(frozen=True)
class Tuning:
    """The settings of `python -m runs tune`.

    common: train's options, the same for all trials. seeds: each trial trains with all of them.
    trials: wanted in all, by all processes. url: of the storage. command: starts it again.
    """

    common: dict[str, Any]
    seeds: tuple[int, ...]
    objective: Objective
    space: tuple[Parameter, ...]
    trials: int
    plan: str
    plan_seed: int
    pruner: str
    folder: Path
    url: str = field(repr=False)  # it may have a password
    name: str
    screen: Screen | None
    json: bool
    command: str

    def config(
        self, values: Mapping[str, Value] | None = None, number: int = 0, seed: int = 0
    ) -> TrainConfig:
        """A trial's run with one seed. UsageError if its settings do not go together."""
        folder = self.folder / "runs" / f"trial{number}-seed{seed}"
        return make_config({**self.common, **(values or {}), "seed": seed, "log_dir": str(folder)})

    @property
    def keeps_study(self) -> bool:
        """Its storage is a file in its folder, as it is unless the command names another."""
        return self.url == _study_url(self.folder)

    @property
    def signature(self) -> dict[str, Any]:
        """What two commands must have in common to add to the same study."""
        return _signature(self.config(), self.seeds, self.objective, self.space)


def _study_url(folder: Path) -> str:
    return f"sqlite:///{folder / STUDY_FILE}"


def _signature(
    config: TrainConfig, seeds: tuple[int, ...], objective: Objective, space: Sequence[Parameter]
) -> dict[str, Any]:
    """By option, as JSON-like values."""
    options = {k: v for k, v in asdict(config).items() if k not in OF_ONE_RUN}
    return {
        **{k: list(v) if isinstance(v, tuple) else v for k, v in options.items()},
        "seeds": list(seeds),
        "objective": list(objective.names),
        "target": objective.target,
        "bandwidth": None if objective.network is None else str(objective.network),
        "search": [str(parameter) for parameter in space],
    }


# -- from options --------------------------------------------------------------------------------


def make_tunings(given: dict[str, Any]) -> dict[str, Tuning]:
    """The studies, by compression setting; one under "" if the command names none."""
    given = dict(given)
    texts = given.pop("setting", None)
    own = {"policy", "base", "cf", "search"}.intersection(given)
    if texts is None and given.get("plan") == "random" and not own:
        texts = HARRIS_SETTINGS
    if texts is None:
        return {"": make_tuning(given)}
    given.setdefault("search", [name for name in HARRIS if name not in given])
    how = {name: value for name, value in given.items() if name not in HOW}
    task = given.get("task", TrainConfig.task)
    folder = _folder(task, [given.get("plan", "tpe"), how])
    base = Path(given.get("log_dir", folder))
    found: dict[str, Tuning] = {}
    for text in texts:
        try:
            one = parse_contender(text)
            both = next((name for name in one.given if name in given), None)
            if both is not None:
                raise UsageError(
                    f"{option(both)} {given[both]} is given for all settings; accepted: one of "
                    f"the two"
                )
            if any(tuning.folder == base / one.folder for tuning in found.values()):
                raise UsageError("is given twice; accepted: once")
            tuning = make_tuning({**given, **one.given, "log_dir": str(base / one.folder)})
        except UsageError as error:
            said = str(error).removeprefix(f"--contender {text}: ")
            raise UsageError(f"--setting {text}: {said}") from error
        found[one.label] = replace(tuning, name=f"{base.name}/{one.folder}")
    return found


def make_tuning(given: dict[str, Any]) -> Tuning:
    """UsageError names the option, its value and what is accepted."""
    given, command = dict(given), _command(given)
    plan = given.pop("plan", "tpe")
    trials, plan_seed = given.pop("trials", TRIALS), given.pop("plan_seed", 0)
    seeds = tuple(dict.fromkeys(given.pop("seeds", (0,))))
    as_json, folder = given.pop("json", False), given.pop("log_dir", None)
    url, screen = given.pop("storage", None), _screen(given)
    wanted, also = given.pop("search", None), given.pop("also", ())
    objective = _objective(given, quality_alone=plan == "random")
    pruner = _pruner(given.pop("pruner", None), objective, plan)
    if plan == "random" and wanted is None:
        given.setdefault("policy", "fixed")
        wanted = [name for name in HARRIS if name not in given]
    if "policy" not in given:
        given["policy"] = _policy(given, [*(wanted or ()), *also])
    steps = given.setdefault("steps", TrainConfig.steps)
    given.setdefault("eval_every", max(1, steps // EVALUATIONS))
    config = make_config({**given, "log_dir": "."})
    space = _space(config, given, wanted, also)
    path = Path(folder or _folder(config.task, _signature(config, seeds, objective, space)))
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
        url=url or _study_url(path),
        name=path.name or "tune",
        screen=screen,
        json=as_json,
        command=command,
    )


def _policy(given: dict[str, Any], specs: Sequence[str]) -> str:
    """The one that is trained by default, if it has the settings that were given and those that are
    to be searched, else the first that has."""
    chosen, named = policy_for(given), set(map(setting, specs))
    own = {name for name in given if name not in CONFIG_OPTIONS}
    for policy in (chosen, *BY_POLICY):
        searched = {*BY_POLICY.get(policy, ()), *ON_REQUEST}
        if own <= {*argument_names(policy)} and named <= searched:
            return policy
    return chosen


def _pruner(name: str | None, objective: Objective, plan: str) -> str:
    several = len(objective.names) > 1
    if name not in (None, "none") and several:
        raise UsageError(
            f"--pruner {name}: Optuna prunes with one objective only, got --objective "
            f"{' '.join(objective.names)}; accepted: none"
        )
    return name or ("none" if plan == "random" or several else "median")


def _space(
    config: TrainConfig, given: dict[str, Any], wanted: Sequence[str] | None, also: Sequence[str]
) -> tuple[Parameter, ...]:
    policy = policy_name(config.policy)
    if policy not in BY_POLICY:
        raise UsageError(
            f"--policy {config.policy}: has nothing to search; accepted: {', '.join(BY_POLICY)}"
            + (" (for a dense run --base none)" if config.policy == "off" else "")
        )
    written, ours = written_arguments(config.policy), BY_POLICY[policy]
    fixed = [*given, *(name for name in ours if name.removeprefix(f"{policy}_") in written)]
    own = () if config.base == "none" else ours
    specs = [name for name in own if name not in fixed] if wanted is None else list(wanted)
    task = TASKS.get(config.task)
    rates = {} if task is None else task.learning_rates
    lr = learning_rate(config) or rates.get(config.model or "", next(iter(rates.values()), 1.0))
    space = search([*specs, *also], policy, config.steps, lr, fixed)
    if not space:
        raise UsageError("--search: nothing is left to search; accepted: lr, for one")
    return space


def _objective(given: dict[str, Any], quality_alone: bool) -> Objective:
    target, bandwidth = given.pop("target", None), given.pop("bandwidth", None)
    default = ["quality"] if quality_alone else ["quality", "bytes"]
    names = tuple(given.pop("objective", default if target is None else ["seconds"]))
    shown = " ".join(names)
    if names not in ACCEPTED:
        raise UsageError(f"--objective {shown}: must be one of: {OBJECTIVES}")
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
    return Objective(names, target, network, TASKS[name].quality_name, TASKS[name].higher_is_better)


def _screen(given: dict[str, Any]) -> Screen | None:
    proxy = given.pop("proxy", None)
    asked = {name: given.pop(name) for name in ("timeline", "replays", "keep") if name in given}
    if proxy is None:
        for name, value in asked.items():
            raise UsageError(f"--{name} {value}: needs --proxy replay")
        return None
    if "timeline" not in asked:
        raise UsageError(
            "--proxy replay: needs --timeline, the log folder of a run; one with gains of all CFs "
            "is made by: python -m runs train --policy goodput"
        )
    return Screen(asked["timeline"], asked.get("replays", REPLAYS), asked.get("keep", KEPT))


def _command(given: dict[str, Any]) -> str:
    """The command line that starts the same study again, but for a password."""
    words = ["python", "-m", "runs", "tune"]
    for name, value in given.items():
        if name == "json":
            continue
        if isinstance(value, bool):
            value = "on" if value else "off"
        value = shown_url(value) if name == "storage" else value
        parts = value if isinstance(value, list | tuple) else [value]
        said = [f"{v:g}" if isinstance(v, float) else str(v) for v in parts]
        several = name == "setting"  # which is given once for each
        words += [w for v in said for w in (option(name), v)] if several else [option(name), *said]
    return shlex.join(words)


def _folder(task: str, what: Any) -> Path:
    """The same options find the same folder, so that the same command goes on."""
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    return Path("logs", f"tune-{task}-{digest[:8]}")
