"""A script's default device (`torch.set_default_device`) is not that of the host's numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore

from adaptive import AdaptiveCompressor
from adaptive.exchange.strategies import Gathered
from adaptive.network.collectives import PendingSum
from compressors.kernels import blocks
from tests.distributed.test_device_path import ByStep


def test_training_reads_no_number_from_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meta tensor in the place of one of the host's would raise where it is read. (torch forgets
    the default device in `backward()`, but not in `step()`.)"""
    monkeypatch.setattr(blocks, "force_device_path", True)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = DDP(nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        policy = ByStep([10.0, 30.0, 1.0])
        options: dict[str, Any] = {"memory": "updates", "exchange": Gathered()}  # it is rehearsed
        compressor = AdaptiveCompressor("topk", (2, 1000), policy=policy, **options)
        inputs = torch.randn(6, 4, 64)
        with torch.device("meta"):
            compressor.attach(model, optimizer=optimizer)
            for x in inputs:
                model(x).square().mean().backward()
                optimizer.step()
            compressor.load_state_dict(compressor.state_dict())
            compressor.detach()
    finally:
        dist.destroy_process_group()


def test_statistics_are_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """To pinned memory, which only the host has."""
    empty, there = torch.empty, torch.zeros(3, device="meta")
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda device: event)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **more: empty(*args, **more))
    monkeypatch.setattr(PendingSum, "wait", lambda _: torch.ones(3, device="cpu"))
    group: Any = None
    with torch.device("meta"):
        assert PendingSum(there, group).read().tolist() == [1.0] * 3
