"""The study of gossip's consensus step runs, and what diverges is said to."""

from __future__ import annotations

import pytest

from adaptive import Gossip
from docs.studies.consensus import held_out_loss, main
from tests.unit.ranks import simulates


@simulates
def test_it_prints_a_loss_for_each_consensus_step(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--steps", "2", "--workers", "2", "--consensus-steps", "0.5", "0.1", "--cfs", "10"])
    out = capsys.readouterr().out
    assert out.startswith("all-reduce: 2.9")  # about log(20)
    for algorithm in ("choco-sgd, CF 10", "deepsqueeze, CF 10"):
        assert f"{algorithm} 2.9" in out


@simulates
def test_gossip_with_the_mean_of_all_is_all_reduce() -> None:
    complete = Gossip("complete", "deepsqueeze", consensus_step=1.0)
    losses = [held_out_loss("none", 1.0, sync, 3, 2) for sync in (None, complete)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
