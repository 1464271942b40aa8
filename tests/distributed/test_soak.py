"""The soak (make soak), short: that it holds, and that it would notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.processes import run_ranks
from tests.distributed.soak import RESUMES, SETTINGS, soak


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_short_soak_finds_nothing(setting: str, tmp_path: Path) -> None:
    for found in run_ranks(2, soak, setting, 300, 1, str(tmp_path), limit=170):
        assert found["wrong"] == []
        assert found["resumed"] == RESUMES
        assert found["skipped"] > 0
        assert found["switches"] > 0


def _meddled(rank: int, folder: str) -> Any:
    """One rank's replica is nudged."""
    step = torch.optim.SGD.step

    def nudged(self: torch.optim.SGD, closure: Any = None) -> Any:
        found = step(self, closure)
        if rank == 1:
            self.param_groups[0]["params"][0].data[0] += 1e-9
        return found

    torch.optim.SGD.step = nudged  # type: ignore[method-assign]
    return soak(rank, "defaults", 40, 1, folder)["wrong"]


@pytest.mark.long
def test_a_replica_that_differs_is_noticed(tmp_path: Path) -> None:
    for wrong in run_ranks(2, _meddled, str(tmp_path)):
        assert "replicas differ" in wrong[0]
