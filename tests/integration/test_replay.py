"""`python -m runs replay` over real recorded runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runs.__main__ import main
from runs.compare.options import make_comparison
from runs.config import TrainConfig
from runs.options import make_config
from runs.records import read_records
from runs.replay.make import start_policy
from runs.replay.replay import replay
from runs.replay.source import read_source
from tests.integration.commands import LIMIT, ROOT, assert_refused, python_m

pytestmark = pytest.mark.long

STEPS = 60
NESTED = "Warmup(GraVAC(window=6, dense_window=3), steps=5)"
RUNS = (
    "gravac:window=6",
    "accordion:interval=7,cf_range=10/200",
    "topk@20:probe=100/500",
    NESTED,
)


@pytest.fixture(scope="module")
def folders(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Log folders of real runs, by the contender that made them."""
    folder = tmp_path_factory.mktemp("replay")
    given = {"data": str(text), "steps": STEPS, "batch_size": 1, "log_dir": str(folder / "log")}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    words += ["--slice=0", *(f"--contender={run}" for run in RUNS)]
    command = (*python_m("compare"), *words)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    comparison = make_comparison({**given, "contender": list(RUNS)})
    return {c.label: comparison.config(c, 0).folder for c in comparison.contenders}


def _result(capfd: Any, *words: object) -> dict[str, Any]:
    assert main(["replay", *map(str, words), "--json"]) == 0
    return dict(json.loads(capfd.readouterr().out))


@pytest.mark.parametrize("run", RUNS)
def test_a_policy_replays_its_own_record_bit_for_bit(
    run: str, folders: dict[str, Path], capfd: Any
) -> None:
    source = read_source(str(folders[run]))
    assert source.config is not None
    assert len(source.recorded.steps) == STEPS
    policy = start_policy(source.config, source)
    replayed = replay(policy, source.recorded)
    reports = [record.report for record in source.recorded.steps]
    assert [plan.send for plan in replayed.plans] == [report.cf for report in reports]
    for plan, report in zip(replayed.plans, reports, strict=True):
        assert {plan.send, *plan.probe} - {1.0} == set(report.measurements)
    assert list(replayed.events) == source.recorded.events  # steps, CFs and reasons
    assert replayed.sums == 0

    again = start_policy(source.config, source)  # its numbers are those recorded, to the bit
    for record in source.recorded.steps:
        again.plan()
        again.observe(record.report)
        status = {k: v for k, v in again.status().items() if k not in ("t_sys", "t_comp")}
        assert repr(status) == repr(dict(record.status))  # nan is nan

    result = _result(capfd, folders[run])
    assert result["identical"]
    assert result["same_cf_steps"] == STEPS
    assert main(["replay", str(folders[run])]) == 0
    assert "identical to the record" in capfd.readouterr().out


def test_the_file_alone_is_enough_with_the_same_settings(
    folders: dict[str, Path], tmp_path: Path, capfd: Any
) -> None:
    path = tmp_path / "somewhere.jsonl"
    path.write_bytes((folders[RUNS[0]] / "timeline.jsonl").read_bytes())
    assert _result(capfd, path, "--policy", "GraVAC(window=6)")["identical"]
    assert (tmp_path / "replay-gravac.png").read_bytes().startswith(b"\x89PNG")


def test_another_policy_is_modelled_and_says_so(folders: dict[str, Path], capfd: Any) -> None:
    folder = folders[RUNS[2]]
    # CF 20 of the record is on the way from 10 to 1000: measured at 20, 100 and 500.
    result = _result(capfd, folder, "--policy", "GraVAC(window=5)", "--epsilon", 0.05)
    assert not result["identical"]
    assert result["followed"] == 0  # it begins dense
    assert result["switches"]
    assert sum(share for _, share in result["share_at_cf"]) == pytest.approx(1)
    assert result["modelled_bytes"] > 0
    assert result["modelled_seconds"] > 0
    assert any("this is a model" in note for note in result["notes"])

    goodput = _result(capfd, folder, "--policy", "goodput")
    assert any("signal gain was not recorded" in note for note in goodput["notes"])

    fixed = _result(capfd, folder, "--policy", "fixed", "--cf", 100)
    recorded = read_records(folder / "timeline.jsonl")
    assert recorded.header is not None
    assert fixed["modelled_bytes"] == STEPS * recorded.header.wire_bytes[100]  # never sent
    assert fixed["recorded_bytes"] == recorded.bytes_sent
    assert fixed["same_cf_steps"] == 0

    schedule = ("--policy", "Schedule({0: 1, 20: 10, 50: 100})")
    scheduled = _result(capfd, folder, *schedule)
    assert scheduled["share_at_cf"] == [[1, 1 / 3], [10, 1 / 2], [100, 1 / 6]]

    accordion = _result(capfd, folder, "--policy", "Accordion(interval=10)")
    assert any("norms of summed gradients" in note for note in accordion["notes"])
    assert dict(map(tuple, accordion["share_at_cf"])).keys() <= {10, 1000}


BAD = {
    "/nowhere": ["TIMELINE /nowhere", "timeline.jsonl"],
    "EMPTY": ["holds no step"],
    "DAMAGED": ["line 1", "not JSON"],
    "RUN --policy x": ["--policy", "'x'", "gravac"],
    "RUN --policy off": ["--policy", "'off'"],
    "RUN --epsilon 0.5": ["--epsilon needs --policy"],
    "RUN --policy accordion --epsilon 0.5": ["--epsilon", "--policy gravac"],
    "RUN --policy gravac --epsilon 7": ["--policy", "epsilon=7", "(0, 1]"],
    "RUN --policy gravac --cf-range 1000 10": ["--cf-range", "must not exceed"],
    "RUN --policy fixed --cf-range 10 20": ["--cf-range", "--cf"],
    "RUN --policy gravac --base x": ["--base", "'x'", "topk"],
    "RUN --plot /nowhere/x.png": ["--plot /nowhere/x.png"],
    "RUN/timeline.jsonl --workers 0": ["--workers", "'0'"],
    "ALONE": ["--policy must be given", "config.json"],
}


@pytest.mark.parametrize("options", BAD)
def test_bad_options_are_one_line(
    options: str, folders: dict[str, Path], tmp_path: Path, capfd: Any
) -> None:
    empty, damaged, alone = (tmp_path / name for name in ("empty", "damaged", "alone.jsonl"))
    empty.write_text("")
    damaged.write_text("what\n")
    recorded = (folders[RUNS[0]] / "timeline.jsonl").read_text().splitlines(keepends=True)
    alone.write_text("".join(line for line in recorded if '"kind":"header"' not in line))
    files = {"RUN": folders[RUNS[0]], "EMPTY": empty, "DAMAGED": damaged, "ALONE": alone}
    words = options.split()
    first, slash, rest = words[0].partition("/")
    words[0] = f"{files[first]}{slash}{rest}" if first in files else words[0]
    assert_refused(capfd, "replay", *words, parts=BAD[options])


def test_quantizers_are_asked_for_the_cfs_that_they_have(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """CFs are those of the base on the recorded model, as they were in training."""
    source = read_source(str(folders[RUNS[0]]))
    config: TrainConfig = make_config(
        {"policy": "gravac", "base": "qsgd", "log_dir": str(tmp_path)}
    )
    policy = start_policy(config, source)
    assert max(policy.candidates()) <= 32
