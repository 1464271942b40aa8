"""Momentum correction: the invariant holds of velocities, masking clears what was sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Momentum, Residual
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Scripted,
    flat_parameters,
    local_gradients,
    loss_of,
    small_net,
    waiting,
)

STEPS = 8


def _velocity_invariant(
    rank: int, base: str, cfs: list[float], nesterov: bool, share: float | None
) -> float:
    """What is missing, at most, when what was sent, what waits in residuals and what velocities
    have yet to deliver are set against all gradients, each of which adds up to g / (1 - m)."""
    model = DDP(small_net(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=nesterov)
    compressor = AdaptiveCompressor(
        base, (1.5, 1000), policy=Scripted(cfs), memory=Momentum(share=share, masking=False)
    )
    compressor.attach(model, optimizer=optimizer)
    total: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    for step in range(STEPS):
        for name, g in local_gradients(model, step, rank).items():
            total[name] = total.get(name, 0) + g / (1 - 0.9)
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        for name, p in model.module.named_parameters():
            sent[name] = sent.get(name, 0) + p.grad.flatten() * dist.get_world_size()
        optimizer.step()
    state = compressor.state_dict()
    assert state["memory_kind"] == "momentum"
    worst = 0.0
    for name in total:
        kept = state["memory"][name]
        usual = 1.2 / cfs[-1] ** (1 / 3) if base == "topk" else 1.0
        assert kept["momentum_share"] == pytest.approx(1.0 if cfs[-1] == 1 else share or usual)
        both = torch.stack([total[name], waiting(kept, 0.9, nesterov)])
        dist.all_reduce(both)
        worst = max(worst, float((sent[name] + both[1] - both[0]).abs().max()))
    return worst


def _shares(rank: int) -> dict[str, tuple[int, float]]:
    model = DDP(small_net(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    compressor = AdaptiveCompressor("topk", (1, 100), policy=Scripted([10.0, 50.0]), dense_below=50)
    compressor.attach(model, optimizer=optimizer)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    memory = compressor.state_dict()["memory"]
    return {n: (p.numel(), memory[n]["momentum_share"]) for n, p in model.module.named_parameters()}


def test_what_does_not_wait_keeps_its_momentum() -> None:
    shares = run_ranks(2, _shares)[0].values()
    assert {numel < 50 for numel, _ in shares} == {True, False}
    for numel, share in shares:
        assert share == pytest.approx(1.0 if numel < 50 else 1.2 / 50 ** (1 / 3))


@pytest.mark.parametrize("base", ["topk", "randomk"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("share", [1.0, None, 0.1])
@pytest.mark.parametrize("last", [1.0, 3.0])
def test_sent_plus_waiting_is_the_sum_of_gradients(
    base: str, nesterov: bool, share: float | None, last: float
) -> None:
    cfs = [10.0, 1.0, 50.0, 50.0, 1.0, 3.0, 10.0, last]
    worst = run_ranks(2, _velocity_invariant, base, cfs, nesterov, share)
    assert max(worst) < 1e-11


def _masked(rank: int, masking: float | bool, cf: float) -> list[tuple[int, int]]:
    """For each parameter: velocities that are zero, and elements sent, after one step."""
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    policy = Scripted([cf])
    compressor = AdaptiveCompressor(
        "topk", (1, 1000), policy=policy, memory=Momentum(masking=masking), granularity="layer"
    )
    compressor.attach(model, optimizer=optimizer)
    loss_of(model, 0, rank).backward()
    memory = compressor.state_dict()["memory"]
    return [
        (int((memory[name]["velocity"] == 0).sum()), max(1, int(p.numel() / cf)))
        for name, p in model.module.named_parameters()
    ]


@pytest.mark.parametrize(
    ("masking", "cf", "masks"),
    [
        (32.0, 40.0, True),
        (32.0, 10.0, False),
        (True, 10.0, True),
        (False, 40.0, False),
        (True, 1.0, False),
    ],
)
def test_masking_clears_the_velocity_of_what_was_sent(
    masking: float | bool, cf: float, masks: bool
) -> None:
    for counts in run_ranks(2, _masked, masking, cf):
        for zeros, sent in counts:
            assert zeros == (sent if masks and cf > 1 else 0)


def _memory_kinds(rank: int) -> dict[str, str]:
    def kind(optimizer_of: Any, **options: Any) -> str:
        model = DDP(small_net())
        compressor = AdaptiveCompressor(policy="fixed", **options)
        compressor.attach(model, optimizer=optimizer_of and optimizer_of(model.parameters()))
        return compressor.state_dict()["memory_kind"]

    sgd, plain = torch.optim.SGD, lambda p: torch.optim.SGD(p, lr=0.1)
    found = {
        "no optimizer": kind(None),
        "sgd": kind(plain),
        "sgd momentum": kind(lambda p: sgd(p, lr=0.1, momentum=0.9)),
        "adamw": kind(torch.optim.AdamW),
        "asked for residual": kind(lambda p: sgd(p, lr=0.1, momentum=0.9), memory="residual"),
    }
    for optimizer_of in (None, plain, torch.optim.AdamW):
        with pytest.raises(ValueError, match="memory='momentum' needs an SGD of torch's"):
            kind(optimizer_of, memory="momentum")
    return found


def test_which_memory_is_used() -> None:
    for found in run_ranks(2, _memory_kinds):
        assert found == {
            "no optimizer": "residual",
            "sgd": "residual",
            "sgd momentum": "momentum",
            "adamw": "updates",
            "asked for residual": "residual",
        }


def _clipped(rank: int, cf: float) -> tuple[list[float], list[float]]:
    model = DDP(small_net())
    policy = Scripted([cf])
    compressor = AdaptiveCompressor(
        "topk", (1, 100), policy=policy, memory=Residual(clip_norm=0.01)
    )
    compressor.attach(model)
    before = [float(g.norm()) for g in local_gradients(model, 0, rank).values()]
    loss_of(model, 0, rank).backward()
    memory = compressor.state_dict()["memory"]
    total = [
        float((p.grad.flatten() * 2 + _sum_over_ranks(memory.get(n, {}).get("residual"), p)).norm())
        for n, p in model.module.named_parameters()
    ]
    return before, total


def _sum_over_ranks(residual: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor:
    summed = torch.zeros(p.numel(), dtype=p.dtype) if residual is None else residual.clone()
    dist.all_reduce(summed)
    return summed


@pytest.mark.parametrize("cf", [1.0, 10.0])
def test_local_gradients_are_clipped_before_they_are_accumulated(cf: float) -> None:
    for before, total in run_ranks(2, _clipped, cf):
        assert max(before) > 0.01  # there was something to clip
        assert max(total) <= 2 * 0.01 / 2**0.5 + 1e-12  # two ranks, each at most 0.01 / sqrt(2)


def _optimizer_after_step(rank: int) -> dict[str, Any]:
    """The user's hyper-parameters are theirs again after step(), with a closure and an error."""
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    AdaptiveCompressor("topk", (1, 10), policy="fixed").attach(model, optimizer=optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0, rank)
        loss.backward()
        return loss

    first = float(optimizer.step(closure))
    group = optimizer.param_groups[0]
    after = {k: group[k] for k in ("momentum", "weight_decay", "nesterov", "dampening")}
    return {"loss": first, **after}


def test_closures_work_and_hyper_parameters_are_restored() -> None:
    for found in run_ranks(2, _optimizer_after_step):
        assert found.pop("loss") > 0
        assert found == {"momentum": 0.9, "weight_decay": 0.1, "nesterov": False, "dampening": 0}


def _with_a_hook_that_raises(rank: int) -> float:
    """How far a run at CF 1 ends from plain DDP, if a hook raises in some of its steps, which are
    then taken again."""
    ends = []
    for attached in (False, True):
        model, raises = DDP(small_net()), list[bool]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        if attached:
            compressor = AdaptiveCompressor("topk", (1, 100), policy=Scripted([1.0]))
            compressor.attach(model, optimizer=optimizer)

        def hook(*_: Any, raises: list[bool] = raises) -> None:
            if raises and raises.pop():
                raise KeyError

        optimizer.register_step_pre_hook(hook)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            if attached and step % 2 == 0:
                raises.append(True)
                with pytest.raises(KeyError):
                    optimizer.step()
            optimizer.step()
        ends.append(flat_parameters(model))
    return float((ends[0] - ends[1]).abs().max())


def test_a_step_that_raised_and_is_taken_again_decays_weights_once() -> None:
    assert max(run_ranks(2, _with_a_hook_that_raises)) < 1e-12
