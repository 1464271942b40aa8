"""Bytes that change on the way to one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed
from adaptive.exchange.collectives import NBYTES
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, loss_of, small_net

STEPS, BAD, VICTIM = 4, 2, 1


class _Flipped:
    """The work of a collective, whose output has lost a bit when it is there."""

    def __init__(self, work: dist.Work, out: Tensor) -> None:
        self._work, self._out = work, out

    def get_future(self) -> Any:
        def flip(future: Any) -> Any:
            value = future.value()
            self._out.view(-1)[self._out.numel() // 4] ^= 4  # of what came from rank 0
            return value

        return self._work.get_future().then(flip)


def _flip_bytes(monkeypatch: pytest.MonkeyPatch, collective: str) -> dict[str, bool]:
    """From now on, where the switch that is returned is on, in this process only."""
    name = {"all_gather": "all_gather_single", "broadcast": "broadcast"}.get(collective, collective)
    if not hasattr(dist, name):
        name = "all_gather_into_tensor"
    true, switch = getattr(dist, name), {"on": False}

    def flipped(out: Tensor, *args: Any, **options: Any) -> Any:
        work = true(out, *args, **options)
        return _Flipped(work, out) if switch["on"] and out.dtype == torch.uint8 else work

    monkeypatch.setattr(dist, name, flipped)
    return switch


def _train(rank: int, base: str, exchange: str, collective: str, checksum: bool) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        switch = _flip_bytes(patch, collective)
        model = DDP(small_net(torch.float32))
        compressor = AdaptiveCompressor(
            base, (2, 100), policy=Fixed(cf=4), exchange=exchange, checksum=checksum
        ).attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            switch["on"] = rank == VICTIM and step == BAD
            optimizer.zero_grad()
            try:
                loss_of(model, step, rank).backward()
            except RuntimeError as error:
                return {"step": step, "error": str(error)}
            optimizer.step()
    sent = compressor.summary().payload_bytes
    return {"step": None, "parameters": flat_parameters(model), "payload_bytes": sent}


CASES = [
    ("topk", "all_gather", "all_gather"),
    ("qsgd", "all_gather", "all_gather"),
    ("int8", "all_gather", "all_gather"),
    ("topk", "sharded", "all_to_all_single"),
    ("qsgd", "sharded", "all_gather"),
    ("int8", "sharded", "all_to_all_single"),
    ("topk", "voted_indices", "all_gather"),
    ("topk", "voted_indices", "all_to_all_single"),
]


@pytest.mark.parametrize(("base", "exchange", "collective"), CASES)
def test_a_flipped_bit_is_found_and_no_rank_trains_on(
    base: str, exchange: str, collective: str
) -> None:
    other, victim = run_ranks(
        2, _train, base, exchange, collective, True, lost=[9], timeout=5, limit=60
    )
    assert victim["step"] == BAD
    assert "CorruptPayload: bucket " in victim["error"]
    assert "the payload from rank 0 has not its checksum" in victim["error"]
    assert other["step"] in (BAD, BAD + 1)  # its peer is gone


def test_without_checksums_the_ranks_part_in_silence() -> None:
    first, second = run_ranks(2, _train, "int8", "all_gather", "all_gather", False)
    assert not torch.equal(first["parameters"], second["parameters"])


def _payload_bytes(rank: int, exchange: str, checksum: bool) -> int:
    model = DDP(small_net(torch.float32))
    compressor = AdaptiveCompressor(
        "int8", (2, 100), policy=Fixed(cf=4), exchange=exchange, checksum=checksum
    ).attach(model)
    loss_of(model, 0, rank).backward()
    return compressor.summary().payload_bytes


@pytest.mark.parametrize(("exchange", "signed"), [("all_gather", 1), ("sharded", 3)])
def test_checksums_are_among_the_bytes_reported(exchange: str, signed: int) -> None:
    """signed: payloads that a rank hands to collectives for one bucket: a whole one, or two shards
    and the mean of its own."""
    without, with_them = (run_ranks(2, _payload_bytes, exchange, each)[0] for each in (False, True))
    assert with_them - without == signed * NBYTES
