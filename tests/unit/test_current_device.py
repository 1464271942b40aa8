"""Objects are told among ranks while the model's device is the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from adaptive.session import compressor as module
from tests.unit.in_one_process import one_rank


def test_a_cuda_device_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", enter)
    with module.on_device(torch.device("cuda", 1)):
        assert entered == [torch.device("cuda", 1)]
    with module.on_device(torch.device("cpu")):
        assert len(entered) == 1


def test_whatever_tells_objects_does_so_on_the_models_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch sends objects of an NCCL group from the current device, which need not be the model's:
    DDP is content with `device_ids`."""
    inside, told = [0], []
    gather = dist.all_gather_object

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    def noted(*args: Any, **kwargs: Any) -> None:
        told.append(inside[0])
        gather(*args, **kwargs)

    monkeypatch.setattr(module, "on_device", on_device)
    monkeypatch.setattr(dist, "all_gather_object", noted)
    with one_rank():
        model = DDP(nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        compressor = AdaptiveCompressor()
        for call in (
            lambda: compressor.attach(model, optimizer=optimizer),
            lambda: compressor.load_state_dict(compressor.state_dict("gathered")),
            compressor.close,
            compressor.detach,
        ):
            before = len(told)
            call()
            assert all(told[before:])
        assert len(told) > 2
