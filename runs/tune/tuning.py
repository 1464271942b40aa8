"""What is searched, and for what: the options of tune as Optuna's distributions and directions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from runs.build import check_compression, learning_rate
from runs.config import TrainConfig
from runs.expression import policy_name, value_of
from runs.needs import left_out
from runs.options import CONFIG_OPTIONS, check_measured, make_config, policy_for
from runs.parser import UsageError, option, options, read
from runs.report.run import Run
from runs.settings import Compressing, Optimizing, Training
from runs.tasks import quality_of, tasks

EVALUATIONS = 10
"""In a trial, unless --eval-every says otherwise."""

BY_POLICY = {
    "gravac": ("epsilon", "omega"),
    "goodput": ("margin", "power"),
    "accordion": ("eta",),
    "fixed": ("cf",),
}
"""What is searched of each policy unless the command says otherwise."""

OBJECTIVES = {"quality": "held-out {}", "bytes": "MB sent by a worker", "seconds": "seconds"}
"""What a trial may be judged by, and how it is called; {} is the quality's name."""

DIGITS = 3
"""Significant digits of a searched number: the printed value is exactly the one that ran."""

LOG_FROM = 10
"""A range whose ends differ by such a factor is searched by its logarithm."""

_WORDS = {each.__name__: options(each) for each in (Training, Optimizing, Compressing)}


@dataclass(frozen=True)
class Tuning:
    """The settings of `python -m runs tune`. common: train's options, the same for all trials.
    names: of `OBJECTIVES`. space: what is searched, by name."""

    common: dict[str, Any]
    names: tuple[str, ...]
    space: dict[str, BaseDistribution]
    folder: Path
    verbose: bool = False

    def config(self, settings: Mapping[str, Any], number: int = 0) -> TrainConfig:
        """A trial's run. UsageError if its settings do not go together."""
        folder = str(self.folder / "runs" / f"trial{number}")
        return make_config({**self.common, **settings, "log_dir": folder})

    def chosen(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The settings to run with, of the values that Optuna has drawn."""
        return {name: rounded(self.space[name], params[name]) for name in params}

    @property
    def signature(self) -> dict[str, str]:
        """What two commands must have in common to add to the same study, by option."""
        own = {"objective": " ".join(self.names), "search": space_text(self.space)}
        return {name: str(value) for name, value in {**self.common, **own}.items()}

    @property
    def directions(self) -> list[Literal["minimize", "maximize"]]:
        """In Optuna's words."""
        _, up = quality_of(self.config({}))
        return ["maximize" if up and name == "quality" else "minimize" for name in self.names]

    @property
    def labels(self) -> list[str]:
        """The objectives' names, with units."""
        config = self.config({})
        quality = quality_of(config)[0]
        told = OBJECTIVES | ({"quality": "{}"} if config.script else {})
        return [told[name].format(quality) for name in self.names]

    def values(self, run: Run) -> list[float]:
        """Of a run that is over; nan for what is not known."""
        found = {
            "quality": run.quality,
            "bytes": run.bytes_sent / 1e6,
            "seconds": run.seconds_by(run.trained),
        }
        return [found[name] for name in self.names]

    def told(self, values: Sequence[float]) -> str:
        """The values as a sentence's part."""
        pairs = zip(self.labels, values, strict=True)
        return ", ".join(f"{label} {value:.4g}" for label, value in pairs)


def make_tuning(given: dict[str, Any]) -> Tuning:
    """UsageError names the option, its value and what is accepted."""
    given = dict(given)
    check_measured(given)
    if "script" in given and "metric" not in given:
        raise UsageError("--metric: needed with a script: how it reports its quality")
    folder, specs = given.pop("log_dir", None), given.pop("search", None)
    names = tuple(given.pop("objective", ("quality", "bytes")))
    if "quality" not in names or set(names) - set(OBJECTIVES) or len({*names}) < len(names):
        raise UsageError(
            f"--objective {' '.join(names)}: accepted: quality, alone or with bytes, seconds"
        )
    task = given.get("task", TrainConfig.task)
    if task not in tasks():
        raise UsageError(f"--task {task!r} is unknown; accepted: {', '.join(tasks())}{left_out()}")
    fixed = policy_for(given) if "cf" in given or given.get("base") == "none" else "gravac"
    given.setdefault("policy", fixed)
    if "script" not in given:
        steps = given.setdefault("steps", TrainConfig.steps)
        given.setdefault("eval_every", max(1, steps // EVALUATIONS))
    config = make_config({**given, "log_dir": "."})
    if specs is None:
        own = () if config.base == "none" else BY_POLICY.get(policy_name(config.policy), ())
        specs = [name for name in own if name not in given and f"{name}=" not in config.policy]
    lr = learning_rate(config)
    if lr is None:
        lr = tasks()[task].learning_rates.get(config.model or tasks()[task].models[0], 1.0)
    known = usual(lr)
    if config.script:  # its learning rate is not known
        known = {name: one for name, one in known.items() if name not in ("lr", "clip_grad")}
    space = make_space(specs, known, given)
    if not space:
        raise UsageError(f"--policy {config.policy}: --search says what is searched; e.g. lr")
    if folder is None:
        what = json.dumps([sorted(given.items()), names, space_text(space)], default=str)
        task = Path(config.script[0]).stem if config.script else config.task
        folder = f"logs/tune-{task}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
    tuning = Tuning(given, names, space, Path(folder))
    for name, one in space.items():  # also what only a trial would find out
        for value in getattr(one, "choices", None) or (one.low, one.high):  # type: ignore[attr-defined]
            try:
                check_compression(tuning.config({name: value}))
            except UsageError as error:
                raise UsageError(f"--search {name}={value}: {error}") from error
    return tuning


# -- the space -------------------------------------------------------------------------------------


def usual(lr: float) -> dict[str, BaseDistribution]:
    """The ranges of names that are given none. lr: the task's own learning rate."""
    return {
        "epsilon": FloatDistribution(0.05, 0.9),
        "omega": FloatDistribution(0.01, 0.5, log=True),
        "eta": FloatDistribution(0.05, 1.0),
        "cf": FloatDistribution(2.0, 1000.0, log=True),
        "margin": FloatDistribution(0.01, 0.5, log=True),
        "power": FloatDistribution(0.1, 4.0, log=True),
        "lr": FloatDistribution(lr / 20, 2 * lr, log=True),  # sparsifiers prefer lower ones
        "clip_grad": FloatDistribution(0.1, 10.0, log=True),
    }


def make_space(
    specs: Sequence[str], known: Mapping[str, BaseDistribution], given: Mapping[str, Any]
) -> dict[str, BaseDistribution]:
    """The distributions of NAME, NAME=LOW..HIGH and NAME=A,B,C. known: of names alone. given:
    options that the command fixes. UsageError names the spec and what is accepted."""
    space: dict[str, BaseDistribution] = {}
    for spec in specs:
        name, equals, text = spec.partition("=")
        name = name.strip().replace("-", "_")
        try:
            if name in given:
                raise UsageError(f"{option(name)} fixes it; accepted: one of the two")
            if name in space:
                raise UsageError(f"{name} is searched already; accepted: once")
            space[name] = _distribution(name, text, {} if equals else known)
        except (UsageError, ValueError) as error:
            raise UsageError(f"--search {spec}: {error}") from error
    return space


def _distribution(name: str, text: str, known: Mapping[str, BaseDistribution]) -> BaseDistribution:
    if not text:
        if name not in known:
            raise ValueError(f"needs a range; accepted: {name}=LOW..HIGH, {name}=A,B,C")
        return known[name]
    low_text, dots, high_text = text.partition("..")
    if not dots:
        values = [_value(name, part) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise ValueError(f"accepted: {name}=A,B,C, each once")
        return CategoricalDistribution(values)
    low, high = _value(name, low_text), _value(name, high_text)
    if not (isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high):
        raise ValueError("accepted: two numbers, LOW <= HIGH")
    log = low > 0 and high >= LOG_FROM * low
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)


def _value(name: str, word: str) -> Any:
    """What a word stands for, as a value of that option or argument."""
    if name in CONFIG_OPTIONS:
        value = read("tune", _WORDS, "", [option(name), word])[name]
        return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    return value_of([word])


def rounded(one: BaseDistribution, drawn: Any) -> Any:
    """A number as it is run."""
    if not isinstance(one, FloatDistribution):
        return drawn
    return min(one.high, max(one.low, float(f"{drawn:.{DIGITS}g}")))


def space_text(space: Mapping[str, BaseDistribution]) -> str:
    """The space, to be read."""
    return ", ".join(f"{name}={_text(one)}" for name, one in space.items())


def _text(one: Any) -> str:
    if isinstance(one, CategoricalDistribution):
        return ",".join(map(str, one.choices))
    return f"{one.low:g}..{one.high:g}"
