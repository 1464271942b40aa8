"""Gossip: each rank steps by itself, and exchanges parameters with its neighbours only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from adaptive import AdaptiveCompressor
from adaptive.exchange.topology import named
from tests.distributed.processes import run_ranks
from tests.distributed.setting import batch, flat_parameters, small_net

STEPS = 12

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
}


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return ((model(x) - y) ** 2).mean()


def _reference(ranks: int, optimizer: str, gossip: str, topology: str) -> list[Tensor]:
    """Each rank's parameters, without compression: replicas in one process, mixed as the papers
    write it."""
    models = [small_net() for _ in range(ranks)]
    steps = [OPTIMIZERS[optimizer](model) for model in models]
    rounds = named(topology, ranks).rounds

    def mix(step: int) -> None:
        x = rounds[step % len(rounds)] @ torch.stack([flat_parameters(m) for m in models])
        for model, there in zip(models, x, strict=True):
            nn.utils.vector_to_parameters(there, model.parameters())

    for step in range(STEPS):
        for rank, model in enumerate(models):
            steps[rank].zero_grad()
            _loss(model, step, rank).backward()
        if gossip in ("d-psgd", "dcd-psgd") and step:
            mix(step - 1)  # of the gradients of where they stood
        for each in steps:
            each.step()
        if gossip in ("deepsqueeze", "choco-sgd"):
            mix(step)
    return [flat_parameters(model) for model in models]


def _train(rank: int, optimizer: str, base: str, options: dict[str, Any]) -> dict[str, Any]:
    """Some steps of gossip; what the ranks have come to, and what has been handed to isend."""
    model = DDP(small_net())
    steps = OPTIMIZERS[optimizer](model)
    start = flat_parameters(model)
    compressor = AdaptiveCompressor(base, (8, 8), exchange="gossip", debug=3, **options).attach(
        model, optimizer=steps
    )
    sent, moved, plain = 0, torch.zeros_like(start), dist.isend

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return plain(tensor, *args, **kwargs)

    dist.isend = counting
    before = start

    def see(*_: Any) -> None:
        nonlocal before
        before = flat_parameters(model)

    def count(*_: Any) -> None:
        nonlocal moved
        moved += flat_parameters(model) - before

    for step in range(STEPS):
        steps.zero_grad()
        _loss(model, step, rank).backward()
        steps.step()
    own = flat_parameters(model)
    with compressor.averaged():
        mean = flat_parameters(model)
    assert torch.equal(own, flat_parameters(model))
    summary, explained = compressor.summary(), compressor.explain()
    state = compressor.state_dict()
    compressor.detach()
    return {
        "own": own,
        "mean": mean,
        "united": flat_parameters(model),
        "summary": summary,
        "explained": explained,
        "sent": sent,
        "state": state,
        "start": start,
    }


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("gossip", "topology", "optimizer"),
    [
        ("d-psgd", "ring", "sgd"),
        ("dcd-psgd", "exponential", "adamw"),
        ("deepsqueeze", "one_peer", "adamw"),
        ("choco-sgd", "torus", "sgd"),
    ],
)
def test_uncompressed_it_is_what_replicas_do_that_mix(
    ranks: int, gossip: str, topology: str, optimizer: str
) -> None:
    options = {"gossip": gossip, "topology": topology}
    found = run_ranks(ranks, _train, optimizer, "none", options)
    own = _reference(ranks, optimizer, gossip, topology)
    for rank, mine in enumerate(found):
        torch.testing.assert_close(mine["own"], own[rank], rtol=0, atol=1e-12)
        mean = torch.stack(own).mean(0)
        torch.testing.assert_close(mine["mean"], mean, rtol=0, atol=1e-12)
        assert torch.equal(mine["united"], mine["mean"])
        payload = mine["summary"].payload_bytes
        print(payload, mine["sent"], mine["summary"], mine["explained"])
