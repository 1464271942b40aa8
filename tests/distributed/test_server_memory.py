"""The sharded exchange with an error memory of the server's own, as in DoubleSqueeze."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, ParameterServer
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    flat_parameters,
    local_gradients,
    loss_of,
    same,
    small_net,
)
from tests.distributed.test_resume import Run
from tests.quick import quick

STEPS = 8


def _held(rank: int, down_cf: float | None) -> dict[str, Any]:
    """Sums over all elements, and what the server holds before and after a step that is spoilt."""
    model = DDP(small_net(), bucket_cap_mb=0.004)
    compressor = AdaptiveCompressor(
        "topk+fp32",
        (8, 8),
        policy="fixed",
        exchange=ParameterServer(down_cf=down_cf, own_memory=True),
    ).attach(model)
    own = sent = 0.0
    before: dict[str, Tensor] = {}
    for step in range(STEPS):
        before = compressor.state_dict()["server"]
        own += sum(float(g.sum()) for g in local_gradients(model, step, rank).values())
        model.zero_grad()
        loss_of(model, step, rank).backward()
        sent += sum(float(p.grad.sum()) for p in model.parameters() if p.grad is not None)
    state = compressor.state_dict()
    loss = loss_of(model, STEPS, rank)
    (loss * (torch.inf if rank == 1 else 1.0)).backward()
    after = compressor.state_dict()
    residuals = [kept["residual"] for kept in state["memory"].values()]
    return {
        "own": own,
        "sent": sent,
        "waits": sum(float(each.sum()) for each in residuals),
        "server": sum(float(each.sum()) for each in state["server"].values()),
        "holds": sum(float(each.abs().sum()) for each in state["server"].values()),
        "sends all": all(
            not torch.equal(kept, before[name]) for name, kept in state["server"].items()
        ),
        "unchanged": same(state["server"], after["server"]),
    }


@pytest.mark.parametrize(("ranks", "down_cf"), quick((2, None), of=[(2, None), (4, 20.0)]))
def test_what_means_lose_waits_with_the_server(ranks: int, down_cf: float | None) -> None:
    """Sum of what was sent + what waits with the ranks and with the server = sum of gradients; a
    step that is not finite changes nothing of it."""
    found = run_ranks(ranks, _held, down_cf)
    mean = sum(each["own"] - each["waits"] for each in found) / ranks
    server = sum(each["server"] for each in found)  # each of another shard
    for each in found:
        assert each["sent"] == found[0]["sent"]
        assert each["sent"] + server == pytest.approx(mean, abs=1e-9)
        assert each["holds"] > 0
        assert each["sends all"]
        assert each["unchanged"]


def _resumed(rank: int, path: str) -> tuple[list[Tensor], list[dict[str, Any]], str]:
    def run() -> Run:
        return Run(Fixed(cf=8), "topk", ParameterServer(own_memory=True))

    straight, stopped, resumed = run(), run(), run()
    straight.train(rank, 0, 16)
    stopped.train(rank, 0, 9)
    torch.save(stopped.state(), f"{path}/{rank}")
    resumed.load(rank, torch.load(f"{path}/{rank}", weights_only=True))
    resumed.train(rank, 9, 16)
    both = (straight, resumed)
    told = ""
    try:
        ParameterServer(down_cf=1, own_memory=True)
    except ValueError as error:
        told = str(error)
    states = [each.compressor.state_dict() for each in both]
    return [flat_parameters(each.model) for each in both], states, told


def test_the_servers_memory_is_saved(tmp_path: Path) -> None:
    for parameters, states, told in run_ranks(2, _resumed, str(tmp_path)):
        assert torch.equal(*parameters)
        assert same(*states)
        assert states[0]["server"]
        assert told.startswith("own_memory=True: needs means that are compressed")
