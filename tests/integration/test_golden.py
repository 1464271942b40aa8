"""Whole runs end where they ended when golden.json was made, to the last bit.

A change that is meant to change them makes the file anew (python -m tests.integration.golden) and
says in its commit why each run that differs does.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from adaptive.exchange.choice import EXCHANGES
from adaptive.memory.options import NAMED
from compressors import compressor_names
from policies import policy_names
from tests.integration.golden import FILE, RUNS, runs_now

WRITTEN = json.loads(FILE.read_text(encoding="utf-8"))
MAKE = "python -m tests.integration.golden"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the runs do now, in a process whose arithmetic is pinned."""
    return runs_now("tests.integration.golden", FILE)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_what_it_was_to_the_bit(name: str, found: dict[str, Any]) -> None:
    now, then = found[name], WRITTEN["runs"][name]
    for what in ("cfs", "layer_cfs", "bytes", "parameters"):  # the cause before what it brings on
        assert now[what] == then[what], f"{what} differ; if they should: {MAKE}"


def test_the_file_holds_these_runs_and_no_others() -> None:
    assert list(WRITTEN["runs"]) == list(RUNS)


def test_whatever_can_be_chosen_is_in_some_run() -> None:
    runs = RUNS.values()
    policies = {run.policy().name for run in runs}
    assert policies == {name for name in policy_names() if not name.endswith("-paper")}
    assert {run.base.partition("+")[0] for run in runs} == set(compressor_names())
    assert {run.memory for run in runs if isinstance(run.memory, str)} == set(NAMED)
    assert {run.exchange for run in runs if isinstance(run.exchange, str)} == set(EXCHANGES)
    assert {run.granularity for run in runs} == {"auto", "layer", "bucket"}


def test_runs_that_may_switch_do() -> None:
    switching = [run for run in WRITTEN["runs"].values() if len(run["cfs"]) > 2]
    assert len(switching) > len(RUNS) / 2
