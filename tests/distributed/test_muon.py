"""Muon in parameter space, alone and beside an AdamW: each rank's own Muon steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from adaptive import AdaptiveCompressor, Fixed, LocalSteps, Network, Policy, Schedule
from compressors.kernels import blocks
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Clock,
    flat_parameters,
    listen,
    local_gradients,
    loss_of,
    same,
    small_net,
)
from tests.distributed.test_device_path import ByStep
from tests.distributed.test_updates import differs, mean

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")

LR = 0.02
SWITCHES = {0: 20, 7: 1, 12: 20, 20: 4, 26: 1}
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "alone, as large as AdamW": {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
    "beside": {},
    "beside, as large as AdamW": {"adjust_lr_fn": "match_rms_adamw"},
}


def _matrices() -> nn.Module:
    net = small_net(torch.float32)
    return nn.Sequential(*(nn.Linear(m.in_features, m.out_features, bias=False) for m in net[::2]))


def _optimizers(model: nn.Module, way: str) -> list[Optimizer]:
    """Muon of all that has two dimensions, and of the others an AdamW."""
    parameters = list(model.parameters())
    muon = torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=LR, **WAYS[way])
    others = [p for p in parameters if p.dim() < 2]
    return [muon, AdamW(others, lr=0.01)] if others else [muon]


class Training:
    """A model and its optimizers, compressed if there is a policy."""

    def __init__(self, way: str, policy: Policy | None, **options: Any) -> None:
        torch.manual_seed(0)
        net = _matrices() if way.startswith("alone") else small_net(torch.float32)
        self.model = DDP(net, bucket_cap_mb=0.002)
        self.optimizers = _optimizers(self.model, way)
        self.compressor = None
        if policy is not None:
            options = {"cf_range": (1, 100), "network": Network(clock=Clock()), **options}
            self.compressor = AdaptiveCompressor(policy=policy, **options)
            self.compressor.attach(self.model, optimizer=self.optimizers)

    def train(self, rank: int, start: int, stop: int) -> Training:
        for step in range(start, stop):
            self.model.zero_grad()
            loss_of(self.model, step, rank).backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
        return self

    @property
    def flat(self) -> Tensor:
        return flat_parameters(self.model)

    @property
    def kept(self) -> list[Tensor]:
        """All that the optimizers keep."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return [torch.as_tensor(value) for state in states for value in state.values()]

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.model, *self.optimizers, self.compressor


def _as_ddp(rank: int) -> list[str]:
    """The ways in which CF 1 is not DDP, or something is said of it."""
    wrong, told = [], listen()
    for way in WAYS:
        plain = Training(way, None).train(rank, 0, 20)
        ours = Training(way, Fixed(1)).train(rank, 0, 20)
        assert ours.compressor.memory == "updates"
        if not same([plain.flat, plain.kept], [ours.flat, ours.kept]):
            wrong.append(way)
    return wrong + told


@pytest.mark.parametrize("ranks", [2, 4])
def test_at_cf_1_it_is_plain_ddp_to_the_bit(ranks: int) -> None:
    assert run_ranks(ranks, _as_ddp) == [[]] * ranks


def _one_model(rank: int) -> dict[str, list[float]]:
    """Where ranks differ, in parameters after any phase or in moments after a dense one."""
    found = {}
    for way in WAYS:
        run, apart = Training(way, Schedule(SWITCHES)), []
        start = run.flat
        for phase in ((0, 7), (7, 12), (12, 20), (20, 26), (26, 29)):
            run.train(rank, *phase)
            apart.append(differs([run.flat]))
            if phase[0] in (7, 26):
                apart.append(differs(run.kept))
        assert float((run.flat - start).abs().mean()) > 1e-3  # it has trained
        if any(apart):
            found[way] = apart
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_end_with_one_model_however_cfs_switch(ranks: int) -> None:
    assert run_ranks(ranks, _one_model) == [{}] * ranks


def _adds_up(rank: int, way: str) -> tuple[float, list[float]]:
    """What is missing of the sum of all ranks' updates, enlarged by the noise in their momenta,
    relative to what has moved; and the root mean square of what waits of each matrix."""
    run = Training(way, Fixed(20))
    named = dict(run.model.module.named_parameters())
    twins = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    momenta = dict.fromkeys(named, torch.zeros(()))
    settings = {"lr": LR, "weight_decay": 0.0, **WAYS[way]}
    twin = torch.optim.Muon(list(twins.values()), **settings)
    start, sums = run.flat, torch.zeros(())
    for group in run.optimizers[0].param_groups:
        group["weight_decay"] = 0.0
    for step in range(9):
        for name, gradient in local_gradients(run.model, step, rank).items():
            twins[name].grad = gradient.view_as(twins[name])
            momenta[name] = 0.95 * momenta[name] + 0.05 * gradient
        before = torch.cat([p.detach().flatten() for p in twins.values()])
        twin.step()
        updates = before - torch.cat([p.detach().flatten() for p in twins.values()])
        sizes = [_enlargement(twins[n].grad, momenta[n], step, twin) for n in named]
        sums = sums + updates * torch.cat(
            [torch.full((p.numel(),), size) for p, size in zip(named.values(), sizes, strict=True)]
        )
        run.model.zero_grad()
        loss_of(run.model, step, rank).backward()
        run.optimizers[0].step()
    memory = run.compressor.state_dict()["memory"]
    waiting = []
    for name, p in named.items():
        rows, columns = p.shape
        size = (max(1, rows / columns) / max(rows, columns)) ** 0.5  # root mean square of a step
        in_adamws = LR if "large" in way else LR * size / 0.2
        waits = memory[name]["residual"] * in_adamws
        sums = sums - torch.nn.functional.pad(waits, _place(named, name))
        waiting.append(float(memory[name]["residual"].square().mean().sqrt()))
    moved = start - run.flat
    return float((moved - mean(sums)).norm() / moved.norm()), waiting


def _enlargement(grad: Tensor, momentum: Tensor, step: int, muon: Optimizer) -> float:
    """By what an update of one of two ranks is multiplied, after so many before it."""
    weights = [0.05 * 0.95**i for i in range(1000)]  # of gradients i steps ago, in the momentum
    k = sum(w**2 for w in weights)
    bias = 1 - 0.95 ** (step + 1)
    ratio = float((momentum.norm() / bias / grad.norm()) ** 2)
    signal = min(max((ratio - k) / (1 - k), 0.0), 1.0)
    if muon.param_groups[0]["nesterov"]:
        weights = [0.95 * w for w in weights]
        weights[0] += 0.05
        k = sum(w**2 for w in weights)
    alike = signal / (signal + (1 - signal) * k)
    return (2 / (1 + alike)) ** 0.5


def _place(named: dict[str, nn.Parameter], name: str) -> tuple[int, int]:
    """How many elements lie before a parameter, and after it."""
    sizes, at = [p.numel() for p in named.values()], list(named).index(name)
    return sum(sizes[:at]), sum(sizes[at + 1 :])


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("alone")])
def test_sent_plus_waiting_is_the_sum_of_updates(way: str) -> None:
    for missing, sizes in run_ranks(2, _adds_up, way):
        assert missing < 1e-5
        # Of all shapes what waits is as large, whatever scales the learning rate.
        assert max(sizes) < 1.3 * min(sizes)


def _decayed(rank: int) -> float:
    """By how much parameters differ, relative, from those that only decay: gradients are zero."""
    run = Training("beside", Fixed(100))
    start = run.flat
    decays = [optimizer.param_groups[0]["weight_decay"] for optimizer in run.optimizers]
    for _ in range(5):
        run.model.zero_grad()
        (0.0 * loss_of(run.model, 0, rank)).backward()
        for optimizer in run.optimizers:
            optimizer.step()
    rates = [1 - o.param_groups[0]["lr"] * d for o, d in zip(run.optimizers, decays, strict=True)]
    wanted = torch.cat([p.flatten() * rates[p.dim() < 2] ** 5 for p in _parameters(start, run)])
    return float((run.flat - wanted).norm() / (wanted - start).norm())


def _parameters(flat: Tensor, run: Training) -> list[Tensor]:
    parameters = list(run.model.parameters())
    pieces = flat.split([p.numel() for p in parameters])
    return [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]


def test_decay_is_not_compressed() -> None:
    assert max(run_ranks(2, _decayed)) < 1e-4


def _resumed(rank: int) -> list[str]:
    """Where a run that was stopped differs from one that was not."""
    wrong = []
    for stop in (5, 10):  # compressed, dense
        straight, stopped, resumed = (Training("beside", Schedule(SWITCHES)) for _ in range(3))
        straight.train(rank, 0, 16)
        stopped.train(rank, 0, stop)
        states = [part.state_dict() for part in stopped.parts]
        loss_of(resumed.model, 0, rank).backward()  # DDP's first buckets are others
        for part, state in zip(resumed.parts, states, strict=True):
            part.load_state_dict(state)
        resumed.train(rank, stop, 16)
        ends = [[run.flat, run.kept, run.compressor.state_dict()] for run in (straight, resumed)]
        wrong += [] if same(*ends) else [f"stopped before step {stop}"]
    return wrong


def test_resuming_equals_never_having_stopped() -> None:
    assert run_ranks(2, _resumed) == [[], []]


def _local_steps(rank: int) -> float:
    """How far uncompressed local steps are from the mean of replicas that step by themselves."""
    ours = Training("beside", Fixed(1), sync=LocalSteps(4, overlap=0))
    torch.manual_seed(0)
    alone = small_net(torch.float32)
    optimizers, means = _optimizers(alone, "beside"), list[Tensor]()
    for step in range(12):
        alone.zero_grad()
        loss_of(alone, step, rank).backward()
        clip_grad_norm_(alone.parameters(), 1.0)
        if step and step % 4 == 0:  # the mean has come while backward went on
            for p, united in zip(alone.parameters(), means, strict=True):
                p.data.copy_(united)
        for optimizer in optimizers:
            optimizer.step()
        if step % 4 == 3:
            means = [mean(p.detach()) for p in alone.parameters()]
    ours.train(rank, 0, 12)
    return float((ours.flat - flat_parameters(alone)).abs().max())


def test_local_steps_are_those_of_replicas_that_step_by_themselves() -> None:
    assert max(run_ranks(2, _local_steps)) < 1e-6


def _on_device_path(rank: int) -> tuple[float, float]:
    """By how much ranks differ on the path of a device, and it from that of the host."""
    ends = []
    for on_device in (False, True):
        blocks.force_device_path = on_device
        policy = ByStep([20.0] * 7 + [1.0] * 3 + [5.0] * 4)
        ends.append(Training("beside", policy).train(rank, 0, 14).flat)
    blocks.force_device_path = False
    return differs([ends[1]]), float((ends[0] - ends[1]).abs().max())


def test_the_path_of_a_device_is_that_of_the_host() -> None:
    for apart, from_host in run_ranks(2, _on_device_path):
        assert apart == 0
        assert from_host < 1e-5
