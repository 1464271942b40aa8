"""What training scripts do with gradients and optimizers, while `p.grad` holds updates."""

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


def _adamw(model: nn.Module, **settings: Any) -> AdamW:
    return AdamW(model.parameters(), lr=LR, **{"betas": (0.9, 0.99), **settings})


def _mean_gradient_norm(run: Training, step: int, rank: int) -> float:
    gradients = local_gradients(run.model, step, rank)
    return float(mean(torch.cat(list(gradients.values()))).norm())


def _logged_norms(rank: int) -> list[float]:
    """The norm that clipping returns, relative to that of the mean gradient, from the third step
    on: in the first two nobody knows yet how large updates are."""
    run, found = Training(_adamw, Fixed(20)), []
    for step in range(14):
        wanted = _mean_gradient_norm(run, step, rank)
        run.optimizer.zero_grad()
        loss_of(run.model, step, rank).backward()
        norm = float(clip_grad_norm_(run.model.parameters(), float("inf")))
        if step > 1:
            found.append(norm / wanted)
        else:
            assert norm < 1e-2 * wanted  # nothing that anybody would clip
        run.optimizer.step()
    return found


@pytest.mark.long
def test_the_norm_that_clipping_returns_is_about_that_of_the_mean_gradient() -> None:
    for ratios in run_ranks(2, _logged_norms):
        assert min(ratios) > 1 / 5
        assert max(ratios) < 5
        assert 1 / 2 < sorted(ratios)[6] < 2.5


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


def test_a_script_that_clips_every_step_trains_as_well_as_under_ddp() -> None:
    dense, compressed = run_ranks(2, _clipped_to_one_norm)[0]
    assert compressed < 1.2 * dense


def _clipped_by_what_it_sees(rank: int) -> tuple[float, float]:
    """A script that clips every step to a share of the norm that it finds: how far it gets,
    relative to one that does not clip, and the last norm relative to that of the mean gradient."""
    moved = []
    for share in (None, 0.5):
        run = Training(_adamw, Fixed(20)).train(rank, 0, 3)
        for step in range(3, 40):
            if step == 25:
                start = run.flat
            run.optimizer.zero_grad()
            wanted = _mean_gradient_norm(run, step, rank)
            loss_of(run.model, step, rank).backward()
            norm = float(clip_grad_norm_(run.model.parameters(), float("inf")))
            if share is not None:
                clip_grad_norm_(run.model.parameters(), share * norm)
            run.optimizer.step()
        moved.append(float((run.flat - start).norm()))
    return moved[1] / moved[0], norm / wanted


def test_a_script_that_clips_by_the_norms_that_it_sees_does_not_stall() -> None:
    for moved, norm in run_ranks(2, _clipped_by_what_it_sees):
        assert 1 / 4 < moved < 4  # for Adam, gradients that are all halved are the same
        assert 1 / 20 < norm < 20


def _masked(rank: int) -> dict[str, float]:
    """A script that sets gradients of some parameters to zero, or all: how far these move, and by
    how much the others are apart from where they are without it."""
    found = {}
    for which in ("largest", "all"):
        ends = []
        for masks in (False, True):
            run = Training(lambda m: _adamw(m, weight_decay=0.0), Fixed(20)).train(rank, 0, 5)
            run.optimizer.zero_grad()
            loss_of(run.model, 5, rank).backward()
            ps = list(run.model.parameters())
            chosen = ps if which == "all" else [max(ps, key=lambda p: float(p.grad.norm()))]
            before = [p.detach().clone() for p in chosen]
            for p in chosen if masks else ():
                p.grad.zero_()
            run.optimizer.step()
            ends.append([p.detach().clone() for p in ps if which == "all" or p is not chosen[0]])
        still = [(p - b).detach().abs().max() for p, b in zip(chosen, before, strict=True)]
        found[f"{which}: still"] = float(max(still))
        apart = [float((a - b).abs().max()) for a, b in zip(*ends, strict=True)]
        found[f"{which}: others"] = 0.0 if which == "all" else max(apart)
    return found


def test_gradients_that_a_script_sets_to_zero_move_nothing() -> None:
    for found in run_ranks(2, _masked):
        assert max(found.values()) < 1e-12


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
    """What decoupled weight decay takes off a parameter in a compressed step whose updates are not
    delivered, against what it should."""
    worst = 0.0
    for name in ("adamw, groups", "nadam, decoupled decay"):
        run = Training(ALL[name], Fixed(20))
        run.train(rank, 0, 2)
        run.optimizer.zero_grad()
        loss_of(run.model, 2, rank).backward()
        groups = run.optimizer.param_groups
        wanted = {
            p: p.detach() * (1 - group["lr"] * group["weight_decay"])
            for group in groups
            for p in group["params"]
        }
        for p in run.model.parameters():
            p.grad.zero_()
        run.optimizer.step()
        worst = max(worst, max(float((p - wanted[p]).abs().max()) for p in wanted))
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


def _in_no_optimizer(rank: int) -> dict[str, float]:
    """A parameter in no optimizer: its `p.grad` is what plain error feedback makes of gradients."""
    frees = ("0.weight", "4.bias")
    sums: dict[str, Any] = dict.fromkeys(frees, 0.0)
    sent: dict[str, Any] = dict.fromkeys(frees, 0.0)
    run = Training(
        lambda m: _adamw_without(m, frees),
        Schedule({0: 20, 6: 1, 8: 20}),
        granularity="layer",
    )
    free = {name: p for name, p in run.model.module.named_parameters() if name in frees}
    for step in range(12):
        gradients = local_gradients(run.model, step, rank)
        run.model.zero_grad()
        loss_of(run.model, step, rank).backward()
        for name, p in free.items():
            sums[name] = sums[name] + gradients[name]
            sent[name] = sent[name] + p.grad.flatten()
        run.optimizer.step()
    memory = run.compressor.state_dict()["memory"]
    missing = {
        name: float((sent[name] + mean(memory[name]["residual"] - sums[name])).abs().max())
        for name in frees
    }
    return {**missing, "ranks": differs([run.flat])}


def _adamw_without(model: nn.Module, names: tuple[str, ...]) -> AdamW:
    rest = [p for n, p in model.named_parameters() if n.removeprefix("module.") not in names]
    return AdamW(rest, lr=LR)


def test_a_parameter_in_no_optimizer_has_plain_error_feedback() -> None:
    for found in run_ranks(2, _in_no_optimizer):
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
            # A fused optimizer is called, and makes the step that was late at CF 1.
            if found["skipped"] != 0 and (cf == 20 or not fused):
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


def _after_gradients(rank: int) -> list[float]:
    """The largest move after a memory of huge gradients was detached, and this one attached."""
    found = []
    for again in (False, True):
        run = Training(_adamw, None)
        first = AdaptiveCompressor(cf_range=(1, 100), policy=Fixed(20))
        first.attach(run.model)
        for step in range(4):  # nothing steps: the residual is one of gradients
            run.model.zero_grad()
            (1e5 * loss_of(run.model, step, rank)).backward()
        first.detach()
        second = first if again else AdaptiveCompressor(cf_range=(1, 100), policy=Fixed(20))
        second.attach(run.model, optimizer=run.optimizer)
        start = run.flat
        run.train(rank, 4, 10)
        assert differs([run.flat]) == 0
        found.append(float((run.flat - start).abs().max()))
    return found


def test_a_residual_of_gradients_is_never_taken_for_one_of_updates() -> None:
    for moved in run_ranks(2, _after_gradients):
        assert max(moved) < 6 * 20 * LR


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
    model = DDP(small_net())
    told = listen()

    def attach(optimizer: Optimizer | None, **options: Any) -> str:
        compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Fixed(20), **options)
        compressor.attach(model, optimizer=optimizer)
        kind = compressor.state_dict()["memory_kind"]
        compressor.detach()
        return kind

    of = list(model.parameters())
    others = {"own optimizer": _OwnOptimizer(of), "own step": _OwnStep(of)}
    if hasattr(torch.optim, "Muon"):
        others["muon"] = torch.optim.Muon([p for p in of if p.ndim == 2])
    for name, optimizer in others.items():
        before = len(told)
        found[name] = (attach(optimizer), len(told) - before)
    before = len(told)
    for name, optimizer in {
        "wrapped": _Wrapper(AdamW(of)),
        "inherits": _OwnInit(of),
        "no residual": AdamW(of),
    }.items():
        found[name] = attach(optimizer, memory="residual" if name == "no residual" else "auto")
    found["warned"] = len(told) - before
    refused = {
        "SGD": SGD(of, lr=LR),
        "SGD with momentum": SGD(of, lr=LR, momentum=0.9),
        "None": None,
        "Adam, differentiable": Adam(of, differentiable=True),
        "_OwnStep": _OwnStep(of),
    }
    for name, optimizer in refused.items():
        with pytest.raises(ValueError, match="memory='updates' needs") as caught:
            attach(optimizer, memory="updates")
        assert name.split()[0].strip(",") in str(caught.value)
    return found


def test_which_optimizers_are_stepped_for() -> None:
    for rank, found in enumerate(run_ranks(2, _chosen)):
        warned = int(rank == 0)
        assert found.pop("muon", ("residual", warned)) == ("residual", warned)
        assert found == {
            "own optimizer": ("residual", warned),
            "own step": ("residual", warned),
            "wrapped": "updates",
            "inherits": "updates",
            "no residual": "residual",
            "warned": warned,  # of the residual with AdamW, which was asked for
        }


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
