"""A model that is too small for statistics is trained dense, and nothing is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

from adaptive import AdaptiveCompressor
from tests.distributed.processes import run_ranks
from tests.distributed.setting import batch, flat_parameters, listen


def _train(rank: int, options: dict[str, Any] | None, width: int = 1) -> tuple[Tensor, Any]:
    """21 parameters by 40 steps of SGD with momentum, without a compressor for None."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 4)).double()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = None
    if options is not None:
        compressor = AdaptiveCompressor(**options).attach(model, optimizer=optimizer)
    for step in range(40):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        (model(x)[:, :3] - y).square().mean().backward()
        optimizer.step()
    if options is not None:
        summary = compressor.summary()
        compressor.load_state_dict(compressor.state_dict())
        found = (summary.bytes_sent / summary.dense_bytes, summary.steps, compressor.explain())
        compressor.detach()
    return flat_parameters(model), found


def test_a_model_of_21_parameters_stays_dense_and_sends_nothing_else() -> None:
    dense = run_ranks(2, _train, None)[0][0]
    assert dense.numel() == 21
    for ours, (share, steps, explained) in run_ranks(2, _train, {}):
        assert torch.equal(ours, dense)
        assert (share, steps) == (1.0, 40)
        assert "so small" in explained


def test_a_policy_that_is_named_and_a_larger_model_are_measured() -> None:
    for _, (share, _, explained) in run_ranks(2, _train, {"policy": "goodput"}):
        assert share > 1
        assert "so small" not in explained
    for _, (share, _, explained) in run_ranks(2, _train, {}, 20_000):
        assert share != 1
        assert "so small" not in explained


def _warned(rank: int) -> list[str]:
    told = listen()
    model = DDP(nn.Linear(12, 3))
    AdaptiveCompressor().attach(model, optimizer=torch.optim.AdamW(model.parameters()))
    return told


def test_nobody_is_warned_of_compression_that_does_not_happen() -> None:
    assert run_ranks(2, _warned) == [[], []]


def _resumed(rank: int, kind: type[Optimizer], options: dict[str, Any]) -> str:
    """The error if a state that default settings have saved is loaded with others."""
    state: dict[str, Any] = {}
    for each in ({}, options):
        model = DDP(nn.Linear(12, 3).double())
        optimizer = kind(model.parameters(), **({"momentum": 0.9} if kind is SGD else {}))
        compressor = AdaptiveCompressor(**each).attach(model, optimizer=optimizer)
        if state:
            with pytest.raises(ValueError, match="memory_kind") as error:
                compressor.load_state_dict(state)
        state = compressor.state_dict()
        compressor.detach()
    return f"{error.value}"


@pytest.mark.parametrize("options", [{"policy": "goodput"}, {"debug": 1}])
def test_its_state_is_refused_by_a_run_that_compresses_with_the_reason(options: Any) -> None:
    """Momentum correction took it for a state of a run that had given momentum correction up."""
    for kind, memory in ((SGD, "momentum"), (AdamW, "updates")):
        for error in run_ranks(2, _resumed, kind, options):
            assert f"memory_kind is 'none', expected '{memory}'" in error
            assert "too small for compression" in error


def _on_one_rank_only(rank: int) -> str:
    from datetime import timedelta

    from adaptive.network import agreement

    agreement.PATIENCE = timedelta(seconds=2)
    model = DDP(nn.Linear(12, 3).double())
    compressor = AdaptiveCompressor(policy="fixed").attach(model)
    for step in range(4):
        if rank == 0 and step == 2:
            try:
                compressor.load_state_dict(compressor.state_dict())
            except RuntimeError as error:
                return f"{error}"
        try:
            x, y = batch(step, rank)
            (model(x) - y).square().mean().backward()
        except RuntimeError as error:
            return f"{error}"
    return ""


def test_a_state_that_one_rank_alone_loads_is_an_error_and_no_abort() -> None:
    loaded, trained = run_ranks(2, _on_one_rank_only, timeout=10, lost=[2])
    assert loaded.startswith("load_state_dict must be called on every rank")
    assert "Ranks 1" in loaded
    assert trained
