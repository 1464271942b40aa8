"""What a report is made of: its series, the target, the table, what its pictures show."""

from __future__ import annotations

import json
import re
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive import LinkSpec, StepRecord, StepReport
from runs.config import TrainConfig
from runs.parser import UsageError
from runs.records import Recorded
from runs.report.pictures import Records, curve, looks, make_pictures, scripts
from runs.report.run import Run
from runs.report.source import find_places, read_run
from runs.report.table import cells, head, link_notes, make_rows, make_text, own_networks
from runs.report.target import Target, choose_targets
from runs.tables import text_of

NETWORKS = (LinkSpec.parse("1mbit"),)


def _record(step: int, cf: float = 10.0, seconds: float = 0.5, **changes: Any) -> StepRecord:
    """1000 bytes a step, 5000 if dense."""
    report = StepReport(
        step,
        cf,
        timed_cf=cf,
        seconds=seconds,
        median_seconds=seconds,
        compress_seconds=0.0,
        exchange_seconds=0.0,
        wire_bytes=1000.0,
        dense_wire_bytes=5000.0,
    )
    return StepRecord(report, 0.0, **{"t_sys": 2.0, "t_comp": 1.0, **changes})


def _run(
    name: str = "run",
    records: list[StepRecord] | None = None,
    evaluations: tuple[tuple[int, float], ...] = (),
    **changes: Any,
) -> Run:
    given_config = {"steps": 10, **changes}
    config = TrainConfig(log_dir=name, **given_config)
    steps = [_record(i) for i in range(10)] if records is None else records
    return Run(
        name, Path(name), config, Recorded(steps, []), len(steps) or 10, evaluations, nan, None
    )


# -- the series --------------------------------------------------------------------------------


@given(
    values=st.dictionaries(st.integers(0, 999), st.floats(0, 1), min_size=1, max_size=300),
    most=st.integers(1, 50),
)
def test_curves_have_few_points_as_large_as_the_values(values: dict[int, float], most: int) -> None:
    points = [(step, 2 * value, 2.0) for step, value in sorted(values.items())]
    found = curve(points, max(values) + 1, most)
    (places,), heights = found["x"], [y for y in found["y"] if y is not None]
    assert [x is None for x in places] == [y is None for y in found["y"]]
    assert len(heights) <= most
    steps = [x for x in places if x is not None]
    assert steps == sorted(steps)
    least, largest = min(values.values()), max(values.values())
    assert least - 1e-4 <= min(heights) <= max(heights) <= largest + 1e-4


def test_a_curve_has_a_gap_where_nothing_was_measured() -> None:
    found = curve([(0, 0.5, 1.0), (1, 0.5, 1.0), (7, 0.25, 1.0), (8, 3.0, 2.0)], 9, 9)
    assert found == {"x": [[0, 1, None, 7, 8]], "y": [0.5, 0.5, None, 0.25, 1.0]}


def test_every_switch_of_a_long_run_is_kept() -> None:
    cfs = [10.0 if i % 7 else 1.0 for i in range(5000)]
    run = _run(records=[_record(i, cf) for i, cf in enumerate(cfs)])
    switched = [i for i in range(1, 5000) if cfs[i] != cfs[i - 1]]
    assert [part.first for part in run.history[1:]] == switched
    assert run.shares == {1.0: pytest.approx(715 / 5000), 10.0: pytest.approx(4285 / 5000)}


# -- the target --------------------------------------------------------------------------------

DENSE = {"policy": "fixed", "base": "none"}


def test_the_target_is_the_worst_dense_run_that_finished() -> None:
    runs = [
        _run("a", evaluations=((5, 9.0), (10, 5.0))),
        _run("dense0", evaluations=((10, 4.0),), **DENSE),
        _run("dense1", evaluations=((10, 4.5),), policy="Fixed(cf=1)"),
        _run("off", evaluations=((10, 4.2),), policy="off", base=None),
        _run("stopped", evaluations=((10, 99.0),), steps=20, **DENSE),
    ]
    target = choose_targets(runs, None)["text"]
    assert target.quality == 4.5
    assert "dense" in target.basis
    assert "dense1" in target.basis
    assert choose_targets(runs[:1], None)["text"].quality == 5.0
    assert choose_targets(runs[-1:], None)["text"].quality == 99.0
    assert choose_targets([_run()], None) == {}


def test_without_a_dense_run_it_is_the_worst_run_whichever_way_is_better() -> None:
    lower = [_run(str(q), evaluations=((10, q),)) for q in (5.0, 7.0, 6.0)]
    assert choose_targets(lower, None)["text"].quality == 7.0
    higher = [_run(str(q), evaluations=((10, q),), task="cifar10") for q in (0.5, 0.7)]
    assert choose_targets(higher, None)["cifar10"].quality == 0.5
    both = choose_targets([*lower, *higher], None)
    assert {task: target.quality for task, target in both.items()} == {"text": 7, "cifar10": 0.5}
    with pytest.raises(UsageError, match=r"--target 5: .*accuracy %, perplexity"):
        choose_targets([*lower, *higher], 5.0)
    assert choose_targets(lower, 6.5)["text"] == Target(6.5, "as asked for")


@pytest.mark.parametrize(
    ("task", "goal", "first"), [("text", 5.0, 6), ("text", 3.9, None), ("cifar10", 5.0, 3)]
)
def test_reached_at_the_first_evaluation_that_is_as_good(
    task: str, goal: float, first: int | None
) -> None:
    run = _run(evaluations=((3, 9.0), (6, 5.0), (9, 4.0)), task=task)
    assert Target(goal, "").first(run) == first


# -- the table ---------------------------------------------------------------------------------


def test_a_row_holds_what_the_run_took_to_the_target() -> None:
    run = _run(evaluations=((4, 6.0), (8, 5.0)), policy="goodput")
    (row,) = make_rows([run], {"text": Target(6.0, "")}, NETWORKS)
    assert row.reached is not None
    assert (row.reached.steps, row.reached.bytes_sent) == (4, 4000)
    assert row.reached.seconds == pytest.approx(4 * 0.5)
    # nothing of the time is compression or waiting, so all of it is compute
    assert row.reached.modelled == (pytest.approx(4 * (0.5 + 8000 / 1e6)),)
    assert row.in_all(0) == pytest.approx(10 * (0.5 + 8000 / 1e6))
    by_name = dict(zip(head([row], NETWORKS), cells(row, [row]), strict=True))
    assert by_name["", "perplexity"] == "5.000"
    assert by_name["", "wire factor"] == "5.00"
    assert ("", "scaling eff.") not in by_name  # nobody knows it
    assert by_name["to target", "steps"] == "4"
    assert by_name["measured s", "all"] == "5.000"
    assert list(by_name)[-1] == ("measured s", "to target")
    text = text_of(*make_text([row], NETWORKS)).splitlines()
    heads = [line.split()[0] for line in text if line[:3] == "run"]
    assert heads == ["run"] * 4  # two heads and two rows
    assert text[4].split() == ["1", "Mbit/s:"]
    assert max(map(len, text)) < 100


def test_never_is_not_unknown() -> None:
    evaluated = _run("evaluated", evaluations=((10, 7.0),))
    silent = _run("silent")
    stopped = _run("stopped", records=[_record(0)], steps=20)
    rows = make_rows([evaluated, silent, stopped], {"text": Target(6.0, "")}, NETWORKS)
    assert cells(rows[0], rows).count("never") == 4
    assert "never" not in cells(rows[1], rows)
    assert cells(rows[1], rows)[1] == "-"
    assert cells(rows[2], rows)[2] == "1 of 20"


def test_pauses_are_left_out_of_measured_seconds() -> None:
    """An evaluation after step 4 is in the time of step 3, and of step 4 on the other ranks."""
    seconds = [0.5, 0.5, 0.5, 0.5, 9.0, 4.0, 0.5, 0.5, 0.5, 0.5]
    records = [_record(i, seconds=s) for i, s in enumerate(seconds)]
    run = _run(records=records, evaluations=((4, 6.0), (10, 5.0)))
    assert run.seconds_by(10) == pytest.approx(10 * 0.5)
    assert run.steps_per_second == pytest.approx(2)
    assert isnan(run.seconds_by(11))
    untimed = _run(records=[_record(i, seconds=nan) for i in range(10)])
    assert isnan(untimed.seconds_by(10))
    assert isnan(untimed.steps_per_second)


# -- pictures ----------------------------------------------------------------------------------


def test_the_first_axis_is_time_on_the_own_link_and_dense_is_first_and_grey() -> None:
    evaluations = ((4, 6.0), (8, 5.0))
    runs = [
        _run("goodput", evaluations=evaluations, policy="goodput", link="10mbit"),
        _run("dense", evaluations=evaluations, link="10mbit", **DENSE),
    ]
    networks = own_networks(runs)
    assert [str(network) for network in networks] == ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s"]
    rows = make_rows(runs, {}, networks)
    pictures, notes = make_pictures(rows, {}, networks)
    assert notes == []
    chart = pictures.charts["quality text"]
    titles = [axis["title"] for axis in chart["xs"]]
    assert titles[:2] == [
        "seconds on 10 Mbit/s, modelled",
        "seconds measured (emulated 10 Mbit/s link)",
    ]
    assert all("measured" in title or "modelled" in title for title in titles if "sec" in title)
    dense, goodput = chart["lines"]
    assert (dense["name"].split(":")[0], dense["run"]) == ("dense", None)
    assert goodput["run"] == 0
    assert goodput["x"][0] == [pytest.approx(4 * 0.5008), pytest.approx(8 * 0.5008)]
    assert goodput["x"][-1] == [4, 8]


def test_runs_of_different_links_are_not_set_side_by_side_without_a_word() -> None:
    runs = [_run("here", link="10mbit"), _run("there")]
    (note,) = link_notes(runs)
    assert "emulated 10 Mbit/s link: here" in note
    assert "no emulated link: there" in note
    assert link_notes(runs[:1]) == []
    assert own_networks(runs)[0] == LinkSpec.parse("10mbit")


def test_a_row_is_that_of_the_dashboard() -> None:
    cfs = [10.0, 10.0, 40.0, 40.0]
    records = [_record(i, cf, sent=1e3 * (i + 1), dense=5e3 * (i + 1)) for i, cf in enumerate(cfs)]
    records[3] = _record(3, 40.0, layer_cfs={"a": 1.0}, sent=4e3, dense=2e4)
    run = _run(records=records, evaluations=((2, 6.0),), steps=4)
    ((row,), _) = (pictures := make_pictures(make_rows([run], {}, ()), {}, ())[0]).rows, pictures
    assert row["band"]["cf"] == [10, 40]
    assert row["band"]["step"] == [0, 2]
    assert row["quality"] == {"tag": "perplexity", "step": [1], "second": [0.5], "values": [6]}
    assert row["totals"]["sent"] == [1000, 2000, 3000, 4000]
    assert row["totals"]["moves"] == [0, 0, 1, 1]
    assert row["layers"]["names"] == ["a"]
    assert row["layers"]["cf"][0][-1] == 1
    assert "</" not in pictures.as_json()


def test_plain_ddp_has_a_row_too() -> None:
    run = _run("off", records=[], policy="off", base=None)
    assert Records(run).tags("off") == ["cf/sent"]
    row = make_pictures(make_rows([run], {}, ()), {}, ())[0].rows[0]
    assert (row["band"]["cf"], row["last"]) == ([1], 9)


def test_scripts_are_one_file_without_imports() -> None:
    text = scripts()
    assert not re.search(r"^(import|export) ", text, re.M)
    assert "class Row" in text
    assert "class Chart" in text
    assert "</script" not in text


def test_seeds_share_a_colour_and_settings_do_not() -> None:
    runs = [
        _run("a", seed=0),
        _run("b", seed=1),
        _run("c", policy="GraVAC(epsilon=0.5)"),
        _run("d", **DENSE),
    ]
    look = looks(runs)
    assert look == {"a": (0, 0), "b": (0, 1), "c": (1, 0), "d": (None, 0)}


# -- reading -----------------------------------------------------------------------------------


def test_names_are_as_long_as_it_takes(tmp_path: Path) -> None:
    for name in ("x/run", "y/run", "y/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
    folders = [str(tmp_path / name) for name in ("x/run", "y/run", "y/other", "x/run/../run")]
    places, notes = find_places(tuple(folders), "report.html")
    assert [place.name for place in places] == ["x/run", "y/run", "other"]
    assert notes == []


def test_a_folder_of_a_report_among_others_is_passed_over(tmp_path: Path) -> None:
    run, report = tmp_path / "run", tmp_path / "report"
    run.mkdir()
    report.mkdir()
    (run / "config.json").touch()
    (report / "report.html").touch()
    places, notes = find_places((str(run), str(report)), "report.html")
    assert [place.name for place in places] == ["run"]
    assert len(notes) == 1
    with pytest.raises(UsageError, match="holds no run"):
        find_places((str(report),), "report.html")


def test_records_that_are_cut_short_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    TrainConfig(log_dir=str(tmp_path), steps=9).save()
    lines = [json.dumps({"step": i, "loss": 1.0}) for i in range(4)]
    lines += [json.dumps({"step": 3, "quality": 2.5}), json.dumps({"step": 3, "quality": None})]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    (place,), _ = find_places((str(tmp_path),), "report.html")
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
    (place,), _ = find_places((str(tmp_path),), "report.html")
    with pytest.raises(UsageError) as raised:
        read_run(place)
    for part in (str(tmp_path), *parts):
        assert part in str(raised.value)
