"""What a report is made of: its series, the target, the table, what its pictures show."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import inf, isnan, nan
from pathlib import Path

import pytest

from adaptive import LinkSpec
from adaptive.timeline.records import Header
from runs.compare.report import modelled
from runs.config import TrainConfig
from runs.parser import UsageError
from runs.report.make import choose_target, difference_notes
from runs.report.pictures import Records, looks, make_pictures, scripts
from runs.report.rows import Row, history
from runs.report.run import Run
from runs.report.source import find_places, read_run
from runs.report.table import columns, make_text, reading, row_as_json, shown
from runs.tables import text_of
from tests.unit.made_runs import DENSE, made, record

NETWORKS = (LinkSpec.parse("1mbit"),)


# -- the series --------------------------------------------------------------------------------


def test_every_switch_of_a_long_run_is_kept() -> None:
    cfs = [10.0 if i % 7 else 1.0 for i in range(5000)]
    run = made(records=[record(i, cf) for i, cf in enumerate(cfs)])
    switched = [i for i in range(1, 5000) if cfs[i] != cfs[i - 1]]
    assert [part.first for part in run.history[1:]] == switched
    assert run.shares == {1.0: pytest.approx(715 / 5000), 10.0: pytest.approx(4285 / 5000)}


def test_a_history_calls_rungs_by_their_compressors() -> None:
    run = made(records=[record(i, cf) for i, cf in enumerate([1.0, 8.0, 8.0, 40.0])])
    header = Header("fixed", {}, (10, 1000), 2, "topk", "residual", 9, 36.0, {}, {})
    header = replace(header, rungs={8.0: "int4"})
    run = replace(run, recorded=replace(run.recorded, header=header))
    assert history(run) == "dense x1, int4 (CF 8) x2, 40 x1"


# -- the target --------------------------------------------------------------------------------


def test_the_target_is_the_worst_dense_run_that_finished() -> None:
    runs = [
        made("a", evaluations=((5, 9.0), (10, 5.0))),
        made("dense0", evaluations=((10, 4.0),), **DENSE),
        made("dense1", evaluations=((10, 4.5),), policy="Fixed(cf=1)"),
        made("off", evaluations=((10, 4.2),), policy="ddp", base=None),
        made("stopped", evaluations=((10, 99.0),), steps=20, **DENSE),
    ]
    quality, basis = choose_target(runs, None)
    assert quality == 4.5
    assert "dense" in basis
    assert "dense1" in basis
    assert isnan(choose_target(runs[:1], None)[0])  # it has nobody to catch up with
    assert choose_target([runs[0], runs[-1]], None)[0] == 5.0
    assert choose_target([made(), made("b")], None)[1] == ""


def test_without_a_dense_run_it_is_the_worst_run_whichever_way_is_better() -> None:
    lower = [made(str(q), evaluations=((10, q),)) for q in (5.0, 7.0, 6.0)]
    assert choose_target(lower, None)[0] == 7.0
    higher = [made(str(q), evaluations=((10, q),), task="cifar10") for q in (0.5, 0.7)]
    assert choose_target(higher, None)[0] == 0.5
    assert choose_target(lower, 6.5) == (6.5, "as asked for")


@pytest.mark.parametrize(
    ("task", "goal", "first"), [("text", 5.0, 6), ("text", 3.9, inf), ("cifar10", 5.0, 3)]
)
def test_reached_at_the_first_evaluation_that_is_as_good(
    task: str, goal: float, first: float
) -> None:
    run = made(evaluations=((3, 9.0), (6, 5.0), (9, 4.0)), task=task)
    assert run.steps_to(goal) == first
    assert isnan(run.steps_to(nan))
    assert isnan(made().steps_to(goal))


# -- the table ---------------------------------------------------------------------------------


def _cells(runs: list[Run]) -> list[dict[tuple[str, str], str]]:
    """What the table says of each run, by group and name of the column."""
    rows = [Row(run.name, (run,)) for run in runs]
    known = shown(columns(rows, NETWORKS), rows)
    return [{(one.group, one.name): one.text(row) for one in known} for row in rows]


def test_a_row_holds_what_the_run_took_to_the_target() -> None:
    run = made(evaluations=((4, 6.0), (8, 5.0)), policy="goodput")
    run = replace(modelled(run, NETWORKS), goal=6.0)
    row = Row("run", (run,))
    told = row_as_json(columns([row], NETWORKS), row)
    reached = told["to_target"]
    assert (reached["steps"]["mean"], reached["bytes_sent"]["mean"]) == (4, 4000)
    assert reached["seconds"]["mean"] == pytest.approx(4 * 0.5)
    # nothing of the time is compression or waiting, so all of it is compute
    seconds = reached["modelled_seconds"]["1 Mbit/s"]["values"]
    assert seconds == [pytest.approx(4 * (0.5 + 8000 / 1e6))]
    assert run.modelled_in_all(NETWORKS[0]) == pytest.approx(10 * (0.5 + 8000 / 1e6))
    (by_name,) = _cells([run])
    assert by_name["", "perplexity"] == "5.000"
    assert by_name["", "wire factor"] == "5.00"
    assert ("", "scaling eff.") not in by_name  # nobody knows it
    assert by_name["to target", "steps"] == "4"
    assert by_name["measured s", "all"] == "5.000"
    assert list(by_name)[-1] == ("measured s", "to target")
    known = shown(columns([row], NETWORKS), [row])
    text = text_of(*make_text(known, [row])).splitlines()
    heads = [line.split()[0] for line in text if line[:3] == "run"]
    assert heads == ["run"] * 4  # two heads and two rows
    assert text[4].split() == ["1", "Mbit/s:"]
    assert max(map(len, text)) < 120


def test_never_is_not_unknown() -> None:
    evaluated = made("evaluated", evaluations=((10, 7.0),))
    silent = made("silent")
    runs = [replace(modelled(run, NETWORKS), goal=6.0) for run in (evaluated, silent)]
    never, unknown = _cells(runs)
    assert [*never.values()].count("never") == 4
    assert "never" not in unknown.values()
    assert unknown["", "perplexity"] == "-"
    stopped = made("stopped", records=[record(0)], steps=20)
    assert "not finished: 1 of 20 steps" in stopped.notes


def test_bytes_of_two_levels_are_told_as_those_of_a_node() -> None:
    levels = made("levels", [record(i, inside=70.0) for i in range(10)])
    rows = [Row(run.name, (run,)) for run in (made("flat"), levels)]
    (told,) = (line for line in reading(columns(rows, ()), rows) if "MB sent" in line)
    assert told == "MB sent: by a worker; of levels, which exchanges on two levels, by a node"


def test_seconds_of_a_clock_are_not_told_as_measured() -> None:
    clocked = made("clocked", evaluations=((10, 5.0),), fixed_clock=0.1)
    groups = {group for group, _ in _cells([clocked])[0]}
    assert "fixed clock s" in groups
    assert "measured s" not in groups
    assert ("measured s", "all") in _cells([clocked, made("timed")])[0]  # a note tells of one


def test_a_wire_factor_is_told_for_what_it_is() -> None:
    """Dense bytes are in the parameters' precision: 2 an element of a model in bf16."""
    row = Row("run", (made("run"),))
    (told,) = (line for line in reading(columns([row], ()), [row]) if "wire factor" in line)
    assert "parameters' precision" in told
    assert "fp32" not in told


def test_measured_seconds_are_made_of_the_same_steps_as_the_rate() -> None:
    run = made(records=[record(i) for i in range(10)], evaluations=((4, 6.0), (10, 5.0)))
    assert run.seconds_by(10) == pytest.approx(10 * 0.5)
    assert run.steps_per_second == pytest.approx(2)
    assert isnan(run.seconds_by(11))
    untimed = made(records=[record(i, seconds=nan) for i in range(10)])
    assert isnan(untimed.seconds_by(10))
    assert isnan(untimed.steps_per_second)


# -- pictures ----------------------------------------------------------------------------------


def test_the_first_axis_is_measured_time_and_dense_is_first_and_grey() -> None:
    evaluations = ((4, 6.0), (8, 5.0))
    runs = [
        made("goodput", evaluations=evaluations, policy="goodput", network="10mbit"),
        made("dense", evaluations=evaluations, network="10mbit", **DENSE),
    ]
    chart = make_pictures(runs).chart
    assert chart is not None
    titles = [axis["title"] for axis in chart["xs"]]
    assert titles == ["seconds measured (emulated 10 Mbit/s link)", "MB sent by a worker", "steps"]
    dense, goodput = chart["lines"]
    assert (dense["name"].split(":")[0], dense["run"]) == ("dense", None)
    assert goodput["run"] == 0
    assert goodput["x"][0] == [pytest.approx(2.0), pytest.approx(4.0)]
    assert goodput["x"][-1] == [4, 8]


def test_runs_of_different_links_are_not_set_side_by_side_without_a_word() -> None:
    runs = [made("here", network="10mbit"), made("there")]
    (note,) = difference_notes(runs)
    assert "emulated 10 Mbit/s link: here" in note
    assert "no emulated link: there" in note
    assert difference_notes(runs[:1]) == []


def test_runs_of_different_numbers_of_workers_are_not_set_side_by_side_without_a_word() -> None:
    runs = [made("two"), made("also"), made("four", workers=4)]
    (note,) = difference_notes(runs)
    assert "2 workers: two, also; 4 workers: four" in note
    assert difference_notes(runs[:2]) == []
    header = Header("fixed", {}, (10, 1000), 4, "topk", "residual", 9, 36.0, {}, {})
    recorded = replace(runs[0].recorded, header=header)
    alone = replace(runs[0], config=None, recorded=recorded)  # a timeline without a config
    (note,) = difference_notes([runs[0], alone])
    assert "4 workers" in note


def test_a_row_is_that_of_the_dashboard() -> None:
    cfs = [10.0, 10.0, 40.0, 40.0]
    records = [record(i, cf, sent=1e3 * (i + 1), dense=5e3 * (i + 1)) for i, cf in enumerate(cfs)]
    records[3] = record(3, 40.0, layer_cfs={"a": 1.0}, sent=4e3, dense=2e4)
    run = made(records=records, evaluations=((2, 6.0),), steps=4)
    pictures = make_pictures([run])
    (row,) = pictures.rows
    assert row["band"]["cf"] == [10, 40]
    assert row["band"]["step"] == [0, 2]
    assert row["quality"] == {"tag": "perplexity", "step": [1], "second": [0.5], "values": [6]}
    assert row["totals"]["sent"] == [1000, 2000, 3000, 4000]
    assert row["totals"]["moves"] == [0, 0, 1, 1]
    assert row["layers"]["names"] == ["a"]
    assert row["layers"]["cf"][0][-1] == 1
    assert "</" not in pictures.as_json()


def test_plain_ddp_has_a_row_too() -> None:
    run = made("off", records=[], policy="ddp", base=None)
    assert Records(run).tags("off") == ["cf/sent"]
    row = make_pictures([run]).rows[0]
    assert (row["band"]["cf"], row["last"]) == ([1], 9)


def test_scripts_are_one_file_without_imports() -> None:
    text = scripts()
    assert not re.search(r"^(import|export) ", text, re.M)
    assert "class Row" in text
    assert "class Chart" in text
    assert "</script" not in text


def test_seeds_share_a_colour_and_settings_do_not() -> None:
    runs = [
        made("a", seed=0),
        made("b", seed=1),
        made("c", policy="GraVAC(epsilon=0.5)"),
        made("d", **DENSE),
    ]
    look = looks(runs)
    assert look == {"a": (0, 0), "b": (0, 1), "c": (1, 0), "d": (None, 0)}
    assert looks(runs[::-1]) == look


# -- reading -----------------------------------------------------------------------------------


def test_names_are_as_long_as_it_takes(tmp_path: Path) -> None:
    for name in ("x/run", "y/run", "y/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
    folders = [str(tmp_path / name) for name in ("x/run", "y/run", "y/other", "x/run/../run")]
    places = find_places(tuple(folders))
    assert [place.name for place in places] == ["x/run", "y/run", "other"]


def test_a_folder_of_a_report_among_others_is_passed_over(tmp_path: Path) -> None:
    run, report = tmp_path / "run", tmp_path / "report"
    run.mkdir()
    report.mkdir()
    (run / "config.json").touch()
    (report / "report.html").touch()
    places = find_places((str(run), str(report)))
    assert [place.name for place in places] == ["run"]
    with pytest.raises(UsageError, match="holds no run"):
        find_places((str(report),))


def test_records_that_are_cut_short_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    TrainConfig(log_dir=str(tmp_path), steps=9).save()
    lines = [json.dumps({"step": i, "loss": 1.0}) for i in range(4)]
    lines += [json.dumps({"step": 3, "quality": 2.5}), json.dumps({"step": 3, "quality": None})]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    (place,) = find_places((str(tmp_path),))
    run = read_run(place)
    assert run.trained == 4
    assert run.evaluations[0] == (4, 2.5)
    assert isnan(run.quality)  # the last one was not finite
    assert not run.finished


DAMAGED = {
    "timeline.jsonl": ("{\n{}\n", ["line 1", "not JSON"]),
    "metrics.jsonl": ('{"loss": 1}\n{}\n', ["line 1", "not a metric", "step"]),
    "config.json": ('{"task": "text", "what": 1, "log_dir": ""}', ["damaged", "what"]),
    "result.json": ("{}", ["damaged", "summary"]),
    "slices.jsonl": ('{"first": 1}\n', ["slices.jsonl", "last"]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named(name: str, tmp_path: Path) -> None:
    TrainConfig(log_dir=str(tmp_path)).save()
    text, parts = DAMAGED[name]
    (tmp_path / name).write_text(text)
    (place,) = find_places((str(tmp_path),))
    with pytest.raises(UsageError) as raised:
        read_run(place)
    for part in (str(tmp_path), *parts):
        assert part in str(raised.value)
