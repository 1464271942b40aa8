"""The races' test for a GPU, kept running where there is none: on the path of a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.late_network import FAMILIES
from tests.gpu.test_streams import run


@pytest.mark.long
def test_a_family_of_cases_runs_in_both_ways(tmp_path: Path) -> None:
    assert len({case for cases in FAMILIES.values() for case in cases}) > 25
    run("serial", tmp_path / "right", "scalers")
    run("late", tmp_path / "right", "scalers")
