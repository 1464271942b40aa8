"""Policies by name, the fixed policy, and what all policies may import."""

from __future__ import annotations

import ast
import json
from math import inf, nan
from pathlib import Path

import pytest

import policies
from policies import (
    Accordion,
    Context,
    Fixed,
    GraVAC,
    Plan,
    StepReport,
    Warmup,
    make_policy,
    policy_names,
)

RANGE = (10.0, 1000.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("accordion", Accordion), ("fixed", Fixed), ("gravac", GraVAC), ("warmup", Warmup)],
)
def test_names(name, kind):
    policy = make_policy(name)
    assert type(policy) is kind
    assert policy.name == name
    assert name in policy_names()


def test_an_object_is_passed_through():
    policy = Fixed(20)
    assert make_policy(policy) is policy


def test_settings_are_passed_on():
    assert make_policy("gravac", epsilon=0.7).epsilon == 0.7
    with pytest.raises(ValueError, match="epsilon"):
        make_policy("gravac", epsilon=7)
    with pytest.raises(TypeError, match="epsilon"):
        make_policy(Fixed(), epsilon=0.7)


def test_unknown_name_says_what_is_accepted():
    with pytest.raises(
        ValueError,
        match=r"policy must be one of accordion, budget, .*, warmup; got 'best'",
    ):
        make_policy("best")


@pytest.mark.parametrize("policy", [None, 3, GraVAC])
def test_other_types(policy):
    with pytest.raises(TypeError, match="policy must be a name or a Policy object"):
        make_policy(policy)


def test_register(monkeypatch):
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))
    policies.register("half", lambda cf=2: Fixed(cf))
    assert make_policy("half").cf == 2
    assert make_policy("half", cf=3).cf == 3
    assert "half" in policy_names()
    with pytest.raises(ValueError, match="'half'"):
        policies.register("half", Fixed)


# Fixed


@pytest.mark.parametrize(("cf", "sent"), [(None, 10.0), (1, 1.0), (10, 10.0), (33.3, 33.3)])
def test_fixed_sends_its_cf_for_ever(cf, sent):
    policy = Fixed(cf)
    policy.start(Context(RANGE, 4))
    for step in range(5):
        assert policy.plan() == Plan(send=sent)
        policy.observe(StepReport(step, sent, median_seconds=1.0, timed_cf=sent))
    policy.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert policy.plan() == Plan(send=sent)
    assert (dict(policy.status()), policy.verdict()) == ({}, "")


@pytest.mark.parametrize("cf", [0, 0.99, -3, nan, inf])
def test_fixed_refuses_what_is_no_cf(cf):
    with pytest.raises(ValueError, match="cf="):
        Fixed(cf)


@pytest.mark.parametrize("cf", ["10", True, [10]])
def test_fixed_refuses_what_is_no_number(cf):
    with pytest.raises(TypeError, match="cf="):
        Fixed(cf)


@pytest.mark.parametrize("cf", [9, 1001])
def test_fixed_keeps_to_the_range(cf):
    with pytest.raises(ValueError, match=rf"cf={cf}: must be 1 \(dense\) or inside cf_range"):
        Fixed(cf).start(Context(RANGE, 2))


def test_fixed_refuses_the_state_of_another_cf():
    one, other = Fixed(20), Fixed(30)
    for policy in (one, other):
        policy.start(Context(RANGE, 2))
    with pytest.raises(ValueError, match=r"send=20\.0.*30\.0"):
        other.load_state_dict(one.state_dict())


def test_fixed_before_start():
    with pytest.raises(RuntimeError, match="start"):
        Fixed().plan()


# Purity

ALLOWED = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "inspect",
    "itertools",
    "math",
    "numbers",
    "policies",
    "typing",
}
"""No torch, no numpy, nothing that does I/O, reads a clock or rolls dice."""


def test_policies_import_nothing_impure():
    imported = set()
    for path in Path(policies.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    assert "policies" in imported  # the walk did find imports
    assert imported <= ALLOWED
