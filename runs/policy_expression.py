"""A policy written as Python writes it: `Warmup(steps=50, then=GraVAC(window=20))`.

Read, not evaluated: calls of policies, whose arguments are literals or such calls. A class of the
user's own, MODULE.CLASS, has to be imported, which runs its code. So only the command line may name
one (see `Typed`); what is written in a run's folder is looked up among the library's policies.
"""

from __future__ import annotations

import ast
import shlex
from importlib import import_module
from typing import Any

import policies
from policies import Policy

EXAMPLE = "Warmup(steps=50, then=GraVAC(window=20))"

SHOWN = 200
"""Characters of an expression that an error repeats."""

_CLASSES = {
    name: each
    for name, each in vars(policies).items()
    if isinstance(each, type) and issubclass(each, Policy) and each is not Policy
}
_OURS = ("policies", "adaptive")
"""Modules that export these classes, so that they may stand before their names."""


class Typed(str):
    """An expression that the user has typed on the command line. It stays one where it is copied,
    pickled or kept in a configuration; what is read from a file is a mere `str`, and may not name
    a module."""


class UntrustedPolicyError(ValueError):
    """A run's folder names a policy that would have to be imported."""


def policy_from(expression: str) -> Policy:
    """The policy that an expression calls for: of the library, by the names of its classes, or, if
    it is `Typed`, of the user's own, as MODULE.CLASS. ValueError names the expression and what is
    wrong with it; it is an UntrustedPolicyError if a class of the user's own is named by a file."""
    try:
        made = _value(ast.parse(expression.strip(), mode="eval").body, expression)
    except UntrustedPolicyError:
        raise
    except (RecursionError, MemoryError):
        raise ValueError(_must_be(expression, "it is nested too deep")) from None
    except (ValueError, TypeError, SyntaxError, ArithmeticError, AttributeError) as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(_must_be(expression, what)) from error
    if not isinstance(made, Policy):
        raise ValueError(f"expression must be a policy, as in {EXAMPLE}, got {_shown(expression)}")
    return made


def _must_be(expression: str, what: str) -> str:
    return f"expression must be as in {EXAMPLE}, got {_shown(expression)}: {what}"


def _shown(expression: str) -> str:
    whole = repr(str(expression))
    return whole if len(whole) <= SHOWN else f"{whole[:SHOWN]}... ({len(expression)} characters)"


def _value(node: ast.expr, expression: str) -> Any:
    if not isinstance(node, ast.Call):
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise ValueError(f"{ast.unparse(node)} is neither a literal nor a call") from None
    factory = _named(ast.unparse(node.func), expression)
    if any(isinstance(each, ast.Starred) for each in node.args) or any(
        each.arg is None for each in node.keywords
    ):
        raise ValueError(f"{ast.unparse(node)} has * or **")
    given = {str(each.arg): _value(each.value, expression) for each in node.keywords}
    return factory(*(_value(each, expression) for each in node.args), **given)


def _named(name: str, expression: str) -> type[Policy]:
    """A class of the library, or MODULE.CLASS of the user's own."""
    module, _, last = name.rpartition(".")
    if last in _CLASSES and module in ("", *_OURS):
        return _CLASSES[last]
    accepted = f"accepted: {', '.join(sorted(_CLASSES))}, or MODULE.CLASS of a policy of your own"
    if not module:
        raise ValueError(f"{name} is no policy; {accepted}")
    if not isinstance(expression, Typed):
        again = shlex.quote(expression) if len(expression) <= SHOWN else "POLICY"
        raise UntrustedPolicyError(
            f"expression: the run's folder names {_shown(expression)}, and what a folder names is "
            f"not imported, since that would run its code; accepted, if you trust {name[:SHOWN]}: "
            f"--expression {again} on the command line (beside --resume, or beside --policy "
            f"expression with replay)"
        )
    try:
        found = getattr(import_module(module), last)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} cannot be imported ({error}); {accepted}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(f"{name} is no policy; {accepted}")
    return found
