"""A life has one owner: every way on after an exception, and at the end of a run. The ranks load,
detach, attach, close and save, or are told why they cannot; nobody hangs, and nothing of a half
step stays."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

from adaptive import AdaptiveCompressor, Delayed, Fixed, Gossip, LocalSteps, Network
from adaptive.memory.step_watch import StepWatch
from adaptive.model.replicas import DDPReplica
from adaptive.network.pipeline import Pipeline
from adaptive.session.session import ATTACHED
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Clock,
    Scripted,
    flat_parameters,
    listen,
    loss_of,
    same,
    small_net,
)
from tests.unit.in_one_process import one_rank

SHARDED = {"base": "topk", "exchange": "sharded"}

WAYS: dict[str, dict[str, Any]] = {
    "momentum": {"sgd": True},
    "updates": {},
    "gradients beside Adam": {"base": "int8", "policy": Fixed(4)},
    "dense": {"policy": Fixed(1)},
    "local steps": {"sync": LocalSteps(2), "sgd": True},
    "overlap": {"sync": LocalSteps(3, outer_momentum=0.5, overlap=1), "sgd": True},
    "automatic steps": {"sync": LocalSteps("auto"), "policy": Scripted([10.0], local_steps=[2])},
    "delay": {"sync": Delayed(1), "sgd": True},
    "gossip": {"sync": Gossip(), "sgd": True},
    "gossip, choco-sgd": {"sync": Gossip("ring", algorithm="choco-sgd"), "sgd": True},
}
"""Ways to keep the ranks together: settings by name."""


class Run:
    """A small model in buckets of a few parameters, its optimizer and its compressor."""

    def __init__(self, rank: int, sgd: bool = False, **options: Any) -> None:
        self.rank = rank
        self.model = DDP(small_net(torch.float32), bucket_cap_mb=0.002)
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=0.01)
        if sgd:
            self.optimizer = SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.attach(**options)

    def attach(self, **options: Any) -> None:
        options = {"policy": Fixed(10), "cf_range": (1, 100), **options}
        options = {**options, "policy": copy.deepcopy(options["policy"])}
        self.compressor = AdaptiveCompressor(network=Network(clock=Clock()), **options)
        self.compressor.attach(self.model, optimizer=self.optimizer)

    def train(self, start: int, stop: int) -> torch.Tensor:
        for step in range(start, stop):
            self.optimizer.zero_grad()
            loss_of(self.model, step, self.rank).backward()
            self.optimizer.step()
        return flat_parameters(self.model)

    def save(self) -> list[dict[str, Any]]:
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self._parts()], file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=True)

    def load(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts(), states, strict=True):
            part.load_state_dict(state)

    def _parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.compressor


def apart(model: nn.Module) -> float:
    """The largest difference of a parameter between this rank and rank 0."""
    own = flat_parameters(model)
    first = own.clone()
    dist.broadcast(first, 0)
    return float((own - first).abs().max())


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return ""


@contextmanager
def interrupted(by: type[BaseException]) -> Iterator[None]:
    """Whoever waits for the first of several rounds of an exchange is interrupted."""

    def interrupt(*_: Any) -> None:
        raise by

    with pytest.MonkeyPatch.context() as patch, suppress(by):
        patch.setattr(Pipeline, "_advance", interrupt)
        yield


ROUNDS: dict[str, dict[str, Any]] = {
    "sharded": SHARDED,
    "voted": {"base": "topk", "exchange": "voted_indices"},
    "powersgd": {"base": "powersgd"},
    "automatic steps": {**WAYS["automatic steps"], **SHARDED},
}
"""Exchanges of several rounds, after an optimizer's step."""


def _loaded_after_a_failed_exchange(rank: int) -> dict[str, tuple[float, str]]:
    found = {}
    for name, options in ROUNDS.items():
        run = Run(rank, **options)
        run.train(0, 4)
        saved = run.save()
        straight = run.train(4, 10)
        with interrupted(KeyboardInterrupt):
            run.train(10, 14)
        told = refusal(run.compressor.state_dict)
        run.load(saved)
        found[name] = (float((run.train(4, 10) - straight).abs().max()), told)
        run.compressor.close()
    return found


def test_after_a_failed_exchange_of_several_rounds_a_state_is_loaded_to_the_bit() -> None:
    for found in run_ranks(2, _loaded_after_a_failed_exchange, limit=60, timeout=20):
        for name, (deviation, told) in found.items():
            assert deviation == 0.0, name
            assert "failed" in told, name
            assert "KeyboardInterrupt" in told, name


def _raised_in_backward(rank: int) -> dict[str, Any]:
    """All ranks get an exception in the same backward, outside the hook, once buckets are gone."""
    found: dict[str, Any] = {}
    for name, options in WAYS.items():
        run = Run(rank, **options)
        run.train(0, 6)
        saved, model = run.save(), copy.deepcopy(run.model.module)
        first = next(iter(run.model.module.parameters()))  # its gradient comes last

        def fail(_: Any) -> None:
            raise MemoryError("no memory left")

        handle = first.register_hook(fail)
        with suppress(MemoryError):
            run.train(6, 7)
        handle.remove()
        told = [refusal(run.compressor.state_dict), refusal(run.compressor.averaged)]
        run.load(saved)
        kept = run.compressor.state_dict()
        loaded = all(same(kept[part], saved[2][part]) for part in ("memory", "sync", "moments"))
        handle = first.register_hook(fail)
        with suppress(MemoryError, RuntimeError):  # DDP itself takes no further forward
            run.train(6, 7)
        handle.remove()
        run.compressor.close()
        run.compressor.detach()
        run.model = DDP(model, bucket_cap_mb=0.002)
        run.optimizer = type(run.optimizer)(run.model.parameters(), lr=0.01)
        run.attach(policy=Fixed(10))
        run.train(6, 9)
        run.compressor.detach()
        found[name] = told, loaded, apart(run.model)
    return found


def test_after_a_backward_that_raised_a_state_is_refused_and_every_way_on_is_open() -> None:
    for found in run_ranks(2, _raised_in_backward, limit=80, timeout=20):
        for name, (told, loaded, difference) in found.items():
            assert all("has begun and not ended" in each for each in told), name
            assert loaded, name
            assert difference == 0.0, name


def _detached_after_a_failure(rank: int) -> tuple[float, int]:
    run = Run(rank, **SHARDED)
    run.train(0, 4)
    saved = copy.deepcopy(run.model.module.state_dict())
    with interrupted(MemoryError):
        run.train(4, 5)
    run.compressor.detach()
    run.model.module.load_state_dict(saved)
    run.train(5, 7)  # as plain DDP
    difference = apart(run.model)
    run.attach(**SHARDED)
    run.train(7, 9)
    run.compressor.close()
    return max(difference, apart(run.model)), len(ATTACHED)


def _detached_before_a_step(rank: int) -> dict[str, tuple[float, float]]:
    found = {}
    for name, options in WAYS.items():
        run = Run(rank, **options)
        run.train(0, 4)
        run.optimizer.zero_grad()
        loss_of(run.model, 4, rank).backward()
        run.compressor.detach()
        before = flat_parameters(run.model)
        run.optimizer.step()
        moved = float((flat_parameters(run.model) - before).abs().max())
        run.train(5, 8)
        found[name] = apart(run.model), moved
        run.compressor.close()
    return found


def test_a_compressor_that_is_detached_between_backward_and_step_leaves_equal_gradients() -> None:
    for found in run_ranks(2, _detached_before_a_step, limit=90, timeout=20):
        for name, (difference, moved) in found.items():
            assert difference == 0.0, name
            assert moved > 1e-4, name


def _detached_before_or_after_a_step(rank: int, settings: dict[str, Any]) -> float:
    """How far apart the two models come to rest."""
    ends = []
    for before in (True, False):
        run = Run(rank, sgd=True)
        run.compressor.detach()
        run.optimizer = SGD(run.model.parameters(), lr=0.02, momentum=0.9, **settings)
        run.attach()
        run.train(0, 4)
        run.optimizer.zero_grad()
        loss_of(run.model, 4, rank).backward()
        if before:
            run.compressor.detach()
        run.optimizer.step()
        if not before:
            run.compressor.detach()
        for step in range(200):  # the first sends the residual; the momentum runs out
            run.optimizer.zero_grad()
            (0 * loss_of(run.model, step, rank)).backward()
            run.optimizer.step()
        ends.append(flat_parameters(run.model))
    return float((ends[0] - ends[1]).abs().max())


@pytest.mark.parametrize("settings", [{}, {"nesterov": True}, {"dampening": 0.5}])
def test_momentum_counts_once_if_a_compressor_is_detached_between_backward_and_step(
    settings: dict[str, Any],
) -> None:
    found = run_ranks(2, _detached_before_or_after_a_step, settings, limit=60, timeout=20)
    assert max(found) < 1e-6


def test_after_a_failed_exchange_the_compressor_is_detached_and_another_attached() -> None:
    assert run_ranks(2, _detached_after_a_failure, limit=60, timeout=20) == [(0.0, 1)] * 2


def _attached_after_a_failure(rank: int) -> float:
    """The replica refuses to start once (as FSDP's does on a process group that cannot)."""
    model = DDP(small_net(torch.float32))
    optimizer = AdamW(model.parameters(), lr=0.01)
    compressor = AdaptiveCompressor(policy=Fixed(10))

    def refuse(*_: Any) -> None:
        raise RuntimeError("not on this process group")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDPReplica, "start", refuse)
        with pytest.raises(RuntimeError, match="not on this") as kept:
            compressor.attach(model, optimizer=optimizer)
    assert compressor.detached
    other = AdaptiveCompressor(policy=Fixed(10)).attach(model, optimizer=optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    other.detach()
    del kept
    compressor.attach(model, optimizer=optimizer).close()
    return apart(model)


def test_after_a_failed_attach_nothing_is_attached() -> None:
    assert run_ranks(2, _attached_after_a_failure, limit=60, timeout=20) == [0.0, 0.0]


def _closed_without_a_last_step(rank: int) -> dict[str, float]:
    """Rank 1 leaves its last step out, and all close."""
    found = {}
    for name in ("updates", "automatic steps", "gossip, choco-sgd"):
        run = Run(rank, **WAYS[name])
        run.train(0, 6)
        run.optimizer.zero_grad()
        loss_of(run.model, 6, rank).backward()
        if rank == 0:
            run.optimizer.step()
        run.compressor.close()
        found[name] = apart(run.model)
    return found


def test_close_makes_up_for_a_last_step_that_one_rank_has_left_out() -> None:
    for found in run_ranks(2, _closed_without_a_last_step, limit=30, timeout=15):
        assert found["updates"] == 0.0


def _loaded_without_a_last_step(rank: int) -> dict[str, float]:
    """Rank 1 leaves its last step out, and all load: how far training on is from what it was."""
    found = {}
    for name in ("updates", "automatic steps", "gossip, choco-sgd"):
        run = Run(rank, **WAYS[name])
        run.train(0, 4)
        saved = run.save()
        straight = run.train(4, 8)
        run.optimizer.zero_grad()
        loss_of(run.model, 8, rank).backward()
        if rank == 0:
            run.optimizer.step()
        run.load(saved)
        found[name] = float((run.train(4, 8) - straight).abs().max())
        run.compressor.close()
    return found


def test_a_state_is_loaded_after_a_last_step_that_one_rank_has_left_out() -> None:
    for found in run_ranks(2, _loaded_without_a_last_step, limit=30, timeout=15):
        assert set(found.values()) == {0.0}, found


def _saved_in_inference_mode(rank: int) -> dict[str, float]:
    """By how much the run's end differs from that of a run that is saved and evaluated outside."""
    found = {}
    for name, options in WAYS.items():
        ends = []
        for mode in (torch.no_grad, torch.inference_mode):
            run = Run(rank, **options)
            with mode(), run.compressor.averaged():
                loss_of(run.model.module, 0, rank)
            run.train(0, 3)
            with mode():
                with run.compressor.averaged():
                    loss_of(run.model.module, 0, rank)
                run.compressor.state_dict("gathered")
                run.compressor.load_state_dict(run.compressor.state_dict())
            ends.append(run.train(3, 9))
            run.compressor.close()
        found[name] = float((ends[0] - ends[1]).abs().max())
    return found


def test_a_script_saves_and_evaluates_in_inference_mode() -> None:
    for found in run_ranks(2, _saved_in_inference_mode, limit=90, timeout=20):
        assert found == dict.fromkeys(WAYS, 0.0)


def _left_out(rank: int, options: dict[str, Any], buffers: bool) -> int:
    """Rank 1 leaves steps out: that of the first backward, and with buffers, which DDP broadcasts
    in every forward, another one."""
    net = small_net(torch.float32)
    if buffers:
        net.append(nn.BatchNorm1d(3))
    model = DDP(net)
    optimizer = SGD(model.parameters(), lr=0.02)
    compressor = AdaptiveCompressor(policy=Fixed(10), **options).attach(model, optimizer=optimizer)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        if rank == 0 or not (step == 0 or (buffers and step == 4)):
            optimizer.step()
    compressor.close()
    return compressor.summary().steps


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("algorithm", ["deepsqueeze", "choco-sgd", "naive"])
def test_gossip_makes_up_before_the_forward_for_a_step_left_out(
    algorithm: str, buffers: bool
) -> None:
    options = {"sync": Gossip("ring", algorithm=algorithm)}
    assert run_ranks(2, _left_out, options, buffers, limit=30, timeout=15) == [8, 8]


def _two(model: nn.Module) -> list[Optimizer]:
    layers: list[nn.Module] = list(model.module)
    parts = nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])
    return [AdamW(part.parameters(), lr=0.01, weight_decay=0.1) for part in parts]


def _one_of_two_steps(rank: int, steps: int) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Two optimizers, which step by turns: how far the ranks are apart after each step, and where
    they end after so many steps, and after close()."""
    model = DDP(small_net(torch.float32))
    optimizers = _two(model)
    compressor = AdaptiveCompressor(policy=Fixed(10), network=Network(clock=Clock()))
    compressor.attach(model, optimizer=optimizers)
    found = []
    for step in range(steps):
        optimizer = optimizers[step % 2]
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
        found.append(apart(model))
    before = flat_parameters(model)
    compressor.close()
    return [*found, apart(model)], before, flat_parameters(model)


def test_whoever_reads_the_model_finds_it_whole_where_not_all_optimizers_step() -> None:
    for odd, even in zip(
        run_ranks(2, _one_of_two_steps, 7), run_ranks(2, _one_of_two_steps, 8), strict=True
    ):
        for found, *_ in (odd, even):
            assert max(found) == 0.0
        assert not torch.equal(odd[1], odd[2])  # close() has the last step exchanged
        assert torch.equal(odd[2], even[1])  # as the next forward does


def _steps_without_an_exchange(rank: int) -> str:
    """What is said of steps that no exchange is to follow; nothing is wrong with them."""
    model = DDP(small_net(torch.float32))
    layers: list[nn.Module] = list(model.module)
    optimizers = [
        AdamW(nn.Sequential(*layers[:2]).parameters(), lr=0.01),
        SGD(nn.Sequential(*layers[2:]).parameters(), lr=0.01),  # which keeps nothing
    ]
    compressor = AdaptiveCompressor(policy=Fixed(10)).attach(model, optimizer=optimizers)
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 2 == 0:  # steps each optimizer without a state once, at learning rate 0
            get_state_dict(model, optimizers)
        loss_of(model.module, 100, 0).backward()  # alike on all ranks, and none of DDP's
        for optimizer in optimizers:
            optimizer.step()
    compressor.close()
    return f"apart by {apart(model)}"


def test_a_step_by_gradients_that_ddp_has_not_seen_is_no_late_step() -> None:
    """(Moments are each rank's own, so that ranks part by this, as they would without us.)"""
    for told in run_ranks(2, _steps_without_an_exchange, limit=60, timeout=20):
        assert "apart by" in told


def _rolled_back(rank: int) -> dict[str, tuple[float, float, int]]:
    """The loss after training that has gone astray, and was taken back without the compressor; of
    the same steps without that; and how many warnings there were."""
    found, told = {}, listen()
    ways = ("momentum", "residual", "updates", "overlap", "automatic steps", "delay")
    for name in ways:
        options = {**WAYS.get(name, {"sgd": True, "memory": "residual"})}
        losses = []
        told.clear()
        for astray in (False, True):
            run = Run(rank, **options)
            run.train(0, 20)
            states = copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])
            if astray:
                for group in run.optimizer.param_groups:
                    group["lr"] *= 300
                run.train(20, 32)
            run.model.load_state_dict(states[0])
            run.optimizer.load_state_dict(states[1])
            run.train(40, 70)
            run.compressor.detach()  # to the mean
            with torch.no_grad():
                losses.append(float(sum(loss_of(run.model.module, 100 + i, 0) for i in range(9))))
        found[name] = (*losses, len([each for each in told if "moved far" in each]))
    return found


def test_after_a_model_is_rolled_back_nothing_of_where_it_was_comes_back() -> None:
    for rank, found in enumerate(run_ranks(2, _rolled_back, limit=60, timeout=20)):
        for name, (right, loss, warnings) in found.items():
            assert loss < 1.25 * right, name
            assert warnings == (rank == 0), name


def _moved_by_the_script(rank: int, how: str) -> torch.Tensor:
    """Where training ends with a script that moves parameters between steps."""
    run = Run(rank, sgd=True)
    for step in range(12):
        run.train(step, step + 1)
        own = copy.deepcopy(run.model.module.state_dict())
        with torch.no_grad():
            for p in run.model.parameters():
                p.mul_(0.8 if how == "always" else 1.01 if step == 5 else 1.0)
                if how == "there and back":
                    p.zero_()
        if how == "there and back":
            run.model.module.load_state_dict(own)
    return flat_parameters(run.model)


def _moved_as_always(rank: int) -> list[bool]:
    found = []
    for how in ("always", "a little", "there and back"):
        told = listen()
        ends = [_moved_by_the_script(rank, how)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepWatch, "moved_far", lambda _: False)
            ends.append(_moved_by_the_script(rank, how))
        found.append(torch.equal(*ends) and not any("moved far" in each for each in told))
    return found


def test_what_a_script_does_to_parameters_between_steps_drops_nothing() -> None:
    assert run_ranks(2, _moved_as_always, limit=60, timeout=20) == [[True] * 3] * 2


def test_a_run_that_is_detached_before_its_first_step_is_told_nothing() -> None:
    """Nobody watches its optimizer any more, so nobody may say that no optimizer was seen."""
    with one_rank():
        model = DDP(small_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        AdaptiveCompressor(policy=Fixed(10)).attach(model, optimizer=optimizer).detach()
        told = listen()
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            optimizer.step()
    assert told == []


def test_an_optimizer_is_handed_over_once() -> None:
    with one_rank():
        model = DDP(small_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"each optimizer once, got \[SGD, SGD\]"):
            AdaptiveCompressor().attach(model, optimizer=[optimizer, optimizer])
        AdaptiveCompressor().attach(model, optimizer=[optimizer])
