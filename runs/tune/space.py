"""What is searched: the settings of each policy, and on request what goes with any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from adaptive.memory.options import NAMED
from compressors import make_compressor
from policies.base import GainKind
from policies.ladder import SCALINGS
from runs.option_types import number, number_that
from runs.parser import UsageError, option
from runs.policy_expression import BY_NAME, argument_names

BY_POLICY = {
    "gravac": ("epsilon", "omega", "window", "scaling", "gain"),
    "accordion": ("eta", "interval"),
    "fixed": ("cf",),
    "warmup": ("warmup_steps",),
    "goodput": ("margin", "power"),
    "schedule": (),
}
"""Policies that can be tuned, and what is searched unless the command says otherwise."""

ON_REQUEST = ("base", "memory", "lr", "clip_norm")
HARRIS = ("lr", "clip_norm")
"""Searched by --plan random: each compression setting has its own best learning rate."""

DIGITS = 3
"""Significant digits of a searched number: what is printed is then exactly what ran."""

INTEGER = number_that(lambda value: True, "an integer", int)

Value = float | int | str
Numbers = FloatDistribution | IntDistribution
Distribution = Numbers | CategoricalDistribution


@dataclass(frozen=True)
class Parameter:
    """A searched option, and which of its values are tried."""

    name: str
    distribution: Distribution

    def value(self, drawn: Value) -> Value:
        """What is run with, of a value that Optuna has drawn."""
        if not isinstance(self.distribution, FloatDistribution):
            return drawn
        low, high = self.distribution.low, self.distribution.high
        return min(high, max(low, float(f"{drawn:.{DIGITS}g}")))

    def __str__(self) -> str:
        one = self.distribution
        if isinstance(one, CategoricalDistribution):
            return f"{self.name}={','.join(map(str, one.choices))}"
        return f"{self.name}={one.low:g}..{one.high:g}{' (log)' if one.log else ''}"


def usual(steps: int, lr: float) -> dict[str, Distribution]:
    """What is tried of each option unless the command says otherwise. lr: the task's own."""
    log = {"log": True}
    return {
        "epsilon": FloatDistribution(0.05, 0.9),
        "omega": FloatDistribution(0.01, 0.5, **log),
        # So that a ladder of five fits into a run.
        "window": IntDistribution(max(2, steps // 100), max(4, steps // 6), **log),
        "scaling": CategoricalDistribution(sorted(SCALINGS)),
        "gain": CategoricalDistribution(get_args(GainKind)),
        "eta": FloatDistribution(0.05, 1.0),
        "interval": IntDistribution(max(2, steps // 50), max(4, steps // 4), **log),
        "cf": FloatDistribution(2.0, 1000.0, **log),
        "warmup_steps": IntDistribution(1, max(2, steps // 5), **log),
        "margin": FloatDistribution(0.01, 0.5, **log),
        "power": FloatDistribution(0.1, 4.0, **log),
        "base": CategoricalDistribution(("topk", "topk+bf16", "dgc", "sidco")),
        "memory": CategoricalDistribution(("residual", "momentum")),
        "lr": FloatDistribution(lr / 20, 2 * lr, **log),  # sparsifiers prefer lower ones
        "clip_norm": FloatDistribution(0.1, 10.0, **log),
    }


def setting(spec: str) -> str:
    """The option that NAME, NAME=LOW..HIGH or NAME=A,B,C is about."""
    return spec.partition("=")[0].strip().replace("-", "_")


def search(
    specs: Sequence[str], policy: str, steps: int, lr: float, fixed: Sequence[str] = ()
) -> tuple[Parameter, ...]:
    """The parameters that the specs stand for, in the order given. steps, lr: of the task. fixed:
    options that were given values. UsageError names the spec and what is accepted."""
    found: dict[str, Parameter] = {}
    for spec in specs:
        try:
            name = setting(spec)
            found[name] = Parameter(name, _distribution(spec, policy, usual(steps, lr)))
            if name in fixed:
                raise ValueError(f"{option(name)} fixes it; accepted: one of the two")
        except ValueError as error:
            raise UsageError(f"--search {spec}: {error}") from error
    return tuple(found.values())


def _distribution(spec: str, policy: str, known: dict[str, Distribution]) -> Distribution:
    """ValueError says what is accepted."""
    name, (_, equals, text) = setting(spec), spec.partition("=")
    accepted = (*BY_POLICY[policy], *ON_REQUEST)
    if name not in accepted:
        owner = next((each for each in BY_NAME if name in argument_names(each)), None)
        why = f"{name!r} is for --policy {owner}" if owner else f"{name!r} is unknown"
        raise ValueError(f"{why}; accepted: {', '.join(accepted)}")
    usual = known[name]
    if not equals:
        return usual
    if isinstance(usual, CategoricalDistribution):
        for part in text.split(","):
            _check_choice(name, part, usual)
        return _choice(text.split(","))
    read = INTEGER if isinstance(usual, IntDistribution) else number
    if ".." not in text:
        return _choice([read(part) for part in text.split(",")])
    low, high = map(read, text.split("..", 1))
    if not (low <= high and (low > 0 or not usual.log)):
        raise ValueError(f"must be LOW..HIGH with {'0 < ' if usual.log else ''}LOW <= HIGH")
    return type(usual)(low, high, log=usual.log)


def _choice(values: Sequence[Value]) -> CategoricalDistribution:
    if len(set(values)) < len(values):
        raise ValueError("must be NAME=A,B,C, each once, or NAME=LOW..HIGH")
    return CategoricalDistribution(values)


def _check_choice(name: str, text: str, usual: CategoricalDistribution) -> None:
    """ValueError if it is no value of that option."""
    if name == "base":
        make_compressor(text)
    elif text not in (accepted := tuple(NAMED) if name == "memory" else usual.choices):
        raise ValueError(f"{text!r} is no {name}; accepted: {', '.join(map(str, accepted))}")
