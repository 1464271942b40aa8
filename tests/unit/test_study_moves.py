"""Goodput among step times with noise (docs/studies/moves.py): it soon sends the right CF, moves
seldom, and ends alike on a quiet and on a busy machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.studies.moves import MACHINES, main, run, rungs_apart
from policies import Goodput

MOST_LOST = 10
RISES = 4  # to CF 20, 40, 80 and 160, as the steps done allow them


@settings(max_examples=8, deadline=None, derandomize=True)  # switches alone exceed in 1 of 60
@given(
    st.sampled_from(MACHINES),
    st.floats(-1, 1).map(lambda digits: 10**digits),
    st.floats(0.5, 3.0),
    st.integers(0, 999),
)
def test_few_steps_are_lost_and_a_busy_machine_ends_alike(machine, rate, times, seed) -> None:
    machine = replace(machine, rate=rate, work=machine.work * times)
    quiet, busy = (run(machine, Goodput(), seed, busy) for busy in (False, True))
    assert quiet.lost <= MOST_LOST
    assert quiet.switches <= RISES + 2
    assert busy.switches <= RISES + 4
    assert rungs_apart(quiet.sent[-1], busy.sent[-1]) <= 1


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_it_begins_where_the_link_needs_no_long_time(machine) -> None:
    told, unknown = (Goodput(), Goodput())
    told.start(machine.context())
    unknown.start(replace(machine, known=False).context())
    assert unknown.plan().send == 10.0
    first = told.plan().send
    assert first <= 10.0
    seconds = machine.nbytes(first) * 8e-9 / machine.rate
    most = max(0.1, 5e-9 * 1e6 * machine.millions)
    assert seconds <= most or first == 10.0
    larger = [machine.nbytes(cf) * 8e-9 / machine.rate for cf in (1.0, 2.0, 4.0, 8.0) if cf < first]
    assert all(each > most for each in larger)


def test_the_table_has_a_row_for_each_machine(tmp_path: Path) -> None:
    main(["--seeds", "1", "--machines", "1 M, 10 Gbit/s", "--log-dir", str(tmp_path)])
    header, *rows = (tmp_path / "table.txt").read_text().splitlines()
    assert "lost" in header
    assert [row.split("  ")[0] for row in rows] == ["1 M, 10 Gbit/s"]
