"""What a compressor says of itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    AdaptiveCompressor,
    Delayed,
    Gossip,
    LinkSpec,
    LocalSteps,
    Network,
    Warmup,
)
from runs.modelled_clock import ModelledClock
from runs.simulate.ranks import run_ranks
from tests.unit.ranks import simulates


@simulates
def test_a_compressor_says_what_it_is() -> None:
    said: list[str] = []

    def train(rank: int, _: object) -> None:
        model = DDP(nn.Linear(20, 20))
        compressor = AdaptiveCompressor(
            "topk",
            (10, 100),
            policy=Warmup(steps=2),
            network=Network(clock=ModelledClock(0.01, LinkSpec(2e5, 0.001))),
        )
        said.append(repr(compressor))
        compressor.attach(model)
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(3, 20)).sum().backward()
        said.append(repr(compressor))
        compressor.close()
        compressor.detach()
        said.append(repr(compressor))

    run_ranks(2, train)
    assert len(set(said)) == 3
    fresh, attached, detached = dict.fromkeys(said)
    assert "(base='topk+int4', cf_range=(10, 100), policy=Warmup(" in fresh
    assert fresh.endswith("; not attached)")
    assert attached.endswith("memory='residual'; CF 16 after 4 steps on 2 ranks)")
    assert "; detached, " in detached


def test_a_sync_says_the_same_of_numpys_numbers() -> None:
    """Its text is in a state, which a run with Python's numbers may go on from; and the number of
    steps, which `torch.load` refuses if it is NumPy's."""
    two, quarter = np.int64(2), np.float64(0.25)
    assert repr(Delayed(two)) == repr(Delayed(2))
    assert repr(Delayed((np.int64(1), two))) == repr(Delayed((1, 2)))
    assert repr(LocalSteps(4, overlap=two)) == repr(LocalSteps(4, overlap=2))
    assert repr(Gossip(consensus_step=quarter)) == repr(Gossip(consensus_step=0.25))
