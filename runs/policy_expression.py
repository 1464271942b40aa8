"""A policy written as Python writes it: `Warmup(steps=50, then=GraVAC(window=20))`.

Read, not evaluated: calls of policies, whose arguments are literals or such calls.
"""

from __future__ import annotations

import ast
from importlib import import_module
from typing import Any

import policies
from policies import Policy

EXAMPLE = "Warmup(steps=50, then=GraVAC(window=20))"

_CLASSES = {
    name: each
    for name in policies.__all__
    if isinstance(each := getattr(policies, name), type)
    and issubclass(each, Policy)
    and each is not Policy
}


def policy_from(expression: str) -> Policy:
    """The policy that an expression calls for: of the library, by the names of its classes, or of
    the user's own, as MODULE.CLASS. ValueError names the expression and what is wrong with it."""
    try:
        made = _value(ast.parse(expression.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError) as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(
            f"expression must be as in {EXAMPLE}, got {expression!r}: {what}"
        ) from error
    if not isinstance(made, Policy):
        raise ValueError(f"expression must be a policy, as in {EXAMPLE}, got {expression!r}")
    return made


def _value(node: ast.expr) -> Any:
    if not isinstance(node, ast.Call):
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise ValueError(f"{ast.unparse(node)} is neither a literal nor a call") from None
    factory = _named(ast.unparse(node.func))
    if any(isinstance(each, ast.Starred) for each in node.args) or any(
        each.arg is None for each in node.keywords
    ):
        raise ValueError(f"{ast.unparse(node)} has * or **")
    given = {str(each.arg): _value(each.value) for each in node.keywords}
    return factory(*map(_value, node.args), **given)


def _named(name: str) -> type[Policy]:
    """A class of the library, or MODULE.CLASS of the user's own."""
    if name in _CLASSES:
        return _CLASSES[name]
    module, _, last = name.rpartition(".")
    accepted = f"accepted: {', '.join(sorted(_CLASSES))}, or MODULE.CLASS of a policy of your own"
    if not module:
        raise ValueError(f"{name} is no policy; {accepted}")
    try:
        found = getattr(import_module(module), last)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} cannot be imported ({error}); {accepted}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(f"{name} is no policy; {accepted}")
    return found
