"""Parameter space where a script does not step as usual: late, not at all, on one rank only, with
an error, without some gradients. The ranks stay one model, or are told why they cannot."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from adaptive import AdaptiveCompressor, Fixed
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, listen, loss_of, small_net
from tests.distributed.test_updates import MAKE, Training, differs, moments

CF = 20


def _late(rank: int, habit: str) -> str:
    """What the second step says of this habit."""
    training = Training(MAKE["adamw"], Fixed(CF)).train(rank, 0, 2)
    training.optimizer.zero_grad()
    loss_of(training.model, 2, rank).backward()
    if habit == "a forward":
        loss_of(training.model, 3, rank)
    elif habit == "a forward without gradients":
        with torch.no_grad():
            loss_of(training.model, 3, rank)
    elif habit == "a state for all ranks":
        assert training.compressor is not None
        training.compressor.state_dict(checkpoint="gathered")
    elif habit == "two steps":
        training.optimizer.step()
    try:
        training.optimizer.step()
    except RuntimeError as error:
        return str(error)
    assert differs([training.flat]) == 0
    return ""


@pytest.mark.parametrize(
    ("habit", "raises"),
    [
        ("a forward", True),
        ("two steps", True),
        ("a state for all ranks", True),
        ("a forward without gradients", False),
    ],
)
def test_a_step_by_gradients_whose_exchange_is_over_is_refused(habit: str, raises: bool) -> None:
    for told in run_ranks(2, _late, habit):
        assert ("exchange is over" in told) == raises


class _Around(torch.optim.Optimizer):
    """An optimizer whose step is that of another one, and more."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def _nested(rank: int, by_updates: bool) -> tuple[str, float]:
    """What a step within another's says, and how far the ranks are apart then."""
    model = DDP(small_net())
    inner = AdamW(model.parameters(), lr=0.01)
    optimizer = _Around(inner)
    options: dict[str, Any] = {} if by_updates else {"memory": "residual"}
    compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Fixed(CF), **options)
    compressor.attach(model, optimizer=inner)
    told = ""
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            told = str(error)
            break
    return told, differs([flat_parameters(model)])


@pytest.mark.parametrize("by_updates", [True, False])
def test_a_step_within_another_optimizers_is_refused_where_ranks_step_by_themselves(
    by_updates: bool,
) -> None:
    for told, apart in run_ranks(2, _nested, by_updates):
        assert ("AdamW steps within a step of _Around" in told) == by_updates
        assert ("memory='residual'" in told) == by_updates
        assert apart == 0


def _shared(rank: int) -> str:
    """What the second of two optimizers says that have parameters in common."""
    model = DDP(small_net())
    both = [AdamW(model.parameters(), lr=0.01), SGD([*model.parameters()][:2], lr=0.01)]
    compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Fixed(CF))
    compressor.attach(model, optimizer=both)
    for step in range(3):
        loss_of(model, step, rank).backward()
        try:
            for optimizer in both:
                optimizer.step()
        except RuntimeError as error:
            return str(error)
    return ""


def test_two_optimizers_that_step_the_same_parameters_are_refused_by_that_reason() -> None:
    for told in run_ranks(2, _shared):
        assert "SGD steps parameters that AdamW has stepped after the same backward" in told
        assert "memory='residual'" in told


def _raising(rank: int, which: int) -> float:
    """How far the ranks are apart when one's steps have raised, and training has gone on."""
    training = Training(MAKE["adamw"], Fixed(CF))
    fails = False

    def fail(*_: Any) -> None:
        if fails:
            raise MemoryError

    training.optimizer.register_step_pre_hook(fail)
    for step in range(12):
        fails = step in (3, 4, 8) and rank == which
        with suppress(MemoryError):
            training.train(rank, step, step + 1)
    return differs([training.flat])


def test_a_step_that_raises_on_one_rank_is_left_out() -> None:
    assert run_ranks(2, _raising, 1) == [0.0, 0.0]


def _moments_after_an_error(rank: int) -> list[bool]:
    """Whether first moments are what they were before a step that has raised, once the ranks have
    exchanged their updates without it. (From CF 10 on each step overwrites first moments.)"""
    training = Training(MAKE["adamw"], Fixed(CF)).train(rank, 0, 9)
    before = [each.clone() for each in moments(training)]

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = training.optimizer.register_step_pre_hook(fail)
    with suppress(MemoryError):
        training.train(rank, 9, 10)
    handle.remove()
    loss_of(training.model, 10, rank)
    return [torch.equal(a, b) for a, b in zip(moments(training), before, strict=True)]


def test_a_step_that_raises_leaves_moments_as_they_were() -> None:
    for same in run_ranks(2, _moments_after_an_error):
        assert same
        assert all(same)


def _loaded_after_an_error(rank: int) -> float:
    """How far a run is from where it was saved, once it is loaded after a step that raised."""
    training = Training(MAKE["adamw"], Fixed(CF)).train(rank, 0, 4)
    assert training.compressor is not None
    parts = (training.model, training.optimizer, training.compressor)
    saved = [part.state_dict() for part in parts]
    saved = torch.load(_written(saved), weights_only=True)
    straight = training.train(rank, 4, 7).flat.clone()

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = training.optimizer.register_step_pre_hook(fail)
    with suppress(MemoryError):
        training.train(rank, 7, 8)
    handle.remove()
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    return float((training.train(rank, 4, 7).flat - straight).abs().max())


def test_a_state_is_loaded_after_a_step_that_raised() -> None:
    assert run_ranks(2, _loaded_after_an_error) == [0.0, 0.0]


def _without_gradient(rank: int) -> bool:
    """Whether parameters stay where they are whose gradients a script takes away."""
    model = DDP(small_net(torch.float32), bucket_cap_mb=0.004)
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    AdaptiveCompressor(policy=Fixed(10)).attach(model, optimizer=optimizer)
    still = list(model.parameters())[2:4]
    stood = [p.detach().clone() for p in still]
    for step in range(12):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        for p in still:
            p.grad = None
        optimizer.step()
    assert differs(list(model.parameters())) == 0
    return all(torch.equal(p, before) for p, before in zip(still, stood, strict=True))


def test_a_parameter_without_a_gradient_does_not_decay() -> None:
    assert run_ranks(2, _without_gradient) == [True, True]


def _moved_without_gradient(rank: int, moves: bool) -> list[str]:
    """What is said if a hook of the optimizer moves a parameter that has no gradient."""
    told, net = listen(), small_net()
    net.register_parameter("average", nn.Parameter(torch.ones(5, dtype=torch.float64)))
    options = {"find_unused_parameters": True}
    training = Training(MAKE["adamw"], Fixed(CF), net, ddp=options)
    if moves:
        training.optimizer.register_step_post_hook(lambda *_: net.average.data.mul_(0.9))
    training.train(rank, 0, 3)
    return told


@pytest.mark.parametrize("moves", [True, False])
def test_a_move_without_a_gradient_that_is_lost_is_told_once(moves: bool) -> None:
    told, _ = run_ranks(2, _moved_without_gradient, moves)
    assert [each.split()[0] for each in told] == ["average"] * moves
    assert all("Move it after optimizer.step()" in each for each in told)


def _only_decay(rank: int, dtype: torch.dtype) -> float:
    """The norm of a model after many steps by zero gradients, relative to that without us."""
    ends = []
    for compressed in (False, True):
        model = DDP(small_net(dtype))
        optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        if compressed:
            AdaptiveCompressor(policy=Fixed(10)).attach(model, optimizer=optimizer)
        for step in range(60):
            optimizer.zero_grad()
            (0 * loss_of(model, step, rank)).backward()
            optimizer.step()
        ends.append(flat_parameters(model).double().norm())
    return float(ends[1] / ends[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weight_decay_is_that_of_the_optimizer_in_any_precision(dtype: torch.dtype) -> None:
    """In bfloat16 it is rounded away, and parameters must not grow by what makes up for it."""
    assert run_ranks(2, _only_decay, dtype) == [pytest.approx(1.0, abs=1e-5)] * 2


def _overflown(rank: int, bad: int) -> tuple[float, list[int]]:
    """Two optimizers and one scaler, and one rank whose loss overflows once: how far the ranks are
    apart, and how many steps each optimizer has made."""
    model = DDP(small_net(torch.float32), bucket_cap_mb=0.0001)
    layers: list[nn.Module] = list(model.module)
    made = [
        AdamW(nn.Sequential(*part).parameters(), lr=0.01, weight_decay=0.1)
        for part in (layers[:2], layers[2:])
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    AdaptiveCompressor(policy=Fixed(10)).attach(model, optimizer=made, scaler=scaler)
    for step in range(9):
        for optimizer in made:
            optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss = loss * float("inf") if step in (3, 6) and rank == bad else loss
        scaler.scale(loss).backward()
        for optimizer in made:
            scaler.step(optimizer)
        scaler.update()
    steps = [int(next(iter(of.state.values()))["step"]) for of in made]
    return differs([flat_parameters(model)]), steps


@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_on_one_rank_skips_all_optimizers_on_all_ranks(bad: int) -> None:
    assert run_ranks(2, _overflown, bad) == [(0.0, [7, 7])] * 2


def _left_out(rank: int, as_tensor: bool) -> float:
    """How far three ranks are apart, of which one, another, and all leave a step out. A schedule
    lowers the learning rate after every step, also after one that was left out."""
    lr = torch.tensor(3e-3) if as_tensor else 3e-3
    training = Training(
        lambda m: torch.optim.AdamW(m.parameters(), lr=lr, foreach=False),
        Fixed(10),
        small_net(torch.float64 if as_tensor else torch.float32),
    )
    skips = {2: [0], 4: [2], 5: [0, 1, 2], 7: [1, 2]}
    for step in range(10):
        training.optimizer.zero_grad()
        loss_of(training.model, step, rank).backward()
        if rank not in skips.get(step, []):
            training.optimizer.step()
        training.optimizer.param_groups[0]["lr"] *= 0.8  # of a tensor in place, as schedulers do
    return differs([training.flat])


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_ranks_that_leave_steps_out_stay_alike_to_the_bit(as_tensor: bool) -> None:
    assert run_ranks(3, _left_out, as_tensor) == [0.0] * 3


def _written(state: Any) -> io.BytesIO:
    """A file with this state."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file
