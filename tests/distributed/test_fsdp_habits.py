"""Scripts that do something else than one backward and one step by one optimizer, on a model that
FSDP2 shards: two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard import _fsdp_common as private
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

from adaptive import AdaptiveCompressor
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, batch, listen, small_net

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_all_reduce_hook"),
    reason="attach_fsdp needs FSDPModule.set_all_reduce_hook, torch 2.7",
)

REPLICAS, SHARDS = (2, 1), (1, 2)
PLAIN = MixedPrecisionPolicy()


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))


def sharded(mesh: DeviceMesh, precision: MixedPrecisionPolicy = PLAIN) -> Any:
    model = small_net(torch.float32)
    fully_shard(model, mesh=mesh["shard"], mp_policy=precision)
    return model


def loss_of(model: Any, step: int) -> Tensor:
    x, y = batch(step, dist.get_rank(), torch.float32)
    loss: Tensor = ((model(x) - y) ** 2).mean()
    return loss


def _second_backward(rank: int) -> tuple[str, list[str]]:
    told = listen()
    model, mesh = sharded(mesh_of(REPLICAS)), mesh_of(REPLICAS)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    compressor = AdaptiveCompressor("topk", policy=Scripted([10.0]))
    compressor.attach_fsdp(model, mesh, optimizer=optimizer)
    for step in range(3):
        for micro in range(2):  # both exchange
            loss_of(model, 2 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return compressor.memory, told


def test_a_second_backward_adds_gradients_to_velocities_which_is_noticed() -> None:
    """As with DDP: plain error feedback from then on."""
    (memory, told), (other, _) = run_ranks(2, _second_backward)
    assert memory == other == "residual"
    assert sum("a second backward()" in each for each in told) == 1


def _one_of_two(rank: int, evaluates: bool) -> list[Tensor]:
    """Of DDP and FSDP: the parameters, after steps of which every second one leaves out an
    optimizer. The next forward makes the exchange then, which moves parameters."""
    found = []
    for by_ddp in (True, False):
        mesh = mesh_of(REPLICAS)
        model: Any = DDP(small_net(torch.float32)) if by_ddp else sharded(mesh)
        parameters = list(model.parameters())
        optimizers = [AdamW(parameters[i::2], lr=1e-2, eps=1e-4) for i in range(2)]
        compressor = AdaptiveCompressor(
            "topk", policy=Scripted([10.0]), granularity="layer", exchange="all_gather"
        )
        if by_ddp:
            compressor.attach(model, optimizer=optimizers)
        else:
            compressor.attach_fsdp(model, mesh, optimizer=optimizers)
        for step in range(6):
            loss_of(model, step).backward()
            for optimizer in optimizers[: 1 + step % 2]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if evaluates:  # the parameters of the root stay whole after that
                with torch.no_grad():
                    loss_of(model, 0)
        compressor.close()
        values = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters)
        found.append(torch.cat([each.detach().flatten() for each in values]))
    return found


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_forward_has_the_parameters_that_the_exchange_before_it_has_moved(
    evaluates: bool,
) -> None:
    for by_ddp, by_fsdp in run_ranks(2, _one_of_two, evaluates):
        torch.testing.assert_close(by_fsdp, by_ddp, rtol=1e-4, atol=1e-5)


class _KeepsWeights(SGD):
    """Keeps a copy of the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].setdefault("kept", p.detach().clone())
            kept.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            p.lerp_(kept, 0.5)


class _TwoHeads(nn.Module):
    """The gate's weight is on one shard."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = small_net(torch.float32), nn.Linear(3, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y * torch.sigmoid(self.gate(y))


def _weights_on_one_shard(rank: int) -> tuple[list[str], Tensor]:
    told, mesh = listen(), mesh_of(SHARDS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = _TwoHeads()
    fully_shard(model, mesh=mesh["shard"])
    optimizers: list[Optimizer] = [
        AdamW(model.body.parameters(), lr=1e-3),
        _KeepsWeights(model.gate.parameters(), lr=1e-3),
    ]
    compressor = AdaptiveCompressor("topk", policy=Scripted([10.0]))
    compressor.attach_fsdp(model, mesh, optimizer=optimizers)
    for step in range(5):
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compressor.close()
    return told, model.gate.weight.full_tensor().detach()


def test_all_shards_learn_of_weights_that_an_optimizer_keeps_on_one() -> None:
    (told, weight), (_, other) = run_ranks(2, _weights_on_one_shard, limit=40, timeout=20)
    assert sum("keeps weights in its state" in each for each in told) == 1
    assert torch.equal(weight, other)


def _detached(rank: int) -> dict[str, Any]:
    mesh = mesh_of(SHARDS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = _TwoHeads()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    compressor = AdaptiveCompressor("topk", policy=Scripted([10.0]))
    compressor.attach_fsdp(model, mesh, optimizer=optimizer)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    compressor.detach()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(model, optimizer, options=options)  # empty but on rank 0


def test_after_detach_every_shard_has_every_momentum_buffer() -> None:
    """So torch can gather the optimizer's state, for which it asks each shard for each buffer."""
    first, _ = run_ranks(2, _detached, limit=40, timeout=20)
    buffers = {name: kept["momentum_buffer"] for name, kept in first["state"].items()}
    assert buffers["gate.weight"].shape == (1, 3)
    assert all(bool(buffer.any()) for buffer in buffers.values())


def _unfrozen(rank: int, detaches: bool) -> tuple[str, bool]:
    """What is said once a frozen layer is trained; whether it has moved then."""
    mesh = mesh_of(REPLICAS)
    model: Any = small_net(torch.float32)
    model[0].requires_grad_(False)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = AdamW(model.parameters(), lr=1e-2)
    compressor = AdaptiveCompressor("topk", policy=Scripted([10.0]))
    compressor.attach_fsdp(model, mesh, optimizer=optimizer)
    before, said = model[0].weight.to_local().clone(), ""
    for step in range(4):
        if step == 2:
            if detaches:
                compressor.detach()
            model[0].requires_grad_(True)
            if detaches:
                compressor = AdaptiveCompressor("topk", policy=Scripted([10.0]))
                compressor.attach_fsdp(model, mesh, optimizer=optimizer)
        try:
            loss_of(model, step).backward()
        except RuntimeError as error:
            said = str(error)
            break
        optimizer.step()
        optimizer.zero_grad()
    return said, not torch.equal(before, model[0].weight.to_local())


@pytest.mark.parametrize("detaches", [False, True])
def test_parameters_that_are_unfrozen_later_need_another_compressor(detaches: bool) -> None:
    for said, moved in run_ranks(2, _unfrozen, detaches, timeout=20):
        assert moved == detaches
        assert detaches or said.startswith("FSDP reduces 0.weight, which was not to be reduced")
        assert said.endswith("attach a new one after that") != detaches


def _dense_bytes(rank: int, precision: MixedPrecisionPolicy) -> tuple[float, float]:
    mesh = mesh_of(REPLICAS)
    model = sharded(mesh, precision)
    compressor = AdaptiveCompressor("topk", policy=Scripted([1.0])).attach_fsdp(model, mesh)
    loss_of(model, 0).backward()
    compressor.close()
    total = compressor.summary()
    return total.dense_bytes, total.fp32_wire_factor / total.wire_factor


@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16, None])
def test_dense_bytes_are_those_that_a_dense_step_sends(reduced: torch.dtype | None) -> None:
    """FSDP may reduce gradients in another precision than that of the parameters, by default in
    that of the forward."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    itemsize = 4 if reduced is torch.float32 else 2
    for dense, factor in run_ranks(2, _dense_bytes, precision):
        assert dense == pytest.approx(1139 * itemsize)
        assert factor == pytest.approx(4 / itemsize)


def _late(rank: int) -> list[str]:
    told, mesh = listen(), mesh_of(SHARDS)
    compressor = AdaptiveCompressor("topk", sync="auto", network="10mbit, 80 ms")
    compressor.attach_fsdp(sharded(mesh), mesh)
    return told


def test_a_late_network_is_told_of_by_one_rank() -> None:
    first, other = run_ranks(2, _late)
    assert sum("local steps of sync='auto' need DDP" in each for each in first) == 1
    assert not any("local steps" in each for each in other)


class _Parts(nn.Module):
    """A unit of which every second step uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.more = small_net(torch.float32), nn.Linear(3, 3)

    def forward(self, x: Tensor, all_of_it: bool) -> Tensor:
        y: Tensor = self.body(x)
        return y + self.more(y) if all_of_it else y


def _compiled(rank: int, compiles: bool) -> Tensor:
    mesh = mesh_of(REPLICAS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = _Parts()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = AdamW(model.parameters(), lr=1e-2)
    compressor = AdaptiveCompressor("topk", policy=Scripted([10.0]))
    compressor.attach_fsdp(model, mesh, optimizer=optimizer)
    if compiles:
        model.compile(backend="eager")
    for step in range(4):
        x, y = batch(step, rank, torch.float32)
        ((model(x, step % 2 == 0) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def test_a_compiled_module_may_leave_out_some_of_its_parameters() -> None:
    eager, compiled = (run_ranks(2, _compiled, each, timeout=40) for each in (False, True))
    assert torch.equal(compiled[0], compiled[1])
    torch.testing.assert_close(compiled[0], eager[0])


def _of_other_shards(rank: int) -> str:
    """What is said of a gathered state of two shards where parameters are whole."""
    states = []
    for shape in (SHARDS, REPLICAS):
        mesh = mesh_of(shape)
        model = sharded(mesh)
        compressor = AdaptiveCompressor("topk", policy=Scripted([10.0])).attach_fsdp(model, mesh)
        loss_of(model, 0).backward()
        states.append(compressor.state_dict("gathered"))
        dist.broadcast_object_list(states)
    try:
        compressor.load_state_dict(states[0])
    except ValueError as error:
        return str(error)
    return ""


def test_a_state_of_another_number_of_shards_is_refused_with_advice() -> None:
    for said in run_ranks(2, _of_other_shards, timeout=20):
        assert said.startswith("state: it is of a model in 2 shards, expected 1: ")


def _own_hooks(rank: int) -> list[str]:
    """What is said of all-reduce hooks that one rank has set on a module, or has in place of the
    compressor's; and of the compressor's own, when another one is attached."""
    said, mesh = [], mesh_of(REPLICAS)
    for when in ("before", "after", "never"):
        model = sharded(mesh)
        if when != "before":
            AdaptiveCompressor("topk").attach_fsdp(model, mesh).detach()
        if when != "never" and rank == 1:
            model.set_all_reduce_hook(_own_hook)
        try:
            AdaptiveCompressor("topk").attach_fsdp(model, mesh)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


def _own_hook(flat: Tensor) -> None:
    raise AssertionError


def _hook_after_attaching(rank: int) -> str:
    mesh, model = mesh_of(REPLICAS), small_net(torch.float32)
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    AdaptiveCompressor("topk").attach_fsdp(model, mesh)
    model[0].set_all_reduce_hook(_own_hook)
    with pytest.raises(RuntimeError) as caught:
        loss_of(model, 0).backward()
    return str(caught.value)


def test_an_all_reduce_hook_that_is_set_later_is_noticed() -> None:
    for said in run_ranks(2, _hook_after_attaching, timeout=20):
        assert "0 has an all-reduce hook already (_own_hook)" in said


def test_an_all_reduce_hook_of_the_script_is_not_replaced_in_silence() -> None:
    for before, after, never in run_ranks(2, _own_hooks, timeout=20):
        assert "the root module has an all-reduce hook already (_own_hook)" in before
        assert before == after
        assert never == ""


def _several_meshes(rank: int) -> str:
    mesh, other, model = mesh_of(SHARDS), mesh_of(REPLICAS), small_net(torch.float32)
    by_dim = [private.FSDPMeshInfo(each["shard"], shard_mesh_dim=0) for each in (mesh, other)]

    def placement(p: nn.Parameter) -> Any:
        return private.ShardPlacementResult(Shard(0), by_dim[p.ndim - 1])

    fully_shard(model, mesh=mesh["shard"], shard_placement_fn=placement)
    try:
        AdaptiveCompressor("topk").attach_fsdp(model, mesh)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.skipif(
    not hasattr(private, "ShardPlacementResult"), reason="a module of this torch has one mesh"
)
def test_several_meshes_in_one_module_are_refused_in_a_sentence() -> None:
    for said in run_ranks(2, _several_meshes, timeout=20):
        assert said.startswith("the root module is sharded over several meshes: ")


def _in_backward(rank: int) -> str:
    mesh = mesh_of(REPLICAS)
    model = sharded(mesh)
    optimizers = {p: AdamW([p], lr=0.01) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    compressor = AdaptiveCompressor("topk", policy=Scripted([10.0]))
    compressor.attach_fsdp(model, mesh, optimizer=[*optimizers.values()])
    try:
        for step in range(3):
            loss_of(model, step).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_optimizer_in_backward_is_refused_by_that_name() -> None:
    for told in run_ranks(2, _in_backward):
        assert "AdamW steps within backward (an optimizer in backward" in told
        assert "step after backward" in told


class _Generates(nn.Sequential):
    def generate(self, x: Tensor) -> Any:
        return self[1](x)


def _by_another_method(rank: int, called_before: bool) -> str:
    mesh, model = mesh_of(REPLICAS), _Generates(nn.Linear(60, 60), nn.Linear(60, 60))
    fully_shard(model, mesh=mesh["shard"])
    register_fsdp_forward_method(model, "generate")
    optimizer = AdamW(model.parameters(), lr=0.01)
    AdaptiveCompressor("topk", policy=Scripted([10.0])).attach_fsdp(
        model, mesh, optimizer=optimizer
    )
    if called_before:
        with torch.no_grad():
            model(torch.ones(2, 60))
    try:
        for _ in range(3):
            model.generate(torch.ones(2, 60)).sum().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_method_that_uses_a_part_of_a_unit_needs_one_forward_before() -> None:
    for told in run_ranks(2, _by_another_method, False):
        assert "before the first backward call its forward() once" in told
    assert run_ranks(2, _by_another_method, True) == ["", ""]
