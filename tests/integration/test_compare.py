"""`python -m runs compare`: the grammar, the numbers of its table, and real comparisons."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest

from adaptive import LinkSpec, StepRecord, StepReport
from adaptive.network.pace import Pace
from examples.replay_policy import replay
from policies import GraVAC
from runs.__main__ import main
from runs.compare.command import turns
from runs.compare.contender import parse_contender
from runs.compare.options import make_comparison
from runs.compare.report import side_by_side
from runs.config import TrainConfig
from runs.records import read_records
from runs.report.rows import Row, Spread, history
from runs.report.run import Ending, Run
from runs.report.table import columns, make_text, row_as_json, shown
from runs.tables import text_of
from runs.times import compute_seconds, model_bytes, modelled_seconds
from tests.integration.commands import Start, assert_refused, python_m
from tests.unit.made_runs import made, record

COMPARE = python_m("compare")

# -- the grammar -------------------------------------------------------------------------------

CONTENDERS: dict[str, dict[str, Any]] = {
    "dense": {"policy": "dense"},
    "ddp": {"policy": "ddp"},
    "topk@100": {"policy": "fixed", "base": "topk", "cf": 100.0},
    "topk": {"policy": "fixed", "base": "topk"},
    "topk+bf16@50": {"policy": "fixed", "base": "topk+bf16", "cf": 50.0},
    "fixed@20:base=dgc,memory=residual": {
        "policy": "fixed",
        "base": "dgc",
        "cf": 20.0,
        "memory": "residual",
    },
    "gravac:epsilon=0.5,omega=0.1,base=dgc": {
        "policy": "gravac",
        "epsilon": 0.5,
        "omega": 0.1,
        "base": "dgc",
    },
    "Schedule({0: 1, 9: 10}):base=dgc": {"policy": "Schedule({0: 1, 9: 10})", "base": "dgc"},
    "accordion:cf_range=10/500,memory=Momentum(masking=False, share=1)": {
        "policy": "accordion",
        "cf_range": (10.0, 500.0),
        "memory": "Momentum(masking=False, share=1)",
    },
    "topk@40:steps=9,lr_drop=6,lr=0.2": {
        "policy": "fixed",
        "base": "topk",
        "cf": 40.0,
        "steps": 9,
        "lr_drop": (6,),
        "lr": 0.2,
    },
    "dense:lr=3e-3,clip_grad=1": {
        "policy": "dense",
        "lr": 3e-3,
        "clip_grad": 1.0,
    },
    "warmup:stages=2,warmup=3,lr_schedule=linear": {
        "policy": "warmup",
        "stages": 2,
        "warmup": 3,
        "lr_schedule": "linear",
    },
    "topk@100:optimizer=adamw,betas=0.8/0.99,weight_decay=0": {
        "policy": "fixed",
        "base": "topk",
        "cf": 100.0,
        "optimizer": "adamw",
        "betas": (0.8, 0.99),
        "weight_decay": 0.0,
    },
    "topk@10:probe=20/100": {"policy": "fixed", "base": "topk", "cf": 10.0, "probe": (20, 100)},
}


@pytest.mark.parametrize("text", CONTENDERS)
def test_a_contender_stands_for_options_of_train(text: str) -> None:
    contender = parse_contender(text)
    assert contender.label == text
    assert contender.given == CONTENDERS[text]
    assert contender.config({"log_dir": "x", "steps": 7}).steps == CONTENDERS[text].get("steps", 7)
    assert "/" not in contender.folder


BAD = {
    "--contender dense:base=topk": ["--base topk", "--policy dense sends everything"],
    "--contender off": ["'off' is unknown", "dense, ddp"],
    "--contender nothing": ["nothing", "dense", "gravac", "topk"],
    "--contender gravac@10": ["gravac takes no @CF", "'10'", "topk@100"],
    "--contender topk@0.5": ["'0.5'", ">= 1"],
    "--contender topk@": ["''", ">= 1"],
    "--contender gravac:eps=1": ["GraVAC takes no eps", "epsilon, omega"],
    "--contender gravac:epsilon=0.1,epsilon=0.2": ["epsilon is given twice"],
    "--contender topk@100:cf=5": ["cf is given twice"],
    "--contender gravac:epsilon": ["'epsilon' needs a value"],
    "--contender gravac:epsilon=x": ["epsilon='x'", "in (0, 1]"],
    "--contender gravac:epsilon=7": ["epsilon=7", "(0, 1]"],
    "--contender goodput:base=qsgd": ["'goodput'", "topk", "'qsgd'"],
    "--contender dense:steps=0": ["--contender dense:steps=0", "--steps", "'0'", ">= 1"],
    "--optimizer adam --contender dense:momentum=0.5": [
        "--contender dense:momentum=0.5",
        "--momentum 0.5 is for --optimizer sgd",
    ],
    "--contender ddp:base=topk": ["--base topk needs the library's hook"],
    "--contender topk@10:cf_range=1/2": ["--cf-range 1 2 is for the other policies"],
    "--contender topk+x@10": ["--base", "'topk+x'", "bf16"],
    "--contender dense --contender dense": ["dense", "twice"],
    "--contender ddp --network 1gbit": ["--contender ddp", "--network 1gbit", "hook"],
    "--bandwidths fast": ["--bandwidths fast", "'100mbit'"],
    "--model-mb 0": ["--model-mb", "'0'", "> 0"],
    "--model-mb 170 --workers 1": ["--model-mb 170", "--workers 2"],
    "--seeds -1": ["--seeds", "'-1'", "from 0 to 2^32 - 1"],
    "--slice x": ["--slice", "'x'"],
    "--task x": ["--task", "'x'", "cifar10"],
    "--log-dir /dev/null/x": ["--log-dir", "/dev/null", "folder"],
}


@pytest.mark.parametrize("options", BAD)
def test_bad_options_are_one_line(
    options: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runs.launch.launch", lambda *_: pytest.fail("started workers"))
    assert_refused(capfd, "compare", *options.split(), parts=BAD[options])
    assert list(tmp_path.iterdir()) == []


def test_help_has_the_grammar(capfd: Any) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    out = capfd.readouterr().out
    assert "NAME[@CF][:key=value,...]" in out
    assert "topk+bf16@50" in out


# -- turns -------------------------------------------------------------------------------------


def test_everyone_takes_turns_and_who_begins_goes_round() -> None:
    given = {"contender": ["dense", "topk@100", "gravac"], "steps": 10, "slice": 4, "seeds": [0, 5]}
    comparison = make_comparison(given)
    order = [(t.contender.label[0], t.seed, t.until) for t in turns(comparison)]
    assert len(order) == 18
    assert order[:3] == [("d", 0, 4), ("t", 0, 4), ("g", 0, 4)]
    assert order[3:6] == [("t", 0, 8), ("g", 0, 8), ("d", 0, 8)]
    assert {until for _, _, until in order[6:9]} == {10}
    assert [seed for _, seed, _ in order] == [0] * 9 + [5] * 9


def test_a_contender_may_train_longer_than_the_others() -> None:
    given = {"contender": ["dense", "topk@9:steps=11"], "steps": 4, "slice": 4}
    comparison = make_comparison(given)
    order = [(t.contender.label, t.until) for t in turns(comparison)]
    longer = "topk@9:steps=11"
    assert order == [("dense", 4), (longer, 4), (longer, 8), (longer, 11)]
    whole = make_comparison({**given, "slice": 0})
    assert [t.until for t in turns(whole)] == [4, 11]


def test_the_same_options_find_the_same_folder() -> None:
    first = make_comparison({"steps": 10, "seeds": [0]})
    assert make_comparison({"steps": 10, "seeds": [0, 1], "contender": ["dense"]}).folder == (
        first.folder
    )
    assert make_comparison({"steps": 11}).folder != first.folder


# -- the numbers -------------------------------------------------------------------------------


def _record(step: int, cf: float, compress: float, nbytes: float, pause: float = 0.0) -> StepRecord:
    """Steps of 100 ms of computing; a step's report has the times of the step before."""
    timed = step >= 2
    report = StepReport(
        step,
        cf,
        timed_cf=cf if timed else nan,
        seconds=0.1 + compress + 0.05 + pause if timed else nan,
        compress_seconds=compress / 4 if timed else nan,
        decode_seconds=3 * compress / 4 if timed else nan,
        exchange_seconds=0.05 if timed else nan,
        wire_bytes=nbytes,
        dense_wire_bytes=1e6,
    )
    return StepRecord(report, 0.0, nan, nan)


def test_modelled_seconds_are_compute_compression_latency_and_bytes() -> None:
    compress = [0, 0, 0.01, 0.03, 0.02]  # of steps 1, 2 and 3 in reports 2, 3 and 4
    records = [
        _record(i, 10, spent, 1e5, pause=9.0 if i == 3 else 0) for i, spent in enumerate(compress)
    ]
    assert compute_seconds(records) == pytest.approx(0.1)  # an evaluation does not count
    ends = modelled_seconds(records, LinkSpec.parse("8mbit,7ms"))
    steps = [b - a for a, b in zip([0.0, *ends], ends, strict=False)]
    rest = 0.1 + 0.007 + 0.1  # 1e5 bytes at 8 Mbit/s
    assert steps == pytest.approx([rest + 0.02, rest + 0.01, rest + 0.03, rest + 0.02, rest + 0.02])
    assert isnan(modelled_seconds(records[:2], LinkSpec.parse("8mbit"))[-1])
    larger = modelled_seconds(records, LinkSpec.parse("8mbit"), times=3)
    assert larger[0] == pytest.approx(0.1 + 3 * 0.02 + 3 * 0.1)
    few = [replace(r, report=replace(r.report, statistics_bytes=1e4)) for r in records]
    assert modelled_seconds(few, LinkSpec.parse("8mbit"), times=3)[0] == pytest.approx(
        0.1 + 3 * 0.02 + 3 * 0.09 + 0.01
    )
    assert model_bytes(records, 2) == 1e6  # all-reduce of two ranks sends as many
    assert model_bytes(records, 4) == pytest.approx(1e6 / 1.5)
    assert model_bytes(records, 1) == 0


def _made(seed: int, quality: float, nbytes: float, end: float, cfs: dict[float, int]) -> Run:
    """Ten steps at these CFs, over at second `end` on the only network."""
    sent = [cf for cf, steps in cfs.items() for _ in range(steps)]
    records = [
        StepRecord(
            StepReport(i, cf, wire_bytes=nbytes / 10, dense_wire_bytes=4e5),
            *(0.0, nan, nan),
        )
        for i, cf in enumerate(sent)
    ]
    own = {"policy": "fixed", "base": "none"} if [*cfs] == [1] else {}
    evaluations = ((5, 2 * quality), (10, quality))
    run = made("run", records, evaluations, seed=seed, **own)
    return replace(run, modelled={NETWORK: tuple(end * (i + 1) / 10 for i in range(10))})


NETWORK = LinkSpec.parse("100mbit")


def _numbers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [row_as_json(columns(rows, [NETWORK]), row) for row in rows]


def test_the_table_of_hand_made_runs() -> None:
    rows = [
        Row("dense", (_made(0, 4.0, 4e6, 10, {1: 10}), _made(1, 6.0, 4e6, 12, {1: 10}))),
        Row("fast", (_made(0, 2.0, 4e4, 1, {1: 4, 10: 6}), _made(1, 2.5, 4e4, 1, {1: 5, 10: 5}))),
        Row("bad", (_made(0, 8.0, 4e5, 2, {100: 10}), _made(1, 5.0, 4e5, 2, {100: 10}))),
    ]
    placed = side_by_side(rows, "dense", None)
    dense, fast, _ = _numbers(placed)
    assert dense["quality"]["mean"] == 5.0
    assert dense["quality"]["deviation"] == pytest.approx(2**0.5)
    reached = [
        one["to_target"]["modelled_seconds"]["100 Mbit/s"]["values"] for one in _numbers(placed)
    ]
    assert reached == [[10.0, 12.0], [0.5, 0.5], ["never", 2.0]]
    assert fast["wire_factor"]["mean"] == pytest.approx(100)
    earlier = side_by_side(rows, "dense", 5)
    assert [run.goal for run in earlier[2].runs] == [8.0, 12.0]

    lines = text_of(*make_text(shown(columns(placed, [NETWORK]), placed), placed, "contender"))
    table = lines.splitlines()
    names = ["contender", "dense", "fast", "bad"]
    assert [line.split()[0] for line in table[1:5]] == names
    assert "5.000 ± 1.4" in table[2]
    assert "0.04000" in table[3]
    assert table[6].split() == ["100", "Mbit/s:"]
    assert table[7].split() == ["modelled", "s", "measured", "s"]
    assert [line.split()[0] for line in table[8:12]] == names
    assert "11.00 ± 1.4" in table[9]
    assert table[10].split()[1:3] == ["1.000", "0.5000"]
    assert "2.000 2.000 (1 of 2 never)" in " ".join(table[11].split())
    assert history(placed[0].run) == "dense x10"
    assert history(placed[1].run) == "dense x4, 10 x6"

    unknown = _numbers(side_by_side(rows, None, None))
    assert unknown[0]["to_target"]["steps"]["values"] == [None, None]


def test_small_things() -> None:
    assert isnan(Spread.of([nan]).mean)
    assert Spread.of([1.0, nan, 3.0]).mean == 2.0
    assert Spread.of([1.0, nan, 3.0]).text(4) == "2.000 ± 1.4 (1 of 3 not known)"
    assert Spread.of([1.0, nan, inf]).text(4) == "1.000 (1 of 3 never, 1 of 3 not known)"
    assert Spread.of([2.5e-5]).text(4) == "2.5e-05"  # not as good as any other
    plain = made(
        records=[],
        ending=Ending(10, 1.0, 100.0, 100.0, Pace(steps=7, seconds=1.0)),
        policy="ddp",
        base=None,
    )
    assert [plain.sent_by(done) for done in (1, 5, 10)] == [10, 50, 100]
    assert plain.steps_per_second == 7.0
    many = made(records=[record(i, 10.0 + i) for i in range(20)])
    told = "10 x1, 11 x1, 12 x1, 13 x1, ... 13 more ..., 27 x1, 28 x1, 29 x1"
    assert history(many) == told


def test_settings_that_differ_from_those_of_a_run_in_the_folder_are_refused(
    text: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runs.launch.launch", lambda *_: pytest.fail("started workers"))
    options = ["--data", str(text), "--batch-size", "1", "--contender", "dense"]
    options += ["--log-dir", str(tmp_path)]
    config = make_comparison(
        {
            "data": str(text),
            "batch_size": 1,
            "contender": ["dense"],
            "steps": 9,
            "log_dir": str(tmp_path),
        }
    )
    config.config(config.contenders[0], 0).save()
    assert main(["compare", *options, "--steps", "8"]) == 2
    assert "holds a run with steps=9, not 8" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_the_folder_of_a_run_is_refused(
    command: str, text: Path, tmp_path: Path, capfd: Any
) -> None:
    TrainConfig(log_dir=str(tmp_path)).save()
    words = ("--data", text, "--batch-size", 1, "--steps", 8, "--log-dir", tmp_path)
    assert_refused(capfd, command, *words, parts=["holds a run of its own"])


# -- real ones ---------------------------------------------------------------------------------


@pytest.mark.long
def test_a_closed_terminal_saves_the_turn_and_gives_the_folder_back(
    text: Path, tmp_path: Path, start: Start
) -> None:
    log = tmp_path / "log"
    options = ("--data", text, "--batch-size", 1, "--steps", 100_000, "--contender", "dense")
    command = start(*COMPARE, *options, "--fixed-clock", 0.1, "--log-dir", log)
    command.until(lambda: list(log.glob("runs/*/metrics.jsonl")))
    os.killpg(command.process.pid, signal.SIGHUP)
    assert command.end() == 130, command.err
    assert "Traceback" not in command.err
    assert len(list(log.glob("runs/*/checkpoint/meta.json"))) == 1


@pytest.mark.long
def test_interrupted_and_continued(
    text: Path,
    tmp_path: Path,
    start: Start,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--data", text, "--batch-size", 1, "--steps", 12, "--slice", 6, "--eval-every", 3)
    options += (
        "--contender",
        "dense",
        "--contender",
        "gravac:window=4,steps=15",
        "--fixed-clock",
        0.1,
        "--coding",
        0,
    )
    options += ("--bandwidths", "100mbit", "1gbit,1ms", "--json", "--log-dir", tmp_path / "log")

    first = start(*COMPARE, *options)
    first.until(lambda: "turn 3 of 5" in first.err and len(first.workers()) == 2)
    first.interrupt()
    assert first.end() == 130, first.err
    assert "Traceback" not in first.err
    assert "the same command goes on" in first.err
    assert not json.loads((tmp_path / "log" / "compare.json").read_text())["finished"]

    second = start(*COMPARE, *options)
    assert second.end() == 0, second.err
    assert "turn 1 of 5" not in second.err
    assert "turn 2 of 5" not in second.err
    assert "turn 5 of 5" in second.err
    result = json.loads(second.out)
    assert result == json.loads((tmp_path / "log" / "compare.json").read_text())
    assert result["finished"]
    assert result["dense"] == "dense"
    assert (tmp_path / "log" / "table.txt").read_text().splitlines()[3].startswith("contender")
    assert (tmp_path / "log" / "time.png").read_bytes().startswith(b"\x89PNG")

    dense, gravac = result["rows"]
    for one, steps in ((dense, 12), (gravac, 15)):
        assert [step for step, _ in one["runs"][0]["evaluations"]] == [*range(3, steps + 1, 3)]
        assert sum(p["last"] - p["first"] + 1 for p in one["runs"][0]["cf_history"]) == steps
    # a fixed clock: 0.1 s of compute a step, nothing of compression, all bytes known
    sent = dense["bytes_sent"]["mean"]
    whole = {name: one["mean"] for name, one in dense["modelled_seconds"].items()}
    assert whole["100 Mbit/s"] == pytest.approx(12 * 0.1 + sent * 8 / 1e8)
    hops = 2 * 2  # of an all-reduce of two ranks, for each of two buckets
    assert whole["1 Gbit/s, 1 ms"] == pytest.approx(12 * (0.1 + hops * 1e-3) + sent * 8 / 1e9)
    assert gravac["bytes_sent"]["mean"] < sent

    monkeypatch.setattr("runs.compare.slice.launch", lambda *_: pytest.fail("nothing is left"))
    assert main(["compare", *map(str, options)]) == 0
    assert json.loads(capfd.readouterr().out)["rows"] == result["rows"]

    # The record of a run that was interrupted and resumed is whole: the policy repeats it.
    folder = tmp_path / "log" / "runs" / "gravac_window=4,steps=15-seed0"
    recorded = read_records(folder / "timeline.jsonl")
    plans, end = replay(GraVAC(window=4), recorded)
    assert (len(plans), end) == (15, "")
