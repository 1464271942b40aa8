"""What becomes of a user's optimizer with momentum: it is never changed, and another one may take
its place in mid-run. Plain DDP is run beside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from adaptive import AdaptiveCompressor, Momentum
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, flat_parameters, listen, loss_of, small_net

SETTINGS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}


def _attach(model: DDP, optimizer: Optimizer, cf: float | None) -> AdaptiveCompressor | None:
    if cf is None:
        return None
    policy = Scripted([cf])
    compressor = AdaptiveCompressor(cf_range=(1, 1000), policy=policy, memory=Momentum(share=1))
    return compressor.attach(model, optimizer=optimizer)


def _steps(model: nn.Module, optimizer: Optimizer, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def _held_out(net: nn.Module) -> float:
    with torch.no_grad():
        return sum(float(loss_of(net, 1000 + i, i % 2)) for i in range(20)) / 20


def _settings_in(optimizer: Optimizer) -> list[Any]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def _wrapped_again(rank: int, how: str, cf: float | None) -> tuple[Tensor, list[Any], list[Any]]:
    """The head is trained for ten steps, and then, by another DDP, all of the model."""
    net = small_net()
    for p in net[:3].parameters():
        p.requires_grad_(False)
    optimizer = SGD(net[3:].parameters(), **SETTINGS)
    before = copy.deepcopy(_settings_in(optimizer))
    model = DDP(net)
    compressor = _attach(model, optimizer, cf)
    _steps(model, optimizer, rank, 0, 10)
    if compressor is not None and how == "detached":
        compressor.detach()
    if how != "kept":
        del model, compressor
    for p in net[:3].parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": list(net[:3].parameters())})
    model = DDP(net)
    if cf is not None and how == "kept":
        with pytest.raises(RuntimeError, match=r"another AdaptiveCompressor: detach\(\) that"):
            _attach(model, optimizer, cf)
    elif how != "plain":
        _attach(model, optimizer, cf)
    _steps(model, optimizer, rank, 10, 20)
    return flat_parameters(net), before, _settings_in(optimizer)[:1]


@pytest.mark.parametrize("how", ["detached", "dropped", "kept", "plain"])
def test_a_model_wrapped_again_trains_as_under_ddp(how: str) -> None:
    """kept: the first compressor is alive, and a second one refused. plain: there is none."""
    dense = run_ranks(2, _wrapped_again, how, None)[0][0]
    for ours, before, after in run_ranks(2, _wrapped_again, how, 1.0):
        assert before == after
        # Without detaching, the mean velocity is lost with the compressor.
        exact = how == "detached"
        assert (ours - dense).norm() < (1e-12 if exact else 0.1) * dense.norm()


class _SpikeError(Exception):
    pass


def _raising(optimizer: Optimizer) -> None:
    """A step that fails after its hooks have begun it."""

    def hook(*_: Any) -> None:
        raise _SpikeError

    handle = optimizer.register_step_pre_hook(hook)
    with pytest.raises(_SpikeError):
        optimizer.step()
    handle.remove()


def _in_mid_step(rank: int, what: str) -> bool:
    """The optimizer has the user's settings, whatever happens between the hooks of a step."""
    model = DDP(small_net())
    optimizer = SGD(model.parameters(), **SETTINGS)
    before = _settings_in(optimizer)
    _attach(model, optimizer, 10.0)
    _steps(model, optimizer, rank, 0, 2)
    loss_of(model, 3, rank).backward()
    seen: list[Any] = []
    if what == "raises":
        _raising(optimizer)
    elif what == "adds a group":
        new = nn.Parameter(torch.zeros(3))
        hook = optimizer.register_step_pre_hook(
            lambda *_: optimizer.add_param_group({"params": [new], "momentum": 0.5})
        )
        optimizer.step()
        hook.remove()
        before.append({**before[0], "momentum": 0.5})
    elif what == "looks":
        optimizer.register_step_pre_hook(lambda *_: seen.append(_settings_in(optimizer)))
        optimizer.step()
        assert seen == [before]
    return _settings_in(optimizer) == before


@pytest.mark.parametrize("what", ["raises", "adds a group", "looks"])
def test_the_users_settings_are_never_changed(what: str) -> None:
    assert run_ranks(2, _in_mid_step, what) == [True, True]


MADE_ANEW: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda ps: SGD(ps, lr=0.02, momentum=0.8, weight_decay=1e-3),
    "sgd without momentum": lambda ps: SGD(ps, lr=0.02),
    "adamw": lambda ps: AdamW(ps, lr=3e-3),
}


def _made_anew(rank: int, other: str, cf: float | None) -> tuple[float, list[str], Tensor]:
    torch.manual_seed(0)
    model = DDP(small_net())
    optimizer: Optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    compressor = _attach(model, optimizer, cf)
    told = listen()
    _steps(model, optimizer, rank, 0, 40)
    optimizer = MADE_ANEW[other](model.parameters())
    _steps(model, optimizer, rank, 40, 200)
    kind = "" if compressor is None else compressor.memory
    return _held_out(model.module), [kind, *told], flat_parameters(model)


@pytest.mark.parametrize("cf", [1.0, 10.0])
@pytest.mark.parametrize("other", MADE_ANEW)
def test_an_optimizer_made_anew_trains_as_under_ddp(other: str, cf: float) -> None:
    dense = run_ranks(2, _made_anew, other, None)[0][0]
    results = run_ranks(2, _made_anew, other, cf)
    assert torch.equal(results[0][2], results[1][2])
    for rank, (loss, (kind, *told), _) in enumerate(results):
        assert loss < (1.1 if cf == 1 else 1.3) * dense
        # In dense steps gradients are DDP's own by now, for any optimizer.
        falls_back = other == "adamw" and cf > 1
        assert kind == ("residual" if falls_back else "momentum")
        assert [("AdamW" in each) for each in told] == [True] * (rank == 0 and falls_back)


def _other_parameters(rank: int, cf: float | None) -> Tensor:
    """Groups of one size get other parameters in mid-run, before SGD has its momentum back: two
    exchange theirs, or one gets a layer that stood still, for one that then stands still."""
    ends = []
    for exchange in (True, False):
        model = DDP(small_net())
        first, second, third = ([*model.module[i].parameters()] for i in (0, 2, 4))
        groups = [{"params": first}, {"params": second, "momentum": 0.5, "lr": 0.02}]
        optimizer = SGD(groups, **SETTINGS)
        _attach(model, optimizer, cf)
        for step in range(7):
            if step == 3:
                others = [second, first] if exchange else [third, second]
                for group, parameters in zip(optimizer.param_groups, others, strict=True):
                    group["params"] = parameters
            model.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        ends.append(flat_parameters(model))
    return torch.cat(ends)


def test_groups_that_get_other_parameters_step_as_under_ddp() -> None:
    dense, ours = (run_ranks(2, _other_parameters, cf) for cf in (None, 1.0))
    for expected, found in zip(dense, ours, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def _rates_told(rank: int, made: Callable[[Any, float], Optimizer]) -> list[float]:
    """The learning rates that the policy is told, where an optimizer is made anew in step 3."""
    model, policy = DDP(small_net()), Scripted([5.0])
    optimizer = made(model.parameters(), 0.02)
    AdaptiveCompressor(policy=policy).attach(model, optimizer=optimizer)
    _steps(model, optimizer, rank, 0, 3)
    _steps(model, made(model.parameters(), 0.001), rank, 3, 7)
    return [report.lr for report in policy.reports]


@pytest.mark.parametrize("made", [AdamW, SGD])
def test_policies_are_told_the_rate_of_the_optimizer_that_steps_now(made: Any) -> None:
    for rates in run_ranks(2, _rates_told, made):
        assert rates == pytest.approx([0.02] * 4 + [0.001] * 2)


def _of_two_models(rank: int, kind: str, cf: float | None) -> Tensor:
    """One optimizer, one group, for two DDP models and a parameter of neither."""
    models = [DDP(small_net(seed=seed)) for seed in range(2)]
    alone = nn.Parameter(torch.ones(3, dtype=torch.float64))
    tensors = [*models[0].parameters(), *models[1].parameters(), alone]
    optimizer = SGD(tensors, **SETTINGS) if kind == "sgd" else AdamW(tensors, lr=3e-3)
    for model in models if cf else ():
        policy = Scripted([cf or 1.0])
        compressor = AdaptiveCompressor("topk+fp32", (1, 100), policy=policy)
        compressor.attach(model, optimizer=optimizer)
    for step in range(10):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(models[0], step, rank) + loss_of(models[1], step + 1, rank)
            loss = loss + (alone * alone.detach().sin()).sum()
            loss.backward()
            return loss

        if step % 2:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return torch.cat([*map(flat_parameters, models), alone.detach()])


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_one_optimizer_of_two_models_trains_as_under_ddp(kind: str) -> None:
    dense = run_ranks(2, _of_two_models, kind, None)[0]
    for ours in run_ranks(2, _of_two_models, kind, 1.0):
        assert (ours - dense).norm() < 1e-12 * dense.norm()
    first, second = run_ranks(2, _of_two_models, kind, 10.0)
    assert torch.equal(first[:-3], second[:-3])  # the parameter of neither is each rank's own
    assert (first - dense).norm() < 0.1 * dense.norm()


def _with_numpy(rank: int) -> list[Any]:
    """Of each optimizer, a gathered state as a framework writes it."""
    written = []
    momentum = {"momentum": np.float64(0.9), "nesterov": True}
    for kind, settings in ((AdamW, {}), (SGD, momentum)):
        model = DDP(small_net())
        optimizer = kind(model.parameters(), lr=0.01, **settings)
        schedule = LambdaLR(optimizer, lambda step: np.cos(step / 100))
        compressor = AdaptiveCompressor(policy="fixed").attach(model, optimizer=optimizer)
        for step in range(2):
            _steps(model, optimizer, rank, step, step + 1)
            schedule.step()
        file = BytesIO()
        torch.save(compressor.state_dict(checkpoint="gathered"), file)
        written.append(torch.load(BytesIO(file.getvalue()), weights_only=True))
    return written


def test_a_schedule_may_compute_with_numpy() -> None:
    """Rank 0 read the others' states, and could not, while they waited."""
    for of_rank_0, of_rank_1 in zip(*run_ranks(2, _with_numpy, limit=30, timeout=20), strict=True):
        assert len(of_rank_0["ranks"]) == 2
        assert "ranks" not in of_rank_1
