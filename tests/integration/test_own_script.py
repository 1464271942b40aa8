"""`compare` and `tune` with scripts of a user's own, which are not changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import optuna
import pytest

from runs.__main__ import main
from runs.interrupt import INTERRUPTED
from runs.options import with_script
from runs.records import read_records
from runs.tune.study import open_study
from runs.tune.tuning import make_tuning
from tests.integration.commands import Start, python_m

SCRIPT = """
import json
import sys
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

how, steps, wanted = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(60, 40))
if how == "attached":
    from adaptive import AdaptiveCompressor
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compressor = AdaptiveCompressor("topk", (20, 100), policy="goodput")
    compressor.attach(model, optimizer=optimizer)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(steps):
    loss = model(torch.randn(4, 60)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4 and rank == 0:
        print(json.dumps({"step": step, "val": {"loss": wanted * loss.item()}}))
        print(f"loss {loss.item():.4f}", flush=True)
if how == "fails" and rank == 1:
    raise ValueError("the script's own fault")
if how == "attached":
    compressor.close()
dist.destroy_process_group()
time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work
"""

PLAIN = ("plain", 10**9, 1)
"""Arguments with which it goes on for ever."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def compared(folder: Path, *words: object, capfd: Any) -> dict[str, Any]:
    """What a comparison has found."""
    code = main(["compare", "--json", *map(str, words)])
    out, err = capfd.readouterr()
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert found["log_dir"] == str(folder)
    return found


def test_a_plain_script_is_compared(script: Path, tmp_path: Path, capfd: Any) -> None:
    """The settings reach it by a compressor of the command's, with its optimizer. What it prints is
    out of the way, and the same command repeats nothing."""
    folder = tmp_path / "comparison"
    words = ("--log-dir", folder, "--metric", "loss {}", "--contender", "topk@20")
    words += ("--contender", "dense", "--", script, "plain", 20, 1)
    found = compared(folder, *words, capfd=capfd)
    rows = {row["name"]: row for row in found["rows"]}
    assert [*rows] == ["topk@20", "dense"]
    for row in rows.values():
        (run,) = row["runs"]
        assert [step for step, _ in run["evaluations"]] == [5, 10, 15, 20]
        assert row["quality"]["mean"] == run["evaluations"][-1][1]
        assert run["quality_name"] == "loss"
    assert rows["topk@20"]["wire_factor"]["mean"] > 3 * rows["dense"]["wire_factor"]["mean"]
    assert found["dense"] == "dense"
    assert "loss" in found["headlines"]["topk@20"]
    recorded = read_records(folder / "runs" / "topk@20-seed0" / "timeline.jsonl")
    assert len(recorded.steps) == 20
    assert recorded.header is not None
    assert recorded.header.memory == "updates"  # the optimizer was found
    assert "loss " in (folder / "runs" / "dense-seed0" / "output.txt").read_text()
    before = (folder / "runs" / "dense-seed0" / "result.json").stat().st_mtime_ns
    assert main(["compare", *map(str, words)]) == 0
    assert "turn 1" not in capfd.readouterr().out
    assert (folder / "runs" / "dense-seed0" / "result.json").stat().st_mtime_ns == before


@pytest.mark.long
def test_bytes_and_seconds_need_no_metric(script: Path, tmp_path: Path, start: Start) -> None:
    words = ("--log-dir", tmp_path / "comparison", "--contender", "own")
    run = start(*python_m("compare"), *words, "--", script, "plain", 20, 1)
    assert run.end() == 0
    assert run.err == ""  # no warning of an empty picture


@pytest.mark.long
def test_settings_reach_the_scripts_own_compressor(
    script: Path, tmp_path: Path, capfd: Any
) -> None:
    """In place of its own, and only those that the contender names."""
    folder = tmp_path / "comparison"
    words = ["--log-dir", folder, "--metric", "json:val.loss", "--better", "higher"]
    for label in ("own", "dense", "gravac:epsilon=0.25"):
        words += ["--contender", label]
    found = compared(folder, *words, "--", script, "attached", 20, 2, capfd=capfd)
    assert found["dense"] == "dense"
    headers = {}
    for row in found["rows"]:
        (run,) = row["runs"]
        assert run["higher_is_better"]
        recorded = read_records(Path(run["folder"]) / "timeline.jsonl")
        assert len(recorded.steps) == 20
        headers[row["name"]] = recorded.header
    own, dense, gravac = headers.values()
    assert own.policy == "goodput"
    assert dense.base == "none"
    assert gravac.policy == "gravac"
    assert gravac.settings["epsilon"] == 0.25
    assert own.cf_range == gravac.cf_range == (20, 100)


@pytest.mark.long
def test_a_script_forks_as_under_torchrun(script: Path, tmp_path: Path, capfd: Any) -> None:
    """What it starts does not run a script without a `__main__` guard anew, and takes a lambda."""
    loader = "torch.utils.data.DataLoader([0.0] * 9, 3, num_workers=1, collate_fn=lambda b: b)"
    script.write_text(f"{SCRIPT}list({loader})")
    folder = tmp_path / "comparison"
    words = ("--log-dir", folder, "--contender", "dense", "--", script, "plain", 5, 1)
    compared(folder, *words, capfd=capfd)


@pytest.mark.long
def test_what_a_script_leaves_to_its_end_is_done(script: Path, tmp_path: Path, capfd: Any) -> None:
    """Functions for its exit, and what is written to a file that it does not close."""
    last = """
import atexit
log = open(sys.argv[4].format(rank), "w")
atexit.register(print, '{"loss": 3}', file=log)
"""
    script.write_text(SCRIPT + last)
    metric, log = tmp_path / "rank0.jsonl", tmp_path / "rank{}.jsonl"
    words = ("--log-dir", tmp_path / "made", "--contender", "own", "--metric", f"{metric}:loss")
    found = compared(tmp_path / "made", *words, "--", script, "plain", 5, 1, log, capfd=capfd)
    assert found["rows"][0]["quality"]["mean"] == 3
    assert (tmp_path / "rank1.jsonl").read_text() == '{"loss": 3}\n'


@pytest.mark.long
def test_a_script_may_go_to_another_folder(
    script: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    going = f"import os, sys\nos.chdir({str(tmp_path / 'elsewhere')!r})\nopen(__file__).close()"
    going += "\nif sys.argv[4:]: open(sys.argv[4] + '/of_its_own', 'a').close()"
    script.write_text(f"{going}\n{SCRIPT}")
    monkeypatch.chdir(tmp_path)
    words = ("--log-dir", "made", "--contender", "topk@20", "--metric", "loss {}")
    found = compared(Path("made"), *words, "--", script.name, "plain", 5, 1, "{run}", capfd=capfd)
    assert found["rows"][0]["runs"][0]["evaluations"]
    assert len([*(tmp_path / "made" / "runs").glob("*/of_its_own")]) == 1
    assert main(["doctor", "--json", "seen.json", "--", script.name, "plain", "99", "1"]) == 0
    assert (tmp_path / "seen.json").exists()
    assert not any((tmp_path / "elsewhere").iterdir())


USUAL = """\
    loss = model(torch.randn(4, 60)).square().mean()
    loss.backward()
    optimizer.step()
"""
AS_LIGHTNING = {
    "a wrapper in eval mode": "    model.eval().module.train()\n" + USUAL,
    "a forward in a closure": """\
    def closure():
        loss = model(torch.randn(4, 60)).square().mean()
        loss.backward()
        return loss
    loss = optimizer.step(closure)
""",
}
"""What its scripts do."""


@pytest.mark.long
@pytest.mark.parametrize("how", AS_LIGHTNING)
def test_a_model_that_lightning_trains_is_found(
    how: str, script: Path, tmp_path: Path, capfd: Any
) -> None:
    script.write_text(SCRIPT.replace(USUAL, AS_LIGHTNING[how]))
    folder = tmp_path / "comparison"
    words = ("--log-dir", folder, "--contender", "topk@20", "--", script, "plain", 5, 1)
    compared(folder, *words, capfd=capfd)
    recorded = read_records(folder / "runs" / "topk@20-seed0" / "timeline.jsonl")
    assert len(recorded.steps) == 5


@pytest.mark.long
def test_a_script_that_fails_leaves_no_result(script: Path, tmp_path: Path, capfd: Any) -> None:
    folder = tmp_path / "comparison"
    words = ("compare", "--log-dir", folder, "--contender", "dense", "--", script, "fails", 5, 1)
    assert main([*map(str, words)]) == 1
    err = capfd.readouterr().err
    assert "the script's own fault" in err
    assert "output.txt" in err
    assert not list(folder.glob("runs/*/result.json"))
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()")  # exit code 2
    assert main([*map(str, words)]) == 1
    assert f"{script} has failed: what it has printed is in" in capfd.readouterr().err
    for ending, told in (("sys.exit(5)", "has failed"), ("import os; os._exit(0)", "no result")):
        script.write_text(f"{SCRIPT}{ending}")
        assert main([*map(str, words[:-3]), "plain", "5", "1"]) == 1
        assert told in capfd.readouterr().err
        assert not list(folder.glob("runs/*/result.json"))
    script.write_text(SCRIPT)
    words = ("compare", "--log-dir", folder, "--metric", "nothing {}", "--", script, "plain", 5, 1)
    assert main([*map(str, words)]) == 2
    assert "has reported none in 5 steps" in capfd.readouterr().err


@pytest.mark.long
def test_ctrl_c_keeps_what_is_finished(script: Path, tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "comparison"
    words = ("--log-dir", folder, "--contender", "dense", "--verbose", "--", script, "plain")
    run = start(*python_m("compare"), *words, 10**9, 1)
    run.until(lambda: "loss " in run.err)
    run.interrupt()
    assert run.end() == INTERRUPTED, run.err
    assert "Traceback" not in run.err
    assert "no run is finished" in run.out
    assert "steps/s" not in run.out  # no empty table
    assert "the same command goes on" in run.out


@pytest.mark.long
def test_a_script_that_catches_ctrl_c_is_not_finished(
    script: Path, tmp_path: Path, start: Start
) -> None:
    folder = tmp_path / "comparison"
    loop = SCRIPT[SCRIPT.index("for step") : SCRIPT.index('if how == "fails"')]
    caught = "try:\n" + indent(loop, "    ") + "except KeyboardInterrupt:\n    print('saving')\n"
    script.write_text(SCRIPT.replace(loop, caught))
    run = start(*python_m("compare"), "--log-dir", folder, "--verbose", "--", script, *PLAIN)
    run.until(lambda: "loss " in run.err)
    run.interrupt()
    assert run.end() == INTERRUPTED, run.err
    assert "saving" in run.err
    assert run.out.count("turn ") == 1  # and no other contender has begun
    assert not list(folder.glob("runs/*/result.json"))


@pytest.mark.long
def test_a_script_is_tuned_and_pruned(script: Path, tmp_path: Path, capfd: Any) -> None:
    """A trial that falls behind ends where its script reports, on all ranks."""
    folder = tmp_path / "study"
    script.write_text(SCRIPT.replace("for step in range(steps)", "for step in range(60)"))
    given = {"metric": "json:val.loss", "search": ["wanted=1,1000"]}
    given |= {"objective": ["quality"], "log_dir": str(folder)}
    behind = ["--", str(script), "attached", "0", "{wanted}"]
    study = open_study(make_tuning(with_script({**given, "command": behind[1:]})))
    spaces = {
        "wanted": optuna.distributions.CategoricalDistribution((1, 1000)),
    }
    for _ in range(5):  # those that a pruner has seen before
        study.add_trial(
            optuna.trial.create_trial(
                value=50.0,
                params={"wanted": 1},
                distributions=spaces,
                intermediate_values=dict.fromkeys(range(5, 61, 5), 50.0),
            )
        )
    study.enqueue_trial({"wanted": 1000})
    words: list[str] = ["tune", "--anyway", "--trials", "6"]
    for name, value in given.items():
        several = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        words += ["--" + name.replace("_", "-"), *several]
    assert main([*words, *behind]) == 0
    out = capfd.readouterr().out
    trial = optuna.load_study(
        study_name=folder.name, storage=f"sqlite:///{folder}/study.db"
    ).trials[-1]
    assert trial.state.name == "PRUNED"
    assert 15 <= max(trial.intermediate_values) < 60
    assert "trial 5: 6 of 6" in out
    saved = json.loads((folder / "runs" / "trial5" / "config.json").read_text())
    assert saved["script"][-1] == "1000"
    assert saved["policy"] == "gravac"


@pytest.mark.long
def test_over_real_links(script: Path, tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "comparison"
    words = ("--log-dir", folder, "--contender", "own", "--json", "--", script, "plain", 20, 1)
    run = start(*python_m("netlab"), "--network", "50mbit", "--", "compare", *words)
    assert run.end() == 0, run.err
    (row,) = json.loads(run.out)["rows"]
    assert row["interface_bytes"]["mean"] > 20 * 4 * 60 * 40 / 2
    assert row["runs"][0]["link"].startswith("network of real links of 50mbit")
