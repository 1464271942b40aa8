"""How large steps of Muon are, and how much smaller the mean of several ranks' steps is."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor, nn

from adaptive.memory.muon import enlargements, is_muon, normalized, rate_scale

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")

SHAPES = [(48, 24), (24, 48), (32, 32)]
STEPS = 80


def _last_updates(
    gradients: list[list[Tensor]], nesterov: bool = True, ranks: int = 1
) -> list[Tensor]:
    """What Muon's last step does to each of several matrices, enlarged. gradients: by step."""
    matrices = [nn.Parameter(torch.zeros_like(g)) for g in gradients[0]]
    muon = torch.optim.Muon(matrices, lr=1.0, weight_decay=0.0, nesterov=nesterov)
    for step in gradients:
        before = [p.detach().clone() for p in matrices]
        for p, gradient in zip(matrices, step, strict=True):
            p.grad = gradient
        muon.step()
    scales = enlargements(muon, len(gradients), ranks)
    return [(b - p.detach()) * scales[p] for b, p in zip(before, matrices, strict=True)]


def test_matrices_may_be_in_double_precision() -> None:
    torch.manual_seed(0)
    steps = [[torch.randn(shape) for shape in SHAPES] for _ in range(3)]
    wide = [[gradient.double() for gradient in step] for step in steps]
    found, wanted = _last_updates(wide, ranks=4), _last_updates(steps, ranks=4)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("noise", [0.0, 3.0, 100.0])
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_mean_of_enlarged_updates_is_as_large_as_that_of_the_mean_gradient(
    ranks: int, noise: float, nesterov: bool
) -> None:
    torch.manual_seed(0)
    signals = [torch.randn(shape) for shape in SHAPES]
    runs = [
        [[s + noise * torch.randn_like(s) for s in signals] for _ in range(STEPS)]
        for _ in range(ranks)
    ]
    means = [
        [torch.stack(tensors).mean(0) for tensors in zip(*step, strict=True)]
        for step in zip(*runs, strict=True)
    ]
    wanted = _last_updates(means, nesterov)
    own = [_last_updates(run, nesterov, ranks) for run in runs]
    for i, update in enumerate(wanted):
        size = torch.stack([each[i] for each in own]).mean(0).norm() / update.norm()
        assert 0.75 < float(size) < 1.25


def test_enlargements_are_between_1_and_the_root_of_the_number_of_ranks() -> None:
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    muon = torch.optim.Muon(matrices, lr=1.0)
    for step in range(1, 30):
        for i, p in enumerate(matrices):
            p.grad = torch.zeros_like(p) if i == 0 else torch.randn_like(p) * 10.0 ** (step % 3)
        muon.step()
        for scale in enlargements(muon, step, 4).values():
            assert 1 <= float(scale) <= 2
    muon.zero_grad()
    assert enlargements(muon, 30, 4) == {}


@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_momenta_that_do_not_tell_what_is_noise_enlarge_nothing(momentum: float) -> None:
    """Without momentum, and after an element whose square overflows."""
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.zeros(48, 24))
    muon = torch.optim.Muon([matrix], lr=1.0, momentum=momentum)
    for step in range(1, 6):
        matrix.grad = torch.randn_like(matrix)
        if step == 3 and momentum:
            matrix.grad[3, 4] = 1e38
        muon.step()
        (scale,) = enlargements(muon, step, 4).values()
        assert 1 <= float(scale) <= 2
        if step >= 3:
            assert float(scale) == 1


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_updates_told_in_adamws_rate_are_of_one_size(adjust: str | None) -> None:
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    muon = torch.optim.Muon(matrices, lr=0.3, weight_decay=0.0, adjust_lr_fn=adjust)
    assert is_muon(muon)
    for p in matrices:
        p.grad = torch.randn_like(p)
    muon.step()
    (group,) = muon.param_groups
    for p in matrices:
        size = float(p.detach().square().mean().sqrt()) / (0.3 * rate_scale(group, p.shape))
        assert size == pytest.approx(0.2, rel=0.25)  # singular values are only about 1
        if adjust == "match_rms_adamw":
            assert rate_scale(group, p.shape) == 1


def test_a_gradient_becomes_as_large_as_an_update() -> None:
    size = normalized(torch.randn(1000) * 1e-4).norm() / sqrt(1000)
    assert float(size) == pytest.approx(0.2)
    assert not normalized(torch.zeros(10)).any()
