"""Going on with a run: over the links that it has begun over."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import job
from runs.checkpoint import Checkpoint
from runs.config import TrainConfig
from runs.job import make_job
from runs.netlab.lab import Lab
from runs.parser import UsageError


@pytest.mark.parametrize("rate", [None, "10mbit"])
@pytest.mark.parametrize("present", [None, "10mbit", "1gbit"])
def test_a_run_goes_on_over_the_links_that_it_has_begun_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rate: str | None, present: str | None
) -> None:
    netlab = None if rate is None else ("--network", rate)
    config = TrainConfig(log_dir=str(tmp_path), netlab=netlab)
    lab = "" if rate is None else f"netlab --network {rate} --workers 2 -- "
    assert config.resume_command == f"python -m runs {lab}train --resume {tmp_path}"
    monkeypatch.setattr(job, "find_checkpoint", lambda folder: Checkpoint(folder, 3, 2, config, ()))
    monkeypatch.setattr(
        Lab, "of_environment", lambda: None if present is None else Lab(network=present)
    )
    given = {"resume": str(tmp_path), "steps": 1000}
    if rate == present:
        assert make_job(given, None).checkpoint is not None
        return
    with pytest.raises(UsageError) as refused:
        make_job(given, None)
    links = "this machine's own network" if rate is None else f"netlab's real links of {rate}"
    assert str(refused.value) == (
        f"--resume {tmp_path}: is a run over {links}; accepted: {config.resume_command}"
    )
