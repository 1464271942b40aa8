"""The library's objects as they are written on a command line and in config.json: as Python writes
them, with all of their settings, `LocalSteps(8, overlap=4)`; policies also by name, `gravac`, and
with other policies in them: `Warmup(steps=50, then=GraVAC(window=20))`. So each setting stands in
the library alone, which also checks it.

Read, not evaluated: calls of the library's classes, whose arguments are literals or such calls. A
policy of the user's own, MODULE.CLASS, has to be imported, which runs its code. So only the command
line may name one (see `Typed`); what is written in a run's folder is looked up in the library.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import policies
from policies import Policy
from policies.checks import nearest

EXAMPLE = "Warmup(steps=50, then=GraVAC(window=20))"
PLAIN = "ddp"
"""In a policy's place: plain DDP, without the library."""

WHOLE = "dense"
"""In a policy's place: the library's hook, which sends everything."""

SHOWN = 200
"""Characters of a policy that an error repeats."""

BY_NAME = {name: factory.__qualname__ for name, factory in policies.LIBRARY.items()}
"""How the library's policies are written, GraVAC or GraVAC.paper, by the names that
`AdaptiveCompressor(policy=...)` takes, too."""

_NAMES = {written: name for name, written in BY_NAME.items()}

OBJECTS = {
    "sync": ("LocalSteps", "Delayed", "Gossip", "EveryStep"),
    "memory": ("Momentum", "Residual", "Updates"),
    "exchange": ("ParameterServer", "TwoLevel"),
    "base": (
        *("Ladder", "AdaComp", "DGC", "Int8", "Natural", "OneBit", "PowerSGD", "QSGD", "RandomK"),
        *("RedSync", "SIDCo", "Sketch", "TernGrad", "Threshold", "TopK", "TwoBit"),
    ),
}
"""What can be written for other options, beside names."""

_DTYPES = ("torch.float32", "torch.bfloat16")

_OURS = ("policies.", "adaptive.")
"""Modules that export these classes, so that they may stand before their names."""


class Typed(str):
    """A policy that the user has typed on the command line. It stays one where it is copied,
    pickled or kept in a configuration; what is read from a file is a mere `str`, and may not name
    a module."""


class UntrustedPolicyError(ValueError):
    """A run's folder names a policy that would have to be imported."""


def policy_from(text: str) -> Policy:
    """The policy that is written there: of the library, or, if it is `Typed`, of the user's own, as
    MODULE.CLASS. ValueError says what is wrong with it; it is an UntrustedPolicyError if a class of
    the user's own is named by a file."""
    try:
        if text in BY_NAME:
            return policies.make_policy(text)
        made = _value(_parsed(text), text)
    except UntrustedPolicyError:
        raise
    except (RecursionError, MemoryError):
        raise ValueError(f"policy {_shown(text)}: is nested too deep") from None
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        if text in BY_NAME:
            call = f"{BY_NAME[text]}({', '.join(_taken(policies.LIBRARY[text]))})"
            raise ValueError(f"policy {text} needs arguments, written as {call}") from error
        raise ValueError(f"policy {_shown(text)}: {error}") from error
    if not isinstance(made, Policy):
        raise ValueError(f"policy {_shown(text)}: must be a policy, as in {EXAMPLE}")
    return made


def made_from(text: str, option: str) -> Any:
    """The object of `OBJECTS` that is written there for an option, or a mere name as it is.
    ValueError says what is wrong with it."""
    if is_name(text.replace("+", "")) and (option != "sync" or text == "auto"):
        return text
    try:
        call = _parsed(text, f"{OBJECTS[option][0]}(...)")
        name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if name.removeprefix("adaptive.") not in OBJECTS[option]:
            accepted = " or ".join(f"{each}(...)" for each in OBJECTS[option])
            others = " or auto" if option == "sync" else ", or a name"
            raise ValueError(f"must be {accepted}{others}")
        return _value(call, text)
    except (RecursionError, MemoryError):
        raise ValueError(f"{option} {_shown(text)}: is nested too deep") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{option} {_shown(text)}: {error}") from error


def is_name(text: str) -> bool:
    """Whether it is a mere name, and no call."""
    return re.fullmatch(r"[\w-]+", text) is not None


def policy_name(text: str) -> str:
    """The name of the policy: `gravac` of GraVAC(window=5); a class of the user's own is called by
    its own name. ValueError if the library has no policy of a name that stands alone."""
    if is_name(text):
        if text not in (*BY_NAME, PLAIN):
            raise ValueError(
                f"policy must be one of {', '.join(BY_NAME)}, {WHOLE}, {PLAIN}, or as in "
                f"{EXAMPLE}; got {_shown(text)}{nearest(text, (*BY_NAME, WHOLE, PLAIN))}"
            )
        return text
    head = _without_module(text.partition("(")[0].strip())
    return _NAMES.get(head, head.rpartition(".")[2])


def _without_module(name: str) -> str:
    """GraVAC of policies.GraVAC, and of gravac."""
    for module in _OURS:
        name = name.removeprefix(module)
    return BY_NAME.get(name, name)


def with_arguments(text: str, given: Mapping[str, Any]) -> str:
    """The same policy with further arguments. ValueError if it cannot be read."""
    if not given:
        return text
    call = _parsed(f"{BY_NAME[text]}()" if text in BY_NAME else text)
    if not isinstance(call, ast.Call):
        raise ValueError(f"policy {_shown(text)}: takes no {next(iter(given))}")
    for name, value in given.items():
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        written = ast.parse(repr(value), mode="eval").body
        call.keywords.append(ast.keyword(name, written))
    made = ast.unparse(call)
    # In double quotes, since a shell's are single ones.
    return type(text)(made if '"' in made else made.replace("'", '"'))


def value_of(words: Sequence[str]) -> Any:
    """What words stand for as an argument of a policy: several are a tuple."""
    if len(words) != 1:
        return tuple(value_of([word]) for word in words)
    try:
        return ast.literal_eval(words[0])
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return words[0]


def _parsed(text: str, example: str = EXAMPLE) -> ast.expr:
    for name in BY_NAME:
        if "-" in name:  # which is no name in Python
            text = text.replace(f"{name}(", f"{BY_NAME[name]}(")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"must be as in {example}: {error.msg}") from error


def _shown(text: str) -> str:
    whole = repr(str(text))
    return whole if len(whole) <= SHOWN else f"{whole[:SHOWN]}... ({len(text)} characters)"


def _value(node: ast.expr, text: str) -> Any:
    if not isinstance(node, ast.Call):
        try:
            return ast.literal_eval(node)
        except ValueError:
            if (name := ast.unparse(node)) in _DTYPES:
                return getattr(import_module("torch"), name.removeprefix("torch."))
            raise ValueError(f"{ast.unparse(node)} is neither a literal nor a call") from None
    factory = _named(ast.unparse(node.func), text)
    if any(isinstance(each, ast.Starred) for each in node.args) or any(
        each.arg is None for each in node.keywords
    ):
        raise ValueError(f"{ast.unparse(node)} has * or **")
    given: dict[str, Any] = {}
    for each in node.keywords:
        name = str(each.arg)
        if name in given:
            raise ValueError(f"{name} is given twice")
        given[name] = _value(each.value, text)
    unknown = [name for name in given if is_dataclass(factory) and name not in _taken(factory)]
    if unknown:
        accepted = ", ".join(_taken(factory))
        raise ValueError(f"{factory.__name__} takes no {unknown[0]}; accepted: {accepted}")
    return factory(*(_value(each, text) for each in node.args), **given)


def _taken(made: Any) -> list[str]:
    """The names of the arguments of what makes a policy: a class, or GraVAC.paper."""
    return [each.name for each in fields(getattr(made, "__self__", made)) if each.init]


def _named(name: str, text: str) -> Callable[..., Any]:
    """What makes an object of the library, or MODULE.CLASS of a policy of the user's own."""
    module, _, last = name.rpartition(".")
    ours = _NAMES.get(_without_module(name))
    if ours is not None:
        return policies.LIBRARY[ours]
    if any(name.removeprefix("adaptive.") in names for names in OBJECTS.values()):
        # torch is imported late
        of = "compressors" if last in OBJECTS["base"] else "adaptive"
        return getattr(import_module(of), last)
    accepted = f"accepted: {', '.join(sorted(_NAMES))}, or MODULE.CLASS of a policy of your own"
    if not module:
        raise ValueError(f"{name} is no policy; {accepted}")
    if not isinstance(text, Typed):
        again = shlex.quote(text) if len(text) <= SHOWN else "POLICY"
        raise UntrustedPolicyError(
            f"policy: the run's folder names {_shown(text)}, and what a folder names is not "
            f"imported, since that would run its code; accepted, if you trust {name[:SHOWN]}: "
            f"--policy {again} on the command line (beside --resume)"
        )
    if (here := os.getcwd()) not in sys.path:  # as it is with `python -m`, not with adaptive-runs
        sys.path.append(here)
    try:
        found = getattr(import_module(module), last)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} cannot be imported ({error}); {accepted}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(f"{name} is no policy; {accepted}")
    return found
