"""Moments as flat tensors: what optimizers keep are views of them, whatever is done to these."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive.memory.optimizer_steps import Owner
from adaptive.memory.own_moments import FlatMoments
from adaptive.model.chunks import Chunk
from adaptive.model.parameters import ModelParameter


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _chunk(count: int) -> tuple[Chunk, AdamW, list[Owner]]:
    torch.manual_seed(0)
    tensors = [nn.Parameter(torch.randn(3, 1 + i % 5)) for i in range(count)]
    tensors[-1] = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    optimizer = AdamW(tensors, 0.01)
    chunk = Chunk([ModelParameter(f"p{i}", p) for i, p in enumerate(tensors)])
    return chunk, optimizer, [(optimizer, optimizer.param_groups[0])] * count


def _step(chunk: Chunk, optimizer: AdamW, without: int | None = None) -> None:
    for i, parameter in enumerate(chunk.parameters):
        p = parameter.tensor
        p.grad = None if i == without else torch.randn_like(p)
    optimizer.step()


def _are_views(moments: FlatMoments, chunk: Chunk, optimizer: AdamW) -> bool:
    for name in ("exp_avg", "exp_avg_sq"):
        flat = moments.tensors[name]
        own = [optimizer.state[p.tensor][name] for p in chunk.parameters]
        if any(each.data_ptr() - flat.data_ptr() >= flat.nbytes for each in own):
            return False
    return True


def test_what_the_optimizer_keeps_is_a_view_with_its_values_and_strides() -> None:
    chunk, optimizer, owners = _chunk(4)
    moments = FlatMoments(chunk)
    assert moments.runs(owners) == []  # nothing is kept before the first step
    _step(chunk, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    (run,) = moments.runs(owners)
    assert (run.start, run.stop, float(run.step)) == (0, chunk.numel, 1.0)
    assert _are_views(moments, chunk, optimizer)
    for p, kept in zip(chunk.parameters, before["state"].values(), strict=True):
        now = optimizer.state[p.tensor]
        assert now["exp_avg"].stride() == p.tensor.stride()
        assert all(torch.equal(now[name], kept[name]) for name in kept)
    twin = _chunk(4)
    twin[1].load_state_dict(before)
    for other, step in ((twin, 1), ((chunk, optimizer, owners), 1)):
        torch.manual_seed(step)
        _step(other[0], other[1])
    for mine, theirs in zip(chunk.parameters, twin[0].parameters, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            here: Tensor = optimizer.state[mine.tensor][name]
            assert torch.equal(here, twin[1].state[theirs.tensor][name])


def test_a_loaded_state_is_taken_in_again() -> None:
    chunk, optimizer, owners = _chunk(3)
    moments = FlatMoments(chunk)
    _step(chunk, optimizer)
    moments.runs(owners)
    state = copy.deepcopy(optimizer.state_dict())
    _step(chunk, optimizer)
    optimizer.load_state_dict(state)
    (run,) = moments.runs(owners)
    assert float(run.step) == 1.0
    assert _are_views(moments, chunk, optimizer)
    first = chunk.parameters[0].tensor
    assert torch.equal(run.mean[: first.numel()].view(first.shape), state["state"][0]["exp_avg"])


def test_a_parameter_without_a_step_parts_the_runs_between() -> None:
    chunk, optimizer, owners = _chunk(5)
    moments = FlatMoments(chunk)
    _step(chunk, optimizer, without=2)
    ends = [sum(chunk.sizes[:i]) for i in range(6)]
    runs = moments.runs(owners)
    assert [(run.start, run.stop) for run in runs] == [(0, ends[2]), (ends[3], ends[5])]
    _step(chunk, optimizer)  # its first; the others' second
    steps = [float(run.step) for run in moments.runs(owners)]
    assert steps == [2.0, 1.0, 2.0]
    optimizer.state.clear()
    assert moments.runs(owners) == []
    assert not any(bool(flat.any()) for flat in moments.tensors.values())


def test_an_optimizer_that_no_longer_owns_a_parameter_keeps_its_moments() -> None:
    chunk, optimizer, owners = _chunk(3)
    moments = FlatMoments(chunk)
    _step(chunk, optimizer)
    moments.runs(owners)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    other = AdamW([p.tensor for p in chunk.parameters], 0.01)
    _step(chunk, other)
    (run,) = moments.runs([(other, other.param_groups[0])] * 3)
    assert float(run.step) == 1.0
    for mine, kept in zip(chunk.parameters, before.values(), strict=True):
        assert all(torch.equal(optimizer.state[mine.tensor][name], kept[name]) for name in kept)


def test_moments_of_another_precision_are_taken_in_anew() -> None:
    chunk, optimizer, owners = _chunk(3)
    moments = FlatMoments(chunk)
    _step(chunk, optimizer)
    moments.runs(owners)
    for parameter in chunk.parameters:
        state = optimizer.state[parameter.tensor]
        optimizer.state[parameter.tensor] = {k: v.double() for k, v in state.items()}
    (run,) = moments.runs(owners)
    assert run.mean.dtype == torch.float64
    assert float(run.step) == 1.0
    assert not moments.left_out(owners)
    last = optimizer.state[chunk.parameters[-1].tensor]
    last["exp_avg"] = last["exp_avg"].float()
    assert [(run.start, run.stop) for run in moments.runs(owners)] == [(0, sum(chunk.sizes[:2]))]
    assert moments.left_out(owners)


def test_parameters_may_move_to_another_group() -> None:
    chunk, optimizer, owners = _chunk(4)
    moments = FlatMoments(chunk)
    _step(chunk, optimizer)
    (whole,) = moments.runs(owners)
    first = optimizer.param_groups[0]
    moved, first["params"] = first["params"][2:], first["params"][:2]
    optimizer.add_param_group({"params": moved, "betas": (0.5, 0.9)})
    runs = moments.runs([(optimizer, group) for group in optimizer.param_groups for _ in range(2)])
    assert [run.group["betas"] for run in runs] == [(0.9, 0.999), (0.5, 0.9)]
    assert sum(run.stop - run.start for run in runs) == whole.stop


def test_as_many_operations_for_hundreds_of_tensors_as_for_a_few() -> None:
    calls = []
    for count in (4, 300):
        chunk, optimizer, owners = _chunk(count)
        moments = FlatMoments(chunk)
        _step(chunk, optimizer)
        moments.runs(owners)
        chunk.blocks()
        with _Count() as counted:
            moments.runs(owners)
            chunk.here("before")
            for block in chunk.blocks():
                block.joined(chunk.buffer("work")[block.start : block.stop])
            chunk.go_to(chunk.buffer("work"))
        calls.append(counted.calls)
    assert calls[0] == calls[1] <= 20
