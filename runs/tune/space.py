"""What is searched: the settings of each policy, and on request what goes with any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from adaptive.config import MEMORIES
from compressors import make_compressor
from policies.base import SCALINGS, GainKind
from runs.parser import UsageError
from runs.policy_expression import BY_NAME, argument_names

BY_POLICY = {
    "gravac": ("epsilon", "omega", "window", "scaling", "gain"),
    "accordion": ("eta", "interval"),
    "fixed": ("cf",),
    "warmup": ("warmup_steps",),
    "goodput": ("margin", "power"),
    "budget": ("share",),
    "schedule": (),
}
"""Policies that can be tuned, and what is searched unless the command says otherwise."""

ON_REQUEST = ("base", "memory", "lr", "clip_norm")
HARRIS = ("lr", "clip_norm")
"""Searched by --plan random: each compression setting has its own best learning rate."""

DIGITS = 3
"""Significant digits of a searched number: what is printed is then exactly what ran."""

Value = float | int | str
Numbers = FloatDistribution | IntDistribution


@dataclass(frozen=True)
class Parameter:
    """A searched option, and which of its values are tried."""

    name: str
    distribution: Numbers | CategoricalDistribution

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


def parse(spec: str, policy: str, steps: int, lr: float) -> Parameter:
    """The parameter that NAME, NAME=LOW..HIGH or NAME=A,B,C stands for.

    steps, lr: of the task, from which default ranges come. UsageError says what is accepted.
    """
    name, (_, equals, text) = setting(spec), spec.partition("=")
    accepted = (*BY_POLICY[policy], *ON_REQUEST)
    if name not in accepted:
        owner = next((each for each in BY_NAME if name in argument_names(each)), None)
        why = f"{name!r} is for --policy {owner}" if owner else f"{name!r} is unknown"
        raise UsageError(f"--search {spec}: {why}; accepted: {', '.join(accepted)}")
    usual = _usual(name, steps, lr)
    if equals:
        usual = _range(spec, name, usual, text) if ".." in text else _choice(spec, usual, text)
    return Parameter(name, usual)


def setting(spec: str) -> str:
    """The option that NAME, NAME=LOW..HIGH or NAME=A,B,C is about."""
    return spec.partition("=")[0].strip().replace("-", "_")


def search(
    specs: Sequence[str], policy: str, steps: int, lr: float, fixed: Sequence[str]
) -> tuple[Parameter, ...]:
    """The parameters of the study, in the order given. fixed: options that were given values."""
    found: dict[str, Parameter] = {}
    for spec in specs:
        parameter = parse(spec, policy, steps, lr)
        if parameter.name in fixed:
            raise UsageError(
                f"--search {spec}: --{parameter.name.replace('_', '-')} fixes it; accepted: one of "
                f"the two"
            )
        found[parameter.name] = parameter
    return tuple(found.values())


_CHOICES: dict[str, tuple[str, ...]] = {
    "scaling": tuple(sorted(SCALINGS)),
    "gain": get_args(GainKind),
    "base": ("topk", "topk+bf16", "dgc", "sidco"),
    "memory": ("residual", "momentum"),
}
_EVENLY = {"epsilon": (0.05, 0.9), "eta": (0.05, 1.0)}
_BY_LOGARITHM = {
    "omega": (0.01, 0.5),
    "cf": (2.0, 1000.0),
    "margin": (0.01, 0.5),
    "power": (0.1, 4.0),
    "share": (0.02, 0.8),
    "clip_norm": (0.1, 10.0),
}


def _usual(name: str, steps: int, lr: float) -> Numbers | CategoricalDistribution:
    """What is tried of an option unless the command says otherwise."""
    whole = {
        # So that a ladder of five fits into a run.
        "window": (max(2, steps // 100), max(4, steps // 6)),
        "interval": (max(2, steps // 50), max(4, steps // 4)),
        "warmup_steps": (1, max(2, steps // 5)),
    }
    if name in _CHOICES:
        return CategoricalDistribution(_CHOICES[name])
    if name in whole:
        return IntDistribution(*whole[name], log=True)
    if name in _EVENLY:
        return FloatDistribution(*_EVENLY[name])
    around = (lr / 20, 2 * lr)  # sparsifiers prefer lower ones
    return FloatDistribution(*_BY_LOGARITHM.get(name, around), log=True)


def _range(
    spec: str, name: str, usual: Numbers | CategoricalDistribution, text: str
) -> Numbers | CategoricalDistribution:
    if isinstance(usual, CategoricalDistribution):
        listed = ",".join(map(str, usual.choices))
        raise UsageError(
            f"--search {spec}: {name} has no range; accepted: names, as in {name}={listed}"
        )
    low, high = (_number(spec, part, usual) for part in text.split("..", 1))
    if not (low <= high and (low > 0 or not usual.log)):
        raise UsageError(
            f"--search {spec}: must be LOW..HIGH with {'0 < ' if usual.log else ''}LOW <= HIGH"
        )
    if isinstance(usual, IntDistribution):
        return IntDistribution(int(low), int(high), log=usual.log)
    return FloatDistribution(low, high, log=usual.log)


def _choice(
    spec: str, usual: Numbers | CategoricalDistribution, text: str
) -> CategoricalDistribution:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts) or len(set(parts)) < len(parts):
        raise UsageError(f"--search {spec}: must be NAME=A,B,C, each once, or NAME=LOW..HIGH")
    if not isinstance(usual, CategoricalDistribution):
        return CategoricalDistribution([_number(spec, part, usual) for part in parts])
    name = setting(spec)
    for part in parts:
        try:
            if name == "base":
                make_compressor(part)
            elif part not in (known := MEMORIES if name == "memory" else _CHOICES[name]):
                raise ValueError(f"{part!r} is no {name}; accepted: {', '.join(known)}")
        except ValueError as error:
            raise UsageError(f"--search {spec}: {error}") from error
    return CategoricalDistribution(parts)


def _number(spec: str, text: str, usual: Numbers) -> float:
    whole = isinstance(usual, IntDistribution)
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = float("nan")
    if value - value != 0:  # nan or infinite
        what = "an integer" if whole else "a finite number"
        raise UsageError(f"--search {spec}: {text.strip()!r} must be {what}")
    return value
