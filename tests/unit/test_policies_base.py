"""Policies by name, reasons in words, ladders of CFs, and what all policies may import."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from policies import (
    Accordion,
    Fixed,
    GraVAC,
    Warmup,
    make_policy,
    policy_names,
)
from policies.ladder import MAX_RUNGS, make_ladder
from policies.words import in_short, joined, named


def test_a_reason_is_told_in_short_and_once():
    reason = joined("23% more progress\n0.2 s a step", "", "gains now rest on peers", "x\ny")
    assert reason == "23% more progress; gains now rest on peers; x\n0.2 s a step\ny"
    assert in_short(reason) == "23% more progress; gains now rest on peers; x"
    assert in_short(reason, "verdict: 23% more progress") == "gains now rest on peers; x"
    assert in_short("") == joined("", "") == ""


def test_a_rung_is_named_by_its_compressor():
    rungs = {8: "int4"}
    assert [named(cf, rungs) for cf in (1, 8, 12.5)] == ["dense", "int4 (CF 8)", "CF 12.5"]


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
        match=r"policy must be one of accordion, accordion-paper, .*, warmup; got 'best'",
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


# Purity

ALLOWED = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "difflib",
    "enum",
    "functools",
    "inspect",
    "itertools",
    "math",
    "numbers",
    "policies",
    "statistics",
    "types",
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


# Ladders


@pytest.mark.parametrize(
    ("cf_range", "scaling", "step_size", "rungs"),
    [
        ((10.0, 1000.0), "exponential", 2, (10, 20, 40, 160, 1000)),
        ((10.0, 1000.0), "geometric", 2, (10, 20, 40, 80, 160, 320, 640, 1000)),
        ((1.5, 1000.0), "exponential", 2, (1.5, 3, 6, 24, 384, 1000)),
        ((1.5, 24.0), "geometric", 2, (1.5, 3, 6, 12, 24)),
        ((10.0, 1000.0), "exponential", 10, (10, 100, 1000)),
        ((10.0, 1000.0), "geometric", 10, (10, 100, 1000)),
        ((10.0, 15.0), "exponential", 2, (10, 15)),
        ((10.0, 1000.0), "exponential", 1e200, (10, 1000)),
        ((1000.0, 1004.0), "geometric", 1.002, (1000, 1002, 1004)),
        ((64.0, 64.0), "exponential", 2, (64,)),
        ((64.0, 64.0), "geometric", 2, (64,)),
    ],
)
def test_ladders(cf_range, scaling, step_size, rungs):
    assert make_ladder(cf_range, scaling, step_size) == rungs


@settings(max_examples=40)
@given(
    st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)).map(sorted),
    st.sampled_from(["exponential", "geometric"]),
    st.floats(1.02, 50),
)
def test_every_ladder_climbs_from_one_end_to_the_other(cf_range, scaling, step_size):
    rungs = make_ladder(tuple(cf_range), scaling, step_size)
    assert rungs[0] == cf_range[0]
    assert rungs[-1] == cf_range[1]
    assert list(rungs) == sorted(set(rungs))
    assert len(rungs) <= MAX_RUNGS + 1


@pytest.mark.parametrize("scaling", ["exponential", "geometric"])
def test_a_step_size_too_near_1(scaling):
    with pytest.raises(ValueError, match=r"step_size=1\.0001: .*larger step"):
        make_ladder((10.0, 1000.0), scaling, 1.0001)
