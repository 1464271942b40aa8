"""How far it is from DDP's hook to a compressor."""

from __future__ import annotations

import traceback

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, TopK
from compressors.base import Payload, Spec
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, loss_of, small_net


class _Looking(TopK):
    """Notes who has called it."""

    deepest = 0

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        self._look()
        return super().compress(x, spec, add)

    def _look(self) -> None:
        names = [frame.name for frame in traceback.extract_stack()[:-2]]
        if "adaptive_hook" in names:
            between = len(names) - 1 - names.index("adaptive_hook")
            self.deepest = max(self.deepest, between)


def _depth(rank: int) -> int:
    base = _Looking()
    model = DDP(small_net(torch.float32))
    AdaptiveCompressor(base, (2, 100), policy=Scripted([10.0])).attach(model)
    for step in range(3):
        loss_of(model, step, rank).backward()
    return base.deepest


def test_the_way_from_the_hook_to_a_compressor_is_short() -> None:
    assert 1 <= run_ranks(1, _depth)[0] <= 12
