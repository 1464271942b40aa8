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
from tests.distributed.setting import Scripted, batch, flat_parameters, loss_of, small_net
from tests.quick import quick

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
@pytest.mark.parametrize(
    "how", quick("bf16 parameters", of=["bf16 autocast", "bf16 parameters", "fp16 autocast"])
)
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


def _counted(rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """Bytes of dense and of compressed steps."""
    model = DDP(small_net(dtype))
    policy = Scripted([1.0, 10.0])
    compressor = AdaptiveCompressor("topk+bf16", (1, 100), policy=policy).attach(model)
    for step in range(5):
        loss_of(model, step, rank).backward()
        model.zero_grad()
    compressor.flush()
    sent = {
        (report.cf, report.wire_bytes - report.statistics_bytes, report.dense_wire_bytes)
        for report in policy.reports
    }
    return {"sent": sent, "told": policy.context.wire_bytes, "summary": compressor.summary()}


def _forecast(rank: int, dtype: torch.dtype) -> tuple[set, float, str, list[float]]:
    counted = _counted(rank, dtype)
    summary = counted["summary"]
    factors = [summary.wire_factor, summary.fp32_wire_factor]
    return counted["sent"], counted["told"](1.0), str(summary), factors


@pytest.mark.parametrize(
    ("dtype", "each"), [(torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 8)]
)
def test_a_dense_step_has_the_bytes_of_the_models_own_precision(
    dtype: torch.dtype, each: int
) -> None:
    dense = each * 1139.0  # of two ranks each sends all of it once
    for sent, told, text, (factor, against_fp32) in run_ranks(2, _forecast, dtype):
        assert {cf for cf, *_ in sent} == {1.0, 10.0}
        assert all(said == dense for *_, said in sent)
        assert [wire for cf, wire, _ in sent if cf == 1.0] == [dense] == [told]
        assert against_fp32 == pytest.approx(factor * 4 / each)
        assert ("against fp32" in text) == (each != 4)
