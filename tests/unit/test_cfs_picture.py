"""The picture of what was sent at which CF."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from adaptive import Header
from runs.report.cfs import CFS_FILE, draw_cfs, throughputs, unit_of
from runs.report.rows import Row
from runs.report.table import reading
from tests.unit.made_runs import DENSE, made, record


def test_throughput_is_the_median_of_each_cf_as_far_as_it_is_known() -> None:
    values = {10.0: (1.0, 5.0, 3.0), 40.0: (nan, 7.0), 1.0: (nan,)}
    records = [record(0, cf, t_comp=value) for cf, each in values.items() for value in each]
    assert throughputs(made(records=records)) == {10.0: 3.0, 40.0: 7.0}


def test_runs_beside_one_another_are_drawn_and_one_without_records_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    both = [record(step, 10.0 if step < 4 else 40.0) for step in range(10)]
    plain = made("off", [], ((10, 5.0),), policy="ddp")
    rows = [Row("ours", (made("ours", both),)), Row("dense", (made("dense", **DENSE),))]
    draw_cfs([*rows, Row("off", (plain,))], tmp_path, "cfs")
    assert (tmp_path / CFS_FILE).read_bytes().startswith(b"\x89PNG")


def test_a_run_of_thousands_of_cfs_is_a_picture_of_the_most_used(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    many = [record(step, 2.0 + step / 7) for step in range(3000)]
    draw_cfs([Row(f"{i}", (made(f"{i}", many),)) for i in range(30)], tmp_path, "cfs")
    assert (tmp_path / CFS_FILE).stat().st_size < 10**6


def test_a_table_says_how_large_the_models_are() -> None:
    def sized(name: str, numel: int) -> Row:
        run = made(name)
        header = Header("fixed", {}, (10, 1000), 2, "topk", "residual", numel, 4.0 * numel, {}, {})
        return Row(name, (replace(run, recorded=replace(run.recorded, header=header)),))

    (alike,) = [
        line for line in reading([], [sized("a", 10**6), sized("b", 10**6)]) if "model" in line
    ]
    assert alike == "model: 1 million parameters, 4 MB of gradients in fp32"
    told = [line for line in reading([], [sized("a", 10**6), sized("b", 5000)]) if "model" in line]
    assert told[1] == "model of b: 0.005 million parameters, 0.02 MB of gradients in fp32"


def test_the_unit_is_that_of_the_records() -> None:
    """`train` tells its compressor how many samples a step has."""
    ours, script = made("ours"), made("script", script=("script.py",))
    assert unit_of([Row("ours", (ours,))]) == "samples/s"
    assert "steps/s" in unit_of([Row("ours", (ours,)), Row("script", (script,))])
    assert "steps/s" in unit_of([Row("alone", (replace(ours, config=None),))])
