"""The Lightning callback without DDP: one process is told, several are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.frameworks import needs
from tests.distributed.setting import listen

pytestmark = [pytest.mark.long, needs("lightning")]


def _trainer(world_size: int) -> Any:
    strategy = SimpleNamespace(model=torch.nn.Linear(2, 2))
    return SimpleNamespace(strategy=strategy, world_size=world_size, global_step=5)


def test_without_ddp_one_process_is_told_and_several_are_refused() -> None:
    from adaptive.integrations.lightning import AdaptiveCompressionCallback

    told = listen()
    callback = AdaptiveCompressionCallback(cf_range=(10, 100))
    callback.on_train_start(_trainer(1), None)
    callback.on_train_end(_trainer(1), None)
    assert callback.state_dict() == {}
    assert len(told) == 1
    assert "one process" in told[0]
    with pytest.raises(TypeError, match=r"got SimpleNamespace with 4 processes.*strategy='ddp'"):
        AdaptiveCompressionCallback().on_train_start(_trainer(4), None)
    with pytest.raises(TypeError, match="not both"):
        AdaptiveCompressionCallback(callback.compressor, cf_range=(10, 100))
    with pytest.raises(ValueError, match="base"):  # when it is made, not when training starts
        AdaptiveCompressionCallback(base="top")
