"""Half precision as people train in it: autocast to bf16, parameters in bf16, autocast to fp16 with
a GradScaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed
from tests.distributed.processes import run_ranks
from tests.distributed.setting import batch, flat_parameters, small_net

STEPS = 40
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda ps: torch.optim.SGD(ps, 0.02, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, 3e-3),
}


def _train(rank: int, how: str, name: str, cf: float | None) -> dict[str, Any]:
    """One batch a rank, over and over. cf: None without a compressor."""
    parameters = torch.bfloat16 if how == "bf16 parameters" else torch.float32
    computed = torch.float16 if how == "fp16 autocast" else torch.bfloat16
    model = DDP(small_net(parameters))
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=how == "fp16 autocast")
    compressor = AdaptiveCompressor("topk+int4", (1, 100), policy=Fixed(cf=cf or 1))
    if cf is not None:
        compressor.attach(model, optimizer=optimizer, scaler=scaler)
    x, y = batch(0, rank, torch.float32)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", computed, enabled="autocast" in how):
            out = model(x.to(parameters))
        loss = ((out.float() - y) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    held = () if cf is None else compressor.state_dict()["memory"].values()
    return {
        "parameters": flat_parameters(model),
        "losses": losses,
        "kept": {x.dtype for each in held for x in each.values() if isinstance(x, Tensor)},
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["bf16 autocast", "bf16 parameters", "fp16 autocast"])
def test_compressed_runs_learn_as_dense_ones_do_and_ranks_end_alike(how: str, name: str) -> None:
    dense, whole, compressed = (run_ranks(2, _train, how, name, cf) for cf in (None, 1.0, 10.0))
    for ranks in (dense, whole, compressed):
        assert torch.equal(ranks[0]["parameters"], ranks[1]["parameters"])
    # At CF 1 it is the same run, but for the last bits.
    tolerance = {"rtol": 0.02, "atol": 0.02} if how == "bf16 parameters" else {}
    torch.testing.assert_close(whole[0]["parameters"], dense[0]["parameters"], **tolerance)
    assert compressed[0]["kept"] == {torch.float32}
    for one, other in zip(compressed, dense, strict=True):
        fell, would = (run["losses"][0] - run["losses"][-1] for run in (one, other))
        assert fell > 0.5 * would > 0
