"""The quick part of the table of faults (make faults)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.commands import ROOT


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_fault_has_an_outcome_that_is_not_expected() -> None:
    command = [sys.executable, "-m", "tests.faults", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 not as expected" in done.stdout
