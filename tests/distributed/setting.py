"""Small models, data and a scripted policy that the distributed tests share."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from policies import Context, Plan, Policy, StepReport


class Scripted(Policy):
    """Sends the CFs of a list, over and over, with the local steps and the delays of two others.
    Remembers the reports."""

    name = "scripted"
    chooses_local_steps = chooses_delay = True

    def __init__(
        self,
        cfs: Sequence[float],
        probe: tuple[float, ...] = (),
        local_steps: Sequence[int] = (0,),
        delays: Sequence[int | None] = (None,),
    ) -> None:
        self.cfs = list(cfs)
        self.local_steps, self.delays = local_steps, delays
        self.probe = probe
        self.step = 0
        self.reports: list[StepReport] = []

    def start(self, context: Context) -> None:
        self.context = context

    def plan(self) -> Plan:
        send = self.cfs[self.step % len(self.cfs)]
        probe = tuple(cf for cf in self.probe if cf != send)
        local_steps = self.local_steps[self.step % len(self.local_steps)]
        delay = self.delays[self.step % len(self.delays)]
        why = f"step {self.step}"
        return Plan(send, probe, reason=why, local_steps=local_steps, delay=delay)

    def observe(self, report: StepReport) -> None:
        self.reports.append(report)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]


class Clock:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def small_net(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Three layers, 1,139 parameters, alike on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 14), nn.Tanh(), nn.Linear(14, 3)
        ).to(dtype)


class TwoBranches(nn.Module):
    """Uses one branch or the other, or both: 0, 1, 2."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([small_net(seed=0), small_net(seed=1)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        wanted = self.branches if which == 2 else [self.branches[which]]
        return sum(branch(x) for branch in wanted)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs (8, 12) and targets (8, 3): another batch for every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 12, generator=generator, dtype=dtype)
    return x, torch.sin(x[:, :3] * (1 + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    parameter = next(model.parameters())
    x, y = (t.to(parameter.device) for t in batch(step, rank, parameter.dtype))
    return ((model(x) - y) ** 2).mean()


def local_gradients(model: DDP, step: int, rank: int) -> dict[str, Tensor]:
    """This rank's own gradient at the model's present parameters, without DDP."""
    loss = loss_of(model.module, step, rank)
    names = [name for name, _ in model.module.named_parameters()]
    gradients = torch.autograd.grad(loss, list(model.module.parameters()))
    return {n: g.flatten() for n, g in zip(names, gradients, strict=True)}


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def listen() -> list[str]:
    """What the library warns of from now on."""
    told: list[str] = []
    handler = logging.Handler()
    said = lambda record: told.append(record.getMessage().removeprefix("adaptive: "))  # noqa: E731
    handler.emit = said  # type: ignore[method-assign]
    logging.getLogger("adaptive").addHandler(handler)
    return told


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, whatever is nested in whatever; nan equals nan."""
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
        return alike and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


def waiting(kept: Mapping[str, Any], momentum: float, nesterov: bool = False) -> Tensor | float:
    """What a memory (of one parameter, from a state) has not delivered yet: its residual, and what
    its velocity is going to add to it. A gradient adds up to g / (1 - momentum)."""
    ahead = (
        kept.get("momentum_share", 1.0) * momentum / (1 - momentum)
    )  # m / (1 - m) of the m in use
    if nesterov:
        ahead *= ahead / (1 + ahead)
    return ahead * kept.get("velocity", 0.0) + kept.get("residual", 0.0)
