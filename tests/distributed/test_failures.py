"""A rank that dies, stops or cannot decode: every other rank gets an error in the same step."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, LocalSteps
from adaptive.exchange import strategies
from adaptive.exchange.choice import strategies as allowed_by
from compressors import compressor_names, make_compressor
from compressors.base import InvalidPayload
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, loss_of, small_net

FAILS_AT = 3  # buckets have settled by then


def _pairs() -> list[tuple[str, str]]:
    """Every compressor by name with every exchange that it allows."""
    pairs = []
    for name in compressor_names():
        base = f"{name}+fp32" if name == "topk" else name
        pairs += [(base, way.name) for way in allowed_by(make_compressor(base))]
    return pairs


QUICK = [
    ("topk", "all_gather"),
    ("qsgd", "all_gather"),
    ("bf16", "all_reduce"),
    ("int8", "sharded"),
    ("topk", "voted_indices"),
    ("powersgd", "all_reduce"),
]


def _lose_a_peer(rank: int, base: str, exchange: str, how: int, link: str | None) -> dict[str, Any]:
    """Train until rank 1 is taken away in the middle of its backward."""
    model = DDP(small_net(torch.float32), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compressor = AdaptiveCompressor(
        base, (2, 100), policy="fixed", exchange=exchange, network=link
    ).attach(model)
    for step in range(FAILS_AT + 1):
        before = flat_parameters(model)
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        if rank == 1 and step == FAILS_AT:
            first = next(model.module.parameters())  # its gradient comes last
            first.register_hook(lambda _: os.kill(os.getpid(), how))
        try:
            loss.backward()
        except RuntimeError as error:
            return {"step": step, "error": str(error), **_refusals(compressor, model, rank)}
        optimizer.step()
    return {"step": None, "moved": float((flat_parameters(model) - before).abs().max())}


def _refusals(compressor: AdaptiveCompressor, model: DDP, rank: int) -> dict[str, str]:
    """What is said to a script that goes on, or saves, after a failed exchange."""
    said = {}
    for name, go_on in {
        "next": lambda: loss_of(model, 0, rank).backward(),
        "state": compressor.state_dict,
    }.items():
        try:
            go_on()
        except RuntimeError as error:
            said[name] = str(error)
    return said


def _check_loss_of_a_peer(base: str, exchange: str, how: int, link: str | None = None) -> None:
    survivor, _ = run_ranks(
        2, _lose_a_peer, base, exchange, how, link, lost=[1], timeout=5, limit=60
    )
    assert survivor["step"] == FAILS_AT, survivor
    assert f"step {FAILS_AT} failed" in survivor["state"]
    assert "next" in survivor


@pytest.mark.parametrize(("base", "exchange"), QUICK)
def test_the_survivor_of_a_killed_rank_gets_an_error(base: str, exchange: str) -> None:
    _check_loss_of_a_peer(base, exchange, signal.SIGKILL)


def test_over_an_emulated_link_too() -> None:
    _check_loss_of_a_peer("qsgd", "all_gather", signal.SIGKILL, "100mbit")


@pytest.mark.long
@pytest.mark.parametrize(("base", "exchange"), _pairs())
def test_with_every_base_and_exchange(base: str, exchange: str) -> None:
    _check_loss_of_a_peer(base, exchange, signal.SIGKILL)


@pytest.mark.parametrize(("base", "exchange"), QUICK[:1])
def test_a_rank_that_stops_is_an_error_after_the_groups_timeout(base: str, exchange: str) -> None:
    _check_loss_of_a_peer(base, exchange, signal.SIGSTOP)


def _cannot_decode(rank: int, base: str, exchange: str) -> str:
    """Rank 1 cannot read what arrives in the second round."""
    if rank == 1:
        read, calls = strategies.unpack, iter(range(10**6))

        def corrupt(*args: Any) -> Any:
            if next(calls) == 2:  # two payloads came in the first round
                raise InvalidPayload("a bit was flipped")
            return read(*args)

        strategies.unpack = corrupt
    model = DDP(small_net(torch.float32))
    AdaptiveCompressor(base, (2, 100), policy="fixed", exchange=exchange).attach(model)
    try:
        for step in range(3):
            model.zero_grad()
            loss_of(model, step, rank).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_cannot_decode_the_second_round_says_so() -> None:
    errors = run_ranks(2, _cannot_decode, "qsgd", "sharded", lost=[9], timeout=5, limit=60)
    assert "a bit was flipped" in errors[1]
    assert errors[0]  # its peer is gone


def _lose_a_peer_while_stepping(rank: int) -> dict[str, Any]:
    """Rank 1 is killed before it begins an exchange that rank 0 does not wait for in backward."""
    model = DDP(small_net(torch.float32), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compressor = AdaptiveCompressor(policy="fixed", sync=LocalSteps(4, overlap=3)).attach(model)
    for step in range(20):
        if rank == 1 and step == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        try:
            loss_of(model, step, rank).backward()
            optimizer.step()
        except RuntimeError as error:
            return {"step": step, "error": str(error), **_refusals(compressor, model, rank)}
    return {"step": None}


def test_an_exchange_that_fails_while_ranks_step_fails_before_its_means_are_due() -> None:
    survivor, _ = run_ranks(2, _lose_a_peer_while_stepping, lost=[1], timeout=5, limit=60)
    assert 8 <= survivor["step"] <= 11, survivor  # the exchange of step 8 is due before step 11
    assert "step 1 failed" in survivor["state"]
    assert "next" in survivor
