"""Policies written as Python writes them: read, not evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies import Accordion, Fixed, Goodput, GraVAC, Layerwise, Schedule, Warmup
from runs.compare.contender import parse_contender
from runs.policy_expression import EXAMPLE, policy_from

OWN = """
from policies import Fixed

class Mine(Fixed):
    name = "mine"

def helper():
    raise SystemExit("was called")
"""


def test_calls_with_literals_and_calls_in_them() -> None:
    assert isinstance(policy_from(EXAMPLE), Warmup)
    assert isinstance(policy_from(" Goodput() "), Goodput)
    assert isinstance(policy_from("Accordion(10, high=Fixed(cf=20))"), Accordion)
    written = "GraVAC(epsilon=0.5, allow_dense=False)"
    assert vars(policy_from(written)) == vars(GraVAC(epsilon=0.5, allow_dense=False))
    schedule = policy_from("Schedule({0: 10, 5: 100}, gain='signal')")
    assert isinstance(schedule, Schedule)
    assert (schedule.pieces, schedule.gain) == ({0: 10, 5: 100}, "signal")
    nested = policy_from("Layerwise(Accordion(low=10, high=Goodput(power=1)), window=7)")
    assert isinstance(nested, Layerwise)
    assert nested.gain == "signal"


def test_a_class_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_their_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    policy = policy_from("of_their_own.Mine(cf=20)")
    assert isinstance(policy, Fixed)
    assert (policy.name, policy.cf) == ("mine", 20.0)
    for wrong in ("of_their_own.helper()", "of_their_own.Other()", "not_there.Mine()"):
        with pytest.raises(ValueError, match=r"MODULE\.CLASS of a policy of your own"):
            policy_from(wrong)


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("Warmup(", "never closed"),
        ("3", "must be a policy"),
        ("GraVAC", "neither a literal nor a call"),
        ("Nope()", "Nope is no policy; accepted: Accordion, Budget"),
        ("Policy()", "Policy is no policy"),
        ("GraVAC(eps=1)", "'eps'"),
        ("GraVAC(epsilon=7)", "epsilon=7: must be in (0, 1]"),
        ("GraVAC(epsilon=2**3)", "2 ** 3 is neither"),
        ("GraVAC(**{'epsilon': 1})", "has * or **"),
        ("Warmup(then=Schedule())", "pieces"),
        ("__import__('os').getcwd()", "cannot be imported"),
        ("os.system('true')", "os.system is no policy"),
    ],
)
def test_what_it_is_not(expression: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"^expression must be") as error:
        policy_from(expression)
    assert says in str(error.value)
    assert repr(expression) in str(error.value)


def test_commas_of_an_expression_are_not_those_of_a_contender() -> None:
    text = "Warmup(steps=5, then=Schedule({0: 10, 9: 20}))"
    contender = parse_contender(f"expression:expression={text},base=dgc,cf_range=10/50")
    assert contender.given == {
        "policy": "expression",
        "expression": text,
        "base": "dgc",
        "cf_range": [10.0, 50.0],
    }
