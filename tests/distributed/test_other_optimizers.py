"""Optimizers that the library does not know: parameter space takes their steps as they are, CF 1 is
DDP, and who hands one over is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Optimizer

from adaptive import Fixed, Schedule
from tests.distributed.own_optimizers import LAMB, LARS, Adam8bit, Lion, decoded
from tests.distributed.processes import run_ranks
from tests.distributed.setting import listen, local_gradients, loss_of, same, small_net
from tests.distributed.test_updates import SWITCHES, Training, differs, mean, moments

SINGLE = torch.float32
MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Lion": lambda m: Lion(m.parameters(), lr=3e-3),
    "LARS": lambda m: LARS(m.parameters()),
    "LAMB": lambda m: LAMB(m.parameters()),
    "Adafactor": lambda m: Adafactor(m.parameters(), lr=0.05, weight_decay=0.1),
    "Adam8bit": lambda m: Adam8bit(m.parameters()),
}


def _as_ddp(rank: int) -> list[str]:
    """Those with which CF 1 is not DDP."""
    wrong = []
    for name, make in MAKE.items():
        plain, ours = (
            Training(make, policy, small_net(SINGLE)).train(rank, 0, 12)
            for policy in (None, Fixed(1))
        )
        assert ours.compressor.memory == "updates"
        if not same([plain.flat, moments(plain)], [ours.flat, moments(ours)]):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_at_cf_1_it_is_plain_ddp_to_the_bit(ranks: int) -> None:
    assert run_ranks(ranks, _as_ddp) == [[]] * ranks


def _compressed(rank: int) -> dict[str, Any]:
    """How far ranks differ after any phase, in moments after a dense one, and the last loss over
    the first, dense and compressed."""
    found = {}
    for name, make in MAKE.items():
        apart = []
        run = Training(make, Schedule(SWITCHES), small_net(SINGLE))
        for phase in ((0, 7), (7, 12), (12, 20), (20, 26), (26, 29)):
            run.train(rank, *phase)
            apart.append(differs([run.flat]))
            if phase[0] in (7, 26):
                apart.append(differs(moments(run)))
        found[name] = max(apart), _loss(make, rank, 1), _loss(make, rank, 20)
    return found


def _loss(make: Callable[[nn.Module], Optimizer], rank: int, cf: float) -> float:
    run = Training(make, Fixed(cf), small_net(SINGLE)).train(rank, 0, 60)
    with torch.no_grad():
        return sum(float(loss_of(run.model, step, rank)) for step in range(100, 110)) / 10


def test_ranks_end_with_one_model_that_has_learned_whatever_the_optimizer() -> None:
    with torch.no_grad():
        at_first = sum(float(loss_of(small_net(SINGLE), step, 0)) for step in range(100, 110)) / 10
    found = run_ranks(2, _compressed)
    for name in MAKE:
        apart, dense, compressed = zip(*(each[name] for each in found), strict=True)
        assert apart == (0.0, 0.0), name
        assert dense[0] < 0.8 * at_first, name
        assert compressed[0] < 0.9 * at_first, name


def _adds_up(rank: int) -> dict[str, float]:
    """What is missing of the sum of all ranks' steps, relative to what has moved."""
    found = {}
    for name, make in MAKE.items():
        run = Training(make, Fixed(20), small_net(SINGLE))
        twin = small_net(SINGLE)
        optimizer = make(twin)
        start, sums = run.flat, torch.zeros(())
        for step in range(9):
            # The twin stands where the run does, and its optimizer has seen the same gradients.
            nn.utils.vector_to_parameters(run.flat, twin.parameters())
            gradients = local_gradients(run.model, step, rank).values()
            for p, gradient in zip(twin.parameters(), gradients, strict=True):
                dense = step == 0 and name != "Adafactor"  # the first, if it is not torch's
                own = mean(gradient) if dense else gradient
                p.grad = own.view_as(p).clone()
            before = nn.utils.parameters_to_vector(twin.parameters()).detach().clone()
            optimizer.step()
            after = nn.utils.parameters_to_vector(twin.parameters()).detach()
            sums = sums + before - after
            run.train(rank, step, step + 1)
        lr = run.optimizer.param_groups[0]["lr"]
        memory = run.compressor.state_dict()["memory"]
        names = [n for n, _ in run.model.module.named_parameters()]
        waits = lr * torch.cat([memory[n]["residual"] for n in names])
        moved = start - run.flat
        found[name] = float((moved + mean(waits) - mean(sums)).norm() / moved.norm())
    return found


def test_sent_plus_waiting_is_the_sum_of_steps() -> None:
    for found in run_ranks(2, _adds_up):
        assert max(found.values()) < 1e-4, found


def _codes(rank: int) -> tuple[float, list[Tensor], list[Tensor]]:
    """How far ranks' moments in 8 bits differ once they have agreed; those of the first layer
    before and after."""
    run = Training(MAKE["Adam8bit"], Schedule({0: 20, 5: 1}), small_net(SINGLE)).train(rank, 0, 5)
    p = next(run.model.parameters())
    before = [decoded(run.optimizer.state[p], name, p).clone() for name in ("mean", "root")]
    for group in run.optimizer.param_groups:
        group["betas"] = (1.0, 1.0)  # moments stay as they were agreed on
    run.train(rank, 5, 6)
    after = [decoded(run.optimizer.state[p], name, p) for name in ("mean", "root")]
    return differs(moments(run)), before, after


def test_codes_of_8_bit_moments_and_their_scales_are_those_of_one_rank() -> None:
    """Codes have no mean, and a mean of scales would belong to no rank's codes."""
    (apart, first, agreed), (_, second, others) = run_ranks(2, _codes)
    assert apart == 0
    assert not torch.equal(first[0], second[0])
    for a, b, c in zip(first, agreed, others, strict=True):
        torch.testing.assert_close(a, b, atol=float(a.abs().max()) / 100, rtol=0)
        assert torch.equal(b, c)


class Float8(Optimizer):
    """SGD with a momentum that is kept in float8, and a scale for each tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            momentum = self.momentum(p).mul_(0.9).add_(p.grad) if state else p.grad.clone()
            state["scale"] = momentum.abs().max() / 400
            state["momentum"] = (momentum / state["scale"]).to(torch.float8_e4m3fn)
            p.sub_(momentum, alpha=0.01)

    def momentum(self, p: Tensor) -> Tensor:
        return self.state[p]["momentum"].to(p.dtype) * self.state[p]["scale"]


def _float8(rank: int) -> tuple[float, float]:
    """How far ranks' momenta differ once they have agreed, and their models at the end."""
    run = Training(Float8, Schedule({0: 20, 5: 1, 6: 20}), small_net(SINGLE)).train(rank, 0, 5)
    assert isinstance(run.optimizer, Float8)
    run.compressor.state_dict(checkpoint="gathered")
    agreed = [run.optimizer.momentum(p) for p in run.model.parameters()]
    run.train(rank, 5, 9)
    return differs(agreed), differs([run.flat])


def test_moments_in_float8_and_their_scales_are_those_of_one_rank() -> None:
    assert run_ranks(2, _float8) == [(0.0, 0.0)] * 2


def _told(rank: int) -> dict[str, int]:
    """How often a script is told that an optimizer was not measured."""
    found = {}
    for name, make in {**MAKE, "SGD": lambda m: SGD(m.parameters(), lr=0.1)}.items():
        told = listen()
        Training(make, Fixed(20), small_net(SINGLE), memory="updates").train(rank, 0, 3)
        found[name] = sum(f"optimizer {name}: each rank's steps" in each for each in told)
    return found


def test_who_hands_one_over_is_told_once() -> None:
    first, second = run_ranks(2, _told)
    assert first == {**dict.fromkeys(MAKE, 1), "SGD": 0}
    assert set(second.values()) == {0}
