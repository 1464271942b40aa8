"""Error feedback on updates: dense steps are the optimizer's own, nothing that a rank's optimizer
would have done is lost, and the ranks stay one model."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from adaptive import AdaptiveCompressor, Fixed, Network, Policy, Schedule
from compressors.kernels import blocks
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Clock,
    flat_parameters,
    local_gradients,
    loss_of,
    same,
    small_net,
)
from tests.distributed.test_device_path import ByStep

SWITCHES = {0: 20, 7: 1, 12: 20, 20: 4, 26: 1}
BETAS = (0.9, 0.99)

Groups = list[dict[str, Any]]


def _as_one(model: nn.Module) -> Groups:
    return [{"params": list(model.parameters())}]


def _several(model: nn.Module) -> Groups:
    """As transformers are trained: biases without decay, and the last layer otherwise."""
    named = [(n.removeprefix("module."), p) for n, p in model.named_parameters()]
    last = [p for name, p in named if name.startswith("4.")]
    biases = [p for name, p in named if "bias" in name and not name.startswith("4.")]
    weights = [p for name, p in named if "weight" in name and not name.startswith("4.")]
    return [
        {"params": weights, "weight_decay": 0.1, "lr": 0.002},
        {"params": biases, "weight_decay": 0.0},
        {"params": last, "betas": (0.8, 0.95), "lr": 0.02, "weight_decay": 0.01},
    ]


MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": lambda m: Adam(_as_one(m), lr=0.01, betas=BETAS),
    "adamw": lambda m: AdamW(_as_one(m), lr=0.01, betas=BETAS),
    "nadam": lambda m: NAdam(_as_one(m), lr=0.01, betas=BETAS),
    "radam": lambda m: RAdam(_as_one(m), lr=0.01, betas=BETAS),
    "rmsprop": lambda m: RMSprop(_as_one(m), lr=0.01),
    "adagrad": lambda m: Adagrad(_as_one(m), lr=0.01),
}
VARIANTS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam, coupled decay": lambda m: Adam(_as_one(m), lr=0.01, weight_decay=0.1),
    "adam, no first moment": lambda m: Adam(_as_one(m), lr=0.01, betas=(0.0, 0.99)),
    "adam, amsgrad, foreach": lambda m: Adam(_as_one(m), lr=0.01, amsgrad=True, foreach=True),
    "adamw, fused": lambda m: AdamW(_as_one(m), lr=0.01, fused=True),
    "adamw, maximize": lambda m: AdamW(_as_one(m), lr=1e-4, maximize=True, foreach=False),
    "adamw, groups": lambda m: AdamW(_several(m), lr=0.01, betas=BETAS),
    "nadam, decoupled decay": lambda m: NAdam(
        _as_one(m), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "radam, foreach": lambda m: RAdam(_as_one(m), lr=0.01, foreach=True, weight_decay=0.1),
    "rmsprop, centered, momentum": lambda m: RMSprop(
        _as_one(m), lr=0.003, centered=True, momentum=0.9
    ),
    "adagrad, decays": lambda m: Adagrad(_as_one(m), lr=0.05, lr_decay=0.01, weight_decay=0.1),
    "adamw, tensor lr": lambda m: AdamW(_as_one(m), lr=torch.tensor(0.01), foreach=False),
}
ALL = {**MAKE, **VARIANTS}
CYCLED = ("adamw", "adamw, groups", "rmsprop, centered, momentum")
"""Those whose learning rate and momentum change with every step."""


class Training:
    """A model and its optimizer, compressed if there is a policy. clip: as a script does."""

    def __init__(
        self,
        make: Callable[[nn.Module], Optimizer],
        policy: Policy | None,
        net: nn.Module | None = None,
        cycle: int = 0,
        clip: float = 0.0,
        ddp: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        net = small_net() if net is None else net
        self.model = DDP(net, **({"bucket_cap_mb": 0.004} if ddp is None else ddp))
        self.optimizer = make(self.model)
        self.scheduler: LRScheduler | None = None
        if cycle:
            self.scheduler = OneCycleLR(self.optimizer, max_lr=0.02, total_steps=cycle)
        self.compressor = None
        self.clip = clip
        if policy is not None:
            options = {"cf_range": (1, 100), "network": Network(clock=Clock()), **options}
            self.compressor = AdaptiveCompressor(policy=policy, **options)
            self.compressor.attach(self.model, optimizer=self.optimizer)

    def train(self, rank: int, start: int, stop: int) -> Training:
        for step in range(start, stop):
            self.optimizer.zero_grad()
            loss_of(self.model, step, rank).backward()
            if self.clip:
                clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        return self

    @property
    def flat(self) -> Tensor:
        return flat_parameters(self.model)


def differs(tensors: Sequence[Tensor]) -> float:
    """By how much these tensors differ from those of rank 0, at most; inf if some are not finite. A
    collective."""
    flat = torch.cat([t.detach().flatten().to(torch.float64) for t in tensors])
    first = flat.clone()
    dist.broadcast(first, 0)
    apart = float((flat - first).abs().max())
    return apart if bool(flat.isfinite().all()) else float("inf")


def moments(training: Training) -> list[Tensor]:
    """All that the optimizer keeps."""
    kept = training.optimizer.state.values()
    return [torch.as_tensor(value) for state in kept for value in state.values()]


def _as_plain_ddp(rank: int, kinds: Mapping[str, int]) -> dict[str, float]:
    """By how much CF 1 is apart from DDP, parameters or moments, where it is, after so many steps
    of each kind."""
    found = {}
    for name, steps in kinds.items():
        make, cycle = ALL[name], 60 if name in CYCLED else 0
        plain = Training(make, None, cycle=cycle).train(rank, 0, steps)
        ours = Training(make, Fixed(1), cycle=cycle).train(rank, 0, steps)
        assert ours.compressor.state_dict()["memory_kind"] == "updates"
        pairs = [(plain.flat, ours.flat), *zip(moments(plain), moments(ours), strict=True)]
        apart = max(float((a - b).abs().max()) for a, b in pairs)
        if apart != 0:
            found[name] = apart
    return found


def test_at_cf_1_it_is_plain_ddp_to_the_bit() -> None:
    kinds = {**dict.fromkeys(MAKE, 50), **dict.fromkeys(VARIANTS, 8)}
    assert run_ranks(2, _as_plain_ddp, kinds) == [{}, {}]


@pytest.mark.long
def test_at_cf_1_it_is_plain_ddp_to_the_bit_for_long() -> None:
    assert run_ranks(2, _as_plain_ddp, dict.fromkeys(ALL, 60)) == [{}, {}]


def _attached_late(rank: int) -> list[float]:
    """The same, attached when the optimizer has stepped already."""
    found = []
    for make in (MAKE["adamw"], MAKE["rmsprop"], MAKE["nadam"]):
        plain, ours = (Training(make, None).train(rank, 0, 10) for _ in range(2))
        AdaptiveCompressor(cf_range=(1, 100), policy=Fixed(1)).attach(
            ours.model, optimizer=ours.optimizer
        )
        found.append(float((plain.train(rank, 10, 20).flat - ours.train(rank, 10, 20).flat).norm()))
    return found


def test_attached_to_an_optimizer_that_has_stepped_cf_1_is_plain_ddp() -> None:
    assert run_ranks(2, _attached_late) == [[0.0] * 3] * 2


EXCHANGES, GRANULARITIES = ("all_gather", "sharded"), ("bucket", "layer")
WAYS = [
    ("adamw", "all_gather", "bucket"),
    ("adamw, groups", "sharded", "bucket"),
    ("adam, amsgrad, foreach", "all_gather", "layer"),
    ("adam, no first moment", "all_gather", "bucket"),
    ("nadam", "voted_indices", "layer"),
    ("radam", "all_gather", "bucket"),
    ("rmsprop, centered, momentum", "all_gather", "layer"),
    ("adagrad, decays", "sharded", "bucket"),
]


def _one_model(rank: int, ways: list[tuple[str, str, str]]) -> dict[str, Any]:
    """Where ranks differ, in parameters after any phase or in moments after a dense one."""
    found = {}
    for way in ways:
        name, exchange, granularity = way
        options = {"exchange": exchange, "granularity": granularity}
        run = Training(ALL[name], Schedule(SWITCHES), **options)
        start, apart = run.flat, []
        for phase in ((0, 7), (7, 12), (12, 20), (20, 26), (26, 29)):
            run.train(rank, *phase)
            apart.append(differs([run.flat]))
            if phase[0] in (7, 26):
                apart.append(differs(moments(run)))
        assert float((run.flat - start).abs().mean()) > 1e-4  # it has trained
        if any(apart):
            found[", ".join(way)] = apart
    return found


def test_ranks_end_with_one_model_however_cfs_switch() -> None:
    assert run_ranks(2, _one_model, WAYS) == [{}, {}]


def test_four_ranks_end_with_one_model() -> None:
    assert run_ranks(4, _one_model, WAYS[1:2]) == [{}] * 4


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_end_with_one_model_in_every_way(ranks: int) -> None:
    ways = list(product(ALL, EXCHANGES, GRANULARITIES))[:: 2 if ranks == 2 else 5]
    assert run_ranks(ranks, _one_model, ways, limit=500) == [{}] * ranks


class Rule:
    """What one rank's AdamW makes of a model's gradient (flat), and what it keeps."""

    def __init__(self, numel: int, ranks: int) -> None:
        self.m = self.v = torch.zeros(numel, dtype=torch.float64)
        self.t, self.ranks = 0, ranks

    @property
    def unbiased(self) -> tuple[Tensor, Tensor]:
        return self.m / (1 - BETAS[0] ** self.t), self.v / (1 - BETAS[1] ** self.t)

    def of_mean(self) -> Tensor:
        """Which part of the second moment the mean gradient has: all of the signal's. It is the
        same for 1,024 neighbours."""
        k = (1 - BETAS[0]) / (1 + BETAS[0])  # of mere noise
        parts = []
        for m, v in zip(*(moment.split(1024) for moment in self.unbiased), strict=True):
            q = (((m**2).sum() / v.sum() - k) / (1 - k)).clamp(0, 1)
            parts.append((1 / self.ranks + (1 - 1 / self.ranks) * q).expand(len(m)))
        return torch.cat(parts)

    def update(self, g: Tensor) -> Tensor:
        self.t += 1
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g**2
        return g / (self.unbiased[1].sqrt() + 1e-8) / self.of_mean().sqrt()


def mean(tensor: Tensor) -> Tensor:
    """Over the ranks; a collective."""
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def _adds_up(
    rank: int, options: dict[str, Any], falls: float, steps: int = 9
) -> tuple[float, float, float]:
    """What is missing, relative to all that moved: of the updates while they are compressed, of
    what one dense step then delivers, and of its moments. falls: a step's learning rate / that of
    the step before. An update moves the parameters as far as its own step would have, whenever it
    is sent: residuals are in units of the first learning rate. (Momentum takes over at
    most ENLARGED times a residual. Here the learning rate falls by less than that.)"""
    lr, n = 0.01, dist.get_world_size()
    now = lr
    run = Training(
        lambda m: AdamW(m.parameters(), lr=lr, betas=BETAS, weight_decay=0.0),
        Schedule({0: 20, steps: 1}),
        **options,
    )
    names = [name for name, _ in run.model.module.named_parameters()]
    start, total = run.flat, torch.zeros(())
    rule = Rule(start.numel(), n)
    for step in range(steps):
        now = lr * falls**step
        run.optimizer.param_groups[0]["lr"] = now
        gradients = local_gradients(run.model, step, rank)
        total = total + now * rule.update(torch.cat([gradients[name] for name in names]))
        run.train(rank, step, step + 1)
    memory = run.compressor.state_dict()["memory"]
    residual = torch.cat([memory[name]["residual"] for name in names])
    wanted = mean(total)
    moved = start - run.flat
    missing = float((moved + lr * mean(residual) - wanted).norm() / moved.norm())

    # A dense step: the optimizer's own with the ranks' moments. The first moment has taken over
    # what waited, and delivers it over steps to come, with the lag that it has for the first time.
    before, b = run.flat, BETAS[0]
    lag = sum(b**k / (1 - b ** (rule.t + k)) for k in range(1, 400))  # of m in all later steps
    gradients = local_gradients(run.model, steps, rank)
    of_mean = rule.of_mean()
    divisor = (rule.unbiased[1] * of_mean).sqrt() + 1e-8
    rule.m = rule.m + residual * (lr / now) * divisor / lag
    g = mean(torch.cat([gradients[name] for name in names]))
    m = BETAS[0] * mean(rule.m) + (1 - BETAS[0]) * g
    v = BETAS[1] * mean(rule.v * of_mean) + (1 - BETAS[1]) * g**2
    t = rule.t + 1
    dense = m / (1 - BETAS[0] ** t) / ((v / (1 - BETAS[1] ** t)).sqrt() + 1e-8)
    run.train(rank, steps, steps + 1)
    moved = before - run.flat
    wanted = now * dense
    not_delivered = float((moved - wanted).norm() / moved.norm())
    kept = [run.optimizer.state[p] for p in run.model.parameters()]
    keys = {"exp_avg": m, "exp_avg_sq": v}
    ours = {key: torch.cat([state[key].flatten() for state in kept]) for key in keys}
    apart = max(float((ours[key] - b).norm() / b.norm()) for key, b in keys.items())
    return missing, not_delivered, apart


@pytest.mark.parametrize("ranks", [2, 4])
def test_sent_plus_waiting_is_the_sum_of_updates(ranks: int) -> None:
    for options in ({"granularity": "layer"}, {"exchange": "sharded"})[: 3 - ranks // 2]:
        for falls in (1.0, 0.85):
            for found in run_ranks(ranks, _adds_up, options, falls):
                assert max(found) < 2e-6  # torch's optimizers count steps in float32


def _adds_up_without_mean(rank: int, momentum: float, steps: int = 9) -> tuple[float, float, float]:
    """As `_adds_up`, of RMSprop, which keeps no first moment: 5% of its second moment is taken for
    signal. At CF 20 it steps without momentum, whose updates it makes at once. What waits goes to
    the momentum; without momentum it moves the parameters in the dense step itself."""
    lr, alpha, n = 0.01, 0.9, dist.get_world_size()
    of_mean, length = 0.05 + 0.95 / n, momentum / (1 - momentum)
    run = Training(
        lambda m: RMSprop(m.parameters(), lr=lr, alpha=alpha, momentum=momentum),
        Schedule({0: 20, steps: 1}),
    )
    names = [name for name, _ in run.model.module.named_parameters()]
    start, total, v = run.flat, torch.zeros(()), torch.zeros(())
    for step in range(steps):
        gradients = local_gradients(run.model, step, rank)
        g = torch.cat([gradients[name] for name in names])
        v = alpha * v + (1 - alpha) * g**2
        total = total + lr * g / (v.sqrt() + 1e-8) / of_mean**0.5 / (1 - momentum)
        run.train(rank, step, step + 1)
    memory = run.compressor.state_dict()["memory"]
    residual = mean(torch.cat([memory[name]["residual"] for name in names]))
    moved = start - run.flat
    missing = float((moved + lr * residual - mean(total)).norm() / moved.norm())

    before = run.flat
    gradients = local_gradients(run.model, steps, rank)
    g = mean(torch.cat([gradients[name] for name in names]))
    v = alpha * mean(v * of_mean) + (1 - alpha) * g**2
    waited = momentum * residual / length if momentum else residual
    wanted = lr * (g / (v.sqrt() + 1e-8) + waited)
    run.train(rank, steps, steps + 1)
    moved = before - run.flat
    kept = [run.optimizer.state[p]["square_avg"].flatten() for p in run.model.parameters()]
    apart = float((torch.cat(kept) - v).norm() / v.norm())
    return missing, float((moved - wanted).norm() / moved.norm()), apart


@pytest.mark.parametrize(("ranks", "momentum"), [(2, 0.0), (2, 0.9), (4, 0.9)])
def test_without_a_first_moment_noise_is_assumed_and_nothing_is_lost(
    ranks: int, momentum: float
) -> None:
    for found in run_ranks(ranks, _adds_up_without_mean, momentum):
        assert max(found) < 2e-6


def _distances(rank: int, name: str) -> list[float]:
    """How far each step moves the parameters; the last is dense."""
    run = Training(ALL[name], Schedule({0: 20, 30: 1}))
    found = []
    for step in range(31):
        before = run.flat
        run.train(rank, step, step + 1)
        found.append(float((run.flat - before).norm()))
    return found


@pytest.mark.parametrize("name", ["adamw", "nadam", "radam", "adam, amsgrad, foreach"])
def test_a_dense_step_after_compressed_ones_is_no_jump(name: str) -> None:
    """What waits goes over steps to come, as momentum: at once it would throw a model far back."""
    for *compressed, dense in run_ranks(2, _distances, name):
        assert dense < max(compressed[-5:])


def _leaps(rank: int) -> dict[str, float]:
    """How far the first compressed step moves the parameters, compared to the dense one before."""
    found = {}
    for name in ("adamw", "radam"):
        run = Training(ALL[name], Schedule({0: 1, 8: 20}))
        places = [run.train(rank, step, step + 1).flat.clone() for step in range(9)]
        *_, dense, compressed = ((b - a).norm() for a, b in pairwise(places))
        found[name] = float(compressed / dense)
    return found


def test_what_momentum_hands_over_is_in_proportion_to_the_steps() -> None:
    """RAdam's first steps are a small part of Adam's, so its pending momentum is, too."""
    for leaps in run_ranks(2, _leaps):
        assert leaps["radam"] < 3 * leaps["adamw"]


STOPS: list[tuple[str, int, dict[str, Any]]] = [
    ("adamw", 5, {"clip": 0.1}),  # compressed
    ("adamw", 10, {"clip": 0.1}),  # dense
    ("adamw", 4, {"cycle": 40}),  # the residual is in units of another learning rate
    ("adamw, groups", 12, {}),  # dense until now
    ("nadam", 23, {"granularity": "layer"}),  # momentum has some of its lag
    ("rmsprop, centered, momentum", 15, {"exchange": "sharded"}),
]
MORE_STOPS = [(n, stop, {}) for n, stop in zip(ALL, cycle((3, 7, 9, 12, 20, 22, 26)), strict=False)]


def _parts(run: Training) -> list[Any]:
    """All that a script saves."""
    scheduler = [] if run.scheduler is None else [run.scheduler]
    return [run.model, run.optimizer, run.compressor, *scheduler]


def _stopped_and_not(
    rank: int, stops: list[tuple[str, int, dict[str, Any]]], steps: int
) -> dict[str, str]:
    """What differs of a run that was stopped and one that was not, where something does."""
    found = {}
    for name, stop, options in stops:
        straight, stopped, resumed = (
            Training(ALL[name], Schedule(SWITCHES), **options) for _ in range(3)
        )
        straight.train(rank, 0, steps)
        stopped.train(rank, 0, stop)
        parts = _parts(stopped)
        file = io.BytesIO()
        torch.save([part.state_dict() for part in parts], file)
        file.seek(0)
        states = torch.load(file, weights_only=True)
        loss_of(resumed.model, 0, rank).backward()  # DDP's first buckets are others
        for part, state in zip(_parts(resumed), states, strict=True):
            part.load_state_dict(state)
        resumed.train(rank, stop, steps)
        runs = (straight, resumed)
        pairs = {
            "parameters": [run.flat for run in runs],
            # Torch loads some numbers in another precision.
            "moments": [[each.double() for each in moments(run)] for run in runs],
            "state": [run.compressor.state_dict() for run in runs],
        }
        if wrong := [what for what, (a, b) in pairs.items() if not same(a, b)]:
            found[f"{name}, stopped before step {stop}"] = ", ".join(wrong)
    return found


def test_resuming_equals_never_having_stopped() -> None:
    assert run_ranks(2, _stopped_and_not, STOPS, 24) == [{}, {}]


@pytest.mark.long
def test_resuming_equals_never_having_stopped_wherever() -> None:
    assert run_ranks(2, _stopped_and_not, MORE_STOPS, 29, limit=170) == [{}, {}]


def _half_precision(rank: int) -> dict[str, float]:
    """By how much ranks differ, or inf."""
    found = {}
    for name in ("adamw", "adam, amsgrad, foreach", "nadam", "radam", "rmsprop", "adagrad"):
        net = small_net(torch.bfloat16)
        run = Training(ALL[name], Schedule({0: 20, 5: 1, 6: 20}), net).train(rank, 0, 9)
        if apart := differs([run.flat]):
            found[name] = apart
    return found


def test_parameters_of_half_precision_stay_alike_and_finite() -> None:
    assert run_ranks(2, _half_precision) == [{}, {}]


def _on_device_path(rank: int, name: str) -> dict[str, float]:
    """By how much ranks differ on the path of a device, in parameters and after dense steps in
    moments, and it from that of the host; a gradient that is not finite is one of zero there, so
    that the latter is only without one."""
    found, ends = {}, []
    for on_device, bad_at in ((False, -1), (True, -1), (True, 5)):
        blocks.force_device_path = on_device
        run = Training(ALL[name], ByStep([20.0] * 9 + [1.0] * 2 + [4.0] * 3))
        for step in range(14):
            run.optimizer.zero_grad()
            loss, bad = loss_of(run.model, step, rank), step == bad_at
            (loss * float("nan") if bad and rank == 1 else loss).backward()
            finite = [bool(p.grad.isfinite().all()) for p in run.model.parameters()]
            assert bad != all(finite)
            if not bad:
                run.optimizer.step()
            if step == 10:
                found[f"moments, bad at {bad_at}"] = differs(moments(run))
        found[f"bad at {bad_at}"] = differs([run.flat])
        ends.append(run.flat)
    blocks.force_device_path = False
    found["device and host"] = float((ends[0] - ends[1]).abs().max())
    return found


@pytest.mark.parametrize("name", ["adamw, groups", "nadam", "rmsprop, centered, momentum"])
def test_the_path_of_a_device_is_that_of_the_host(name: str) -> None:
    for found in run_ranks(2, _on_device_path, name):
        assert found.pop("device and host") < 1e-6
        assert set(found.values()) == {0.0}
