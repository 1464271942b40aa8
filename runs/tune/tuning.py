"""A study as plain data, made from the options: what is searched, for what, and in which runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
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
    OBJECTIVES,
    STUDY_FILE,
    TRIALS,
)
from runs.tune.space import BY_POLICY, HARRIS, ON_REQUEST, Parameter, Value, search, setting

OF_ONE_RUN = ("log_dir", "seed", "checkpoint_every", "json")
"""Entries of a run's configuration that are no part of what is tuned."""

HOW = ("trials", "plan", "plan_seed", "pruner", "storage", "log_dir", "json")
"""Options that may change from one command to the next without another folder."""


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

    def told(self, values: Sequence[float]) -> str:
        """The values as a sentence's part."""
        pairs = zip(self.labels, self.shown(values), strict=True)
        return ", ".join(f"{label} {value:.4g}" for label, value in pairs)

    def reached(self, quality: float) -> bool:
        """Is there a target, and is this quality as good?"""
        if self.target is None or not isfinite(quality):
            return False
        return quality >= self.target if self.higher_is_better else quality <= self.target

    def intermediate(self, quality: float) -> float:
        """What the pruner compares, in the direction of the first objective."""
        same = self.names[0] == "quality" or not self.higher_is_better
        return quality if same else -quality

    def values(self, run: Run) -> list[float] | None:
        """Of a finished run; nan for what is not known, None if the target was not reached."""
        done, sent = run.trained, run.bytes_sent
        if self.target is not None:
            steps = run.steps_to(self.target)
            if not isfinite(steps):
                return None
            done = int(steps)
            sent = run.sent_by(done)
        seconds = run.seconds_by(done)
        if self.network is not None:
            seconds = run.modelled_by(done, self.network)
        found = {"quality": run.quality, "bytes": sent, "seconds": seconds}
        return [found[name] for name in self.names]


@dataclass(frozen=True)
class Tuning:
    """The settings of `python -m runs tune`.

    common: train's options, the same for all trials. seeds: each trial trains with all of them.
    trials: wanted in all, by all processes. storage: None for a file in the folder.
    """

    common: dict[str, Any]
    seeds: tuple[int, ...]
    objective: Objective
    space: tuple[Parameter, ...]
    trials: int
    plan: str
    plan_seed: int
    pruner: str
    storage: str | None = field(repr=False)  # it may have a password
    folder: Path = Path(".")
    name: str = ""

    @property
    def url(self) -> str:
        """Of the storage."""
        return self.storage or f"sqlite:///{self.folder / STUDY_FILE}"

    def config(
        self, values: Mapping[str, Value] | None = None, number: int = 0, seed: int = 0
    ) -> TrainConfig:
        """A trial's run with one seed. UsageError if its settings do not go together."""
        folder = self.folder / "runs" / f"trial{number}-seed{seed}"
        return make_config({**self.common, **(values or {}), "seed": seed, "log_dir": str(folder)})

    @property
    def signature(self) -> dict[str, Any]:
        """What two commands must have in common to add to the same study: by option, as JSON-like
        values."""
        options = {k: v for k, v in asdict(self.config()).items() if k not in OF_ONE_RUN}
        network = self.objective.network
        return {
            **{k: list(v) if isinstance(v, tuple) else v for k, v in options.items()},
            "seeds": list(self.seeds),
            "objective": list(self.objective.names),
            "target": self.objective.target,
            "bandwidth": None if network is None else str(network),
            "search": [str(parameter) for parameter in self.space],
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
    base = Path(given.get("log_dir") or _folder(task, [given.get("plan", "tpe"), how]))
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
    given = dict(given)
    plan, folder = given.pop("plan", "tpe"), given.pop("log_dir", None)
    wanted, also = given.pop("search", None), given.pop("also", ())
    objective = _objective(given, quality_alone=plan == "random")
    if plan == "random" and wanted is None:
        given.setdefault("policy", "fixed")
        wanted = [name for name in HARRIS if name not in given]
    how = {
        "trials": given.pop("trials", TRIALS),
        "plan": plan,
        "plan_seed": given.pop("plan_seed", 0),
        "pruner": _pruner(given.pop("pruner", None), objective, plan),
        "seeds": tuple(dict.fromkeys(given.pop("seeds", (0,)))),
        "storage": given.pop("storage", None),
    }
    if "policy" not in given:
        given["policy"] = _policy(given, [*(wanted or ()), *also])
    steps = given.setdefault("steps", TrainConfig.steps)
    given.setdefault("eval_every", max(1, steps // EVALUATIONS))
    config = make_config({**given, "log_dir": "."})
    space = _space(config, given, wanted, also)
    tuning = Tuning(common=given, objective=objective, space=space, **how)
    path = Path(folder or _folder(config.task, tuning.signature))
    return replace(tuning, folder=path, name=path.name or "tune")


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
    if wanted is None:
        wanted = [name for name in ours if name not in fixed and config.base != "none"]
    task = TASKS.get(config.task)
    rates = {} if task is None else task.learning_rates
    lr = learning_rate(config) or rates.get(config.model or "", next(iter(rates.values()), 1.0))
    space = search([*wanted, *also], policy, config.steps, lr, fixed)
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


def _folder(task: str, what: Any) -> Path:
    """The same options find the same folder, so that the same command goes on."""
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    return Path("logs", f"tune-{task}-{digest[:8]}")
