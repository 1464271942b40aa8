"""What is searched: arguments of the policy and options of train, as Optuna's distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial

from runs.expression import value_of
from runs.options import CONFIG_OPTIONS
from runs.parser import UsageError, option, options, read
from runs.settings import Compressing, Optimizing, Training

BY_POLICY = {
    "gravac": ("epsilon", "omega"),
    "accordion": ("eta", "interval"),
    "fixed": ("cf",),
    "warmup": ("warmup_steps",),
    "goodput": ("margin", "power"),
}
"""What is searched of each policy unless the command says otherwise."""

DIGITS = 3
"""Significant digits of a searched number: the printed value is exactly the one that ran."""

LOG_FROM = 10
"""A range whose ends differ by such a factor is searched by its logarithm."""

_WORDS = {each.__name__: options(each) for each in (Training, Optimizing, Compressing)}


def usual(steps: int, lr: float) -> dict[str, BaseDistribution]:
    """The ranges of names that are given none. lr: the task's own learning rate."""
    return {
        "epsilon": FloatDistribution(0.05, 0.9),
        "omega": FloatDistribution(0.01, 0.5, log=True),
        # A ladder of five windows fits into a run.
        "window": IntDistribution(max(2, steps // 100), max(4, steps // 6), log=True),
        "eta": FloatDistribution(0.05, 1.0),
        "interval": IntDistribution(max(2, steps // 50), max(4, steps // 4), log=True),
        "cf": FloatDistribution(2.0, 1000.0, log=True),
        "warmup_steps": IntDistribution(1, max(2, steps // 5), log=True),
        "margin": FloatDistribution(0.01, 0.5, log=True),
        "power": FloatDistribution(0.1, 4.0, log=True),
        "lr": FloatDistribution(lr / 20, 2 * lr, log=True),  # sparsifiers prefer lower ones
        "clip_grad": FloatDistribution(0.1, 10.0, log=True),
        "clip_norm": FloatDistribution(0.1, 10.0, log=True),
    }


def setting(spec: str) -> str:
    """The name that a spec is about."""
    return spec.partition("=")[0].strip().replace("-", "_")


def make_space(
    specs: Sequence[str], known: Mapping[str, BaseDistribution], given: Mapping[str, Any]
) -> dict[str, BaseDistribution]:
    """The distributions of NAME, NAME=LOW..HIGH and NAME=A,B,C. known: of names alone. given:
    options that the command fixes. UsageError names the spec and what is accepted."""
    space: dict[str, BaseDistribution] = {}
    for spec in specs:
        name, text = setting(spec), spec.partition("=")[2]
        try:
            if name in given:
                raise UsageError(f"{option(name)} fixes it; accepted: one of the two")
            space[name] = _distribution(name, text, known)
        except (UsageError, ValueError) as error:
            raise UsageError(f"--search {spec}: {error}") from error
    return space


def _distribution(name: str, text: str, known: Mapping[str, BaseDistribution]) -> BaseDistribution:
    if not text:
        if name not in known:
            raise ValueError(f"needs a range; accepted: {name}=LOW..HIGH, {name}=A,B,C")
        return known[name]
    if ".." not in text:
        values = [value_from(name, part) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise ValueError(f"accepted: {name}=A,B,C, each once")
        return CategoricalDistribution(values)
    low, high = (value_from(name, part) for part in text.split("..", 1))
    numbers = all(type(end) in (int, float) for end in (low, high))
    if not numbers or not low <= high:
        raise ValueError(f"must be {name}=LOW..HIGH, numbers with LOW <= HIGH")
    log = low > 0 and high >= LOG_FROM * low
    if all(isinstance(end, int) for end in (low, high)):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)


def value_from(name: str, word: str) -> Any:
    """What a word stands for, as a value of that option."""
    return (
        read("tune", _WORDS, "", [option(name), word])[name]
        if name in CONFIG_OPTIONS
        else (value_of([word]))
    )


def chosen(space: Mapping[str, BaseDistribution], params: Mapping[str, Any]) -> dict[str, Any]:
    """The settings to run with, of the values that Optuna has drawn."""
    return {name: _rounded(one, params[name]) for name, one in space.items() if name in params}


def _rounded(one: BaseDistribution, drawn: Any) -> Any:
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


def settings_text(space: Mapping[str, BaseDistribution], trial: FrozenTrial) -> str:
    """A trial's settings, to be read."""
    settings = chosen(space, trial.params).items()
    told = [f"{n} {v:g}" if isinstance(v, float) else f"{n} {v}" for n, v in settings]
    return ", ".join(told) or "the policy's defaults"
