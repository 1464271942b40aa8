"""What is searched: the settings of each policy, and on request what goes with any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from adaptive.config import MEMORIES
from compressors import make_compressor
from policies.base import SCALINGS, GainKind
from runs.parser import UsageError
from runs.policy_options import POLICY_OPTIONS
from runs.tune.parameter import Choice, Parameter, Range, Value

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
_NAMES = {
    "scaling": tuple(sorted(SCALINGS)),
    "gain": get_args(GainKind),
    "memory": MEMORIES,
}
HARRIS = ("lr", "clip_norm")
"""Searched by --plan random: each compression setting has its own best learning rate."""

GRAMMAR = """\
What is searched is written NAME, NAME=LOW..HIGH or NAME=A,B,C: lr, epsilon=0.1..0.9, base=topk,dgc.
A policy's own settings are searched by default; base, memory, lr and clip_norm on request. A
setting that is given as an option (--epsilon 0.4) is fixed, and not searched."""


def parse(spec: str, policy: str, steps: int, lr: float) -> Parameter:
    """The parameter that NAME, NAME=LOW..HIGH or NAME=A,B,C stands for.

    steps, lr: of the task, from which default ranges come. UsageError says what is accepted.
    """
    name, (_, equals, text) = setting(spec), spec.partition("=")
    accepted = (*BY_POLICY[policy], *ON_REQUEST)
    if name not in accepted:
        owner = next((o for o, names in POLICY_OPTIONS.items() if name in names), None)
        why = f"{name!r} is for --policy {owner}" if owner else f"{name!r} is unknown"
        raise UsageError(f"--search {spec}: {why}; accepted: {', '.join(accepted)}")
    default = _default(name, steps, lr)
    if not equals:
        return default
    if ".." in text:
        return _range(spec, default, text)
    return _choice(spec, default, text)


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


def _default(name: str, steps: int, lr: float) -> Parameter:
    window = max(2, steps // 100), max(4, steps // 6)  # so that a ladder of five fits into a run
    interval = max(2, steps // 50), max(4, steps // 4)
    table: dict[str, Callable[[], Parameter]] = {
        "epsilon": lambda: Range(name, 0.05, 0.9),
        "omega": lambda: Range(name, 0.01, 0.5, log=True),
        "window": lambda: Range(name, *window, whole=True, log=True),
        "scaling": lambda: Choice(name, tuple(sorted(SCALINGS))),
        "gain": lambda: Choice(name, get_args(GainKind)),
        "eta": lambda: Range(name, 0.05, 1.0),
        "interval": lambda: Range(name, *interval, whole=True, log=True),
        "cf": lambda: Range(name, 2, 1000, log=True),
        "warmup_steps": lambda: Range(name, 1, max(2, steps // 5), whole=True, log=True),
        "margin": lambda: Range(name, 0.01, 0.5, log=True),
        "power": lambda: Range(name, 0.1, 4, log=True),
        "share": lambda: Range(name, 0.02, 0.8, log=True),
        "base": lambda: Choice(name, ("topk", "topk+bf16", "dgc", "sidco")),
        "memory": lambda: Choice(name, ("residual", "momentum")),
        "lr": lambda: Range(name, lr / 20, 2 * lr, log=True),  # sparsifiers prefer lower ones
        "clip_norm": lambda: Range(name, 0.1, 10, log=True),
    }
    return table[name]()


def _range(spec: str, default: Parameter, text: str) -> Parameter:
    if isinstance(default, Choice):
        listed = ",".join(map(str, default.choices))
        raise UsageError(
            f"--search {spec}: {default.name} has no range; accepted: names, as in "
            f"{default.name}={listed}"
        )
    low, high = (_number(spec, part, default.whole) for part in text.split("..", 1))
    if not (low <= high and (low > 0 or not default.log)):
        raise UsageError(
            f"--search {spec}: must be LOW..HIGH with {'0 < ' if default.log else ''}LOW <= HIGH"
        )
    return Range(default.name, low, high, default.whole, default.log)


def _choice(spec: str, default: Parameter, text: str) -> Parameter:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts) or len(set(parts)) < len(parts):
        raise UsageError(f"--search {spec}: must be NAME=A,B,C, each once, or NAME=LOW..HIGH")
    values: list[Value] = list(parts)
    if isinstance(default, Range):
        values = [_number(spec, part, default.whole) for part in parts]
    elif default.name == "base":
        _check_bases(spec, parts)
    elif unknown := [part for part in parts if part not in _NAMES[default.name]]:
        raise UsageError(
            f"--search {spec}: {unknown[0]!r} is no {default.name}; accepted: "
            f"{', '.join(_NAMES[default.name])}"
        )
    return Choice(default.name, tuple(values))


def _check_bases(spec: str, bases: Sequence[str]) -> None:
    for base in bases:
        try:
            make_compressor(base)
        except ValueError as error:
            raise UsageError(f"--search {spec}: {error}") from error


def _number(spec: str, text: str, whole: bool) -> float:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = float("nan")
    if value - value != 0:  # nan or infinite
        what = "an integer" if whole else "a finite number"
        raise UsageError(f"--search {spec}: {text.strip()!r} must be {what}")
    return value
