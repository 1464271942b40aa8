"""Optimizers by what they keep and do, not by name. Each is plain DDP at CF 1, and at other CFs the
ranks are alike at every place where a script may read the model; or one sentence says what is not
served, and it trains on by gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

from adaptive import AdaptiveCompressor, Delayed, Fixed, Gossip, LocalSteps, Policy, Schedule
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, listen, loss_of, same, small_net
from tests.distributed.test_updates import Training, differs

SINGLE = torch.float32


class Kept(Optimizer):
    """SGD with momentum, 0.9, that may keep more than that."""

    groups: ClassVar[dict[str, Any]] = {"lr": 0.01}

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), dict(self.groups))
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        factor = self.factor()
        for p, state, group in self._each():
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].mul_(0.9).add_(p.grad)
            self.move(p, state, self.rate(group) * factor)
        self.after()

    def _each(self) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and self.has(p):
                    yield p, self.state[p], group

    def has(self, p: Tensor) -> bool:
        return True

    def rate(self, group: dict[str, Any]) -> float:
        return group["lr"]

    def factor(self) -> float:
        return 1.0

    def move(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        p.sub_(state["momentum"], alpha=lr)

    def after(self) -> None:
        pass

    def learned(self) -> float:
        """From this rank's gradients, between 0.5 and 1.5."""
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        return 1 + 0.5 * math.sin(1e3 * float(sum(grad.abs().sum() for grad in grads)))


class NumberInGroups(Kept):
    groups: ClassVar = {"lr": 0.01, "d": 1.0}

    def factor(self) -> float:
        group = self.param_groups[0]
        group["d"] = 0.9 * group["d"] + 0.1 * self.learned()
        return group["d"]


class NumberFromStep5(Kept):
    groups: ClassVar = {"lr": 0.01, "d": 1.0}

    def factor(self) -> float:
        if self.calls > 5:
            self.param_groups[0]["d"] = self.learned()
        return self.param_groups[0]["d"]


class TensorInGroups(Kept):
    groups: ClassVar = {"lr": 0.01, "d": torch.ones(())}

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.param_groups[0]["d"] = torch.ones(())

    def factor(self) -> float:
        return float(self.param_groups[0]["d"].lerp_(torch.tensor(self.learned()), 0.1))


class NumberOfItsOwn(Kept):
    d = 1.0

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.d = 1.0

    def factor(self) -> float:
        self.d = 0.9 * self.d + 0.1 * self.learned()
        return self.d


class CopyOfWeights(Kept):
    """Writes parameters from copies of higher precision."""

    def move(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        if "copy" not in state:
            state["copy"] = p.detach().double().reshape(-1)
        state["copy"].sub_(state["momentum"].reshape(-1), alpha=lr)
        p.copy_(state["copy"].view_as(p))


class CopyInAList(Kept):
    def move(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        copy = state.setdefault("kept", [p.detach().clone()])[0]
        p.copy_(copy.sub_(state["momentum"], alpha=lr))


class ScheduleFree(Kept):
    """Its parameters are between two sequences, of which it keeps one; `eval()` goes to the other
    (Defazio and others 2024)."""

    def move(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        z = state.setdefault("z", p.detach().clone())
        p.lerp_(z, 1 / self.calls).sub_(p.grad, alpha=0.1 * lr)
        z.sub_(p.grad, alpha=10 * lr)

    @torch.no_grad()
    def eval(self) -> None:
        for p, state in self.state.items():
            p.lerp_(state["z"], 1 - 1 / 0.9)


class SharedOut(Kept):
    """Each rank steps every other parameter, for all."""

    def has(self, p: Tensor) -> bool:
        return self._places()[p] % dist.get_world_size() == dist.get_rank()

    def after(self) -> None:
        for p, i in self._places().items():
            dist.broadcast(p, i % dist.get_world_size())

    def _places(self) -> dict[Tensor, int]:
        return {p: i for i, p in enumerate(self.param_groups[0]["params"])}


class StateOfNothing(Kept):
    def factor(self) -> float:
        kept = self.state.setdefault("global", {"d": torch.ones(())})
        return float(kept["d"].lerp_(torch.tensor(self.learned()), 0.1))


class WithoutRate(Kept):
    groups: ClassVar = {"eta": 0.01}

    def rate(self, group: dict[str, Any]) -> float:
        return group["eta"]


class RateOfNone(Kept):
    groups: ClassVar = {"lr": None}

    def rate(self, group: dict[str, Any]) -> float:
        return 0.01


class CountsInGroups(Kept):
    """A number that does not depend on gradients."""

    groups: ClassVar = {"lr": 0.01, "k": 0}

    def after(self) -> None:
        self.param_groups[0]["k"] += 1


class NumberInState(Kept):
    """Is served: the ranks agree on numbers as on tensors."""

    def move(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        state["d"] = 0.9 * state.get("d", 1.0) + 0.1 * self.learned()
        super().move(p, state, lr * state["d"])


class ReadOnlyGroups(Kept):
    """As in wrappers of other optimizers."""

    def __init__(self, model: nn.Module) -> None:
        self._inside = Kept(model)
        self.calls = 0

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self._inside.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inside.state

    def step(self, closure: Any = None) -> None:
        self._inside.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inside.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self._inside.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._inside.load_state_dict(state_dict)


UNSERVED: dict[Callable[[nn.Module], Optimizer], str] = {
    NumberInGroups: "numbers that its steps change (d)",
    NumberFromStep5: "numbers that its steps change (d)",
    TensorInGroups: "numbers that its steps change (d)",
    NumberOfItsOwn: "numbers that its steps change (d)",
    CopyOfWeights: "weights in its state (copy)",
    CopyInAList: "state in other forms than tensors (kept)",
    ScheduleFree: "weights in its state (z)",
    SharedOut: "state of other parameters on each rank",
    StateOfNothing: "state that belongs to none of its parameters",
}
SERVED = (Kept, WithoutRate, RateOfNone, CountsInGroups, NumberInState, ReadOnlyGroups)
HABITS = ("steps sometimes", "lr 0", "lr 1e6", "loaded", "attached later", "takes over")


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3)


def _train(
    rank: int, make: Callable[[nn.Module], Optimizer], habit: str, policy: Policy | None
) -> tuple[Training, float]:
    """A run, and how far the ranks were apart at most after any step."""
    first = _adamw if habit == "takes over" else make
    run = Training(first, None if habit == "attached later" else policy, small_net(SINGLE))
    apart = 0.0
    for step in range(18):
        if habit == "attached later" and step == 3 and policy is not None:
            run.compressor = AdaptiveCompressor(cf_range=(1, 100), policy=policy)
            run.compressor.attach(run.model, optimizer=run.optimizer)
        if habit == "takes over" and step == 4:
            run.optimizer = make(run.model)
        group = run.optimizer.param_groups[0]
        lr = group.get("lr")
        if habit.startswith("lr") and step == 11 and lr:
            group["lr"] = float(habit.removeprefix("lr "))
        run.optimizer.zero_grad()
        loss_of(run.model, step, rank).backward()
        if habit != "steps sometimes" or step % 3 != 1:
            run.optimizer.step()
            apart = max(apart, differs([run.flat]))
        if lr:
            group["lr"] = lr
        if habit == "loaded" and step == 12:
            states = [run.optimizer.state_dict()]
            dist.broadcast_object_list(states, 0)
            if make is not SharedOut:  # which has another state on each rank
                run.optimizer.load_state_dict(states[0])
    if hasattr(run.optimizer, "eval"):
        run.optimizer.eval()
    return run, max(apart, differs([run.flat]))


def _held_out(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(float(loss_of(model, step, step % 2)) for step in range(100, 110)) / 10


def _drawn(rank: int, kinds: slice) -> list[str]:
    """What is wrong of some kinds. Each meets three habits."""
    wrong, told = [], listen()
    at_first = _held_out(small_net(SINGLE))
    makes = [*UNSERVED, *SERVED]
    for i in range(*kinds.indices(len(makes))):
        for habit in ("plain", HABITS[i % 6], HABITS[(i + 2) % 6]):
            wrong += _wrong(rank, makes[i], habit, told, at_first)
    return wrong


def _wrong(
    rank: int,
    make: Callable[[nn.Module], Optimizer],
    habit: str,
    told: list[str],
    at_first: float,
) -> list[str]:
    wrong = []
    switch = {0: 20, 7: 1, 9: 20, 14: 1, 16: 20}
    name = f"{make.__name__}, {habit}"
    plain, _ = _train(rank, make, habit, None)
    dense, _ = _train(rank, make, habit, Fixed(1))
    if not same(plain.flat, dense.flat):
        wrong.append(f"{name}: CF 1 is not DDP")
    told.clear()
    run, apart = _train(rank, make, habit, Schedule(switch))
    diverged = habit == "lr 1e6" and not run.flat.isfinite().all()
    if apart and not diverged:
        wrong.append(f"{name}: ranks differ by {apart}")
    times = sum(UNSERVED.get(make, "cannot agree") in each for each in told)
    if times != (rank == 0 and make in UNSERVED):
        wrong.append(f"{name}: told {times} times, of {told}")
    loss = _held_out(run.model)
    if habit != "lr 1e6" and loss > (at_first + _held_out(plain.model)) / 2:
        wrong.append(f"{name}: {loss} of {at_first}")
    return wrong


QUARTERS = [
    slice(0, None, 4),
    *(pytest.param(slice(i, None, 4), marks=pytest.mark.long) for i in (1, 2, 3)),
]


@pytest.mark.parametrize("kinds", QUARTERS)
def test_whatever_an_optimizer_keeps_ranks_stay_alike_or_a_sentence_says_it_is_not_served(
    kinds: slice,
) -> None:
    assert run_ranks(2, _drawn, kinds) == [[], []]


def _replaced(rank: int, cf: float | None) -> tuple[float, float, int]:
    """AdamW, and from step 30 on SGD with a learning rate that is 20 times as large."""
    told = listen()
    run = Training(
        lambda m: AdamW(m.parameters(), lr=3e-3), cf and Fixed(cf), small_net(SINGLE)
    ).train(rank, 0, 30)
    run.optimizer = SGD(run.model.parameters(), lr=0.06, momentum=0.9)
    worst = 0.0
    for step in range(30, 60):
        run.train(rank, step, step + 1)
        worst = max(worst, _held_out(run.model) if step % 10 < 3 else 0.0)
    assert differs([run.flat]) == 0
    return worst, _held_out(run.model), sum("SGD steps parameters of AdamW" in t for t in told)


def test_what_waits_of_an_optimizer_is_not_scaled_by_the_rate_of_another() -> None:
    (worst, dense, _), _ = run_ranks(2, _replaced, None)
    for rank, (largest, loss, told) in enumerate(run_ranks(2, _replaced, 100.0)):
        assert largest < 1.5 * worst
        assert loss < 1.5 * dense
        assert told == (rank == 0)


def _replaced_and_closed(rank: int) -> int:
    """How often it is told that SGD, stepped with a closure, has taken AdamW's place."""
    told = listen()
    run = Training(lambda m: AdamW(m.parameters(), lr=3e-3), Fixed(20)).train(rank, 0, 3)
    optimizer = SGD(run.model.parameters(), lr=0.06, momentum=0.9)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(run.model, 3, rank)
        loss.backward()
        return loss

    optimizer.step(closure)
    return sum("SGD steps parameters of AdamW" in t for t in told)


def test_an_optimizer_that_is_new_in_a_step_with_a_closure_is_told_of() -> None:
    assert run_ranks(2, _replaced_and_closed) == [1, 0]


def _warmed_up(rank: int) -> float:
    """The held-out loss where from step 30 on a new AdamW begins at a thousandth of its rate."""
    run = Training(lambda m: AdamW(m.parameters(), lr=1e-2), Fixed(20)).train(rank, 0, 30)
    run.optimizer = AdamW(run.model.parameters(), lr=1e-2)
    warm_up = torch.optim.lr_scheduler.LinearLR(run.optimizer, start_factor=1e-3, total_iters=20)
    for step in range(30, 60):
        run.train(rank, step, step + 1)
        warm_up.step()
    return _held_out(run.model)


def test_what_waits_is_not_blown_up_for_an_optimizer_whose_rate_warms_up() -> None:
    assert max(run_ranks(2, _warmed_up)) < 0.4


def _goes_on(rank: int, make: Callable[[nn.Module], Optimizer]) -> Tensor:
    """From a state that was saved after it was found that it is not served: by how much a run that
    goes on from there is another."""
    whole = Training(make, Fixed(20), small_net(SINGLE), ddp={}).train(rank, 0, 8)
    states = [deepcopy(each.state_dict()) for each in (whole.model, whole.optimizer)]
    state = deepcopy(whole.compressor.state_dict())
    whole.train(rank, 8, 14)
    told = listen()
    other = Training(make, Fixed(20), small_net(SINGLE), ddp={})
    loss_of(other.model, 0, rank).backward()  # buckets are as they will be
    other.model.load_state_dict(states[0])
    other.optimizer.load_state_dict(states[1])
    other.compressor.load_state_dict(state)
    other.train(rank, 8, 14)
    assert not any("cannot agree" in each for each in told)
    return (whole.flat - other.flat).abs().max()


def _go_on(rank: int) -> list[float]:
    return [float(_goes_on(rank, make)) for make in (CopyOfWeights, NumberInGroups, Kept)]


def test_a_run_that_resumes_need_not_find_it_out_again() -> None:
    for apart in run_ranks(2, _go_on):
        assert max(apart) < 1e-6  # torch loads a state in the precision of its parameter


def _refused(rank: int) -> list[str]:
    found = []
    for options in ({"sync": LocalSteps("auto")}, {"memory": "updates"}):
        policy = Scripted([20.0], local_steps=[1])
        run = Training(SharedOut, policy, small_net(SINGLE), **options)
        with pytest.raises(RuntimeError, match="SharedOut keeps state of other") as error:
            run.train(rank, 0, 3)
        found.append(str(error.value))
    # It changes a number from its sixth step on, in rounds of several steps.
    policy, sync = Scripted([20.0], local_steps=[4]), LocalSteps("auto")
    run = Training(NumberFromStep5, policy, small_net(SINGLE), sync=sync)
    with pytest.raises(RuntimeError, match="NumberFromStep5 keeps numbers") as error:
        run.train(rank, 0, 20)
    return [*found, str(error.value)]


def test_what_cannot_step_by_itself_is_refused_where_that_was_asked_for() -> None:
    first, second = run_ranks(2, _refused)
    assert first == second
    assert "sync=LocalSteps('auto') does not go with" in first[0]
    assert "memory='updates' does not go with" in first[1]
    assert "sync=LocalSteps('auto') does not go with" in first[2]


def _undone(rank: int) -> list[str]:
    found = []
    for sync in (LocalSteps(2), Delayed(1), Gossip()):
        for make in (CopyOfWeights, SharedOut):
            run = Training(make, Fixed(20), small_net(SINGLE), sync=sync)
            with pytest.raises(RuntimeError, match="does not go with optimizer") as error:
                run.train(rank, 0, 6)
            found.append(str(error.value))
        run = Training(NumberInGroups, Fixed(20), small_net(SINGLE), sync=sync).train(rank, 0, 6)
        assert run.flat.isfinite().all()
    return found


def test_what_would_undo_an_exchange_between_its_steps_is_refused() -> None:
    first, second = run_ranks(2, _undone)
    assert first == second
    for copies, shared in zip(first[::2], first[1::2], strict=True):
        assert "CopyOfWeights: it keeps weights in its state" in copies
        assert "SharedOut: it keeps state of other parameters on each rank" in shared


class _OfCopies:
    """Steps copies of the parameters, and writes the parameters from these."""

    def __init__(self, model: nn.Module) -> None:
        self.theirs = list(model.parameters())
        self.copies = [p.detach().clone().requires_grad_() for p in self.theirs]
        self.inside = AdamW(self.copies, lr=0.01)

    def step(self) -> None:
        for p, copy in zip(self.theirs, self.copies, strict=True):
            copy.grad = p.grad
        self.inside.step()
        for p, copy in zip(self.theirs, self.copies, strict=True):
            p.data.copy_(copy)


def _copies(rank: int) -> tuple[str, int, int]:
    model, told = DDP(small_net()), listen()
    by_copies = _OfCopies(model)
    with pytest.raises(ValueError, match="optimizer must be one of") as error:
        AdaptiveCompressor(policy=Fixed(20)).attach(model, optimizer=by_copies.inside)
    counts = []
    for optimizer in (by_copies, SGD(model.parameters(), lr=0.01)):
        told.clear()
        compressor = AdaptiveCompressor(policy=Fixed(20)).attach(model)
        for step in range(3):
            model.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        compressor.detach()
        model = DDP(small_net())
        counts.append(sum("no optimizer that has them was seen" in each for each in told))
    return str(error.value), *counts


def test_who_steps_copies_of_the_parameters_is_told_what_to_do() -> None:
    for rank, (error, copies, plain) in enumerate(run_ranks(2, _copies)):
        assert "leave it out: attach(model)" in error
        assert (copies, plain) == (rank == 0, 0)
