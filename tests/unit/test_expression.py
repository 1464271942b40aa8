"""Policies written as Python writes them: read, not evaluated."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies import (
    Accordion,
    Fixed,
    Goodput,
    GraVAC,
    Schedule,
    Warmup,
    make_policy,
    policy_names,
)
from runs.__main__ import main
from runs.compare.contender import parse_contender
from runs.config import TrainConfig
from runs.expression import (
    BY_NAME,
    EXAMPLE,
    Typed,
    UntrustedPolicyError,
    policy_from,
    with_arguments,
)
from runs.job import make_job
from runs.options import make_config
from tests.integration.commands import assert_refused

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
    assert isinstance(policy_from("Accordion(10, high=20)"), Accordion)
    written = "GraVAC(epsilon=0.5, allow_dense=False)"
    assert vars(policy_from(written)) == vars(GraVAC(epsilon=0.5, allow_dense=False))
    schedule = policy_from("Schedule({0: 10, 5: 100}, gain='error_fed')")
    assert isinstance(schedule, Schedule)
    assert (schedule.pieces, schedule.gain) == ({0: 10, 5: 100}, "error_fed")
    nested = policy_from("Warmup(Accordion.paper(low=10, interval=20), steps=7)")
    assert isinstance(nested, Warmup)
    assert isinstance(nested.then, Accordion)
    assert nested.then.epoch == 2


def test_a_class_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the present folder, which is not on the path of a console script or of an example."""
    (tmp_path / "of_their_own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*filter(None, sys.path)])
    policy = policy_from(Typed("of_their_own.Mine(cf=20)"))
    assert isinstance(policy, Fixed)
    assert (policy.name, policy.cf) == ("mine", 20.0)
    for wrong in ("of_their_own.helper()", "of_their_own.Other()", "not_there.Mine()"):
        with pytest.raises(ValueError, match=r"MODULE\.CLASS of a policy of your own"):
            policy_from(Typed(wrong))


def test_what_was_typed_stays_so_in_a_configuration() -> None:
    """Worker processes, contenders and studies get copies."""
    config = make_config({"policy": Typed("a.B()"), "log_dir": "x"})
    for same in (
        replace(config, steps=7),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
    ):
        assert isinstance(same.policy, Typed)
    read = TrainConfig.from_json(json.loads(json.dumps(config.as_json())))
    assert read == config
    assert not isinstance(read.policy, Typed)
    contender = parse_contender("Warmup(then=a.B(cf=2))")
    assert isinstance(contender.given["policy"], Typed)


def test_the_librarys_own_may_be_named_with_their_module_by_anyone() -> None:
    for name in ("Fixed", "policies.Fixed", "adaptive.Fixed"):
        assert isinstance(policy_from(f"{name}(cf=20)"), Fixed)


# -- a run's folder may not name code to run ------------------------------------------------------

PAYLOAD = """
from pathlib import Path
Path(__file__).with_name("was_imported").touch()
from policies import Fixed

class Mine(Fixed):
    pass
"""


class Folder:
    """A run's folder as somebody has sent it: it names a class beside it."""

    def __init__(self, path: Path, expression: str) -> None:
        self.path, self.expression = path, expression
        config = TrainConfig(log_dir="elsewhere", steps=4, policy=expression)
        self.path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config.as_json()))
        steps = [
            {"kind": "step", "elapsed": 0.1 * i, "t_sys": 1.0, "t_comp": 1.0, "status": {}}
            | {"report": {"step": i, "cf": 20.0, "measurements": {}, "dense_wire_bytes": 4000}}
            for i in range(4)
        ]
        (path / "timeline.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        (path / "checkpoint" / "step-4").mkdir(parents=True)
        meta = {"step": 4, "world_size": 2, "digests": ["", ""], "config": config.as_json()}
        (path / "checkpoint" / "meta.json").write_text(json.dumps(meta))
        for rank in range(2):
            (path / "checkpoint" / "step-4" / f"rank{rank}.pt").touch()

    @property
    def imported(self) -> bool:
        return any(self.path.parent.rglob("was_imported"))


@pytest.fixture(params=["{}.X()", "{}.Mine(cf=20)", "Warmup(steps=1, then={}.Mine(cf=20))"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Folder:
    name = f"payload_{tmp_path.name}"  # not imported in an earlier test
    package = tmp_path / name / "evil.py"
    package.parent.mkdir()
    package.write_text(PAYLOAD)
    monkeypatch.syspath_prepend(tmp_path)
    return Folder(tmp_path / "run", request.param.format(f"{name}.evil"))


def test_a_folder_cannot_have_its_code_run(folder: Folder, capfd: Any) -> None:
    options = ["--resume", folder.path, "--steps", 9]
    parts = ["the run's folder names", "is not imported", "--policy", "on the command line"]
    assert_refused(capfd, "train", *options, parts=parts)
    assert not folder.imported


def test_a_report_does_without_the_folders_code(folder: Folder, capfd: Any) -> None:
    assert main(["report", str(folder.path), "--json"]) == 0
    assert not folder.imported
    [row] = json.loads(capfd.readouterr().out)["rows"]
    assert row["steps"]["values"] == [4]


def test_who_names_it_again_goes_on_with_it(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    if ".X()" in folder.expression:
        pytest.skip("names no policy")
    given = {"resume": str(folder.path), "steps": 9}
    monkeypatch.setattr("runs.job.check", lambda config: None)  # reads data
    job = make_job({**given, "policy": Typed(folder.expression)}, None)
    assert isinstance(job.config.policy, Typed)
    assert not isinstance(make_job(given, None).config.policy, Typed)
    other = ["--resume", folder.path, "--steps", 9, "--policy", "Goodput()"]
    capfd.readouterr()
    assert_refused(capfd, "train", *other, parts=["--policy Goodput()", "accepted: the same"])


def test_an_unimportable_name_in_a_folder_is_not_even_looked_for() -> None:
    with pytest.raises(UntrustedPolicyError, match="on the command line"):
        policy_from("not_there.Mine()")


@pytest.mark.parametrize(
    "expression",
    ["-" * 5000 + "1", "(" * 5000, "[" * 150 + "]" * 150, "Warmup(then=" * 3000 + ")" * 3000],
    ids=["minus", "brackets", "lists", "calls"],
)
def test_what_is_nested_too_deep_is_one_short_line(
    expression: str, capfd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()  # where runs go that are not given a folder
    parts = ["--policy"]
    with pytest.raises(ValueError, match=r"^policy ") as error:
        policy_from(expression)
    assert len(str(error.value)) < 1000
    words = [f"--policy={expression}"]
    assert_refused(capfd, "train", *words, parts=parts)


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("Warmup(", "never closed"),
        ("3", "must be a policy"),
        ("GraVAC", "neither a literal nor a call"),
        ("schedule", "needs arguments, written as Schedule(pieces, gain)"),
        ("Nope()", "Nope is no policy; accepted: Accordion, Accordion.paper, Fixed"),
        ("Policy()", "Policy is no policy"),
        ("GraVAC(eps=1)", "GraVAC takes no eps; accepted: epsilon, "),
        ("Goodput(marign=0.1)", "Goodput takes no marign; accepted: "),
        ("GraVAC(epsilon=7)", "epsilon=7: must be in (0, 1]"),
        ("GraVAC(epsilon=2**3)", "2 ** 3 is neither"),
        ("GraVAC(**{'epsilon': 1})", "has * or **"),
        ("Warmup(then=Schedule())", "pieces"),
        ("__import__('os').getcwd()", "cannot be imported"),
        ("os.system('true')", "os.system is no policy"),
        ("Fixed(cf=1e999)", "cf"),
        ("Schedule([1])", ""),
        ("Warmup(then=3)", ""),
        ("Fixed(cf=\0)", ""),
    ],
)
def test_what_it_is_not(expression: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"^policy ") as error:
        policy_from(Typed(expression))
    assert says in str(error.value)
    assert expression in str(error.value) or repr(expression) in str(error.value)


def test_brackets_of_a_policy_are_none_of_a_contenders() -> None:
    text = "Warmup(steps=5, then=Schedule({0: 10, 9: 20}))"
    contender = parse_contender(f"{text}:base=dgc,cf_range=10/50")
    assert contender.given == {"policy": text, "base": "dgc", "cf_range": (10.0, 50.0)}


def test_names_are_those_of_the_library() -> None:
    """The same in AdaptiveCompressor(policy=...) and on the command line."""
    assert {*BY_NAME} == {*policy_names()}
    for name in BY_NAME:
        try:
            wanted = make_policy(name)
        except TypeError:
            with pytest.raises(ValueError, match=f"^policy {name} needs arguments"):
                policy_from(name)
        else:
            assert repr(policy_from(name)) == repr(wanted)
            assert repr(policy_from(f"{name}()")) == repr(wanted)


def test_arguments_are_written_into_a_policy() -> None:
    assert with_arguments("gravac", {}) == "gravac"
    assert (
        with_arguments("gravac", {"epsilon": 0.5, "window": 5}) == "GraVAC(epsilon=0.5, window=5)"
    )
    assert with_arguments("GraVAC.paper(window=9)", {"gain": "raw"}) == (
        'GraVAC.paper(window=9, gain="raw")'
    )
    typed = with_arguments(Typed("Fixed()"), {"cf": 100.0, "probe": (10, 20.5)})
    assert isinstance(typed, Typed)
    assert typed == "Fixed(cf=100, probe=(10, 20.5))"
    with pytest.raises(ValueError, match="takes no epsilon"):
        policy_from(with_arguments("accordion", {"epsilon": 1}))
    with pytest.raises(ValueError, match="epsilon is given twice"):
        policy_from(with_arguments("GraVAC(epsilon=0.5)", {"epsilon": 1}))
