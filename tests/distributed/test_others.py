"""Other people's compressors: DDP hooks as rungs of the ladder, and examples/grace.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, GraVAC, HookRung, MemoryTimeline
from examples.grace import GraceCompressor, GraceTopK
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, flat_parameters, loss_of, small_net


def _train(
    rank: int, cfs: list[float], kind: str, momentum: float, steps: int = 8
) -> dict[str, Any]:
    model = DDP(small_net(torch.float32), bucket_cap_mb=25 if kind == "powersgd" else 0.002)
    hooks: dict[float, Any] = {
        "fp16": {2.0: default_hooks.fp16_compress_hook},
        "powersgd": {
            4.0: HookRung(
                powerSGD_hook.powerSGD_hook,
                powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2),
            )
        },
        "dense": {3.0: default_hooks.allreduce_hook},
    }[kind]
    policy, timeline = Scripted(cfs), MemoryTimeline()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    compressor = AdaptiveCompressor(
        "topk", (2, 100), policy=policy, hooks=hooks, timeline=timeline
    ).attach(model, optimizer=optimizer)
    held = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
        memory = compressor.state_dict()["memory"]
        held.append(sum("residual" in kept for kept in memory.values()))
    return {
        "parameters": flat_parameters(model),
        "sent": [report.cf for report in policy.reports],
        "gains": [report.cf in report.measurements for report in policy.reports],
        "held": held,
        "reasons": [event.reason for event in timeline.events],
        "bytes": [report.wire_bytes for report in policy.reports],
    }


def test_the_residual_goes_along_with_the_hooks_first_step() -> None:
    results = run_ranks(2, _train, [10.0, 10.0, 2.0, 2.0, 2.0, 10.0], "fp16", 0.0)
    for result in results:
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert result["sent"][:7] == [10.0, 10.0, 2.0, 2.0, 2.0, 10.0, 10.0]
        assert result["gains"][:6] == [True, True, False, False, False, True]
        assert result["held"][:6] == [6, 6, 0, 0, 0, 6]
    dense = run_ranks(2, _train, [1.0], "fp16", 0.0)
    assert results[0]["bytes"][3] < 0.6 * dense[0]["bytes"][3]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_hook_that_loses_nothing_is_dense_training(momentum: float) -> None:
    for cfs in ([1.0], [10.0, 10.0, 1.0, 1.0, 10.0]):
        dense = run_ranks(2, _train, cfs, "dense", momentum)
        through = [3.0 if cf == 1 else cf for cf in cfs]
        hooked = run_ranks(2, _train, through, "dense", momentum)
        torch.testing.assert_close(
            hooked[0]["parameters"], dense[0]["parameters"], rtol=1e-5, atol=1e-6
        )


def test_torchs_powersgd_hook_with_its_own_state() -> None:
    results = run_ranks(2, _train, [10.0, 4.0, 4.0, 4.0, 4.0], "powersgd", 0.0)
    assert torch.equal(results[0]["parameters"], results[1]["parameters"])
    assert 4.0 in results[0]["sent"]


class GraceSigns:
    """No ratio, no floating-point tensor but the scale."""

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        return [tensor >= 0, tensor.abs().mean().reshape(1)], tensor.shape

    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        signs, scale = tensors
        return ((signs.to(scale.dtype) * 2 - 1) * scale).view(ctx)


def _grace(rank: int, kind: str, exchange: str) -> dict[str, Any]:
    """Sum of sent + residual - sum of gradients, on real processes."""
    model = DDP(small_net(), bucket_cap_mb=0.004)
    base = (
        GraceCompressor(GraceTopK())
        if kind == "topk"
        else GraceCompressor(GraceSigns(), ratio=None, cf=32)
    )
    policy = Scripted([10.0, 40.0, 1.0, 10.0] if kind == "topk" else [32.0, 1.0, 32.0])
    compressor = AdaptiveCompressor(
        base, (10, 100) if kind == "topk" else (32, 32), policy=policy, exchange=exchange
    ).attach(model)
    sent, sums = 0.0, 0.0
    for step in range(6):
        gradients = torch.autograd.grad(loss_of(model.module, step, rank), model.parameters())
        sums = sums + torch.cat([g.flatten() for g in gradients])
        model.zero_grad()
        loss_of(model, step, rank).backward()
        mean = torch.cat([p.grad.flatten() for p in model.parameters()])
        sent = sent + mean * dist.get_world_size()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.02 * p.grad
    memory = compressor.state_dict()["memory"]
    residual = torch.cat(
        [
            memory.get(name, {}).get("residual", torch.zeros(p.numel(), dtype=p.dtype))
            for name, p in model.module.named_parameters()
        ]
    )
    both = torch.stack([sums, residual])
    dist.all_reduce(both)
    return {
        "deviation": float((sent + both[1] - both[0]).abs().max() / both[0].abs().max()),
        "parameters": flat_parameters(model),
        "gain": policy.reports[0].measurements[policy.cfs[0]].gain("error_fed"),
    }


@pytest.mark.parametrize("kind", ["topk", "signs"])
def test_grace_objects_lose_nothing(kind: str) -> None:
    results = run_ranks(2, _grace, kind, "auto")
    for result in results:
        assert result["deviation"] < 1e-12
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert 0 < result["gain"] < 1


def _scaled(rank: int) -> list[float]:
    """A gradient far below what half precision can hold, under a loss scale."""
    layer = torch.nn.Linear(4, 1, bias=False)
    model = DDP(layer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    AdaptiveCompressor(
        "topk",
        (2, 100),
        policy=Scripted([2.0]),
        hooks={2: default_hooks.fp16_compress_hook},
        memory="none",
    ).attach(model, scaler=scaler)
    scaler.scale(1e-8 * model(torch.ones(2, 4)).mean()).backward()
    return (layer.weight.grad / scaler.get_scale()).flatten().tolist()


def test_a_hook_gets_gradients_times_the_loss_scale() -> None:
    for gradient in run_ranks(2, _scaled):
        assert gradient == pytest.approx([1e-8] * 4, rel=1e-2)


def _nan_in_between(rank: int) -> dict[str, Any]:
    """The hook's step that is to empty the residual is nonfinite on one rank."""
    model = DDP(small_net(torch.float32))
    policy = Scripted([10.0, 10.0, 2.0])
    compressor = AdaptiveCompressor(
        "topk", (2, 100), policy=policy, hooks={2: default_hooks.fp16_compress_hook}
    ).attach(model)
    held = []
    for step in range(6):
        bad = step == 2 and rank == 1
        (loss_of(model, step, rank) * (float("nan") if bad else 1.0)).backward()
        model.zero_grad()
        policy.cfs = [10.0] if step < 1 else [2.0]
        memory = compressor.state_dict()["memory"]
        held.append(sum("residual" in kept for kept in memory.values()))
    return {"sent": [report.cf for report in policy.reports], "held": held}


def test_the_residual_waits_until_a_hooks_step_has_arrived() -> None:
    for result in run_ranks(2, _nan_in_between):
        assert result["sent"] == [10.0, 10.0, 2.0, 2.0, 2.0, 2.0]
        assert result["held"] == [6, 6, 6, 0, 0, 0]


def _refused(rank: int, what: str) -> str:
    model = DDP(small_net(torch.float32))
    hooks: dict[float, Any] = {2.0: HookRung(default_hooks.fp16_compress_hook, gain=0.9)}
    options: dict[str, Any] = {"policy": Scripted([10.0])}
    if what == "gain":
        hooks = {2.0: HookRung(default_hooks.fp16_compress_hook, gain=0.9 - 0.1 * rank)}
    if what == "hook":
        hook = (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)[rank]
        hooks = {2.0: HookRung(hook)}
    if what == "outside":
        hooks = {200.0: default_hooks.fp16_compress_hook}
    if what == "candidate":
        hooks, options = {4.0: default_hooks.fp16_compress_hook}, {"policy": "gravac"}
    with pytest.raises((ValueError, RuntimeError)) as caught:
        AdaptiveCompressor("topk", (2, 100), hooks=hooks, **options).attach(model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("gain", "set up differently"),
        ("hook", "set up differently"),
        ("outside", r"hooks must have CFs inside cf_range \(2, 100\), got 200"),
        ("candidate", "hooks: CF 4 is a candidate of GraVAC too"),
    ],
)
def test_hooks_that_cannot_work_are_refused_on_every_rank(what: str, told: str) -> None:
    for message in run_ranks(2, _refused, what):
        assert re.search(told, message)


def _only_hooks(rank: int, base: str, gain: float | None) -> tuple[list[float], float]:
    model = DDP(small_net(torch.float32))
    policy = GraVAC(window=4, dense_window=2) if gain else Fixed(cf=2)
    compressor = AdaptiveCompressor(
        base,
        (2, 100),
        policy=policy,
        hooks={2: HookRung(default_hooks.fp16_compress_hook, gain=gain)},
    ).attach(model)
    sent = []
    for step in range(8):
        loss_of(model, step, rank).backward()
        sent.append(compressor.cf)
    return sent, compressor.summary().floats_sent


def test_a_hook_is_a_rung_for_gravac_if_its_gain_is_told_and_works_without_a_base() -> None:
    for sent, _ in run_ranks(2, _only_hooks, "topk", 0.999):
        assert 2.0 in sent
    for sent, floats in run_ranks(2, _only_hooks, "none", None):
        assert sent == [2.0] * 8
        assert floats == 8 * 1139 / 2
