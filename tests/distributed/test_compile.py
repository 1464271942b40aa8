"""torch.compile around the DDP model, with dynamo's own splitting of the graph at DDP's buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import utils as metrics
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Delayed
from adaptive.model.replicas import DDPReplica, adaptive_hook
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, flat_parameters, loss_of, small_net

STEPS = 5


def _net() -> nn.Module:
    """Of more than two buckets of a megabyte: dynamo refuses smaller ones."""
    torch.manual_seed(0)
    wide = [nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 800), nn.Tanh(), nn.Linear(800, 3)]
    return nn.Sequential(nn.Linear(12, 400), nn.Tanh(), *wide)


def _train(rank: int, when: str, autograd: bool) -> tuple[Tensor, list[float]]:
    """Parameters, and the CFs sent. when: to attach, before or after compiling; "eager" without."""
    torch._dynamo.config.compiled_autograd = autograd
    model = DDP(_net(), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    policy = Scripted([10.0, 1.0])
    compressor = AdaptiveCompressor(policy=policy)
    if when != "after":
        compressor.attach(model, optimizer=optimizer)
    called: Any = model if when == "eager" else torch.compile(model, backend="aot_eager")
    if when == "after":
        compressor.attach(getattr(called, "_orig_mod", called), optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, step, rank).backward()
        optimizer.step()
    compressor.flush()
    return flat_parameters(model), [report.cf for report in policy.reports]


def _compiled(rank: int) -> list[tuple[Tensor, list[float]]]:
    ways = [("eager", False), ("before", False), ("after", True)]
    return [_train(rank, when, autograd) for when, autograd in ways]


def test_a_compiled_model_trains_as_one_that_is_not() -> None:
    results = run_ranks(2, _compiled)
    for result in results:
        eager = results[0][0][0]
        for parameters, sent in result:
            assert sent == [10.0, 1.0, 10.0, 1.0, 10.0]
            torch.testing.assert_close(parameters, eager)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one[0], other[0])


def _leaves_out(rank: int, sync: Any, rests: set[int], compiles: bool) -> Tensor:
    """Parameters. rests: ranks that leave out their second step."""
    model = DDP(nn.Sequential(_net(), nn.BatchNorm1d(3)), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    compressor = AdaptiveCompressor(policy=Scripted([10.0]), sync=sync)
    compressor.attach(model, optimizer=optimizer)
    called: Any = torch.compile(model, backend="aot_eager") if compiles else model
    for step in range(3):
        optimizer.zero_grad()
        loss_of(called, step, rank).backward()
        if step != 1 or rank not in rests:
            optimizer.step()
    compressor.close()
    return flat_parameters(model)


def _all_leave_out(rank: int) -> list[list[Tensor]]:
    cases: list[tuple[Any, set[int]]] = [(None, {0}), (Delayed(2), {0, 1})]
    return [[_leaves_out(rank, *case, compiles) for compiles in (False, True)] for case in cases]


def test_a_compiled_forward_makes_up_for_a_step_that_was_left_out() -> None:
    for results in run_ranks(2, _all_leave_out, timeout=20):
        for eager, compiled in results:
            torch.testing.assert_close(compiled, eager)


def _around_a_compiled_module(rank: int) -> list[tuple[Tensor, list[str]]]:
    """Parameters, and their names in a state, without and with torch.compile inside DDP."""
    found = []
    for net in (small_net(), torch.compile(small_net(), backend="aot_eager")):
        model = DDP(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Scripted([1.0]))
        compressor.attach(model, optimizer=optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        found.append((flat_parameters(model), list(compressor.state_dict()["parameters"])))
    return found


def test_ddp_around_a_compiled_module_trains_as_ddp_and_its_states_fit() -> None:
    for (plain, names), (compiled, named) in run_ranks(2, _around_a_compiled_module):
        torch.testing.assert_close(compiled, plain)
        assert named == names
        assert names[0] == "0.weight"


def _python_reducer(rank: int) -> list[str]:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    model = DDP(small_net())
    compressor, said = AdaptiveCompressor(), []
    try:
        compressor.attach(model)
    except RuntimeError as error:
        said.append(str(error))
    model.register_comm_hook(DDPReplica(), adaptive_hook)
    try:
        loss_of(model, 0, rank).backward()
    except RuntimeError as error:
        said.append(str(error))
    torch._dynamo.config.optimize_ddp = True
    AdaptiveCompressor().attach(DDP(small_net()))  # as is told
    return said


def test_the_python_reducer_is_refused_with_what_to_set_instead() -> None:
    # Older DDP hands hooks gradients only inside a compiled graph, and else buckets, as ever.
    always = not hasattr(DDP, "_should_disable_cpp_reducer")
    for attached, hooked in run_ranks(2, _python_reducer):
        assert hooked == attached if always else "no compressor" in hooked
        assert "leave optimize_ddp at True" in attached


def _stepped(rank: int, kind: str, compiles: bool) -> tuple[Tensor, list[str]]:
    """Parameters, and the files of the library in which dynamo has compiled something."""
    torch._dynamo.reset()
    metrics.clear_compilation_metrics()
    model = DDP(small_net())
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    AdaptiveCompressor(policy=Scripted([10.0])).attach(model, optimizer=optimizer)
    step_once = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        step_once()
    files = [str(each.co_filename) for each in metrics.get_compilation_metrics()]
    assert compiles <= len(files)
    return flat_parameters(model), [file for file in files if "adaptive" in Path(file).parts]


def _all_stepped(rank: int) -> list[list[tuple[Tensor, list[str]]]]:
    return [[_stepped(rank, kind, c) for c in (False, True)] for kind in ("SGD", "Adagrad")]


def test_a_compiled_step_leaves_the_library_out_of_its_graph() -> None:
    for result in run_ranks(2, _all_stepped):
        for (eager, _), (compiled, files) in result:
            torch.testing.assert_close(compiled, eager)
            assert files == []
