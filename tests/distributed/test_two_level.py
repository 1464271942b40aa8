"""Two levels: a node of several ranks is one rank to all that compresses.

Four ranks are two nodes of two. What they do is compared with two ranks, each of which has the
batches of a whole node.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from adaptive import AdaptiveCompressor, LocalSteps, ParameterServer, TwoLevel
from policies import Fixed
from tests.distributed.processes import run_ranks
from tests.distributed.setting import batch, flat_parameters, small_net

STEPS = 12

WAYS: dict[str, dict[str, Any]] = {
    "gathered": {"base": "topk+int4"},
    "layers": {"base": "topk+fp32", "granularity": "layer"},
    "server": {"base": "topk", "between": ParameterServer(down_cf=5, own_memory=True)},
    "votes": {"base": "topk+fp32", "between": "voted_indices"},
    "summed": {"base": "bf16", "cf": 2},
    "rounds": {"base": "powersgd", "cf": 4},
    "quantized": {"base": "int8", "cf": 4},
    "random": {"base": "randomk"},
    "dense": {"base": "topk", "cf": 1},
    "local steps": {"base": "topk", "sync": LocalSteps(3)},
}
OPTIMIZERS = {
    "none": lambda parameters: SGD(parameters, lr=0.05),
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def _node_loss(model: nn.Module, step: int, ranks: list[int]) -> Tensor:
    losses = []
    for rank in ranks:
        x, y = batch(step, rank)
        losses.append(((model(x) - y) ** 2).mean())
    return torch.stack(losses).mean()


def _train(rank: int, way: str, optimizer: str, levels: bool, steps: int = STEPS) -> dict[str, Any]:
    """With levels rank i has the batches i, without 2i and 2i + 1."""
    settings = dict(WAYS[way])
    cf, between = settings.pop("cf", 10), settings.pop("between", "auto")
    model = DDP(small_net(), bucket_cap_mb=0.002)
    opt = OPTIMIZERS[optimizer](list(model.parameters()))
    exchange = TwoLevel(node=2, between=between) if levels else between
    compressor = AdaptiveCompressor(
        policy=Fixed(cf), cf_range=(2, 100), exchange=exchange, **settings
    )
    compressor.attach(model, optimizer=None if optimizer == "none" else opt)
    ranks = [rank] if levels else [2 * rank, 2 * rank + 1]
    for step in range(steps):
        opt.zero_grad()
        _node_loss(model, step, ranks).backward()
        opt.step()
    compressor.flush()
    summary = compressor.summary()
    return {"parameters": flat_parameters(model), "summary": summary, "cf": compressor.cf}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_node_is_one_rank(way: str, optimizer: str) -> None:
    nodes = run_ranks(4, _train, way, optimizer, True)
    ranks = run_ranks(2, _train, way, optimizer, False)
    for rank, of_node in enumerate(nodes):
        alone = ranks[rank // 2]
        assert torch.equal(of_node["parameters"], nodes[rank // 2 * 2]["parameters"])
        if way != "local steps":  # in the middle of a round
            assert torch.equal(of_node["parameters"], nodes[0]["parameters"])
        assert torch.allclose(of_node["parameters"], alone["parameters"], rtol=1e-6, atol=1e-9)
        assert of_node["cf"] == alone["cf"]
