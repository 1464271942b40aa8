"""Local steps: each rank steps by itself, and the ranks exchange how far they have come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from adaptive import (
    AdaptiveCompressor,
    Delayed,
    Goodput,
    JSONLTimeline,
    LinkSpec,
    LocalSteps,
    MemoryRule,
    MemoryTimeline,
    Momentum,
    Network,
    Residual,
)
from compressors.kernels import blocks
from policies import Context
from runs.modelled_clock import ModelledClock
from runs.records import Recorded, exchanges, read_records, seconds_by_step
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Scripted,
    TwoBranches,
    batch,
    flat_parameters,
    listen,
    loss_of,
    same,
    small_net,
)
from tests.distributed.test_resume import Run
from tests.quick import quick

STEPS, EVERY = 14, 4

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
}


def _loss(model: nn.Module, step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x, y = batch(step, rank, dtype)
    return ((model(x) - y) ** 2).mean()


def _train(
    rank: int, optimizer: str, cfs: list[float], options: dict[str, Any], bucket_mb: float
) -> dict[str, Any]:
    model = DDP(small_net(), bucket_cap_mb=bucket_mb)
    steps = OPTIMIZERS[optimizer](model)
    compressor = AdaptiveCompressor(policy=Scripted(cfs), cf_range=(1, 64), debug=1, **options)
    compressor.attach(model, optimizer=steps)
    for step in range(STEPS):
        steps.zero_grad()
        _loss(model, step, rank).backward()
        steps.step()
    before = flat_parameters(model)
    with compressor.averaged():
        averaged = flat_parameters(model)
    own = flat_parameters(model)
    assert options["sync"].overlap or torch.equal(own, before)
    summary, state = compressor.summary(), compressor.state_dict()
    compressor.detach()
    anchors, kept = state["sync"]["anchors"], state["memory"]
    names = [name for name, _ in model.module.named_parameters()]
    rest = [kept.get(name, {}).get("residual", torch.zeros(())) for name in names]
    return {
        "own": own,
        "averaged": averaged,
        "anchor": torch.cat([anchors[name] for name in names]),
        "rest": torch.cat(
            [each.expand_as(anchors[name]) for name, each in zip(names, rest, strict=True)]
        ),
        "united": flat_parameters(model),
        "summary": summary,
    }


def _reference(
    ranks: int, optimizer: str, outer_lr: float, outer_momentum: float, overlap: int
) -> list[Tensor]:
    """The anchor and each rank's parameters after as many steps, without compression: replicas in
    one process, and an outer optimizer of torch's. What is under way at the end lands if that moves
    the mean of the ranks' parameters, which is asked for then."""
    models = [small_net() for _ in range(ranks)]
    steps = [OPTIMIZERS[optimizer](model) for model in models]
    anchor = nn.Parameter(flat_parameters(models[0]).clone())
    outer = torch.optim.SGD(
        [anchor], lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
    )
    then: list[Tensor] = []
    moves_mean = (outer_lr, outer_momentum) != (1.0, 0.0)
    for step in range(STEPS + overlap * moves_mean):
        for rank, model in enumerate(models):
            steps[rank].zero_grad()
            _loss(model, step, rank).backward()
        if step and step % EVERY == 0 and step < STEPS:
            then = [flat_parameters(model) for model in models]
        if then and step % EVERY == overlap:
            anchor.grad = anchor.detach() - torch.stack(then).mean(0)
            outer.step()
            for model, stood in zip(models, then, strict=True):
                here = anchor.detach() + flat_parameters(model) - stood
                nn.utils.vector_to_parameters(here, model.parameters())
            then = []
        for each in steps if step < STEPS else []:
            each.step()
    return [anchor.detach(), *map(flat_parameters, models)]


@pytest.mark.parametrize(
    ("optimizer", "outer", "overlap"),
    [
        pytest.param("sgd", (0.7, 0.9), 0, marks=pytest.mark.long),
        pytest.param("sgd", (1.0, 0.0), 3, marks=pytest.mark.long),
        pytest.param("adamw", (1.0, 0.0), 0, marks=pytest.mark.long),
        pytest.param("adamw", (0.7, 0.9), 1, marks=pytest.mark.long),
        ("adamw", (0.7, 0.9), 3),
    ],
)
def test_uncompressed_it_is_what_replicas_and_an_outer_sgd_do(
    optimizer: str, outer: tuple[float, float], overlap: int
) -> None:
    options = {"sync": LocalSteps(EVERY, *outer, overlap)}
    found = run_ranks(2, _train, optimizer, [1.0], options, 25 if overlap else 0.004)
    anchor, *own = _reference(2, optimizer, *outer, overlap)
    for rank, mine in enumerate(found):
        torch.testing.assert_close(mine["anchor"], anchor, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine["own"], own[rank], rtol=0, atol=1e-12)
        mean = torch.stack(own).mean(0)
        torch.testing.assert_close(mine["united"], mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine["averaged"], mine["united"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("exchange", "overlap"), [("all_gather", 3), ("voted_indices", 0)])
def test_compressed_ranks_end_alike_and_bytes_are_counted(
    ranks: int, exchange: str, overlap: int
) -> None:
    options = {"exchange": exchange, "sync": LocalSteps(EVERY, overlap=overlap)}
    found = run_ranks(ranks, _train, "adamw", [8.0, 1.0, 16.0], options, 0.004)
    mean = torch.stack([each["own"] - each["rest"] for each in found]).mean(0)
    for each in found:
        assert torch.equal(each["anchor"], found[0]["anchor"])
        assert torch.equal(each["united"], found[0]["united"])
        torch.testing.assert_close(each["united"], mean, rtol=0, atol=1e-12)
        assert each["summary"].steps == (STEPS - 1) // EVERY
        assert each["summary"].dense_bytes > 3 * EVERY * each["summary"].bytes_sent / 4


def _outer_steps(rank: int, cfs: list[float]) -> list[dict[str, Any]]:
    """The synchroniser's state while each flight is under way, and after it has landed."""
    model = DDP(small_net())
    optimizer = OPTIMIZERS["adamw"](model)
    compressor = AdaptiveCompressor(
        "topk+fp32", (1, 64), policy=Scripted(cfs), sync=LocalSteps(EVERY, 0.7, 0.9, overlap=2)
    ).attach(model, optimizer=optimizer)
    found = []
    for step in range(5 * EVERY):
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        optimizer.step()
        if step >= EVERY and step % EVERY in (0, 2):  # it has begun; it has landed
            found.append(compressor.state_dict()["sync"])
    return found


def test_outer_momentum_waits_for_what_is_not_exchanged() -> None:
    """m = 0.9 m + d and anchor -= 0.7 (d + 0.9 m) where something was exchanged, and nothing
    moves where not; in a dense round all was exchanged."""
    cfs = [8.0, 1.0, 16.0, 4.0]
    first, second = run_ranks(2, _outer_steps, cfs)
    for cf, begun, landed, other in zip(cfs, first[::2], first[1::2], second[1::2], strict=True):
        (flight,) = begun["flights"].values()
        assert not landed["flights"]
        for name, d in flight["mean"].items():
            there = d != 0 if cf > 1 else torch.ones_like(d, dtype=torch.bool)
            before, m = begun["moving"][name], landed["moving"][name]
            assert torch.equal(m[~there], before[~there])
            torch.testing.assert_close(m[there], (0.9 * before + d)[there], rtol=0, atol=1e-12)
            moved = begun["anchors"][name] - landed["anchors"][name]
            step = torch.where(there, 0.7 * (d + 0.9 * m), 0.0)
            torch.testing.assert_close(moved, step, rtol=0, atol=1e-12)
            assert torch.equal(landed["anchors"][name], other["anchors"][name])


def _stand_still(rank: int, base: str, exchange: str) -> list[Tensor]:
    """Parameters, less residuals, after some steps and after many more with a learning rate of 0:
    only exchanges move them."""
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compressor = AdaptiveCompressor(
        base, (8, 8), policy="fixed", sync=LocalSteps(2), exchange=exchange
    ).attach(model, optimizer=optimizer)

    def now() -> Tensor:
        kept = compressor.state_dict()["memory"]
        named = model.module.named_parameters()
        rest = [kept.get(n, {}).get("residual", torch.zeros(p.numel())) for n, p in named]
        return flat_parameters(model) - torch.cat(rest)

    found = []
    for step in range(60):
        if step == 8:
            optimizer.param_groups[0]["lr"] = 0.0
            found.append(now())
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        optimizer.step()
    return [*found, now(), flat_parameters(model)]


@pytest.mark.parametrize(
    ("base", "exchange"),
    [
        ("topk+fp32", "all_gather"),
        pytest.param(*("topk", "all_gather"), marks=pytest.mark.long),
        pytest.param(*("topk", "voted_indices"), marks=pytest.mark.long),
        ("int8", "sharded"),
    ],
)
def test_exchanges_keep_the_mean_and_bring_the_ranks_together(base: str, exchange: str) -> None:
    found = run_ranks(4, _stand_still, base, exchange)
    before, after, own = (torch.stack(each) for each in zip(*found, strict=True))
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=1e-6)
    spread = (own - own.mean(0)).norm()
    assert spread < 0.05 * (before - before.mean(0)).norm()


def _spoilt(rank: int, on_device: bool, overlap: int) -> list[Tensor]:
    """The anchor at first, after a round that was spoilt on rank 1, and after a good one."""
    blocks.force_device_path = on_device
    model = DDP(small_net(), bucket_cap_mb=0.004)
    optimizer = OPTIMIZERS["sgd"](model)
    compressor = AdaptiveCompressor(policy="fixed", sync=LocalSteps(EVERY, overlap=overlap)).attach(
        model, optimizer=optimizer
    )
    anchors = []
    for step in range(2 * EVERY + 1 + overlap):
        if step in (0, EVERY + 1 + overlap):
            kept = compressor.state_dict()["sync"]["anchors"]
            anchors.append(torch.cat(list(kept.values())))
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        if rank == 1 and step == EVERY - 1:
            for p in model.parameters():
                p.grad = torch.full_like(p, torch.inf)
        if rank == 1 and EVERY <= step <= EVERY + overlap:  # the momentum is spoilt as well
            optimizer.state.clear()
        optimizer.step()
    assert flat_parameters(model).isfinite().all()
    kept = compressor.state_dict()["sync"]["anchors"]
    return [*anchors, torch.cat(list(kept.values()))]


@pytest.mark.parametrize(("on_device", "overlap"), [(False, 0), (True, 0), (False, 2), (True, 1)])
def test_a_round_with_parameters_that_are_not_finite_is_thrown_away(
    on_device: bool, overlap: int
) -> None:
    """All ranks go back to where they stood alike, also the one that has failed."""
    (first, spoilt, good), others = run_ranks(2, _spoilt, on_device, overlap)
    assert torch.equal(first, spoilt)
    assert not torch.equal(good, first)
    assert good.isfinite().all()
    assert torch.equal(good, others[-1])


class Plain(MemoryRule):
    """Plain error feedback."""

    def accumulate(self, kept: Any, grad: Tensor, cf: float) -> Tensor:
        return grad


def _spoilt_beside_a_rule(rank: int, cf: float, overlap: int) -> tuple[Tensor, Tensor]:
    """How far all ranks have come in the end, and how far rank 0 by itself. Rank 1 has gradients of
    zero, and once infinite ones."""
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compressor = AdaptiveCompressor(
        "topk+fp32",
        policy=Scripted([cf]),
        cf_range=(1, 64),
        sync=LocalSteps(2, overlap=overlap),
        memory=Plain(),
    ).attach(model, optimizer=optimizer)
    began, moved = flat_parameters(model), torch.zeros(())
    for step in range(14):
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        for p in model.parameters():
            if rank == 1:
                p.grad = torch.full_like(p, torch.inf if step == 5 else 0.0)
        moved = moved - 0.05 * torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.step()
    compressor.detach()
    return flat_parameters(model) - began, moved


@pytest.mark.parametrize("cf", [1.0, 8.0])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_bad_round_does_not_count_twice_beside_a_memory_rule(cf: float, overlap: int) -> None:
    (moved, alone), (other, _) = run_ranks(2, _spoilt_beside_a_rule, cf, overlap)
    assert torch.equal(moved, other)
    torch.testing.assert_close(moved, alone / 2, rtol=0, atol=1e-12)


def _spoilt_deep(rank: int, overlap: int, on_device: bool) -> list[bool]:
    """After which steps all of a rank's parameters are finite; they move in several parts."""
    blocks.force_device_path = on_device
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(12, 12), nn.Tanh())))
    model = DDP(net, bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    AdaptiveCompressor(policy="fixed", sync=LocalSteps(EVERY, overlap=overlap)).attach(model)
    finite = []
    for step in range(24):
        optimizer.zero_grad()
        x, _ = batch(step, rank, torch.float32)
        model(x).square().mean().backward()
        if rank == 1 and step == EVERY - 1:
            for p in model.parameters():
                p.grad = torch.full_like(p, torch.inf)
        optimizer.step()
        finite.append(bool(flat_parameters(model).isfinite().all()))
    return finite


@pytest.mark.parametrize(("overlap", "on_device"), [(1, False), (2, True), (3, False)])
def test_a_rank_recovers_from_a_bad_step_though_its_parameters_move_one_after_the_other(
    overlap: int, on_device: bool
) -> None:
    good, bad = run_ranks(2, _spoilt_deep, overlap, on_device)
    assert all(good)
    assert not all(bad)
    assert all(bad[2 * EVERY + overlap :])


def _left_out_before(rank: int, planned: list[int] | None) -> list[Tensor]:
    """Rank 1 leaves out the step before all states are gathered, and the one before the end."""
    model = DDP(small_net())
    optimizer, found = OPTIMIZERS["adamw"](model), []
    policy = Scripted([8.0], local_steps=planned or [0])
    sync = None if planned is None else LocalSteps("auto", overlap=0)
    compressor = AdaptiveCompressor(policy=policy, sync=sync).attach(model, optimizer=optimizer)
    for end in (compressor.state_dict, lambda _: compressor.detach()):
        for step in range(5):
            optimizer.zero_grad()
            _loss(model, step, rank).backward()
            if rank == 0 or step < 4:
                optimizer.step()
        end("gathered")
        found.append(flat_parameters(model))
    return found


@pytest.mark.parametrize("planned", [None, [1], [2, 1]])
def test_states_are_gathered_though_a_rank_has_left_its_step_out(planned: list[int] | None) -> None:
    for first, second in zip(*run_ranks(2, _left_out_before, planned), strict=True):
        assert torch.equal(first, second)


def _spoilt_auto(rank: int, planned: list[int], cf: float, on_device: bool) -> dict[str, Any]:
    """The last step of rank 1's second round is spoilt. Its script throws away what the optimizer
    keeps of that."""
    blocks.force_device_path = on_device
    model = DDP(small_net(), bucket_cap_mb=0.004)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    compressor = AdaptiveCompressor(
        policy=Scripted([cf], local_steps=planned), sync=LocalSteps("auto"), debug=1
    ).attach(model, optimizer=optimizer)
    finite = []
    for step in range(24):
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        if rank == 1 and step == 4:  # the first round is of one step
            for p in model.parameters():
                p.grad = torch.full_like(p, torch.inf)
        optimizer.step()
        if rank == 1 and 4 <= step < 9:
            optimizer.state.clear()
        finite.append(bool(flat_parameters(model).isfinite().all()))
    with compressor.averaged():
        mean = flat_parameters(model)
    compressor.detach()
    return {"finite": finite, "mean": mean, "end": flat_parameters(model)}


@pytest.mark.parametrize(
    ("planned", "cf", "on_device"),
    [([4], 8.0, False), ([4], 8.0, True), ([4, 1], 8.0, False), ([4], 1.0, False)],
)
def test_a_number_that_is_chosen_survives_a_bad_step(
    planned: list[int], cf: float, on_device: bool
) -> None:
    good, bad = run_ranks(2, _spoilt_auto, planned, cf, on_device)
    assert all(good["finite"])
    assert bad["finite"][4] == (1 in planned)  # before a round of one step the mean arrives at once
    assert all(bad["finite"][12:])
    assert torch.equal(good["mean"], bad["mean"])
    assert torch.equal(good["end"], bad["end"])
    assert good["end"].isfinite().all()


def _left_out(rank: int) -> tuple[Tensor, list[str]]:
    """Rank 1 leaves out the step before which the last means are due."""
    model = DDP(small_net(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told = listen()
    compressor = AdaptiveCompressor(
        policy=Scripted([1.0]), sync=LocalSteps(EVERY, overlap=3), debug=1
    ).attach(model)
    for step in range(13):
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        if rank == 0 or step != 2 * EVERY - 1:
            optimizer.step()
    anchors = compressor.state_dict()["sync"]["anchors"]
    return torch.cat(list(anchors.values())), told


def test_a_step_left_out_while_means_are_due_is_no_alarm() -> None:
    (first, _), (second, told) = run_ranks(2, _left_out)
    assert torch.equal(first, second)
    assert told == []


def _left_out_of_a_round(rank: int, stop: int) -> Tensor:
    """Rank 1 leaves out the first step of a round of two, before which means are due. stop: the
    step before which the run is saved, and goes on in another compressor; 0: none."""

    def made() -> tuple[DDP, torch.optim.Optimizer, AdaptiveCompressor]:
        model = DDP(small_net())
        optimizer = OPTIMIZERS["adamw"](model)
        compressor = AdaptiveCompressor(
            policy=Scripted([8.0], local_steps=[2]), sync=LocalSteps("auto", overlap=0), debug=1
        )
        return model, optimizer, compressor.attach(model, optimizer=optimizer)

    model, optimizer, compressor = made()
    for step in range(9):
        if stop and step == stop:
            saved = [each.state_dict() for each in (model.module, optimizer, compressor)]
            model, optimizer, compressor = made()
            for each, state in zip((model.module, optimizer, compressor), saved, strict=True):
                each.load_state_dict(state)
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        if rank == 0 or step != 3:  # the first round is of one step
            optimizer.step()
    compressor.detach()
    return flat_parameters(model)


def test_anchors_are_compared_once_all_ranks_have_landed() -> None:
    first, second = run_ranks(2, _left_out_of_a_round, 0)
    assert torch.equal(first, second)


def test_anchors_are_compared_once_all_ranks_have_landed_after_a_load() -> None:
    """The step that was left out comes before the save, and the comparison after the load."""
    first, second = run_ranks(2, _left_out_of_a_round, 4)
    assert torch.equal(first, second)


def _rolled_back(rank: int) -> bool:
    """A state is loaded while an exchange is under way that takes some time."""
    model = DDP(small_net(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compressor = AdaptiveCompressor(
        policy="fixed", sync=LocalSteps(EVERY, overlap=3), network="20kbit"
    ).attach(model)
    for step in range(2 * EVERY + 1):
        if step == EVERY + 3:
            state = compressor.state_dict()
        optimizer.zero_grad()
        _loss(model, step, rank, torch.float32).backward()
        optimizer.step()
    compressor.load_state_dict(state)
    before = compressor.state_dict()["memory"]
    time.sleep(1)
    return same(before, state["memory"]) and same(compressor.state_dict()["memory"], before)


def test_what_was_under_way_does_not_change_a_state_that_is_loaded() -> None:
    assert run_ranks(2, _rolled_back) == [True, True]


def _dropped(rank: int) -> list[bool]:
    """Whether the means that were under way are there once a script has moved parameters far."""
    model = DDP(small_net(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compressor = AdaptiveCompressor(
        policy="fixed", sync=LocalSteps(EVERY, overlap=3), network="20kbit"
    ).attach(model, optimizer=optimizer)
    for step in range(EVERY + 1):
        optimizer.zero_grad()
        _loss(model, step, rank, torch.float32).backward()
        optimizer.step()
    anchor: Any = compressor._session._sync._anchor  # type: ignore[union-attr]
    [flight] = anchor.flights
    with torch.no_grad():
        torch._foreach_mul_([*model.parameters()], 0.5)
    model(batch(0, rank, torch.float32)[0])
    return [anchor.flights == [], *(mean.done() for mean in flight.means)]


def test_means_that_are_dropped_arrive_before_a_later_flight_uses_their_buffers() -> None:
    assert all(all(found) for found in run_ranks(2, _dropped))


def _unused(rank: int) -> dict[str, Tensor]:
    """Accumulates two micro-batches a step; the second branch is used by rank 1 only."""
    model = DDP(TwoBranches(), find_unused_parameters=True, bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compressor = AdaptiveCompressor(
        policy=Scripted([8.0, 1.0]), sync=LocalSteps(2, outer_lr=1.0, outer_momentum=0.0)
    ).attach(model, optimizer=optimizer)
    for step in range(9):
        optimizer.zero_grad()
        x, y = batch(step, rank)
        with model.no_sync():
            ((model(x, rank) - y) ** 2).mean().backward()
        ((model(x, 0) - y) ** 2).mean().backward()
        optimizer.step()
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        sum_of = dist.all_reduce
        patched.setattr(dist, "all_reduce", lambda *a, **k: calls.append(1) or sum_of(*a, **k))
        with compressor.averaged():
            averaged = flat_parameters(model)
    assert len(calls) == 1  # as many as chunks, not as many as parameters: each waits for latency
    own = flat_parameters(model)
    compressor.detach()
    return {"own": own, "averaged": averaged, "united": flat_parameters(model)}


def test_accumulated_gradients_and_unused_parameters() -> None:
    found = run_ranks(2, _unused)
    for each in found:
        assert torch.equal(each["united"], found[0]["united"])
        torch.testing.assert_close(each["averaged"], found[0]["united"], rtol=0, atol=1e-12)
        torch.testing.assert_close(each["own"], each["united"], rtol=0, atol=0.1)
    assert not torch.equal(found[0]["united"][-100:], flat_parameters(TwoBranches())[-100:])


def _forget_times(state: dict[str, Any]) -> None:
    """When exactly the network brings what it brings, no two runs have in common."""
    controller = state["controller"]
    del controller["timing"], controller["dense_timer"], controller["totals"]["pace"]


def _resumed(rank: int, overlap: int, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    def run() -> Run:
        policy = Scripted([4.0, 1.0, 16.0])
        sync = LocalSteps(3, outer_momentum=0.5, overlap=overlap)
        return Run(policy, "topk", "auto", sync=sync)

    straight, stopped, resumed = run(), run(), run()
    straight.train(rank, 0, 21)
    stopped.train(rank, 0, 10)  # one step before a flight may land
    state = stopped.state()
    assert bool(state["compressor"]["sync"]["flights"]) == (overlap > 0)
    torch.save(state, f"{path}/{rank}")
    resumed.load(rank, torch.load(f"{path}/{rank}", weights_only=True))
    resumed.train(rank, 10, 21)
    ends = [
        r.compressor.state_dict() | {"own": flat_parameters(r.model)} for r in (straight, resumed)
    ]
    return ends[0], ends[1]


@pytest.mark.parametrize("overlap", [0, 2])
def test_resuming_equals_never_having_stopped(overlap: int, tmp_path: Path) -> None:
    for straight, resumed in run_ranks(2, _resumed, overlap, str(tmp_path)):
        for state in (straight, resumed) if overlap else ():
            _forget_times(state)
        assert same(straight, resumed)


def _refused(rank: int) -> list[str]:
    told = []
    for options in (
        {"hooks": {4: bf16_compress_hook}},
        {"memory": Momentum(clip_norm=1.0)},
        {"memory": "momentum"},
        {"memory": Residual(dtype=torch.bfloat16)},
    ):
        try:
            AdaptiveCompressor(policy="fixed", sync=LocalSteps(4), **options)
        except ValueError as error:
            told.append(str(error))
    for given in ({"outer_momentum": 1.0}, {"overlap": 4}, {"steps": 1}, {"steps": "many"}):
        try:
            LocalSteps(**{"steps": 4, **given})
        except ValueError as error:
            told.append(str(error))
    return told


def test_what_does_not_go_with_local_steps_is_refused() -> None:
    for told in run_ranks(2, _refused):
        names = ("hooks must", "memory must", "memory must", "memory must", "outer_momentum=1.0")
        names += ("overlap=4", "steps=1", "steps='many'")
        assert [text.startswith(name) for text, name in zip(told, names, strict=True)] == [True] * 8


def _by_hand(rank: int, optimizers: int) -> tuple[Tensor, list[str]]:
    """Parameters at the end, and what was warned of, with so many optimizers; with none the script
    moves the parameters itself."""
    model = DDP(small_net())
    halves = [list(model.parameters())[:3], list(model.parameters())[3:]]
    parts = halves if optimizers == 2 else [list(model.parameters())]
    made = [torch.optim.SGD(part, lr=0.05) for part in parts]
    messages = listen()
    AdaptiveCompressor(policy=Scripted([1.0]), sync=LocalSteps(2)).attach(model)
    for step in range(55):
        model.zero_grad()
        _loss(model, step, rank).backward()
        for each in made[:optimizers]:
            each.step()
        with torch.no_grad():
            for p in model.parameters():
                if not optimizers:
                    p -= 0.05 * p.grad
    return flat_parameters(model), messages


def test_any_number_of_optimizers() -> None:
    warnings = 0
    for (one, _), (two, told), (none, warned) in zip(
        *(run_ranks(2, _by_hand, optimizers) for optimizers in (1, 2, 0)), strict=True
    ):
        assert torch.equal(one, two)
        assert told == []
        torch.testing.assert_close(none, one, rtol=0, atol=1e-12)
        assert all("no optimizer of the model's parameters has stepped" in line for line in warned)
        warnings += len(warned)
    assert warnings == 1


def _scaled(rank: int) -> dict[str, Any]:
    """Rank 1's scaler leaves out the step after an exchange, which moves it one step later."""
    model = DDP(small_net(torch.float32))
    optimizer = OPTIMIZERS["adamw"](model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    compressor = AdaptiveCompressor(
        "topk", (8, 8), policy="fixed", sync=LocalSteps(EVERY), debug=1
    ).attach(model, optimizer=optimizer, scaler=scaler)
    scales = []
    for step in range(3 * EVERY):
        optimizer.zero_grad()
        x, y = batch(step, rank, torch.float32)
        too_large = rank == 1 and step == EVERY
        loss = ((model(x) - y) ** 2).mean() * (torch.inf if too_large else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    compressor.detach()
    return {"united": flat_parameters(model), "scales": scales}


def test_a_scaler_that_leaves_out_a_step_on_one_rank() -> None:
    first, second = run_ranks(2, _scaled)
    assert torch.equal(first["united"], second["united"])
    assert first["united"].isfinite().all()
    assert (first["scales"][-1], second["scales"][-1]) == (4.0, 2.0)


def _overflowing(rank: int, sync: Any, late: int) -> tuple[Tensor, list[str]]:
    """Rank 1's scaler leaves out the step before which means are due. The model has several
    buckets, so the hook of the first one is called in the middle of the backward."""
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(12, 12), nn.Tanh())))
    model = DDP(net, bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    told = listen()
    compressor = AdaptiveCompressor(policy="fixed", sync=sync, debug=1).attach(
        model, optimizer=optimizer, scaler=scaler
    )
    for step in range(12):
        optimizer.zero_grad()
        x, _ = batch(step, rank, torch.float32)
        loss = model(x).square().mean() * (torch.inf if rank == 1 and step == late else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    compressor.detach()
    return flat_parameters(model), told


@pytest.mark.parametrize(
    ("sync", "late"), [(LocalSteps(4, overlap=3), 7), (Delayed(1), 2), (Delayed(2), 5)]
)
def test_means_land_before_the_next_forward_if_the_step_is_left_out(sync: Any, late: int) -> None:
    """In its backward they would change parameters that this backward needs."""
    (first, told), (second, _) = run_ranks(2, _overflowing, sync, late)
    assert torch.equal(first, second)
    assert told == []


def _half(rank: int) -> dict[str, Any]:
    model = DDP(small_net(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compressor = AdaptiveCompressor("topk", (4, 4), policy="fixed", sync=LocalSteps(2), debug=1)
    compressor.attach(model)
    for step in range(9):
        optimizer.zero_grad()
        x, y = batch(step, rank, torch.bfloat16)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    anchors = compressor.state_dict()["sync"]["anchors"]
    compressor.detach()
    united = flat_parameters(model)
    return {"united": united, "dtypes": {united.dtype, *(a.dtype for a in anchors.values())}}


def test_parameters_in_half_precision_have_an_anchor_in_single() -> None:
    first, second = run_ranks(2, _half)
    assert torch.equal(first["united"], second["united"])
    assert first["dtypes"] == {torch.bfloat16, torch.float32}
    assert not torch.equal(first["united"], flat_parameters(small_net(torch.bfloat16)))


CHANGING = [1, 2, 4, 1, 1, 4, 1, 2]
"""Numbers of local steps as a policy may plan them."""


def _parting(rank: int, cfs: list[float], strided: bool, overlap: int) -> dict[str, Any]:
    """Some steps, then many that would change nothing but for the exchanges: without gradients, and
    so without updates. In each of these what the ranks hold is added up."""
    net = small_net()
    if strided:  # a parameter whose elements do not lie in the order of its indices
        net[0].weight = nn.Parameter(net[0].weight.detach().t().contiguous().t())
    model = DDP(net, bucket_cap_mb=0.004)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, weight_decay=0.0)
    compressor = AdaptiveCompressor(
        "topk+fp32",
        (2, 64),
        policy=Scripted(cfs, local_steps=CHANGING),
        sync=LocalSteps("auto", overlap=overlap),
        debug=1,
    ).attach(model, optimizer=optimizer)

    def holds() -> Tensor:
        """This rank's share of the mean of all: its parameters less what waits. A flight that lands
        takes away on one rank what it brings to another."""
        state, held = compressor.state_dict(), []
        arrived.append(len(state["sync"]["flights"]))
        kept, [(_, unit)] = state["memory"], state["moments"]["units"]
        for name, p in model.module.named_parameters():
            rest = kept.get(name, {}).get("residual", torch.zeros(p.numel()).double()) * unit
            held.append((p.detach() - rest.as_strided(p.size(), p.stride())).flatten())
        return torch.cat(held)

    found, apart, arrived = [], [], []
    for step in range(60):
        if step == 17:
            optimizer.param_groups[0]["lr"] = 0.002
        if step >= 17:
            found.append(holds())
            apart.append(bool(compressor.state_dict()["sync"]["anchors"]))
        optimizer.zero_grad()
        (_loss(model, step, rank) * (1.0 if step < 17 else 0.0)).backward()
        optimizer.step()
    summary = compressor.summary()
    compressor.detach()
    return {
        "held": torch.stack(found),
        "apart": apart,
        "arrived": arrived,
        "united": flat_parameters(model),
        "summary": summary,
    }


@pytest.mark.parametrize(
    ("ranks", "strided", "overlap"),
    quick(
        (2, True, 2),
        (4, True, 0),
        of=[(2, False, 0), (2, True, 2), (4, False, 2), (4, True, 0)],
    ),
)
def test_parting_and_meeting_again_loses_nothing(ranks: int, strided: bool, overlap: int) -> None:
    found = run_ranks(ranks, _parting, [8.0, 32.0, 1.0, 8.0, 4.0], strided, overlap)
    assert {True, False} == set(found[0]["apart"])
    assert max(found[0]["arrived"]) > 0
    mean = torch.stack([each["held"] for each in found]).mean(0)
    torch.testing.assert_close(mean, mean[:1].expand_as(mean), rtol=0, atol=1e-12)
    for each in found:
        assert each["apart"] == found[0]["apart"]
        assert torch.equal(each["united"], found[0]["united"])
        assert each["summary"].local_steps > 1.4 * each["summary"].steps
    torch.testing.assert_close(found[0]["united"], mean[0], rtol=0, atol=1e-12)


def _restarted(rank: int) -> float:
    """The loss after a warm restart. A phase of rounds of several steps has ended before it, at a
    rate of next to nothing."""
    model = DDP(small_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = Scripted([20.0], local_steps=[4] * 10 + [1] * 10)
    compressor = AdaptiveCompressor(cf_range=(1, 100), policy=policy, sync=LocalSteps("auto"))
    compressor.attach(model, optimizer=optimizer)
    for step in range(60):
        optimizer.param_groups[0]["lr"] = 1e-6 if 34 <= step < 43 else 0.01
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        optimizer.step()
    with torch.no_grad():
        return float(sum(_loss(model.module, 500 + step, 0) for step in range(8)) / 8)


def test_a_warm_restart_does_not_enlarge_what_has_waited() -> None:
    assert max(run_ranks(2, _restarted)) < 0.4


def _resumed_apart(rank: int, stop: int, path: str) -> list[dict[str, Any]]:
    def run() -> Run:
        policy = Scripted([4.0, 1.0, 16.0], local_steps=CHANGING)
        sync = LocalSteps("auto", overlap=stop % 3)
        return Run(policy, "topk", "auto", memory="updates", sync=sync)

    straight, stopped, resumed = run(), run(), run()
    straight.train(rank, 0, 30)
    stopped.train(rank, 0, stop)
    torch.save(stopped.state(), f"{path}/{rank}")
    resumed.load(rank, torch.load(f"{path}/{rank}", weights_only=True))
    resumed.train(rank, stop, 30)
    return [
        r.compressor.state_dict() | {"own": flat_parameters(r.model)} for r in (straight, resumed)
    ]


@pytest.mark.parametrize("stop", quick(9, 11, of=range(8, 13)))
def test_resuming_while_ranks_part_and_meet(stop: int, tmp_path: Path) -> None:
    """Stopped after each step of a few rounds: together, apart, and just before either."""
    for straight, resumed in run_ranks(2, _resumed_apart, stop, str(tmp_path)):
        for state in (straight, resumed):
            _forget_times(state)
        assert same(straight, resumed)


def _on_a_link(rank: int, path: str) -> dict[str, Any]:
    """Goodput chooses, on a link that is slow at first and then fast."""
    model = DDP(small_net(torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clock, timeline = ModelledClock(1e-3, LinkSpec(1e6)), MemoryTimeline()
    compressor = AdaptiveCompressor(
        policy=Goodput(goal="time", opening=2, cooldown=2),
        cf_range=(10, 40),
        sync=LocalSteps("auto"),
        network=Network(clock=clock),
        timeline=[timeline, JSONLTimeline(f"{path}/{rank}.jsonl")],
    ).attach(model, optimizer=optimizer)
    chosen = []
    for step in range(900):
        if step == 250:
            clock.link = LinkSpec(1e12)
        optimizer.zero_grad()
        x, y = batch(step, rank, torch.float32)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        chosen.append(compressor.policy.plan().local_steps)
    own = flat_parameters(model)
    summary = compressor.summary()
    compressor.close()
    return {"chosen": chosen, "own": own, "summary": summary, "steps": timeline.steps}


@pytest.mark.long
def test_goodput_chooses_how_many_local_steps(tmp_path: Path) -> None:
    found = run_ranks(2, _on_a_link, str(tmp_path))
    chosen, summary = found[0]["chosen"], found[0]["summary"]
    assert chosen[240] > 1
    assert chosen[-1] == 1
    assert found[1]["chosen"] == chosen
    assert torch.equal(found[0]["own"], found[1]["own"])
    assert summary.local_steps == 900
    assert summary.steps == len(found[0]["steps"]) < 800
    recorded = read_records(tmp_path / "0.jsonl")
    assert recorded.wire_factor == pytest.approx(summary.wire_factor)
    done = exchanges(recorded.steps)
    assert len(done) == 900
    assert done[-1] == summary.steps
    seconds = seconds_by_step(recorded.steps, [float(i) for i in range(1, summary.steps + 1)])
    assert len(seconds) == 900
    assert seconds == sorted(seconds)
    assert replay_like(recorded) == [record.report.cf for record in recorded.steps]


def replay_like(recorded: Recorded) -> list[float]:
    """The CFs that the policy plans when it is shown what was recorded."""
    header = recorded.header
    assert header is not None
    policy = Goodput(goal="time", opening=2, cooldown=2)
    wire = header.wire_bytes
    policy.start(
        Context(
            header.cf_range,
            header.world_size,
            rungs=header.rungs,
            assumed=header.assumed,
            uncoded=frozenset(header.uncoded),
            wire_bytes=lambda cf: wire[cf],
            local_steps=header.local_steps,
            overlap=header.overlap,
            power=header.power,
        )
    )
    planned = []
    for record in recorded.steps:
        planned.append(policy.plan().send)
        policy.observe(record.report)
    return planned


def _not_auto(rank: int) -> list[str]:
    told = []
    for options in (
        {"policy": "gravac"},
        {"memory": "residual"},
        {"policy": "goodput", "hooks": {40.0: bf16_compress_hook}},
    ):
        try:
            AdaptiveCompressor(sync=LocalSteps("auto"), **options)
        except ValueError as error:
            told.append(str(error))
    model = DDP(small_net())
    _, *others = model.parameters()
    some = torch.optim.AdamW(others, lr=1e-3)
    for given, base in ((None, "topk"), (some, "topk"), (OPTIMIZERS["adamw"](model), "qsgd")):
        try:
            AdaptiveCompressor(base, sync=LocalSteps("auto")).attach(model, optimizer=given)
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    plan = Scripted([8.0], local_steps=[3])
    adam = OPTIMIZERS["adamw"](model)
    try:
        AdaptiveCompressor(policy=plan, sync=LocalSteps("auto")).attach(model, optimizer=adam)
        _loss(model, 4, rank).backward()
    except ValueError as error:
        told.append(str(error))
    return told


def test_what_does_not_go_with_auto_is_refused() -> None:
    first, second = run_ranks(2, _not_auto)
    policy, memory, hooks, without, some, unbiased, planned = first
    assert "'gravac'" in policy
    assert memory.startswith("memory must be 'auto' or 'updates' with sync=LocalSteps(")
    assert hooks.startswith("hooks must be empty with sync=LocalSteps(")
    assert "LocalSteps('auto') needs an optimizer of all parameters" in without
    assert some.endswith("got AdamW, without 0.weight")
    assert "memory must be 'none' or 'auto' for base 'qsgd'" in unbiased
    assert (
        planned
        == "policy 'scripted' plans 3 local steps: it must be one of 1, 2, 4, 8, 16, 32, or 0"
    )
    assert [second[i] for i in (0, 1, *range(3, 7))] == [first[i] for i in (0, 1, *range(3, 7))]


def _detached(rank: int, optimizer_name: str, local_steps: int | str) -> list[Tensor]:
    """Detached while the ranks are apart, and later another one is attached."""
    model = DDP(TwoBranches(), find_unused_parameters=True)
    optimizer = OPTIMIZERS[optimizer_name](model)
    planned = [1, 2, 4] if local_steps == "auto" else [0]

    def attached() -> AdaptiveCompressor:
        policy = Scripted([8.0], local_steps=planned)
        compressor = AdaptiveCompressor(policy=policy, sync=LocalSteps(local_steps), debug=1)
        return compressor.attach(model, optimizer=optimizer)

    compressor, found = attached(), []
    for step in range(40):
        if step == 9:
            compressor.detach()
        if step in (9, 14):
            found.append(flat_parameters(model))
        if step == 14:
            compressor = attached()
        optimizer.zero_grad()
        x, y = batch(step, rank)
        which = rank if step < 9 else 2  # a rank has no moments of the other's branch
        ((model(x, which) - y) ** 2).mean().backward()
        optimizer.step()
    compressor.detach()
    return [*found, flat_parameters(model)]


@pytest.mark.parametrize(("optimizer", "local_steps"), [("adamw", "auto"), ("sgd", 4)])
def test_ranks_that_are_detached_while_apart_go_on_alike(
    optimizer: str, local_steps: int | str
) -> None:
    for first, second in zip(*run_ranks(2, _detached, optimizer, local_steps), strict=True):
        assert torch.equal(first, second)


def _evaluated(rank: int) -> tuple[Tensor, list[str]]:
    """Evaluated by the mean between any two steps, while means that move far are under way."""
    model = DDP(small_net(torch.float32))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    told = listen()
    policy = Scripted([8.0], local_steps=[1, 2, 4, 2])
    compressor = AdaptiveCompressor(policy=policy, sync=LocalSteps("auto", overlap=0))
    compressor.attach(model, optimizer=optimizer)
    for step in range(20):
        optimizer.zero_grad()
        _loss(model, step, rank, torch.float32).backward()
        optimizer.step()
        with compressor.averaged():
            pass
    compressor.detach()
    return flat_parameters(model), [line for line in told if "moved far" in line]


def test_means_that_land_for_an_evaluation_are_no_checkpoint_that_was_loaded() -> None:
    (first, told), (second, _) = run_ranks(2, _evaluated)
    assert not told
    assert torch.equal(first, second)


def _shrunk(rank: int, sync: str, where: str) -> tuple[dict[str, Any], Tensor]:
    """The anchor and the parameters of a script that has shrunk its weights, on one rank or all."""
    model = DDP(small_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kind = {"delayed": Delayed(4), "local": LocalSteps(4)}.get(sync, LocalSteps("auto"))
    planned = {"rounds of several": [4], "rounds of all kinds": [4, 1, 1, 2, 1]}.get(sync, [0])
    policy = Scripted([10.0], local_steps=planned)
    compressor = AdaptiveCompressor(policy=policy, sync=kind).attach(model, optimizer=optimizer)
    for step in range(40):
        if step == 13 and (where == "on all ranks" or rank == 1):
            with torch.no_grad():
                torch._foreach_mul_([*model.parameters()], 0.8)
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return compressor.state_dict()["sync"]["anchors"], flat_parameters(model)


@pytest.mark.parametrize("where", ["on all ranks", "on one rank"])
@pytest.mark.parametrize("sync", ["local", "delayed", "rounds of several", "rounds of all kinds"])
def test_ranks_meet_after_a_script_has_moved_parameters_far(sync: str, where: str) -> None:
    first, second = run_ranks(2, _shrunk, sync, where)
    assert same(first[0], second[0])
    assert first[0] or torch.equal(first[1], second[1])


def _momentum_after_meeting(rank: int) -> list[float]:
    """The outer momentum after each step of a script that has shrunk its weights on rank 1."""
    model = DDP(small_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = LocalSteps(2, outer_momentum=0.5, overlap=0)
    compressor = AdaptiveCompressor(policy="fixed", sync=sync).attach(model, optimizer=optimizer)
    found = []
    for step in range(16):
        if step == 7 and rank == 1:
            with torch.no_grad():
                torch._foreach_mul_([*model.parameters()], 0.8)
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        moving = compressor._session._sync._anchor._velocity  # type: ignore[union-attr]
        found.append(sum(float(each.abs().sum()) for each in moving.values()))
        optimizer.step()
    return found


def test_ranks_that_have_met_go_on_without_the_momentum_of_before() -> None:
    """Rank 1 drops its momentum at once, and rank 0 when they meet, in step 9."""
    first, second = run_ranks(2, _momentum_after_meeting)
    assert min(first[3:10]) > 0
    assert first[10:] == second[10:]
    assert first[10] == 0.0
    assert first[-1] > 0


def _shrunk_and_nan(rank: int) -> Tensor:
    """Parameters of a script that has shrunk its weights, with a NaN on rank 1 in the round in
    which the ranks meet."""
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = Scripted([10.0], local_steps=[4])
    compressor = AdaptiveCompressor(policy=policy, sync=LocalSteps("auto"))
    compressor.attach(model, optimizer=optimizer)
    for step in range(24):
        if step == 13:
            with torch.no_grad():
                torch._foreach_mul_([*model.parameters()], 0.8)
        optimizer.zero_grad()
        (loss_of(model, step, rank) * (math.nan if (step, rank) == (18, 1) else 1)).backward()
        optimizer.step()
    return flat_parameters(model)


def test_a_nan_of_one_rank_stays_there_while_ranks_meet() -> None:
    for parameters in run_ranks(2, _shrunk_and_nan):
        assert parameters.isfinite().all()


def _shrunk_then(rank: int, sync: Any, at: int, resumes: bool) -> dict[str, Any]:
    """The anchor of a script that has shrunk its weights on rank 1 before step 13, and that reads
    all statistics before step `at`, or goes on from a saved state there."""

    def run() -> tuple[Any, Any, AdaptiveCompressor]:
        model = DDP(small_net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        policy = Scripted([10.0], local_steps=[4] if sync == LocalSteps("auto") else [0])
        compressor = AdaptiveCompressor(policy=policy, sync=sync)
        return model, optimizer, compressor.attach(model, optimizer=optimizer)

    model, optimizer, compressor = run()
    for step in range(40):
        if step == 13 and rank == 1:
            with torch.no_grad():
                torch._foreach_mul_([*model.parameters()], 0.8)
        if step == at and not resumes:
            compressor.flush()
        elif step == at:
            saved = model.state_dict(), optimizer.state_dict(), compressor.state_dict()
            compressor.close()
            for fresh, state in zip(both := run(), saved, strict=True):
                fresh.load_state_dict(state)
            model, optimizer, compressor = both
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    anchors: dict[str, Any] = compressor.state_dict()["sync"]["anchors"]
    return anchors


@pytest.mark.parametrize(
    ("sync", "at", "resumes"),
    [
        (Delayed(4), 16, False),
        (Delayed(4), 16, True),
        (LocalSteps(4), 14, True),  # the other ranks do not know yet
        (LocalSteps(4), 18, True),
        (LocalSteps("auto"), 18, True),
    ],
)
def test_ranks_meet_though_statistics_are_read_or_saved_before(
    sync: Any, at: int, resumes: bool
) -> None:
    first, second = run_ranks(2, _shrunk_then, sync, at, resumes)
    assert first
    assert same(first, second)


def _with_closure(rank: int, closures: bool) -> list[Tensor]:
    """Parameters and gradients after each step of ranks that part and meet."""
    model = DDP(small_net(), bucket_cap_mb=0.004)
    optimizer = OPTIMIZERS["adamw"](model)
    compressor = AdaptiveCompressor(
        policy=Scripted([8.0], local_steps=CHANGING), sync=LocalSteps("auto"), debug=1
    ).attach(model, optimizer=optimizer)
    found = []
    for step in range(40):

        def backward(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = _loss(model, step, rank)
            loss.backward()
            return loss

        if closures:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        found += [flat_parameters(model), *(p.grad.clone() for p in model.parameters())]
    summary = compressor.summary()
    assert summary.steps <= 40
    compressor.detach()
    assert compressor.summary().local_steps == 40
    return found


def test_ranks_part_and_meet_in_closures_as_without() -> None:
    for plain, closed in zip(
        run_ranks(2, _with_closure, False), run_ranks(2, _with_closure, True), strict=True
    ):
        assert same(plain, closed)


def _two_models(rank: int) -> list[Tensor]:
    """Two models that part and meet at other times, in one script."""
    models = [DDP(small_net()), DDP(small_net())]
    optimizers = [OPTIMIZERS["adamw"](model) for model in models]
    for model, optimizer, planned in zip(models, optimizers, ([2, 1], CHANGING), strict=True):
        AdaptiveCompressor(
            policy=Scripted([8.0], local_steps=planned), sync=LocalSteps("auto"), debug=1
        ).attach(model, optimizer=optimizer)
    for step in range(30):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            _loss(model, step, rank).backward()
            optimizer.step()
    return [flat_parameters(model) for model in models]


def test_two_models_part_and_meet() -> None:
    for first, second in zip(*run_ranks(2, _two_models), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0.1)


class Deep(nn.Module):
    """Many layers, so that a bucket is exchanged while backward still needs others' weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [12, *([24] * 6), 3]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _skipping(rank: int, skipped: int, who: int) -> Tensor:
    """A scaler leaves out one step, on one rank or on both."""
    model = DDP(Deep(), bucket_cap_mb=0.002)
    optimizer = OPTIMIZERS["adamw"](model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    compressor = AdaptiveCompressor(
        policy=Scripted([8.0], local_steps=[1, 2, 1, 2]), sync=LocalSteps("auto")
    ).attach(model, optimizer=optimizer, scaler=scaler)
    for step in range(24):
        optimizer.zero_grad()
        x, y = batch(step, rank, torch.float32)
        too_large = step == skipped and rank in (who, who - 1)
        loss = ((model(x) - y) ** 2).mean() * (torch.inf if too_large else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    compressor.detach()
    return flat_parameters(model)


@pytest.mark.parametrize("skipped", quick(5, of=[4, 5, 8]))
def test_a_step_is_left_out_while_ranks_part_or_meet(skipped: int) -> None:
    for who in (0, 1):  # rank 0; both
        first, second = run_ranks(2, _skipping, skipped, who)
        assert torch.equal(first, second)
        assert first.isfinite().all()


def _of_several(rank: int, names: list[str]) -> Tensor:
    """Ranks whose optimizers share the parameters, and whose memory is the optimizers'."""
    model = DDP(small_net())
    first, *others = model.parameters()
    makes: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    }
    optimizers = [makes[name](p) for name, p in zip(names, ([first], others), strict=True)]
    compressor = AdaptiveCompressor(
        policy=Scripted([8.0, 4.0, 1.0], local_steps=CHANGING), sync=LocalSteps("auto"), debug=1
    ).attach(model, optimizer=optimizers)
    for step in range(30):
        _loss(model, step, rank).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    compressor.detach()
    return flat_parameters(model)


@pytest.mark.parametrize("names", [["sgd", "adamw"], ["adamw", "sgd"]])
def test_number_of_steps_changes_with_any_optimizers(names: list[str]) -> None:
    first, second = run_ranks(2, _of_several, names)
    assert torch.equal(first, second)
    assert first.isfinite().all()


def _detached_state(rank: int) -> str:
    trained = Run(
        Scripted([8.0], local_steps=[2]), "topk", "auto", sync=LocalSteps("auto"), memory="updates"
    )
    trained.train(rank, 0, 7)
    state = trained.compressor.state_dict()
    trained.compressor.detach()
    try:
        trained.compressor.load_state_dict(state)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_state_for_a_detached_one_is_refused() -> None:
    assert all(run_ranks(2, _detached_state))
