"""The papers' suites: that each is a comparison which can be run, and that its table adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any

import pytest

from adaptive import LinkSpec
from runs.build import check_compression
from runs.compare.options import make_comparison
from runs.models import MODELS
from runs.papers.boxes import BOXES_FILE, by_technique, draw_boxes
from runs.papers.suite_table import at_best_rates, suite_json, suite_notes, suite_table
from runs.papers.suites import CODING, SUITES, Plan
from runs.parser import UsageError
from runs.report.rows import Row
from runs.report.run import Ending
from runs.tables import text_of
from runs.tasks import tasks
from tests.unit.made_runs import made

PARTS = [(suite, part) for suite in SUITES.values() for part in suite.parts]


@pytest.mark.parametrize("scale", [None, 0.001, 1.0])
@pytest.mark.parametrize(("suite", "part"), PARTS, ids=lambda one: getattr(one, "task", None))
def test_every_part_is_a_comparison(suite, part, scale) -> None:
    given = {"suite": suite.name, "task": part.task, "data": "somewhere"}
    comparison = make_comparison(given if scale is None else {**given, "scale": scale})
    number = len(suite.entries) * max(1, len(suite.lrs))
    assert len(comparison.contenders) == number
    assert len({contender.folder for contender in comparison.contenders}) == number
    assert comparison.seeds == suite.seeds
    assert comparison.steps == -(-part.steps * (scale or suite.scale) // 1)
    assert comparison.model_mb == part.model_mb
    for contender in comparison.contenders:
        config = comparison.config(contender, 0)
        check_compression(config)
        assert config.fixed_clock is not None
        assert config.model == (part.model if scale == 1 else part.small)
        assert all(isinstance(step, int) for step in [config.lr_drop or ()][0])
    assert {part.model, part.small} <= {*tasks()[part.task].models} & {*MODELS}


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_a_suite_refers_to_its_own_columns_and_entries(suite) -> None:
    names = {entry.name for entry in suite.entries}
    assert len(names) == len(suite.entries)
    for column in suite.columns:
        assert column.over in {None, *names}
        assert any(column.only in name for name in names)
    for entry in suite.entries:
        assert len(entry.figures) in (0, len(suite.parts))
        assert all(len(figures) <= len(suite.columns) for figures in entry.figures)
    assert any(entry.figures for entry in suite.entries)
    papers = [entry.spec for entry in suite.entries if "-paper" in entry.spec]
    assert all("window=" in spec or "interval=" in spec for spec in papers)


def test_steps_in_brackets_shrink_with_the_scale() -> None:
    gravac = SUITES["gravac"]
    plan = Plan(gravac, gravac.parts[0], 0.2, ("epsilon 0.7", "our Acc"))
    found = {contender.label: contender.given for contender in plan.contenders}
    assert found["GraVAC, epsilon 0.7"]["window"] == 100
    assert found["our Accordion 10/1000"]["interval"] == 132
    assert len(found) == 2
    assert plan.options["lr_drop"] == [1800, 2800]
    tiny = [c.given for c in Plan(gravac, gravac.parts[0], 1e-6).contenders]
    assert {given["window"] for given in tiny if "window" in given} == {40}
    assert {given["interval"] for given in tiny if "interval" in given} == {120}
    dgc = SUITES["dgc"]
    words = Plan(dgc, dgc.parts[1], dgc.scale).contenders[1].given
    assert words["clip_local"] == 0.25
    assert words["policy"] == "Warmup.paper(steps=5)"


def test_compression_of_each_contender_takes_what_was_measured_for_it() -> None:
    gravac = SUITES["gravac"]
    given = {c.label: c.given for c in Plan(gravac, gravac.parts[0], 1.0).contenders}
    assert given["top-k 10"]["coding"] == CODING["textbook@10"]
    assert given["DGC 1000"]["coding"] == CODING["dgc@1000"]
    assert [name for name, each in given.items() if "coding" not in each] == ["dense"]


def test_each_entry_counts_with_its_best_learning_rate() -> None:
    harris = SUITES["harris"]
    plan = Plan(harris, harris.parts[0], 0.01, ("none", "DGC 50x"))
    given = {c.label: c.given["lr"] for c in plan.contenders}
    assert given == {
        **{f"none, lr {lr:g}": lr for lr in (0.5, 2, 8)},
        **{f"DGC 50x, lr {lr:g}": lr / 10 for lr in (0.5, 2, 8)},
    }
    qualities = {
        **{"none, lr 0.5": 120.0, "none, lr 2": 110.0, "none, lr 8": nan},
        **{"DGC 50x, lr 0.5": 99.0, "DGC 50x, lr 2": 100.0, "topk@7": 50.0},
    }
    rows = [_row(name, [(0, quality, 8, 4e6, 1)]) for name, quality in qualities.items()]
    best, rates = at_best_rates(plan, rows)
    assert rates == {"none": 2, "DGC 50x": 0.5}
    assert [(row.label, row.run.quality) for row in best] == [
        *(("none", 110.0), ("DGC 50x", 99.0), ("topk@7", 50.0))
    ]
    worse = {each["contender"]: each["columns"][1] for each in suite_json(plan, rows)["rows"]}
    assert worse["DGC 50x"]["here"]["mean"] == pytest.approx(100 * (100 / 111 - 1))
    assert "learning" in text_of(suite_table(plan, rows))


def test_a_technique_has_a_box_of_its_settings_each_at_its_best_rate(tmp_path) -> None:
    harris = SUITES["harris"]
    plan = Plan(harris, harris.parts[0], 0.01)
    qualities = {
        **{"none, lr 0.5": 120.0, "top-k 50x, lr 0.5": 99.0, "top-k 50x, lr 2": 90.0},
        **{"top-k 500x, lr 8": 130.0, "QSGD 7 bits, lr 0.5": 95.0, "DGC 50x, lr 0.5": nan},
    }
    rows = [_row(name, [(0, quality, 8, 4e6, 1)]) for name, quality in qualities.items()]
    assert by_technique(plan, rows) == {"none": [120], "top-k": [90, 130], "QSGD": [95]}
    draw_boxes(plan, rows, tmp_path, "boxes")
    assert (tmp_path / BOXES_FILE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"suite": "x"},
            "--suite 'x': is unknown; accepted: gravac, gravac-randomk, accordion, harris",
        ),
        ({"suite": "harris", "task": "text"}, "--task text: has no such part; accepted: words"),
        ({"suite": "liu", "scale": 0.1, "steps": 9}, "--scale 0.1 --steps 9: accepted: one"),
        ({"scale": 0.5}, "--scale 0.5: needs --suite"),
        ({"only": ["x"]}, "--only x: needs --suite"),
        (
            {"suite": "liu", "only": ["none"]},
            "--only none: is in no name; accepted: parts of dense",
        ),
        ({"simulated": True}, "--simulated on: needs --fixed-clock"),
        ({"suite": "liu", "contender": ["dense", "dense"]}, "is given twice"),
    ],
)
def test_bad_suites(given, message) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        make_comparison(given)


def _row(label: str, runs: Sequence[tuple[int, float, float, float, float]]) -> Row:
    """Of four steps. runs: (seed, quality, seconds, bytes, floats)."""
    network = LinkSpec.parse("1mbit")
    found = []
    for seed, quality, seconds, nbytes, floats in runs:
        ending = Ending(4, quality, nbytes, 4e6, 1.0, floats_sent=floats, test=quality + 1)
        of_words = {"task": "words", "seed": seed, "steps": 4}
        run = made(label, [], ((4, quality),), ending, **of_words)
        found.append(replace(run, trained=4, modelled={network: (seconds,) * 4}))
    return Row(label, tuple(found))


def _columns(plan: Plan, rows: Sequence[Row]) -> list[list[dict[str, Any]]]:
    return [row["columns"] for row in suite_json(plan, rows)["rows"]]


def test_the_table_has_the_papers_figures_beside_ratios_of_each_seed() -> None:
    gravac = SUITES["gravac"]
    plan = Plan(gravac, gravac.parts[0], 0.02)
    rows = [
        _row("dense", [(0, 50.0, 100, 4e6, 1e6), (1, 52.0, 100, 4e6, 1e6)]),
        _row("top-k 10", [(0, 49.0, 20, 8e5, 1e5), (1, 50.0, 30, 8e5, 1e5)]),
        _row("GraVAC, epsilon 0.7", [(1, 51.0, 10, 4e5, 5e4)]),
        _row("goodput:power=1", [(0, 48.0, 40, 2e6, 5e5)]),
    ]
    made_of_it = suite_json(plan, rows)["rows"]
    by_name = {row["contender"]: row["columns"] for row in made_of_it}
    assert [column["name"] for column in by_name["dense"]] == [
        "perplexity",
        "speed-up over top-k 10",
        "bytes, times fewer than dense",
        "floats, times fewer than dense",
    ]
    ours = by_name["GraVAC, epsilon 0.7"]
    assert [column["paper"] for column in ours] == [80.2, 4.32, None, 163]
    assert [column["here"]["mean"] for column in ours] == [51.0, 3.0, 10.0, 20.0]
    assert by_name["dense"][1]["here"]["mean"] == pytest.approx((0.2 + 0.3) / 2)
    assert made_of_it[3]["spec"] == "goodput:power=1"
    text = text_of(suite_table(plan, rows)).splitlines()
    assert len({len(line) for line in text[1:]}) <= 3
    assert "51.00 ± 1.4" in text[2]
    assert text[4].split() == [
        *("GraVAC,", "epsilon", "0.7", "80.2", "51.00", "4.32", "3.000"),
        *("-", "10.00", "163", "20.00"),
    ]
    notes = suite_notes(plan)
    assert notes[0].startswith("paper: GraVAC (Tyagi, Swany, 2023)")
    assert "400 of 20000 steps, resnet8 for resnet101" in notes[1]


def test_columns_that_need_a_contender_which_is_left_out_are_said_to() -> None:
    gravac = SUITES["gravac"]
    whole, part = (
        suite_notes(Plan(gravac, gravac.parts[0], 0.02, only)) for only in ((), ("DGC",))
    )
    assert not any("not known" in note for note in whole)
    first, second = [note for note in part if "not known" in note]
    assert first.startswith("speed-up over top-k 10: not known without the contender 'top-k 10'")
    assert second.startswith("bytes, times fewer than dense, floats, times fewer than dense: not")


def test_percent_worse_epochs_and_columns_of_some() -> None:
    harris = SUITES["harris"]
    plan = Plan(harris, harris.parts[0], 0.01)
    none, topk = (
        _row("none", [(0, 99.0, 8, 4e6, 1)]),
        _row("top-k 50x", [(0, 199, 2, 1e5, 1)]),
    )
    _, ours = _columns(plan, [none, topk])
    assert [column["here"]["mean"] for column in ours] == [
        *(200.0, 100.0, 40.0, 2 / 4 * 1327),
        None,
    ]
    stopped = replace(topk.run, ending=replace(topk.run.ending, best_step=3))
    (early,) = _columns(plan, [Row("top-k 50x", (stopped,))])
    assert early[4]["here"]["mean"] == pytest.approx(4 / 1327)
    assert ours[1]["paper"] == pytest.approx(100 * (89.6 / 92.2 - 1))
    (alone,) = _columns(plan, [topk])
    assert alone[1]["here"]["mean"] is None

    accordion = SUITES["accordion"]
    plan = Plan(accordion, accordion.parts[0], 0.01)
    rows = [_row("top-k low", [(0, 1, 1, 1, 5)]), _row("PowerSGD low", [(0, 1, 1, 1, 9)])]
    saved = [one["here"]["mean"] for found in _columns(plan, rows) for one in found[1:3]]
    assert saved == [None, 1.0, 1.0, None]
