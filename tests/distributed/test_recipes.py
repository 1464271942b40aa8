"""What docs/recipes.md tells people to write."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import Accordion, AdaptiveCompressor, Warmup
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, batch, flat_parameters, listen

STEPS = 6


def _two_models() -> tuple[DDP, DDP]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(12, 60), nn.Tanh(), nn.Linear(60, 3))
    discriminator = nn.Sequential(nn.Linear(3, 80), nn.Tanh(), nn.Linear(80, 1))
    return DDP(generator), DDP(discriminator)


def _gan(rank: int, cf: float | None, kind: Any) -> tuple[Tensor, list[str]]:
    """Parameters of both models, and what was warned of. cf: None without compressors."""
    g, d = _two_models()
    optimizer_g, optimizer_d = (kind(model.parameters(), 0.02) for model in (g, d))
    told = listen()
    if cf is not None:
        for model, optimizer in ((g, optimizer_g), (d, optimizer_d)):
            compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Scripted([cf]))
            compressor.attach(model, optimizer=optimizer)
    for step in range(STEPS):
        noise, real = batch(step, rank, torch.float32)
        fake = g(noise)
        scores = d(torch.cat([real, fake.detach()]))
        optimizer_d.zero_grad()
        (softplus(-scores[:8]).mean() + softplus(scores[8:]).mean()).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        softplus(-d.module(fake)).mean().backward()
        optimizer_g.step()
    return torch.cat([flat_parameters(g), flat_parameters(d)]), list(told)


def _gans(rank: int, kind: Any) -> dict[str, tuple[Tensor, list[str]]]:
    return {
        "plain": _gan(rank, None, kind),
        "at CF 1": _gan(rank, 1.0, kind),
        "at CF 10": _gan(rank, 10.0, kind),
    }


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_gan_leaves_nothing_of_the_generators_loss_in_the_discriminator(kind: Any) -> None:
    for result in run_ranks(2, _gans, kind):
        torch.testing.assert_close(result["at CF 1"][0], result["plain"][0])
        assert not torch.equal(result["at CF 10"][0], result["plain"][0])
        for recipe in ("at CF 1", "at CF 10"):
            assert result[recipe][1] == []


def _accumulated(rank: int, compressed: bool) -> Tensor:
    model, _ = _two_models()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    if compressed:
        compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Scripted([1.0]))
        compressor.attach(model, optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [batch(10 * step + part, rank, torch.float32) for part in range(3)]
        for x, y in parts[:-1]:
            with model.no_sync():
                ((model(x) - y).square().mean() / 3).backward()
        x, y = parts[-1]
        ((model(x) - y).square().mean() / 3).backward()
        optimizer.step()
    if compressed:
        assert compressor.summary().steps == STEPS
    return flat_parameters(model)


def _accumulated_both(rank: int) -> list[Tensor]:
    return [_accumulated(rank, compressed) for compressed in (False, True)]


def test_gradients_are_accumulated_under_no_sync() -> None:
    for plain, ours in run_ranks(2, _accumulated_both):
        torch.testing.assert_close(ours, plain)


def _batches_by_regime(rank: int, compressed: bool, sizes: list[int]) -> tuple[list[int], Tensor]:
    """How many micro-batches each step has taken, and the parameters. sizes: without compressor."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 60), nn.Tanh(), nn.Linear(60, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if compressed:
        policy = Accordion.paper(low=1, high=1, interval=6)
        AdaptiveCompressor(policy=policy).attach(model, optimizer=optimizer)
    taken: list[int] = []

    def loss() -> Tensor:
        x, y = batch(step + len(taken), rank, torch.float32)
        return ((model(x) - y) ** 2).mean()

    for step in range(20):
        micro_batches = (1 if policy.critical else 4) if compressed else sizes[step]
        with model.no_sync():
            for _ in range(micro_batches - 1):
                loss().backward()
        loss().backward()
        taken.append(micro_batches)
        if step == 13:
            for group in optimizer.param_groups:
                group["lr"] /= 10  # critical again
        optimizer.step()
        optimizer.zero_grad()
    return taken, flat_parameters(model)


def test_batches_grow_outside_critical_regimes() -> None:
    first, second = run_ranks(2, _batches_by_regime, True, [])
    assert first[0] == second[0]
    assert first[0][:8] == [1] * 8
    assert 4 in first[0][8:14]
    assert 1 in first[0][14:]
    plain = run_ranks(2, _batches_by_regime, False, first[0])
    torch.testing.assert_close(first[1], plain[0][1])
    assert torch.equal(first[1], second[1])


def _dgc(rank: int) -> tuple[list[float], Tensor]:
    """Each step's root of the mean over ranks of ||g||^2, over the limit, and the parameters."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 60), nn.Tanh(), nn.Linear(60, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms: list[float] = []
    compressor = AdaptiveCompressor(
        policy=Warmup.paper(steps=2),
        timeline=lambda numbers, step: norms.append(numbers.get("gradient/norm", 0.0)),
    ).attach(model, optimizer=optimizer)
    parameters = list(model.parameters())
    limit = 0.3 / math.sqrt(dist.get_world_size())
    for step in range(12):
        x, y = batch(step, rank, torch.float32)
        loss = ((model(x) - y) ** 2).mean()
        own = torch.autograd.grad(loss, parameters, retain_graph=True)
        norm = torch.stack([gradient.norm() for gradient in own]).norm()
        (loss * (limit / norm).clamp(max=1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert compressor.memory == "momentum"
    assert compressor.cf == 1000
    compressor.close()
    return [norm / limit for norm in norms], flat_parameters(model)


def test_deep_gradient_compression_clips_by_the_norm_of_the_whole_local_gradient() -> None:
    (norms, parameters), (_, others) = run_ranks(2, _dgc)
    assert max(norms) == pytest.approx(1.0, rel=1e-4)
    assert torch.equal(parameters, others)
