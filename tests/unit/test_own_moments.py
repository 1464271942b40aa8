"""What a change of the momentum share, and a sync, leave of moments and of what waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, NAdam, Optimizer, RMSprop

from adaptive.memory.moments import Run, weight_of_mean
from adaptive.memory.optimizer_steps import Owners
from adaptive.memory.own_moments import OwnMoments
from adaptive.model.parameters import ModelParameter
from tests.unit.model_parameters import Parameters

BETA1, BETA2, EPS = 0.9, 0.99, 1e-8
ABOUT = {"rtol": 0.1, "atol": 0.0}
"""The share of noise is estimated from first moments, which are still those of mean gradients."""

RANKS = 4
STEPS = 30


class Kept:
    """Two parameters, and an Adam that has stepped them with gradients that are partly noise."""

    def __init__(self, amsgrad: bool = False) -> None:
        torch.manual_seed(0)
        tensors = [nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (300, 40)]
        self.adam = Adam(tensors, 0.1, (BETA1, BETA2), EPS, amsgrad=amsgrad)
        for step in range(STEPS):
            for p in tensors:
                p.grad = (1 + torch.randn_like(p)) * (2 if step < 10 else 1)
            self.adam.step()
        self.of = [ModelParameter(f"p{i}", p) for i, p in enumerate(tensors)]
        self.moments = OwnMoments(Owners(Parameters(self.of), [self.adam]), RANKS)
        self.moments.state.had_full_momentum = True

    def named(self, name: str) -> Tensor:
        return torch.cat([self.adam.state[p.tensor][name] for p in self.of])

    @property
    def waits(self) -> Tensor:
        """All residuals."""
        return torch.cat([p.zeros() if p.unsent is None else p.unsent.clone() for p in self.of])

    def pending(self, square: Tensor, share: float) -> Tensor:
        """What the first moment has yet to move, in learning rates, beside these second moments."""
        decay = share * BETA1 / (1 - BETA1)
        decay = decay / (1 + decay)
        mean = self.named("exp_avg") / (1 - decay**STEPS)
        ahead = share * BETA1 / (1 - BETA1)
        return ahead * mean / ((square / (1 - BETA2**STEPS)).sqrt() + EPS)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_sync_gives_second_moments_back_the_size_that_they_had_of_mean_gradients(
    amsgrad: bool,
) -> None:
    kept = Kept(amsgrad)
    names = ["exp_avg_sq", *["max_exp_avg_sq"] * amsgrad]
    before = [kept.named(name).clone() for name in names]
    kept.moments.begin_own_steps(1.0)
    for name, square in zip(names, before, strict=True):
        times = kept.named(name) / square  # a gradient of one rank has up to N times the noise
        assert 1.5 < times.min() < times.max() <= RANKS
    kept.moments.before_sync()
    for name, square in zip(names, before, strict=True):
        torch.testing.assert_close(kept.named(name), square, **ABOUT)


def test_a_momentum_of_rmsprop_that_does_not_decay_stays_in_the_optimizer() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = RMSprop([p], lr=0.1, momentum=1.0)
    p.grad = torch.ones(4)
    optimizer.step()
    before = optimizer.state[p]["momentum_buffer"].clone()
    moments = OwnMoments(Owners(Parameters([ModelParameter("p", p)]), [optimizer]), RANKS)
    moments.begin_own_steps(0.0)
    assert moments.settings_with_share(optimizer, optimizer.param_groups) in (
        None,
        optimizer.param_groups,
    )
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], before)


@pytest.mark.parametrize("kind", [Adagrad, RMSprop])
def test_second_moments_without_a_first_moment_count_as_noise(kind: type[Optimizer]) -> None:
    p = nn.Parameter(torch.randn(7))
    optimizer = kind([p], lr=0.1)
    p.grad = torch.ones(7)
    optimizer.step()
    name = "sum" if kind is Adagrad else "square_avg"
    before = optimizer.state[p][name].clone()
    moments = OwnMoments(Owners(Parameters([ModelParameter("p", p)]), [optimizer]), RANKS)
    moments.begin_own_steps(1.0)
    torch.testing.assert_close(optimizer.state[p][name], before / (0.05 + 0.95 / RANKS))
    moments.begin_own_steps(1.0)  # of local gradients already
    moments.before_sync()
    torch.testing.assert_close(optimizer.state[p][name], before)


def test_a_centered_rmsprop_keeps_its_mean_and_has_no_negative_variance() -> None:
    p = nn.Parameter(torch.randn(7, dtype=torch.float64))
    optimizer = RMSprop([p], lr=0.1, centered=True)
    moments = OwnMoments(Owners(Parameters([ModelParameter("p", p)]), [optimizer]), RANKS)
    moments.begin_own_steps(1.0)
    for _ in range(STEPS * 20):
        p.grad = 1 + 0.1 * torch.randn_like(p)  # mostly signal
        optimizer.step()
    state = optimizer.state[p]
    mean, variance = state["grad_avg"].clone(), state["square_avg"] - state["grad_avg"] ** 2
    moments.before_sync()
    torch.testing.assert_close(state["grad_avg"], mean)
    kept = state["square_avg"] - state["grad_avg"] ** 2
    torch.testing.assert_close(kept, variance * (0.05 + 0.95 / RANKS))


def test_the_momentum_of_rmsprop_has_as_much_to_move_whatever_the_share() -> None:
    p = nn.Parameter(torch.randn(7, dtype=torch.float64))
    optimizer = RMSprop([p], lr=0.1, momentum=0.9)
    parameter = ModelParameter("p", p)
    moments = OwnMoments(Owners(Parameters([parameter]), [optimizer]), RANKS)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        optimizer.step()

    def waits() -> Tensor:
        momentum = optimizer.state[p]["momentum_buffer"] * moments.state.share * 0.9 / (1 - 0.9)
        momentum = momentum * moments.update_scale(optimizer, optimizer.param_groups[0])
        return momentum if parameter.unsent is None else momentum + parameter.unsent

    total = waits().clone()
    for share in (1.0, 0.3, 0.6, 0.0, 0.2):
        moments.begin_own_steps(share)
        torch.testing.assert_close(waits(), total)
    moments.before_sync()
    assert not parameter.has_residual
    torch.testing.assert_close(waits(), total)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_what_momentum_has_yet_to_move_is_the_same_whatever_the_share(amsgrad: bool) -> None:
    kept = Kept(amsgrad)
    name = "max_exp_avg_sq" if amsgrad else "exp_avg_sq"
    square = kept.named(name).clone()
    total = kept.pending(square, 1.0)
    kept.moments.begin_own_steps(0.3)  # the residual takes over what momentum loses
    torch.testing.assert_close(kept.waits, 0.7 * total, **ABOUT)
    kept.moments.begin_own_steps(0.6)  # momentum takes over all that waits
    assert not any(p.has_residual for p in kept.of)
    torch.testing.assert_close(kept.pending(square, 0.6), total, **ABOUT)
    kept.moments.begin_own_steps(0.2)
    for parameter in kept.of:
        parameter.open_residual().add_(1.0)  # what a step has not sent
    kept.moments.before_sync()
    assert not any(p.has_residual for p in kept.of)
    torch.testing.assert_close(kept.pending(kept.named(name), 1.0), total + 1, **ABOUT)


@pytest.mark.parametrize("had", [False, True])
def test_a_run_that_began_without_momentum_gets_it_with_its_first_full_share(had: bool) -> None:
    kept = Kept()
    kept.moments.state.share, kept.moments.state.had_full_momentum = 0.0, had
    square = kept.named("exp_avg_sq").clone()
    total = kept.pending(square, 1.0)
    kept.moments.begin_own_steps(0.0)
    kept.moments.begin_own_steps(1.0)
    torch.testing.assert_close(kept.pending(square, 1.0), total * (not had))


@pytest.mark.parametrize(
    ("kind", "steps"), [(Adam, 2), (Adam, 5), (Adam, 500), (NAdam, 500), (NAdam, 4000)]
)
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_residual_and_momentum_move_the_parameters_as_far_as_momentum_alone(
    kind: type[Adam | NAdam], steps: int, share: float
) -> None:
    """After a few steps, whose bias correction is large, and of NAdam, whose step multiplies the
    first moment by a number that depends on the share."""

    def run(share: float, again: float | None = None) -> Tensor:
        """How far residual and momentum move the parameter after a change of share."""
        p = nn.Parameter(torch.ones(8, dtype=torch.float64))
        optimizer: Optimizer = kind([p], 1.0, (BETA1, BETA2), EPS)
        p.grad = torch.linspace(0.5, 2, 8, dtype=torch.float64)
        for _ in range(steps):
            optimizer.step()
        one = ModelParameter("p", p)
        moments = OwnMoments(Owners(Parameters([one]), [optimizer]), ranks=1)
        moments.state.had_full_momentum = True
        moments.begin_own_steps(share)
        if again is not None:
            moments.begin_own_steps(share := again)
        before = p.detach().clone()
        p.grad = torch.zeros_like(p)
        # The second moment stays as it is, bias correction included.
        square = optimizer.state[p]["exp_avg_sq"] / (1 - BETA2**steps)
        for group in moments.settings_with_share(optimizer, optimizer.param_groups) or ():
            optimizer.param_groups[0]["betas"] = group["betas"]
        for step in range(steps + 1, steps + 1 + 400 * (share > 0)):
            optimizer.state[p]["exp_avg_sq"].copy_(square * (1 - BETA2**step) / BETA2)
            optimizer.step()
        return before - p.detach() + (one.zeros() if one.unsent is None else one.unsent)

    alone = run(1.0)
    torch.testing.assert_close(run(share), alone, rtol=0.03, atol=0.0)
    torch.testing.assert_close(run(share, again=1.0), alone, rtol=0.03, atol=0.0)


@pytest.mark.parametrize("beta1", [0.1, 0.9, 0.99, 0.999, 0.9999])
def test_the_weight_of_a_first_moment_is_the_sum_over_all_later_steps(beta1: float) -> None:
    done = [1, 2, 10, 1000, 100_000]
    k = torch.arange(1, int(50 / (1 - beta1)), dtype=torch.float64)
    expected = [float((beta1**k / (1 - beta1 ** (step + k))).sum()) for step in done]
    run = Run({"betas": (beta1, BETA2)}, torch.tensor(done, dtype=torch.float32), {})
    told = weight_of_mean(run, 1.0)
    torch.testing.assert_close(told, torch.tensor(expected), rtol=1e-6, atol=0.0)
