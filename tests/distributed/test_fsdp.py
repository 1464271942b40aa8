"""Two replicas of a model that FSDP2 shards in two, against torch's own HSDP: four processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from adaptive import (
    Accordion,
    AdaptiveCompressor,
    LocalSteps,
    MemoryTimeline,
    Residual,
    reshard_states,
)
from adaptive.fsdp import _group_of
from compressors.kernels import blocks
from tests.distributed.golden_fsdp import FILE
from tests.distributed.golden_fsdp import RUNS as GOLDEN
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, batch, listen, same, small_net
from tests.distributed.test_device_path import ByStep
from tests.integration.golden import runs_now

RANKS, STEPS = 4, 5
MAKE = "python -m tests.distributed.golden_fsdp"

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PLAIN = MixedPrecisionPolicy()

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda parameters: AdamW(parameters, lr=1e-2, foreach=True),
}
MEMORIES = {"sgd": "residual", "momentum": "momentum", "adamw": "updates"}


class Gated(nn.Module):
    """Shards of unequal size, some of them empty; a frozen parameter; a module (the gate) and a
    parameter (the shift) that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(12, 9), nn.Linear(9, 1), nn.Linear(9, 3)
        self.shift = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)

    def forward(self, x: Tensor, which: int = 2) -> Tensor:
        hidden = torch.tanh(self.first(x))
        y = self.last(hidden) * self.frozen
        if which >= 1:
            y = y * torch.sigmoid(self.gate(hidden))
        return y + self.shift if which >= 2 else y


class Run:
    """A model on a mesh of (2, 2); native: torch's HSDP, without a compressor."""

    def __init__(
        self,
        kind: str,
        cfs: list[float] | None = None,
        native: bool = False,
        precision: MixedPrecisionPolicy = PLAIN,
        attach: bool = True,
        base: str = "topk",
        **options: Any,
    ) -> None:
        self.mesh = mesh_of()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model: Any = Gated()
        of = self.mesh if native else self.mesh["shard"]
        for module in (self.model.first, self.model.gate, self.model.last, self.model):
            fully_shard(module, mesh=of, mp_policy=precision)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[kind](self.parameters)
        if not native:
            options = {"policy": Scripted(cfs or [1.0]), **options}
            self.compressor = AdaptiveCompressor(base, (2, 100), **options)
        if attach and not native:
            self.attach()

    def attach(self, **options: Any) -> None:
        handed_over = {"optimizer": self.optimizer, **options}
        self.compressor.attach_fsdp(self.model, self.mesh, **handed_over)

    def backward(self, step: int, which: int = 2) -> None:
        x, y = batch(step, dist.get_rank(), torch.float32)
        ((self.model(x, which) - y) ** 2).mean().backward()

    def train(self, start: int, stop: int, uses: tuple[int, ...] = (2,)) -> None:
        for step in range(start, stop):
            self.backward(step, uses[step % len(uses)])
            self.optimizer.step()
            self.optimizer.zero_grad()

    def shards(self) -> Tensor:
        """This rank's, flat."""
        return torch.cat([p.to_local().detach().flatten() for p in self.model.parameters()])

    def kind_of_memory(self) -> str:
        kind: str = self.compressor.state_dict()["memory_kind"]
        return kind


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


def are_replicas(results: list[Tensor]) -> bool:
    """Rank (replica, shard) is 2 * replica + shard."""
    return torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def _at_cf_1(rank: int, kind: str) -> list[tuple[Tensor, Tensor, str]]:
    found = []
    for precision in (PLAIN, HALF):
        native, ours = (Run(kind, native=n, precision=precision) for n in (True, False))
        for run in (native, ours):
            run.train(0, STEPS, uses=(2, 0, 2, 1))
        found.append((native.shards(), ours.shards(), ours.kind_of_memory()))
    return found


def _mean_of_ones(rank: int) -> float:
    mean = torch.empty(1)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(mean, torch.ones(2), op=dist.ReduceOp.AVG)
    return float(mean)


@pytest.fixture(scope="module")
def _on_this_torch() -> None:
    if not hasattr(FSDPModule, "set_all_reduce_hook"):
        pytest.skip("attach_fsdp needs FSDPModule.set_all_reduce_hook, torch 2.7")
    if run_ranks(2, _mean_of_ones) != [1.0, 1.0]:
        pytest.skip("the gloo of this torch sums where FSDP2 asks for the mean")


on_this_torch = pytest.mark.usefixtures("_on_this_torch")


@on_this_torch
@pytest.mark.parametrize(
    "kind", ["adamw", *(pytest.param(k, marks=pytest.mark.long) for k in ("sgd", "momentum"))]
)
def test_at_cf_1_it_is_torchs_own_hsdp(kind: str) -> None:
    """In float32 and with half-precision parameters, also of steps that leave some out."""
    start = run_ranks(1, _start)[0]
    for found in run_ranks(RANKS, _at_cf_1, kind):
        for native, ours, memory in found:
            torch.testing.assert_close(ours, native, rtol=1e-5, atol=1e-6)
            assert memory == MEMORIES[kind]
            assert not torch.isin(ours, start).all()


def _start(rank: int) -> Tensor:
    torch.manual_seed(0)
    return torch.cat([p.detach().flatten() for p in Gated().parameters()])


def _compressed(rank: int, device_path: bool) -> dict[str, Any]:
    blocks.force_device_path = device_path
    told = listen()
    found: dict[str, Any] = {}
    for kind in OPTIMIZERS:
        run = Run(kind, policy=ByStep([10.0, 10.0, 10.0, 1.0, 10.0]), debug=1)
        run.train(0, 9, (2, 0, 2, 1))
        found[kind] = (run.shards(), run.kind_of_memory())
    return {"found": found, "told": told}


@on_this_torch
@pytest.mark.parametrize("device_path", [False, True])
def test_replicas_stay_equal_to_the_bit(device_path: bool) -> None:
    """Compressed, with dense steps in between, and modules that only some steps use; `debug`
    compares the plans of all ranks, and each shard's replicas, before every step."""
    results = run_ranks(RANKS, _compressed, device_path)
    assert [result["told"] for result in results] == [[]] * RANKS
    for kind in OPTIMIZERS:
        shards, memories = zip(*(result["found"][kind] for result in results), strict=True)
        assert are_replicas(list(shards))
        assert not torch.equal(shards[0], shards[1])
        assert {*memories} == {MEMORIES[kind]}


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"exchange": "sharded"}),
    ("topk", {"exchange": "voted_indices"}),
    ("dgc", {"granularity": "layer"}),
    ("randomk", {"exchange": "all_reduce"}),
    ("powersgd", {}),
    ("sketch", {}),
    ("signsgd", {"memory": Residual(dtype=torch.bfloat16)}),
    ("topk", {"policy": Accordion.paper(4, 20, interval=2)}),
    ("topk", {"policy": "accordion"}),
]


def _each_way(rank: int) -> list[tuple[Tensor, list[float]]]:
    found = []
    for base, options in WAYS:
        options = {"policy": ByStep([4.0, 10.0, 1.0]), "debug": 1, **options}
        run, cfs = Run("adamw", base=base, **options), []
        for step in range(5):
            run.train(step, step + 1, (2, 0, 1))
            cfs.append(run.compressor.cf)
        found.append((run.shards(), cfs))
    return found


@pytest.mark.long
@on_this_torch
def test_every_way_to_exchange() -> None:
    """Shards are of unequal size, and some are empty."""
    for of_ranks in zip(*run_ranks(RANKS, _each_way), strict=True):
        shards, cfs = zip(*of_ranks, strict=True)
        assert are_replicas(list(shards))
        assert shards[0].isfinite().all()
        assert all(each == cfs[0] for each in cfs)


@on_this_torch
def test_whole_runs_end_where_they_did_to_the_bit() -> None:
    written = json.loads(FILE.read_text(encoding="utf-8"))["runs"]
    assert list(written) == list(GOLDEN)
    now = runs_now("tests.distributed.golden_fsdp", FILE)
    for name, run in written.items():
        for what in ("cfs", "layer_cfs", "bytes", "parameters"):  # the cause first
            assert now[name][what] == run[what], f"{name}: {what} differ; if they should: {MAKE}"


def _bytes(rank: int, cf: float) -> tuple[float, float, Tensor]:
    torch.manual_seed(0)
    mesh = mesh_of()
    model: Any = nn.Sequential(nn.Linear(12, 400), nn.Tanh(), nn.Linear(400, 3))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh["shard"])
    optimizer = AdamW(model.parameters(), lr=3e-3)
    compressor = AdaptiveCompressor("topk", policy=Scripted([cf]))
    compressor.attach_fsdp(model, mesh, optimizer=optimizer)
    losses = []
    for step in range(20):
        x, y = batch(step, rank, torch.float32)
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    total = compressor.summary()
    return total.bytes_sent, total.dense_bytes, torch.tensor(losses[-10:])


@on_this_torch
def test_fewer_bytes_cross_the_slow_network() -> None:
    losses: dict[float, list[Tensor]] = {cf: [] for cf in (1.0, 10.0)}
    for cf, of_ranks in losses.items():
        results = run_ranks(RANKS, _bytes, cf)
        of_ranks += [loss for *_, loss in results]
    for sent, dense, _ in results:
        # What torch's HSDP would all-reduce is half of the 6,403 parameters, to one other replica.
        assert dense == pytest.approx(20 * 4 * (12 * 200 + 200 + 2 * 400 + 2))
        assert sent < dense / 10
    dense_loss, loss = (torch.stack(of_ranks).mean() for of_ranks in losses.values())
    assert loss < 1.1 * dense_loss


def _balance(rank: int) -> list[tuple[Tensor, Tensor]]:
    """What was sent and what remains, and the gradients, of each parameter's shard here."""
    given, remains = [], []
    uses = (2, 0, 1)
    for native in (True, False):
        run = Run("sgd", [10.0, 5.0, 100.0], native=native, memory="residual")
        total = [torch.zeros_like(p.to_local()) for p in run.parameters]
        for step in range(7):  # parameters stay as they are
            run.backward(step, uses[step % 3])
            for into, p in zip(total, run.parameters, strict=True):
                if p.grad is not None:
                    into += p.grad.to_local()
            run.optimizer.zero_grad()
        given.append(total)
    names = [name for name, p in run.model.named_parameters() if p.requires_grad]
    memory = run.compressor.state_dict()["memory"]
    for name, p in zip(names, run.parameters, strict=True):
        residual = memory.get(name, {}).get("residual", torch.zeros(p.to_local().numel()))
        dist.all_reduce(residual, group=run.mesh.get_group("replica"))
        remains.append(residual.view_as(p.to_local()) / 2)
    return [
        (sent + rest, all_of_it)
        for all_of_it, sent, rest in zip(given[0], given[1], remains, strict=True)
    ]


@on_this_torch
def test_what_was_sent_and_what_remains_is_the_sum_of_the_gradients() -> None:
    for pairs in run_ranks(RANKS, _balance):
        for ours, gradients in pairs:
            torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-6)
    assert sum(float(gradients.abs().sum()) for _, gradients in pairs) > 0.1


def _resumed_in_one_file(rank: int) -> bool:
    """From what rank 0 has gathered for all, with an optimizer whose moments are not saved
    beside."""
    cfs = [10.0, 10.0, 5.0]
    begun, again = (Run("adamw", cfs) for _ in range(2))
    begun.train(0, 5)
    state = [begun.compressor.state_dict("gathered")]
    dist.broadcast_object_list(state)
    state = deepcopy(state)
    with torch.no_grad():
        for p, before in zip(again.model.parameters(), begun.model.parameters(), strict=True):
            p.to_local().copy_(before.to_local())
    again.optimizer.load_state_dict(deepcopy(begun.optimizer.state_dict()))
    for moments in again.optimizer.state.values():
        moments["exp_avg_sq"].fill_(1.0)
    again.compressor.load_state_dict(state[0])
    again.train(5, 9)
    begun.train(5, 9)
    assert len(state[0]["ranks"]) == RANKS
    return torch.equal(again.shards(), begun.shards())


@on_this_torch
def test_a_run_resumes_from_one_file() -> None:
    assert run_ranks(RANKS, _resumed_in_one_file) == [True] * RANKS


def _resumed_by_dcp(rank: int, kind: str, folder: str) -> bool:
    """As docs/fsdp.md describes it."""
    begun, again = (Run(kind, [10.0, 10.0, 5.0]) for _ in range(2))
    begun.train(0, 5)
    state = begun.compressor.state_dict(checkpoint="gathered")
    model, optimizer = get_state_dict(begun.model, begun.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    if rank == 0:
        torch.save(state, f"{folder}/compressor.pt")
    begun.train(5, 9)
    dist.barrier()
    model, optimizer = get_state_dict(again.model, again.optimizer)
    parts = {"model": model, "optimizer": optimizer}
    dcp.load(parts, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(again.model, again.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    again.compressor.load_state_dict(torch.load(f"{folder}/compressor.pt", weights_only=True))
    again.train(5, 9)
    return torch.equal(again.shards(), begun.shards())


@on_this_torch
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_run_resumes_by_torch_distributed_checkpoint(kind: str, tmp_path: Path) -> None:
    assert run_ranks(RANKS, _resumed_by_dcp, kind, str(tmp_path)) == [True] * RANKS


def _resumed(rank: int, kind: str) -> tuple[bool, str]:
    cfs = [10.0, 10.0, 1.0, 5.0]
    whole, begun = Run(kind, cfs), Run(kind, cfs)
    whole.train(0, 9)
    begun.train(0, 5)
    state = deepcopy(begun.compressor.state_dict())
    optimizer = deepcopy(begun.optimizer.state_dict())
    again = Run(kind, cfs)
    with torch.no_grad():
        for p, before in zip(again.model.parameters(), begun.model.parameters(), strict=True):
            p.to_local().copy_(before.to_local())
    again.optimizer.load_state_dict(optimizer)
    again.compressor.load_state_dict(state)
    again.train(5, 9)
    alike = torch.equal(again.shards(), whole.shards()) and same(
        again.compressor.state_dict()["memory"], whole.compressor.state_dict()["memory"]
    )
    assert state["memory"]
    states = [state] * RANKS
    dist.all_gather_object(states, state)
    try:
        again.compressor.load_state_dict(states[rank ^ 1])
    except ValueError as error:
        refused = str(error)
    of_one_shard = reshard_states(states[rank % 2 :: 2], 4)
    assert [each["shard"] for each in of_one_shard] == [state["shard"]] * 4
    return alike, refused


@on_this_torch
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_resumed_run_is_the_one_that_never_stopped(kind: str) -> None:
    """Each rank loads its own state, and refuses that of another shard."""
    for rank, (alike, refused) in enumerate(run_ranks(RANKS, _resumed, kind)):
        assert alike
        assert f"shard is '{1 - rank % 2} of 2', expected '{rank % 2} of 2'" in refused


def _accumulated(rank: int) -> tuple[Tensor, Tensor, int]:
    native, ours = Run("adamw", native=True), Run("adamw")
    for run in (native, ours):
        for step in range(9):
            syncs = step % 3 == 2
            run.model.set_requires_gradient_sync(syncs)
            run.backward(step, (2, 1, 0)[step % 3])
            if syncs:
                run.optimizer.step()
                run.optimizer.zero_grad()
    return native.shards(), ours.shards(), ours.compressor.summary().steps


@on_this_torch
def test_gradients_are_accumulated_before_the_exchange() -> None:
    """Also those of a module that the last micro-batch does not use."""
    for native, ours, steps in run_ranks(RANKS, _accumulated):
        torch.testing.assert_close(ours, native, rtol=1e-5, atol=1e-6)
        assert steps == 3


def _clipped(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    runs = [Run("adamw", native=True), Run("adamw"), Run("adamw", [10.0])]
    for run in runs:
        for step in range(STEPS):
            run.backward(step)
            nn.utils.clip_grad_norm_(run.parameters, 0.1)
            run.optimizer.step()
            run.optimizer.zero_grad()
    return runs[0].shards(), runs[1].shards(), runs[2].shards()


@on_this_torch
def test_clipping_the_norm_over_all_shards() -> None:
    results = run_ranks(RANKS, _clipped)
    for native, ours, _ in results:
        torch.testing.assert_close(ours, native, rtol=1e-5, atol=1e-6)
    assert are_replicas([compressed for *_, compressed in results])


def _scaled(rank: int, kind: str) -> tuple[Tensor, Tensor]:
    found = []
    for native in (True, False):
        run = Run(kind, native=native, attach=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if not native:
            run.attach(scaler=scaler)
        for step in range(STEPS):
            x, y = batch(step, rank, torch.float32)
            scaler.scale(((run.model(x) - y) ** 2).mean()).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
        found.append(run.shards())
    return found[0], found[1]


@on_this_torch
def test_a_scaled_loss() -> None:
    for native, ours in run_ranks(RANKS, _scaled, "adamw"):
        torch.testing.assert_close(ours, native, rtol=1e-5, atol=1e-6)


def _not_finite(rank: int) -> dict[str, Any]:
    run = Run("sgd", [10.0])
    run.train(0, 3)
    before = run.compressor.state_dict()["memory"]
    own = _gradient_of_replica(run, 3)
    x, y = batch(3, rank, torch.float32)
    if rank == 1:
        x[0, 0] = torch.inf
    ((run.model(x) - y) ** 2).mean().backward()
    of_first = run.model.first.weight.grad.to_local()
    run.optimizer.zero_grad()
    after = run.compressor.state_dict()["memory"]
    run.train(4, 6)
    name = "first.weight"
    return {
        "finite": bool(of_first.isfinite().any()),
        "before": before[name]["residual"],
        "after": after[name]["residual"],
        "own": own,
        "shards": run.shards(),
    }


def _gradient_of_replica(run: Run, step: int) -> Tensor:
    """This rank's shard of its replica's gradient of the first layer's weight, made without FSDP
    and without a compressor, flat."""
    model, (replica, shard) = Gated(), divmod(dist.get_rank(), 2)
    full = {name: p.full_tensor().detach() for name, p in run.model.named_parameters()}
    model.load_state_dict(full)
    for rank in (2 * replica, 2 * replica + 1):
        x, y = batch(step, rank, torch.float32)
        (((model(x) - y) ** 2).mean() / 2).backward()
    assert model.first.weight.grad is not None
    return model.first.weight.grad.chunk(2)[shard].flatten()


@on_this_torch
def test_a_gradient_that_is_not_finite_leaves_no_trace_and_others_wait_in_residuals() -> None:
    results = run_ranks(RANKS, _not_finite)
    for rank, result in enumerate(results):
        assert not result["finite"]
        waits = result["own"] if rank >= 2 else torch.zeros_like(result["own"])  # ranks 0, 1: nan
        torch.testing.assert_close(result["after"], result["before"] + waits)
        assert result["shards"].isfinite().all()
    assert are_replicas([result["shards"] for result in results])


def _decisions(rank: int) -> list[list[float]]:
    """On a slow link, by real clocks, which differ between ranks."""
    found = []
    for policy in ("goodput", "gravac"):
        timeline = MemoryTimeline()
        run = Run(
            "adamw",
            policy=policy,
            timeline=timeline,
            network="200kbit",
            debug=1,
            exchange="all_gather",
        )
        cfs = []
        for step in range(12):
            run.train(step, step + 1, (2, 0))
            cfs.append(run.compressor.cf)
        assert (len(timeline.steps) > 0) == (rank == 0)
        found.append(cfs)
    return found


@on_this_torch
def test_all_ranks_take_the_same_decisions() -> None:
    results = run_ranks(RANKS, _decisions)
    assert all(result == results[0] for result in results)
    assert all(max(cfs) > 1 for cfs in results[0])


def _other_meshes(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Four replicas that are not sharded, whose activations are computed anew in backward."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replica", "shard"))
    found = []
    for native, cf in ((True, 1.0), (False, 1.0), (False, 10.0)):
        model: Any = nn.Sequential(_Checkpointed(small_net(torch.float32)), nn.Linear(3, 3))
        with torch.no_grad():
            model[1].weight.copy_(torch.eye(3))
            model[1].bias.zero_()
        for module in (model[0], model[1], model):
            fully_shard(module, mesh=mesh if native else mesh["shard"])
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if not native:
            compressor = AdaptiveCompressor("topk", policy=Scripted([cf]))
            compressor.attach_fsdp(model, mesh, optimizer=optimizer)
        for step in range(STEPS):
            x, y = batch(step, rank, torch.float32)
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([p.to_local().detach().flatten() for p in model.parameters()]))
    return found[0], found[1], found[2]


class _Checkpointed(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.net, x, use_reentrant=False)
        return y


@on_this_torch
def test_replicas_that_are_not_sharded() -> None:
    results = run_ranks(RANKS, _other_meshes)
    for native, ours, compressed in results:
        torch.testing.assert_close(ours, native, rtol=1e-5, atol=1e-6)
        assert torch.equal(compressed, results[0][2])


def _reports(rank: int) -> list[dict[str, Any]]:
    policy = Scripted([10.0, 1.0, 5.0], probe=(20.0,))
    run = Run("adamw", policy=policy)
    run.train(0, STEPS, (2, 0))
    run.compressor.flush()
    return [asdict(report) for report in policy.reports]


@on_this_torch
def test_policies_are_told_the_same_on_all_ranks() -> None:
    """Times and bytes, too, which differ: shards are of unequal size."""
    first, *others = run_ranks(RANKS, _reports)
    assert len(first) == STEPS
    assert all(same(other, first) for other in others)
    assert all(report["wire_bytes"] > report["statistics_bytes"] > 0 for report in first)
    assert all(report["timed_bytes"] > 0 for report in first[2:])


def _unequal_at_the_start(rank: int) -> Tensor:
    run = Run("sgd", attach=False)
    with torch.no_grad():
        for p in run.model.parameters():
            p.to_local().add_(rank // 2)
    run.attach()
    return run.shards()


@on_this_torch
def test_replicas_begin_as_the_first_one() -> None:
    first = run_ranks(RANKS, _unequal_at_the_start)
    assert are_replicas(first)
    start = run_ranks(1, _start)[0]
    assert torch.isin(first[0], start).all()


def _buffers(rank: int) -> dict[str, Tensor]:
    """Buffers of dtypes and layouts that gloo does not take as they are."""
    model: Any = small_net(torch.float32)
    for name, dtype in (("short", torch.int16), ("mask", torch.bool), ("rotary", torch.complex64)):
        model.register_buffer(name, torch.full((3,), rank // 2, dtype=dtype))
    model.register_buffer("turned", (torch.arange(6.0) + rank // 2).view(2, 3).t())
    model.register_buffer("sliced", (torch.arange(8.0) + rank // 2)[::2])
    model.register_buffer("expanded", torch.full((1, 5), float(rank // 2)).expand(1000, 5))
    fully_shard(model, mesh=mesh_of()["shard"])
    AdaptiveCompressor("topk").attach_fsdp(model, mesh_of())
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@on_this_torch
def test_buffers_of_any_kind_begin_as_those_of_the_first_replica() -> None:
    results = run_ranks(RANKS, _buffers)
    assert len(results[0]) == 6
    for other in results[1:]:
        assert same(other, results[0])
    assert results[0]["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert results[0]["sliced"].tolist() == [0, 2, 4, 6]


def _again(rank: int) -> dict[str, Any]:
    told = listen()
    run = Run("adamw", [10.0])
    run.train(0, 3)
    try:
        run.attach()
    except RuntimeError as error:
        twice = str(error)
    run.backward(3)
    run.compressor.detach()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.train(4, 5)
    detached = run.compressor.cf
    run.compressor = AdaptiveCompressor("topk", (20, 100), policy="fixed", memory="residual")
    run.attach()
    run.train(5, 9)
    return {
        "twice": twice,
        "detached": detached,
        "second": run.compressor.cf,
        "told": told,
        "shards": run.shards(),
    }


@on_this_torch
def test_detached_and_another_attached() -> None:
    """Dense meanwhile. The step of a backward before `detach` has the replicas' mean gradient."""
    results = run_ranks(RANKS, _again)
    for rank, result in enumerate(results):
        assert "attached to a model already" in result["twice"]
        assert result["detached"] == 1
        assert result["second"] == 20
        assert all("plain error feedback" in each for each in result["told"])
        assert len(result["told"]) == (rank == 0)
    assert are_replicas([result["shards"] for result in results])


def _refused(rank: int) -> list[str]:
    mesh = mesh_of()
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))

    def sharded(of: DeviceMesh) -> Any:
        model = small_net(torch.float32)
        fully_shard(model, mesh=of)
        return model

    def attach(model: Any, of: Any, **options: Any) -> None:
        AdaptiveCompressor("topk", **options).attach_fsdp(model, of)

    def train(
        precision: MixedPrecisionPolicy, all_reduce: bool = True, factor: float | None = None
    ) -> None:
        run = Run("sgd", precision=precision)
        if factor is not None:
            run.model.last.set_gradient_divide_factor(factor)
        run.model.set_requires_all_reduce(all_reduce)
        run.model.set_force_sum_reduction_for_comms(precision is not PLAIN)
        run.train(0, 1)

    wrong: list[Callable[[], object]] = [
        lambda: attach(small_net(), mesh),
        lambda: AdaptiveCompressor("topk").attach(sharded(mesh["shard"])),
        lambda: attach(sharded(mesh["shard"]), mesh["shard"]),
        lambda: attach(sharded(mesh["shard"]), None),
        lambda: attach(sharded(mesh), mesh),
        lambda: attach(sharded(world), mesh),
        lambda: attach(sharded(mesh["shard"]), mesh, sync=LocalSteps(4)),
        lambda: attach(sharded(mesh["shard"]), mesh, hooks={20.0: _hook}),
        lambda: attach(sharded(mesh["shard"]), mesh, debug=rank),
        lambda: train(HALF),
        lambda: train(PLAIN, all_reduce=False),
        lambda: train(PLAIN, factor=2.0),
    ]
    told = []
    for attempt in wrong:
        try:
            attempt()
            told.append("")
        except (TypeError, ValueError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def _hook(state: Any, bucket: Any) -> Any:
    raise AssertionError


@on_this_torch
def test_what_it_cannot_do_is_said_on_every_rank() -> None:
    expected = [
        ("TypeError", "fully_shard was called on, got Sequential"),
        ("TypeError", "attach_fsdp(model, mesh)"),
        ("ValueError", "mesh must have two dimensions, (replicas, shards)"),
        ("ValueError", "mesh must have two dimensions, (replicas, shards)"),
        ("ValueError", "call fully_shard with the mesh's second dimension alone"),
        ("ValueError", "which is not the mesh's second dimension"),
        ("ValueError", "sync must be None"),
        ("ValueError", "hooks must be empty"),
        ("RuntimeError", "set up differently on rank"),
        ("RuntimeError", "reduce_dtype=torch.float32"),
        ("RuntimeError", "set_requires_gradient_sync(False)"),
        ("RuntimeError", "set_gradient_divide_factor must not be called"),
    ]
    for told in run_ranks(RANKS, _refused):
        for got, (kind, part) in zip(told, expected, strict=True):
            assert got.startswith(kind), got
            assert part in got


class _Empty(nn.Linear, FSDPModule):
    pass


def test_an_older_torch_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """And `attach` knows a sharded model by what every version has."""
    monkeypatch.delattr(FSDPModule, "set_all_reduce_hook", raising=False)
    model = nn.Linear.__new__(_Empty)
    nn.Linear.__init__(model, 2, 2)
    with pytest.raises(RuntimeError, match=r"attach_fsdp needs FSDPModule\.set_all_reduce_hook"):
        AdaptiveCompressor().attach_fsdp(model, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sharded by FSDP2"):
        AdaptiveCompressor().attach(model)  # type: ignore[arg-type]


def _in_a_part_of_the_world(rank: int) -> list[int]:
    """The ranks of the group that is made for a mesh of all ranks but the last."""
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]))
    dist.new_group([0, 4])  # so that the mesh's ranks are in different numbers of groups
    dist.new_group([3])
    return dist.get_process_group_ranks(_group_of(mesh)) if rank < 4 else []


def test_a_mesh_may_be_a_part_of_the_world_whatever_groups_a_script_has_made() -> None:
    *inside, outside = run_ranks(5, _in_a_part_of_the_world, timeout=20, limit=60)
    assert inside == [[0, 1, 2, 3]] * 4
    assert outside == []
