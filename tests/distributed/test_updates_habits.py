"""What training scripts do with gradients and optimizers, while each rank steps by itself."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from adaptive import AdaptiveCompressor, Fixed, Schedule
from tests.distributed.own_optimizers import LARS
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    TwoBranches,
    batch,
    flat_parameters,
    listen,
    local_gradients,
    loss_of,
    small_net,
)
from tests.distributed.test_updates import ALL, Training, differs, mean, moments

LR = 0.01
SINGLE = torch.float32


def _adamw(model: nn.Module, **settings: Any) -> AdamW:
    return AdamW(model.parameters(), lr=LR, **{"betas": (0.9, 0.99), **settings})


def _held_out(run: Training) -> float:
    with torch.no_grad():
        return sum(float(loss_of(run.model, step, 7)) for step in range(1000, 1010)) / 10


def _clipped_to_one_norm(rank: int) -> list[float]:
    """Held-out losses of scripts that clip every step, dense and compressed, and how far they get
    at first, where both are clipped for the first time."""
    dense, compressed = (Training(_adamw, policy, clip=0.05) for policy in (None, Fixed(10)))
    for run in (dense, compressed):
        run.train(rank, 0, 60)
    assert differs([compressed.flat]) == 0
    return [_held_out(dense), _held_out(compressed)]


@pytest.mark.long
def test_a_script_that_clips_every_step_trains_as_well_as_under_ddp() -> None:
    dense, compressed = run_ranks(2, _clipped_to_one_norm)[0]
    assert compressed < 1.2 * dense


def _step_after_saving(rank: int) -> list[float]:
    """How far a step moves the parameters, in a run that was not saved before it and in one that
    was, for all ranks in one file."""
    runs = [Training(_adamw, Fixed(10)).train(rank, 0, 20) for _ in range(2)]
    runs[1].compressor.state_dict("gathered")
    before = runs[0].flat.clone()
    return [float((run.train(rank, 20, 21).flat - before).norm()) for run in runs]


def test_saving_is_not_seen_in_the_next_step() -> None:
    usual, saved = run_ranks(2, _step_after_saving)[0]
    assert 0.5 * usual < saved < 1.5 * usual


def _masked(rank: int) -> dict[str, float]:
    """A script that sets the gradients of some parameters to zero in every step: how far these
    move, and how far the others."""
    run = Training(lambda m: _adamw(m, weight_decay=0.0), Schedule({0: 20, 6: 1, 8: 20}))
    frozen = [p for name, p in run.model.named_parameters() if "2." in name]
    before = {p: p.detach().clone() for p in run.model.parameters()}
    for step in range(12):
        run.optimizer.zero_grad()
        loss_of(run.model, step, rank).backward()
        for p in frozen:
            p.grad.zero_()
        run.optimizer.step()
    moved = {p: float((p.detach() - b).abs().max()) for p, b in before.items()}
    return {
        "frozen": max(moved[p] for p in frozen),
        "others": min(moved[p] for p in moved if all(p is not f for f in frozen)),
    }


def test_parameters_whose_gradients_a_script_sets_to_zero_do_not_move() -> None:
    for found in run_ranks(2, _masked):
        assert found["frozen"] == 0
        assert found["others"] > LR


def _frozen(rank: int, how: str) -> list[float]:
    """A script that freezes the first layer for steps 6 to 11: how far the layer moves meanwhile,
    and afterwards, and by how much the ranks differ."""
    run = Training(_adamw, Fixed(20), small_net(SINGLE), ddp={"find_unused_parameters": True})
    layer = run.model.module[0]
    stood, moved = [flat_parameters(layer)], []
    for step in range(18):
        run.optimizer.zero_grad()
        if how == "requires_grad":
            layer.requires_grad_(step // 6 != 1)
        loss_of(run.model, step, rank).backward()
        if how == "no gradient" and step // 6 == 1:
            for p in layer.parameters():
                p.grad = None
        run.optimizer.step()
        if step % 6 == 5:
            stood.append(flat_parameters(layer))
            moved.append(float((stood[-1] - stood[-2]).abs().max()))
    return [*moved, differs([run.flat])]


@pytest.mark.parametrize("how", ["requires_grad", "no gradient"])
def test_parameters_that_a_script_freezes_for_a_time_do_not_move_meanwhile(how: str) -> None:
    for before, frozen, after, apart in run_ranks(2, _frozen, how):
        assert min(before, after) > LR
        assert (frozen, apart) == (0, 0)


def _apart(rank: int, one: Callable[[Training, int], None], other: Callable, **options: Any) -> Any:
    """Two runs from the same start, stepped differently: by how much their parameters are apart,
    and by how much the ranks'."""
    make = options.pop("make", _adamw)
    ends = []
    for habit in (one, other):
        run = Training(make, Schedule({0: 20, 8: 1, 10: 20}), **options)
        for step in range(14):
            habit(run, step)
        ends.append(run.flat)
        assert differs([run.flat]) == 0
    return float((ends[0] - ends[1]).abs().max())


def _closures(rank: int) -> list[float]:
    def plain(run: Training, step: int) -> None:
        run.train(rank, step, step + 1)

    def in_closure(run: Training, step: int) -> None:
        def closure() -> Tensor:
            run.optimizer.zero_grad()
            loss = loss_of(run.model, step, rank)
            loss.backward()
            return loss

        assert float(run.optimizer.step(closure)) > 0

    return [_apart(rank, plain, in_closure, make=ALL[name]) for name in ("adamw", "adamw, groups")]


def test_a_closure_is_called_once_and_makes_the_same_step() -> None:
    assert run_ranks(2, _closures) == [[0.0, 0.0]] * 2


def _accumulated(rank: int) -> float:
    """A batch in two backwards, the first of them without synchronisation, and in one."""

    def whole(run: Training, step: int) -> None:
        run.optimizer.zero_grad()
        (loss_of(run.model, 2 * step, rank) + loss_of(run.model, 2 * step + 1, rank)).backward()
        run.optimizer.step()

    def in_two(run: Training, step: int) -> None:
        run.optimizer.zero_grad()
        with run.model.no_sync():
            loss_of(run.model, 2 * step, rank).backward()
        loss_of(run.model, 2 * step + 1, rank).backward()
        run.optimizer.step()

    return _apart(rank, whole, in_two)


def test_gradients_may_be_accumulated_without_synchronisation() -> None:
    assert max(run_ranks(2, _accumulated)) < 1e-9


def _settings_of_each_group(rank: int) -> list[float]:
    """How far each group's parameters move in a compressed step, relative to its learning rate: the
    settings are read in every step."""
    run = Training(ALL["adamw, groups"], Fixed(20))
    run.train(rank, 0, 3)
    found = []
    for lr in (0.0, 1e-3):
        for group in run.optimizer.param_groups:
            before = [p.detach().clone() for p in group["params"]]
            for each in run.optimizer.param_groups:
                each["lr"] = lr if each is group else 0.0
            run.train(rank, 3, 4)
            moved = [
                (p.detach() - b).abs().max() for p, b in zip(group["params"], before, strict=True)
            ]
            found.append(float(max(moved)))
    return found


def test_groups_keep_their_own_learning_rates() -> None:
    for found in run_ranks(2, _settings_of_each_group):
        assert found[:3] == [0.0] * 3
        assert min(found[3:]) > 1e-4


def _decay_is_each_groups(rank: int) -> float:
    """What decoupled weight decay takes off parameters whose gradients are zero in every step,
    against what it should."""
    worst = 0.0
    for name in ("adamw, groups", "nadam, decoupled decay"):
        run = Training(ALL[name], Fixed(20))
        wanted = {p: p.detach().clone() for p in run.model.parameters()}
        for step in range(3):
            run.optimizer.zero_grad()
            loss_of(run.model, step, rank).backward()
            for group in run.optimizer.param_groups:
                for p in group["params"]:
                    p.grad.zero_()
                    wanted[p] *= 1 - group["lr"] * group["weight_decay"]
            run.optimizer.step()
        worst = max(worst, max(float((p - w).abs().max()) for p, w in wanted.items()))
    return worst


def test_decoupled_decay_is_that_of_the_optimizer() -> None:
    assert max(run_ranks(2, _decay_is_each_groups)) < 1e-15


def _added_later(rank: int) -> dict[str, Any]:
    """The last layer joins the optimizer in the middle; its gradients are huge."""
    found = {}
    for cf_then in (20, 1):
        run = Training(
            lambda m: AdamW([p for n, p in m.named_parameters() if ".4." not in n], lr=LR),
            Schedule({0: 20, 6: cf_then, 9: 20}),
        )
        late = [p for n, p in run.model.named_parameters() if ".4." in n]
        start = [p.detach().clone() for p in late]
        for step in range(6):
            run.model.zero_grad()
            (1e4 * loss_of(run.model, step, rank)).backward()
            run.optimizer.step()
        still = max(float((p - s).detach().abs().max()) for p, s in zip(late, start, strict=True))
        run.optimizer.add_param_group({"params": late, "lr": LR})
        for step in range(6, 12):
            run.model.zero_grad()
            (1e4 * loss_of(run.model, step, rank)).backward()
            run.optimizer.step()
        moved = max(float((p - s).detach().abs().max()) for p, s in zip(late, start, strict=True))
        found[f"then CF {cf_then}"] = (still, moved, differs([run.flat]))
    return found


def test_a_group_may_be_added_later() -> None:
    for found in run_ranks(2, _added_later):
        for still, moved, apart in found.values():
            assert still == 0
            assert LR < moved < 6 * 20 * LR  # no step is far from the learning rate
            assert apart == 0


def _taken_out(rank: int, swapped: bool) -> tuple[float, float, float]:
    """The head's group is taken out of the optimizer after 3 steps (swapped: in the same step the
    first layer's comes in), and put back after 6. How far the head has moved meanwhile, how far
    afterwards, and by how much the ranks differ."""

    def of(prefix: str) -> list[Tensor]:
        return [p for n, p in run.model.module.named_parameters() if n.startswith(prefix)]

    def make(model: nn.Module) -> AdamW:
        named = [*model.named_parameters()]
        head = [p for n, p in named if ".4." in n]
        rest = [p for n, p in named if ".4." not in n and not (swapped and ".0." in n)]
        return AdamW([{"params": head, "weight_decay": 0.1}, {"params": rest}], lr=LR)

    def moved(start: int, stop: int) -> float:
        before = [p.detach().clone() for p in head]
        run.train(rank, start, stop)
        return max(float((p - b).detach().abs().max()) for p, b in zip(head, before, strict=True))

    run = Training(make, Fixed(20))
    head, groups = of("4."), run.optimizer.param_groups
    run.train(rank, 0, 3)
    group = groups.pop(0)
    if swapped:
        run.optimizer.add_param_group({"params": of("0.")})
    still = moved(3, 6)
    groups.append(group)
    return still, moved(6, 12), differs([run.flat])


@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_taken_out_of_the_optimizer_stands_still(swapped: bool) -> None:
    for still, moved, apart in run_ranks(2, _taken_out, swapped):
        assert still == apart == 0.0
        assert moved > LR / 2


def _layers(model: nn.Module) -> list[list[Tensor]]:
    return [layer for layer in ([*each.parameters()] for each in model.module) if layer]


def _exchanged_between_groups(rank: int) -> tuple[float, float, float]:
    """Two groups exchange their parameters, and the second gets a learning rate of 0: how far each
    group's parameters then move at most, and by how much the ranks differ."""
    run = Training(
        lambda model: AdamW([{"params": each} for each in _layers(model)], lr=LR), Fixed(20)
    )
    first, second, _ = run.optimizer.param_groups
    run.train(rank, 0, 3)
    first["params"], second["params"] = second["params"], first["params"]
    second["lr"] = 0.0
    before = [[p.detach().clone() for p in group["params"]] for group in (first, second)]
    run.train(rank, 3, 6)
    moved = [
        max(float((p.detach() - b).abs().max()) for p, b in zip(group["params"], old, strict=True))
        for group, old in zip((first, second), before, strict=True)
    ]
    return moved[0], moved[1], differs([run.flat])


def test_groups_may_exchange_their_parameters() -> None:
    for moved, still, apart in run_ranks(2, _exchanged_between_groups):
        assert still == apart == 0.0
        assert moved > LR / 2


RATES = (1e-3, 1e-5, 1e-4)


def _groups_joined(rank: int) -> tuple[float, bool]:
    """A script joins groups of several learning rates in mid-run: by how much the parameters have
    then moved less or more than by the sum of all updates, relative, once all was sent; and whether
    a run that resumes after that goes on to the bit."""

    def make() -> Training:
        groups = lambda of: [  # noqa: E731
            {"params": each, "lr": lr} for each, lr in zip(_layers(of), RATES, strict=True)
        ]
        return Training(lambda model: SGD(groups(model)), Fixed(10), memory="updates")

    def join(run: Training) -> None:
        parameters = [p for each in _layers(run.model) for p in each]
        run.optimizer.param_groups.clear()
        run.optimizer.add_param_group({"params": parameters, "lr": RATES[0]})

    def step(run: Training, weight: float, index: int) -> None:
        run.optimizer.zero_grad()
        (weight * loss_of(run.model, index, rank)).backward()
        run.optimizer.step()

    run, resumed = make(), make()
    start, total = run.flat.clone(), torch.zeros(())
    for index in range(6):
        gradients = local_gradients(run.model, index, rank).values()
        rates = [lr for lr in RATES for _ in range(2)]  # of a weight and a bias
        total = total + torch.cat([lr * g for lr, g in zip(rates, gradients, strict=True)])
        step(run, 1.0, index)
    join(run)
    step(run, 0.0, 6)
    saved = [deepcopy(part.state_dict()) for part in _parts(run)]
    step(resumed, 0.0, 0)  # DDP's first buckets are others
    join(resumed)
    for part, state in zip(_parts(resumed), saved, strict=True):
        part.load_state_dict(state)
    for index in range(7, 100):
        for each in (run, resumed):
            step(each, 0.0, index)
    total = mean(total)
    sizes = [sum(p.numel() for p in each) for each in _layers(run.model)]
    pairs = zip((start - run.flat).split(sizes), total.split(sizes), strict=True)
    missing = max(float((moved - wanted).norm() / wanted.norm()) for moved, wanted in pairs)
    return missing, torch.equal(run.flat, resumed.flat)


def test_what_waits_moves_parameters_as_far_where_groups_are_joined() -> None:
    for missing, alike in run_ranks(2, _groups_joined):
        assert missing < 1e-9
        assert alike


def _resumed_with_a_late_group(rank: int) -> list[Tensor]:
    """The last layer joins the optimizer after attach(). Parameters of a run that never stopped,
    and of a resumed one, whose script adds the group before it loads the states."""

    def join(run: Training) -> None:
        late = [p for n, p in run.model.named_parameters() if ".4." in n]
        run.optimizer.add_param_group({"params": late})

    whole, resumed = (Training(lambda m: _adamw_without(m, HEAD), Fixed(20)) for _ in range(2))
    whole.train(rank, 0, 3)
    join(whole)
    whole.train(rank, 3, 6)
    saved = [deepcopy(part.state_dict()) for part in _parts(whole)]
    resumed.train(rank, 0, 1)
    join(resumed)
    for part, state in zip(_parts(resumed), saved, strict=True):
        part.load_state_dict(state)
    return [run.train(rank, 6, 9).flat for run in (whole, resumed)]


HEAD = ("4.weight", "4.bias")


def _parts(run: Training) -> tuple[Any, ...]:
    return run.model, run.optimizer, run.compressor


def test_a_run_resumes_where_a_group_was_added_later() -> None:
    for whole, resumed in run_ranks(2, _resumed_with_a_late_group):
        assert torch.equal(whole, resumed)


def _joined_before_a_closure(rank: int) -> float:
    """By how much ranks differ where a group is new in a step with a closure. SGD: an optimizer
    that is not adaptive may move parameters before its closure runs."""

    def without_head(model: nn.Module) -> SGD:
        return SGD([p for n, p in model.named_parameters() if ".4." not in n], lr=LR, momentum=0.9)

    def closure() -> Tensor:
        run.model.zero_grad()
        loss = loss_of(run.model, step, rank)
        loss.backward()
        return loss

    run = Training(without_head, Fixed(20), memory="updates")
    for step in range(5):
        if step == 2:
            late = [p for n, p in run.model.named_parameters() if ".4." in n]
            run.optimizer.add_param_group({"params": late})
        run.optimizer.step(closure)
    return differs([run.flat])


def test_a_group_may_be_added_before_a_step_with_a_closure() -> None:
    assert run_ranks(2, _joined_before_a_closure) == [0.0, 0.0]


def _in_no_optimizer(rank: int) -> dict[str, float]:
    """Parameters in no optimizer: by how much their `p.grad` differs from the mean gradient, and
    how often rank 0 is warned of them."""
    told = listen()
    frees = ("0.weight", "4.bias")
    run = Training(lambda m: _adamw_without(m, frees), Schedule({0: 20, 6: 1, 8: 20}))
    free = {name: p for name, p in run.model.module.named_parameters() if name in frees}
    worst = 0.0
    for step in range(12):
        gradients = local_gradients(run.model, step, rank)
        run.model.zero_grad()
        loss_of(run.model, step, rank).backward()
        for name, p in free.items():
            worst = max(worst, float((p.grad.flatten() - mean(gradients[name])).abs().max()))
        run.optimizer.step()
    warned = sum("hand all optimizers over" in each for each in told)
    return {"gradient": worst, "warned": float(warned), "ranks": differs([run.flat])}


def _adamw_without(model: nn.Module, names: tuple[str, ...]) -> AdamW:
    rest = [p for n, p in model.named_parameters() if n.removeprefix("module.") not in names]
    return AdamW(rest, lr=LR)


def test_a_parameter_in_no_optimizer_gets_the_mean_gradient() -> None:
    for rank, found in enumerate(run_ranks(2, _in_no_optimizer)):
        assert found.pop("warned") == (rank == 0)
        assert max(found.values()) < 1e-12


def _unused(rank: int, name: str, cf: float, ways: str) -> dict[str, float]:
    """By how much ranks differ, step by step."""
    run = Training(
        ALL[name],
        Schedule({0: cf, 7: 1, 9: cf}),
        TwoBranches(),
        ddp={"find_unused_parameters": True, "bucket_cap_mb": 0.004},
    )
    found = {}
    for step in range(11):
        which = {"alike": step % 3, "one rank": (step + rank) % 2, "from step 5": 0}[ways]
        if ways == "from step 5" and step > 4:
            which = 2 * rank
        x, y = batch(step, rank)
        run.optimizer.zero_grad()
        ((run.model(x, which) - y) ** 2).mean().backward()
        run.optimizer.step()
        if apart := differs([run.flat]):
            found[f"{name}, CF {cf}, step {step}"] = apart
    return found


def _unused_each_way(rank: int, ways: str) -> dict[str, float]:
    found = _unused(rank, "adamw", 20, ways) | _unused(rank, "nadam", 4, ways)
    return found | _unused(rank, "rmsprop, centered, momentum", 20, ways)


@pytest.mark.parametrize("ways", ["alike", "one rank", "from step 5"])
def test_ranks_stay_alike_where_parameters_go_unused(ways: str) -> None:
    assert run_ranks(2, _unused_each_way, ways) == [{}, {}]


class Gated(nn.Module):
    """A net whose last layer's gradient is exactly zero now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()
        self.gate = 1.0
        self.net[4].weight.register_hook(lambda g: g * self.gate)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _zero_gradients(rank: int, unused: bool) -> dict[str, float]:
    found = {}
    for where in ("on all ranks", "on one rank"):
        net = Gated()
        ddp = {"find_unused_parameters": unused, "bucket_cap_mb": 0.004}
        run = Training(_adamw, Schedule({0: 20, 8: 1, 12: 20}), net, ddp=ddp)
        for step in range(16):
            zero = step % 3 == 1 and (where == "on all ranks" or rank == 1)
            net.gate = 0.0 if zero else 1.0
            run.train(rank, step, step + 1)
            if apart := differs([run.flat]):
                found[f"{where}, step {step}"] = apart
    return found


@pytest.mark.parametrize("unused", [False, True])
def test_ranks_stay_alike_where_gradients_are_exactly_zero(unused: bool) -> None:
    assert run_ranks(2, _zero_gradients, unused) == [{}, {}]


def _scaled(rank: int, fused: bool, overflow: str, cf: float) -> dict[str, float]:
    """A script with a loss scale, whose loss overflows in step 5, on rank 1 or on all."""
    run = Training(lambda m: _adamw(m, fused=fused), None, small_net(torch.float32))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    run.compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Schedule({0: 20, 5: cf, 6: 20}))
    run.compressor.attach(run.model, optimizer=run.optimizer, scaler=scaler)
    skipped = 0.0
    for step in range(12):
        run.optimizer.zero_grad()
        loss = loss_of(run.model, step, rank)
        bad = step == 5 and (rank == 1 or overflow == "all")
        before = run.flat
        scaler.scale(loss * float("inf") if bad else loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        if step == 5:
            skipped = float((run.flat - before).norm())
    return {"skipped": skipped, "apart": differs([run.flat])}


def _scaled_each_way(rank: int, fused: bool) -> list[str]:
    """What is wrong."""
    wrong = []
    for overflow in ("all", "one"):
        for cf in (20, 1):
            found = _scaled(rank, fused, overflow, cf)
            what = f"overflow on {overflow}, CF {cf}: "
            if found["apart"]:
                wrong.append(f"{what}ranks differ by {found['apart']}")
            # A fused optimizer is called all the same, and updates of earlier steps arrive with it.
            if found["skipped"] != 0 and not fused:
                wrong.append(f"{what}the step was not skipped, {found['skipped']}")
    return wrong


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_whose_loss_overflows_is_skipped_on_all_ranks(fused: bool) -> None:
    assert run_ranks(2, _scaled_each_way, fused) == [[], []]


def _scale_matters_not(rank: int, fused: bool) -> list[float]:
    """A loss scale that was handed over changes nothing, nor does unscaling before clipping."""
    ends = []
    for how in ("none", "scaled", "unscaled"):
        run = Training(lambda m: _adamw(m, fused=fused), None, small_net(torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=how != "none")
        policy = Schedule({0: 20, 8: 1, 10: 20})
        compressor = AdaptiveCompressor(cf_range=(1, 100), policy=policy)
        compressor.attach(run.model, optimizer=run.optimizer, scaler=scaler)
        for step in range(13):
            run.optimizer.zero_grad()
            scaler.scale(loss_of(run.model, step, rank)).backward()
            if how == "unscaled":
                scaler.unscale_(run.optimizer)
                clip_grad_norm_(run.model.parameters(), 1e6)
            scaler.step(run.optimizer)
            scaler.update()
        ends.append(run.flat)
        assert differs([run.flat]) == 0
    return [float((end - ends[0]).abs().max()) for end in ends[1:]]


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_that_was_handed_over_changes_nothing(fused: bool) -> None:
    assert max(map(max, run_ranks(2, _scale_matters_not, fused))) < 1e-4


def _nan_on_one_rank(rank: int, cf: float) -> dict[str, Any]:
    """What p.grad is in the bad step, and how training goes on."""
    run = Training(_adamw, Schedule({0: 20, 5: cf, 6: 20, 12: 1}), ddp={})
    for step in range(15):
        run.optimizer.zero_grad()
        bad = step == 5
        loss = loss_of(run.model, step, rank)
        (loss * float("nan") if bad and rank == 1 else loss).backward()
        if bad:
            nan = all(bool(p.grad.isnan().all()) for p in run.model.parameters())
            run.optimizer.zero_grad()
        else:
            before = run.flat
            run.optimizer.step()
            assert 0 < float((run.flat - before).abs().max()) < 30 * LR  # with all that was late
    return {"nan": nan, "apart": differs([run.flat]), "moments": differs(moments(run))}


@pytest.mark.parametrize("cf", [20, 1])
def test_a_gradient_that_is_not_a_number_is_so_on_all_ranks_and_leaves_no_trace(cf: float) -> None:
    expected = {"nan": True, "apart": 0.0, "moments": 0.0}
    assert run_ranks(2, _nan_on_one_rank, cf) == [expected] * 2


def _detached(rank: int) -> dict[str, Any]:
    run = Training(_adamw, Fixed(20)).train(rank, 0, 8)
    run.compressor.detach()
    found: dict[str, Any] = {"ranks": differs([run.flat]), "moments": differs(moments(run))}
    # From here on a plain run that begins where this one stands must do the same.
    plain = Training(_adamw, None)
    plain.model.load_state_dict(run.model.state_dict())
    plain.optimizer.load_state_dict(deepcopy(run.optimizer.state_dict()))
    run.train(rank, 8, 12)
    plain.train(rank, 8, 12)
    found["dense"] = float((run.flat - plain.flat).abs().max())
    other = AdaptiveCompressor(cf_range=(1, 100), policy=Fixed(50))
    other.attach(run.model, optimizer=run.optimizer)
    run.train(rank, 12, 18)
    return {**found, "again": differs([run.flat]), "kind": other.memory}


def test_after_detach_it_is_a_plain_run_and_another_can_be_attached() -> None:
    plain = {"ranks": 0.0, "moments": 0.0, "dense": 0.0, "again": 0.0, "kind": "updates"}
    assert run_ranks(2, _detached) == [plain] * 2


def _state_loaded_in_mid_run(rank: int) -> tuple[float, bool]:
    """All ranks load the optimizer's state of rank 0, as scripts that save one file do."""
    run = Training(_adamw, Schedule({0: 20, 9: 1})).train(rank, 0, 5)
    states = [run.optimizer.state_dict()]
    dist.broadcast_object_list(states, 0)
    run.optimizer.load_state_dict(states[0])
    before = run.flat
    run.train(rank, 5, 12)
    return max(differs([run.flat]), differs(moments(run))), not torch.equal(before, run.flat)


def test_an_optimizers_state_may_be_loaded_in_mid_run() -> None:
    assert run_ranks(2, _state_loaded_in_mid_run) == [(0.0, True)] * 2


def _spikes(rank: int) -> list[float]:
    """How far a run gets whose third step is a spike that is discarded, relative to one without it,
    and by how much the ranks differ."""
    ends, starts = [], []
    for spike in (False, True):
        run = Training(_adamw, Fixed(20))
        run.train(rank, 0, 2)
        starts.append(run.flat)
        if spike:
            run.optimizer.zero_grad()
            (1e6 * loss_of(run.model, 9, rank)).backward()
            run.compressor.discard()
        run.train(rank, 2, 12)
        ends.append(run.flat)
    moves = [end - start for end, start in zip(ends, starts, strict=True)]
    return [float(moves[1].norm() / moves[0].norm()), differs([ends[1]])]


def test_a_spike_that_is_discarded_does_not_stall_training() -> None:
    for ratio, apart in run_ranks(2, _spikes):
        assert 0.3 < ratio < 3
        assert apart == 0


class _OwnOptimizer(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR})

    def step(self, closure: Any = None) -> None:
        return


class _OwnStep(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class _OwnInit(AdamW):
    """Inherits its step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=LR, weight_decay=0.0)


class _Wrapper(Optimizer):
    """As Accelerate's: an optimizer that has the real one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def _chosen(rank: int) -> dict[str, Any]:
    """Which memory each optimizer gets, and how often is warned of it."""
    found: dict[str, Any] = {}
    told = listen()

    def attach(make: Callable[[list[Any]], Any], **options: Any) -> tuple[str, int]:
        model, before = DDP(small_net()), len(told)
        compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Fixed(20), **options)
        of = make(list(model.parameters()))
        compressor.attach(model, optimizer=of)
        return compressor.memory, len(told) - before

    makes: dict[str, Callable[[list[Any]], Any]] = {
        "own optimizer": _OwnOptimizer,
        "own step": _OwnStep,
        "LARS": LARS,
        "wrapped": lambda of: _Wrapper(AdamW(of)),
        "inherits": _OwnInit,
        "two": lambda of: [AdamW(of[:3]), SGD(of[3:], lr=LR)],
        "SGD": lambda of: SGD(of, lr=LR),
        "SGD with momentum": lambda of: SGD(of, lr=LR, momentum=0.9),
        "LBFGS": torch.optim.LBFGS,
        "one of two": lambda of: AdamW(of[:3]),
    }
    for name, make in makes.items():
        found[name] = attach(make)
    found["no updates"] = attach(AdamW, memory="residual")
    found["SGD, updates"] = attach(makes["SGD with momentum"], memory="updates")
    for make in (torch.optim.LBFGS, lambda of: Adam(of, differentiable=True), lambda of: None):
        with pytest.raises(ValueError, match="memory='updates' needs"):
            attach(make, memory="updates")
    stranger = SGD(nn.Linear(2, 2).parameters(), lr=LR)
    with pytest.raises(ValueError, match="optimizer must be one of the model's parameters"):
        attach(lambda of: stranger)
    scheduler = torch.optim.lr_scheduler.StepLR(stranger, 1)
    with pytest.raises(TypeError, match=r"this is a scheduler: hand its \.optimizer over"):
        attach(lambda of: scheduler)
    return found


def test_which_optimizers_step_by_themselves() -> None:
    for rank, found in enumerate(run_ranks(2, _chosen)):
        warned = int(rank == 0)
        assert found == {
            **dict.fromkeys(("own optimizer", "own step", "LARS"), ("updates", 0)),
            **dict.fromkeys(("wrapped", "inherits", "two", "SGD, updates"), ("updates", 0)),
            "one of two": ("updates", warned),
            "SGD": ("residual", 0),
            "SGD with momentum": ("momentum", 0),
            "LBFGS": ("residual", warned),
            "no updates": ("residual", warned),
        }


def _not_handed_over(rank: int, kind: Any, memory: str) -> int:
    """How often a script is warned that hands no optimizer over."""
    told, model = listen(), DDP(small_net())
    optimizer = kind(model.parameters(), lr=LR)
    AdaptiveCompressor(cf_range=(1, 100), policy=Fixed(20), memory=memory).attach(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return sum("compressor.attach(model, optimizer=optimizer)" in each for each in told)


@pytest.mark.parametrize(
    ("kind", "memory", "times"), [(AdamW, "auto", 1), (AdamW, "residual", 0), (SGD, "auto", 0)]
)
def test_who_forgets_to_hand_the_optimizer_over_is_told_once(
    kind: Any, memory: str, times: int
) -> None:
    assert run_ranks(2, _not_handed_over, kind, memory) == [times, 0]


def _wrapped_steps(rank: int) -> float:
    """A wrapper's step is the step of the optimizer in it."""

    def plain(run: Training, step: int) -> None:
        run.train(rank, step, step + 1)

    ends = []
    for wraps in (False, True):
        run = Training(lambda m: NAdam(m.parameters(), lr=LR), None)
        handed = run.optimizer = _Wrapper(run.optimizer) if wraps else run.optimizer
        compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Schedule({0: 20, 5: 1}))
        compressor.attach(run.model, optimizer=handed)
        for step in range(8):
            plain(run, step)
        ends.append(flat_parameters(run.model))
    return float((ends[0] - ends[1]).abs().max())


def test_a_wrapper_steps_as_what_it_wraps() -> None:
    assert run_ranks(2, _wrapped_steps) == [0.0, 0.0]


def _hooked(rank: int, kind: str, when: str) -> list[float]:
    """Losses where a hook of the optimizer's own clips gradients before its step, or clears them
    after."""
    model = DDP(small_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-9)

    def register() -> None:
        if kind == "clip":
            optimizer.register_step_pre_hook(clip)
        else:
            optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())

    if when == "before":
        register()
    AdaptiveCompressor(policy=Fixed(cf=10)).attach(model, optimizer=optimizer)
    if when == "after":
        register()
    losses = []
    for _ in range(20):
        if kind == "clip":
            optimizer.zero_grad()
        loss = loss_of(model, 0, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_hooks_of_the_optimizer_do_what_they_do_without_us() -> None:
    """Those that clip where they come before ours, those that clear where they come after."""
    clipped = run_ranks(2, _hooked, "clip", "before")
    cleared = run_ranks(2, _hooked, "clear", "after")
    assert all(losses[-1] > 0.5 * losses[0] for losses in clipped)  # nearly nothing moves
    assert all(losses[-1] < 0.5 * losses[0] for losses in cleared)


def _any_habit(rank: int, name: str, cf: float) -> tuple[float, float]:
    """The loss that a script ends with which does something to gradients, relative to the one it
    begins with; and by how much the ranks differ."""
    run = Training(_adamw, None, small_net(SINGLE))
    ps, drawn = list(run.model.parameters()), torch.Generator().manual_seed(0)
    made: list[Optimizer] = [run.optimizer]
    if name.startswith("two optimizers"):
        made = [_adamw(run.model.module[:2]), _adamw(run.model.module[2:])]
    if cf > 1:
        compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Schedule({0: cf, 30: 1, 33: cf}))
        compressor.attach(run.model, optimizer=made if name == "two optimizers" else made[:1])
    losses = []
    for step in range(60):
        for optimizer in made:
            optimizer.zero_grad()
        if name == "no_sync slip" and step == 20:
            with run.model.no_sync():
                loss_of(run.model, step, rank).backward()
        loss = loss_of(run.model, step, rank)
        losses.append(loss.item())
        (loss * 1024 if name == "scaled loss" else loss).backward()
        with torch.no_grad():
            for p in ps:
                if name == "noise":
                    p.grad += 0.01 * torch.randn(p.shape, generator=drawn)
                elif name == "decay by hand":
                    p.grad += 1e-3 * p
                elif name == "divided by 320":
                    p.grad /= 320
                elif name == "adaptive clipping":
                    p.grad *= (0.01 * p.norm() / (p.grad.norm() + 1e-6)).clamp(max=1)
                elif name == "clipped by parameter":
                    p.grad *= (0.1 / (p.grad.norm() + 1e-6)).clamp(max=1)
                elif name == "scaled loss":
                    p.grad /= 1024
        if name == "clipped by value":
            nn.utils.clip_grad_value_(ps, 0.01)
        if name == "penalty":
            with run.model.no_sync():
                (1e-3 * sum(p.square().sum() for p in ps)).backward()
        if name == "an optimizer made anew" and step == 25:
            made = [NAdam(run.model.parameters(), lr=LR)]
        for optimizer in made:
            optimizer.step()
    return sum(losses[-10:]) / sum(losses[:10]), differs([flat_parameters(run.model)])


HABITS = (
    "noise",
    "decay by hand",
    "divided by 320",
    "adaptive clipping",
    "clipped by parameter",
    "clipped by value",
    "penalty",
    "no_sync slip",
    "scaled loss",
    "an optimizer made anew",
    "two optimizers",
    "two optimizers, one handed over",
)


def _any_habits(rank: int, names: tuple[str, ...]) -> dict[str, list[tuple[float, float]]]:
    return {name: [_any_habit(rank, name, cf) for cf in (1, 20)] for name in names}


@pytest.mark.parametrize("names", [HABITS[:6], HABITS[6:]])
def test_whatever_a_script_does_to_gradients_it_trains_as_under_ddp(names: Any) -> None:
    for found in run_ranks(2, _any_habits, names):
        for name, ((dense, _), (compressed, apart)) in found.items():
            assert dense < 0.9, name  # the script learns something
            assert compressed < 1.25 * dense, name
            assert apart == 0, name
