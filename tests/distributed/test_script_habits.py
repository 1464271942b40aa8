"""What scripts do with gradients between backward and step, or instead of a step."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

from adaptive import AdaptiveCompressor
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Scripted,
    batch,
    flat_parameters,
    listen,
    local_gradients,
    loss_of,
    same,
    small_net,
)


def _clip(model: DDP) -> None:
    clip_grad_norm_(model.parameters(), 0.1)


def _clip_in_place(model: DDP) -> None:
    for p in model.parameters():
        p.grad.data.clamp_(-0.01, 0.01)


def _decay(model: DDP) -> None:
    for p in model.parameters():
        p.grad = p.grad + 0.1 * p.detach()


def _noise(model: DDP) -> None:
    for p in model.parameters():
        p.grad += 0.01 * torch.sin(100 * p.grad + 1)


def _drop_some(model: DDP) -> None:
    """As a script that freezes a layer for a time."""
    for p in model.module[2].parameters():
        p.grad = None


def _only_look(model: DDP) -> None:
    clip_grad_norm_(model.parameters(), float("inf"))
    torch.autograd.grad(loss_of(model.module, 99, 0), [*model.module.parameters()])


def _run_backward_again(model: DDP) -> None:
    loss_of(model, 99, dist.get_rank()).backward()


def _climb(model: DDP) -> None:
    """Global SAM: the first backward is exchanged as well, and says where to climb."""
    climbed = [0.05 * p.grad for p in model.parameters()]
    with torch.no_grad():
        for p, climb in zip(model.parameters(), climbed, strict=True):
            p.add_(climb)
    model.zero_grad()
    _run_backward_again(model)
    with torch.no_grad():
        for p, climb in zip(model.parameters(), climbed, strict=True):
            p.sub_(climb)


def _throw_away(model: DDP) -> None:
    model.zero_grad()
    _run_backward_again(model)


HABITS: dict[str, tuple[Callable[[DDP], None], str]] = {
    "clips": (_clip, "residual"),
    "clips in place, past autograd": (_clip_in_place, "residual"),
    "decays": (_decay, "residual"),
    "adds noise": (_noise, "residual"),
    "accumulates without no_sync": (_run_backward_again, "residual"),
    "climbs by the mean": (_climb, "residual"),
    "drops the gradients of a layer": (_drop_some, "residual"),
    "throws a backward away": (_throw_away, "momentum"),
    "only looks": (_only_look, "momentum"),
}


def _with_habit(habit: str, rank: int, views: bool) -> tuple[str, float, int]:
    torch.manual_seed(0)
    model = DDP(small_net(), bucket_cap_mb=0.002, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    compressor = AdaptiveCompressor(policy=Scripted([10.0])).attach(model, optimizer=optimizer)
    told = listen()
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        HABITS[habit][0](model)
        optimizer.step()
    own = flat_parameters(model)
    first = own.clone()
    dist.broadcast(first, 0)
    kind = compressor.state_dict()["memory_kind"]
    return kind, float((own - first).abs().max()), sum("p.grad was changed" in t for t in told)


def _with_all_habits(rank: int, views: bool) -> dict[str, tuple[str, float, int]]:
    return {habit: _with_habit(habit, rank, views) for habit in HABITS}


@pytest.mark.parametrize("views", [False, True], ids=["gradients", "views of buckets"])
def test_changing_velocities_ends_momentum_correction(views: bool) -> None:
    expected = {habit: (kind, 0.0) for habit, (_, kind) in HABITS.items()}
    for rank, result in enumerate(run_ranks(2, _with_all_habits, views)):
        assert {habit: found[:2] for habit, found in result.items()} == expected
        warned = [int(rank == 0 and kind == "residual") for _, kind in HABITS.values()]
        assert [found[2] for found in result.values()] == warned


def _with_hook(rank: int, clears: bool | None, settings: dict[str, Any]) -> tuple[str, int]:
    """A hook of the optimizer's own, which torch calls after the library's, clips before the step.
    clears: it does not, and another one clears gradients after the step, to None or to zero."""
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, **settings)
    compressor = AdaptiveCompressor(policy=Scripted([10.0])).attach(model, optimizer=optimizer)
    optimizer.register_step_pre_hook(lambda *_: _clip(model) if clears is None else None)
    if clears is not None:
        optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad(clears))
    told = listen()
    for step in range(4):
        loss_of(model, step, rank).backward()
        optimizer.step()
        if clears is None:
            optimizer.zero_grad()
    return compressor.memory, sum("p.grad was changed" in t for t in told)


def _with_hooks(rank: int, settings: dict[str, Any]) -> list[tuple[str, int]]:
    return [_with_hook(rank, clears, settings) for clears in (None, True, False)]


@pytest.mark.parametrize("settings", [{"weight_decay": 0.1}, {"fused": True, "maximize": True}])
def test_what_a_hook_of_the_optimizer_clips_is_noticed(settings: dict[str, Any]) -> None:
    for rank, (clipped, *cleared) in enumerate(run_ranks(2, _with_hooks, settings)):
        assert clipped == ("residual", int(rank == 0))
        assert cleared == [("momentum", 0)] * 2


def _loss_with(rank: int, clips: bool, cf: float | None) -> float:
    """Held-out loss of a small transformer, trained with the usual clipping of gradients, or with
    two backward passes for each step, none of them under no_sync()."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.Linear(12, 16), layer, nn.Linear(16, 12))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if cf is not None:
        AdaptiveCompressor(policy=Scripted([cf])).attach(model, optimizer=optimizer)

    def loss(step: int, source: int) -> torch.Tensor:
        x = batch(step, source, torch.float32)[0].unsqueeze(0)
        return (model(x) - x.sin().cumsum(dim=1)).square().mean()

    for step in range(80):
        optimizer.zero_grad(set_to_none=clips)
        loss(step, rank).backward()
        if clips:
            clip_grad_norm_(model.parameters(), 0.5)
        else:
            loss(step + 500, rank).backward()
        optimizer.step()
    with torch.no_grad():
        return sum(float(loss(step, 7)) for step in range(1000, 1020)) / 20


def _losses_with_habits(rank: int) -> list[list[float]]:
    cfs = (None, 1.0, 10.0)
    return [[_loss_with(rank, clips, cf) for cf in cfs] for clips in (True, False)]


@pytest.mark.long
def test_a_script_that_clips_or_accumulates_trains_as_well_as_under_ddp() -> None:
    for dense, at_1, at_10 in run_ranks(2, _losses_with_habits)[0]:
        assert at_1 < 1.1 * dense
        assert at_10 < 1.3 * dense


def _switched_once(rank: int, nesterov: bool) -> float:
    """What is missing of all gradients, relative, after momentum has gone back to the optimizer
    because gradients were changed (hardly) in one step."""
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, nesterov=nesterov)
    compressor = AdaptiveCompressor(policy=Scripted([10.0] * 9 + [1.0] * 200))
    compressor.attach(model, optimizer=optimizer)
    start, total = flat_parameters(model), torch.zeros(())
    for step in range(120):
        optimizer.zero_grad()
        if step < 9:
            gradients = local_gradients(model, step, rank).values()
            total = total + torch.cat(list(gradients)) / (1 - 0.9)
        (loss_of(model, step, rank) * (step < 9)).backward()
        if step == 4:
            for p in model.parameters():
                p.grad *= 1.0001
        optimizer.step()
    assert compressor.state_dict()["memory_kind"] == "residual"
    dist.all_reduce(total)
    total /= dist.get_world_size()
    moved = (start - flat_parameters(model)) / 1e-6
    return float((moved - total).norm() / total.norm())


@pytest.mark.parametrize("nesterov", [False, True])
def test_nothing_is_lost_when_momentum_goes_back(nesterov: bool) -> None:
    assert max(run_ranks(2, _switched_once, nesterov)) < 1e-3


def _resumed(rank: int) -> tuple[str, bool]:
    """A script that clips, stopped and continued: the memory, and whether nothing differs."""
    ends: list[torch.Tensor] = []
    for stops in (False, True):
        model = DDP(small_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        compressor = AdaptiveCompressor(policy=Scripted([10.0])).attach(model, optimizer=optimizer)
        for step in range(9):
            if stops and step == 5:
                saved = compressor.state_dict(), model.state_dict(), optimizer.state_dict()
                model = DDP(small_net())
                optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
                compressor = AdaptiveCompressor(policy=Scripted([10.0]))
                compressor.attach(model, optimizer=optimizer)
                loss_of(model, 0, rank).backward()  # DDP's first buckets are others
                optimizer.step()
                compressor.load_state_dict(saved[0])
                model.load_state_dict(saved[1])
                optimizer.load_state_dict(saved[2])
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            _clip(model)
            optimizer.step()
        ends.append(flat_parameters(model))
    return compressor.state_dict()["memory_kind"], same(*ends)


def test_a_run_that_has_fallen_back_resumes_so() -> None:
    assert run_ranks(2, _resumed) == [("residual", True)] * 2


def _scaled(rank: int, handed_over: bool, clips: bool, fused: bool) -> str:
    model = DDP(small_net(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    compressor = AdaptiveCompressor(policy=Scripted([10.0]))
    compressor.attach(model, optimizer=optimizer, scaler=scaler if handed_over else None)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, rank)).backward()
        if clips:
            scaler.unscale_(optimizer)
            _clip(model)
        scaler.step(optimizer)
        scaler.update()
    return compressor.state_dict()["memory_kind"]


def _scaled_each_way(rank: int, fused: bool) -> list[str]:
    return [_scaled(rank, *each, fused) for each in ((True, False), (True, True), (False, False))]


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_was_handed_over_may_unscale(fused: bool) -> None:
    assert run_ranks(2, _scaled_each_way, fused) == [["momentum", "residual", "residual"]] * 2


def _fused(rank: int, nesterov: bool) -> list[float]:
    """How far a fused SGD, which unscales gradients itself, is at CF 1 from plain DDP; the second
    time one step has an infinite loss."""
    apart = []
    for nonfinite in (-1, 6):
        ends = []
        for compressed in (False, True):
            model = DDP(small_net(torch.float32))
            settings = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True, **settings)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            if compressed:
                compressor = AdaptiveCompressor(policy=Scripted([1.0]), cf_range=(1, 32))
                compressor.attach(model, optimizer=optimizer, scaler=scaler)
            for step in range(20):
                optimizer.zero_grad()
                loss = loss_of(model, step, rank)
                scaler.scale(loss * float("inf") if step == nonfinite else loss).backward()
                scaler.step(optimizer)
                scaler.update()
            ends.append(flat_parameters(model))
        apart.append(float((ends[0] - ends[1]).abs().max()))
    return apart


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_fused_optimizer_unscales_the_decay_of_weights_too(nesterov: bool) -> None:
    assert max(map(max, run_ranks(2, _fused, nesterov))) < 1e-6


def _two_optimizers(rank: int) -> tuple[str, bool]:
    """One has stepped before what the other steps with is clipped."""
    model = DDP(small_net())
    first, *others = (layer.parameters() for layer in model.module if list(layer.parameters()))
    ours = torch.optim.SGD(first, lr=0.02, momentum=0.9)
    other = torch.optim.SGD([p for group in others for p in group], lr=0.02)
    compressor = AdaptiveCompressor(policy=Scripted([10.0])).attach(model, optimizer=ours)
    for step in range(6):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        other.step()
        clip_grad_norm_(ours.param_groups[0]["params"], 1e-3)
        ours.step()
    return compressor.state_dict()["memory_kind"], ours.param_groups[0]["momentum"] == 0.9


def test_what_is_clipped_between_two_optimizers_is_noticed() -> None:
    assert run_ranks(2, _two_optimizers) == [("residual", True)] * 2


def _never_cleared(rank: int, momentum: float) -> str:
    """Gradients add up in a layer that the optimizer does not step by momentum. momentum: of its
    group, which the script does not clear; -1: no optimizer has it."""
    model = DDP(small_net())
    head, rest = [*model.module[4].parameters()], [*model.module[:4].parameters()]
    optimizer = torch.optim.SGD(rest, lr=0.02, momentum=0.9)
    if momentum >= 0:
        optimizer.add_param_group({"params": head, "momentum": momentum})
    compressor = AdaptiveCompressor(policy=Scripted([10.0])).attach(model, optimizer=optimizer)
    for step in range(6):
        for p in rest:
            p.grad = None
        loss_of(model, step, rank).backward()
        optimizer.step()
    return compressor.state_dict()["memory_kind"]


def _never_cleared_each_way(rank: int) -> list[str]:
    return [_never_cleared(rank, momentum) for momentum in (-1.0, 0.0, 0.9)]


def test_gradients_that_add_up_end_momentum_correction_where_they_hold_velocities() -> None:
    assert run_ranks(2, _never_cleared_each_way) == [["momentum", "momentum", "residual"]] * 2


def _two_backwards(rank: int) -> str:
    """Every second parameter, the first included, is of a group without momentum."""
    model = DDP(small_net())
    groups: list[dict[str, Any]] = [{"params": [*model.parameters()][i::2]} for i in range(2)]
    groups[0]["momentum"] = 0.0
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    compressor = AdaptiveCompressor(policy=Scripted([10.0])).attach(model, optimizer=optimizer)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        _run_backward_again(model)
        optimizer.step()
    return compressor.state_dict()["memory_kind"]


def test_gradients_added_to_velocities_are_noticed_whichever_group_has_momentum() -> None:
    assert run_ranks(2, _two_backwards) == ["residual"] * 2


def _closure(rank: int, clips: bool, by_name: bool) -> list[str]:
    """What is said of an optimizer that is stepped with a closure."""
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    AdaptiveCompressor(policy=Scripted([10.0])).attach(model, optimizer=optimizer)
    step, told = 0, listen()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        if clips:
            _clip(model)
        return loss

    while step < 5:
        step += 1
        loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert loss is not None
    return list(told)


def _closures(rank: int) -> list[list[str]]:
    return [_closure(rank, clips, by_name) for by_name in (False, True) for clips in (False, True)]


def test_what_is_clipped_in_a_closure_is_noticed() -> None:
    quiet, said, silent, repeated = run_ranks(2, _closures)[0]
    assert quiet == silent == []
    assert [len(said), len(repeated)] == [1, 1]
    assert "p.grad was changed" in said[0]


def _resumed_after_clipping(rank: int) -> tuple[float, dict[str, float]]:
    """How far apart a run that clips and one that was resumed end."""
    ends, kept = [], {}
    for stops in (False, True):
        states: list[Any] = []
        for first, last in ((0, 5), (5, 11)) if stops else ((0, 11),):
            model = DDP(small_net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            compressor = AdaptiveCompressor("topk+fp32", policy=Scripted([10.0, 10.0, 1.0]))
            compressor.attach(model, optimizer=optimizer)
            if states:
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
                compressor.load_state_dict(states[2])
            for step in range(first, last):
                optimizer.zero_grad()
                loss_of(model, step, rank).backward()
                _clip(model)
                optimizer.step()
            states = [deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())]
            states.append(compressor.state_dict())
            kept = states[-1]["moments"]
        ends.append(flat_parameters(model))
    return float((ends[0] - ends[1]).abs().max()), kept


def test_a_run_that_clips_goes_on_from_the_lag_that_its_momentum_had() -> None:
    for apart, kept in run_ranks(2, _resumed_after_clipping):
        assert apart < 1e-9  # DDP's first buckets are others
        assert 0 < kept["share"] < 1


def _optimizer_made_anew(rank: int) -> tuple[float, bool]:
    """The share of the lag after a script that clips has made its SGD anew, and whether the buffers
    of another SGD, of other parameters, are left alone."""
    model = DDP(small_net())
    first, *others = (list(layer.parameters()) for layer in model.module if [*layer.parameters()])
    rest = [p for group in others for p in group]
    other = torch.optim.SGD(rest, lr=0.02, momentum=0.5)
    ours = torch.optim.SGD(first, lr=0.02, momentum=0.9)
    compressor = AdaptiveCompressor("topk+fp32", policy=Scripted([10.0]))
    compressor.attach(model, optimizer=ours)
    alone = True
    for step in range(10):
        if step == 6:
            ours = torch.optim.SGD(first, lr=0.02, momentum=0.9)
        model.zero_grad()
        loss_of(model, step, rank).backward()
        before = [other.state[p]["momentum_buffer"].clone() for p in rest] if step else []
        other.step()
        grads = [p.grad for p in rest]
        if step > 6:
            expected = [0.5 * buffer + grad for buffer, grad in zip(before, grads, strict=True)]
            after = [other.state[p]["momentum_buffer"] for p in rest]
            alone &= all(map(torch.allclose, expected, after))
        clip_grad_norm_(first, 1e-3)
        ours.step()
    return compressor.state_dict()["moments"]["share"], alone


def test_an_sgd_made_anew_takes_the_place_of_the_first_after_clipping_too() -> None:
    for share, alone in run_ranks(2, _optimizer_made_anew):
        assert 0 < share < 1
        assert alone


def _state_of_plain_error_feedback(rank: int) -> list[str]:
    """What is said when momentum correction is asked for, and the state has none."""
    states, told = [], listen()
    for options in ({"memory": "residual"}, {}):
        model = DDP(small_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        compressor = AdaptiveCompressor(policy=Scripted([10.0]), **options)
        compressor.attach(model, optimizer=optimizer)
        if states:
            compressor.load_state_dict(states[0])
        states.append(compressor.state_dict())
    assert states[1]["memory_kind"] == "residual"
    return told


def test_a_state_without_momentum_correction_is_not_loaded_in_silence() -> None:
    first, second = run_ranks(2, _state_of_plain_error_feedback)
    assert "plain error feedback" in first[0]
    assert second == []


def _discarding(rank: int, momentum: float) -> tuple[bool, bool]:
    """Whether the memory is empty after `discard`, and training goes on as from the start."""
    ends = []
    for spike in (False, True):
        model = DDP(small_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)
        compressor = AdaptiveCompressor(policy=Scripted([10.0]))
        compressor.attach(model, optimizer=optimizer)
        loss_of(model, 0, rank).backward()  # DDP's first buckets are others
        compressor.discard()
        empty = not any("residual" in m for m in compressor.state_dict()["memory"].values())
        for step in range(4):
            optimizer.zero_grad()
            if spike and step == 0:
                (1e6 * loss_of(model, 9, rank)).backward()
                compressor.discard()
                optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        ends.append(flat_parameters(model))
    return empty, same(*ends)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_discard_leaves_no_trace_of_a_backward(momentum: float) -> None:
    assert run_ranks(2, _discarding, momentum) == [(True, True)] * 2


def _scaled_residual(rank: int, how: str, fused: bool) -> int:
    """How often a GradScaler that was not handed over is told of, with plain error feedback."""
    model = DDP(small_net(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=how != "no scaler")
    compressor = AdaptiveCompressor(policy=Scripted([10.0]))
    handed_over = scaler if how == "handed over" else None
    compressor.attach(model, optimizer=optimizer, scaler=handed_over)
    told = listen()
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, rank)).backward()
        if how == "no scaler":
            _clip(model)
        scaler.step(optimizer)
        scaler.update()
    return sum("GradScaler" in message for message in told)


def _scaled_residual_each_way(rank: int, fused: bool) -> list[int]:
    ways = ("not handed over", "handed over", "no scaler")
    return [_scaled_residual(rank, how, fused) for how in ways]


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_was_not_handed_over_is_told_of_with_any_memory(fused: bool) -> None:
    assert run_ranks(2, _scaled_residual_each_way, fused) == [[1, 0, 0], [0, 0, 0]]


def _earlier_state(rank: int) -> str:
    """What is said of a state from before momentum correction was given up."""
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    compressor = AdaptiveCompressor(policy=Scripted([10.0])).attach(model, optimizer=optimizer)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        if step == 1:
            saved = compressor.state_dict()
        if step > 1:
            _clip(model)
        optimizer.step()
    with pytest.raises(ValueError, match="attach a new AdaptiveCompressor") as caught:
        compressor.load_state_dict(saved)
    return str(caught.value)


def test_a_state_from_before_momentum_was_given_up_says_what_to_do() -> None:
    assert all(run_ranks(2, _earlier_state))
