"""The device path in real processes, on CPU tensors that are treated as those of a device.

It must do what the host path does: nothing is lost, a nonfinite step leaves no trace, and training
comes to the same parameters, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from adaptive import (
    AdaptiveCompressor,
    LocalSteps,
    MemoryTimeline,
    Momentum,
    Residual,
)
from adaptive.memory import optimizer_sync
from adaptive.model.chunks import DEVICE_CHUNK
from adaptive.sync import every_step
from adaptive.sync.anchor import Anchor
from compressors.kernels import blocks
from policies import Plan
from tests.distributed.balance import balance
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, batch, flat_parameters, loss_of, small_net
from tests.distributed.test_unused import _run as run_unused

STEPS = 8
CFS = [10.0, 100.0, 1.0, 3.0, 1000.0]


class ByStep(Scripted):
    """Sends the CFs of a list, whether or not the reports come late."""

    def __init__(self, cfs: list[float], probe: tuple[float, ...] = ()) -> None:
        super().__init__(cfs, probe)
        self.planned = 0

    def plan(self) -> Plan:
        send = self.cfs[self.planned % len(self.cfs)]
        self.planned += 1
        return Plan(send, tuple(cf for cf in self.probe if cf != send))


def _balance(rank: int, base: str, options: dict[str, Any], bad_at: int | None) -> dict[str, Any]:
    blocks.force_device_path = True
    ddp_options = {"bucket_cap_mb": 0.004}
    cfs = CFS if base in ("topk", "dgc", "randomk", "sketch", "powersgd") else [4.0, 1.0, 32.0]
    policy = ByStep(cfs)
    return balance(
        rank, base, policy, STEPS, options=options, ddp_options=ddp_options, bad_at=bad_at
    )


WAYS = [
    ("topk", {"exchange": "all_gather", "granularity": "bucket"}),
    ("topk", {"exchange": "sharded"}),
    ("topk", {"exchange": "voted_indices"}),
    ("dgc+int8", {"exchange": "voted_indices"}),
    ("dgc", {"granularity": "layer"}),
    ("topk", {"granularity": "layer"}),
    ("randomk", {"exchange": "all_reduce"}),
    ("powersgd", {}),
    ("sketch", {}),
    ("int8", {"exchange": "sharded"}),
    ("signsgd", {}),
    ("bf16", {}),
]


@pytest.mark.parametrize(("base", "options"), WAYS, ids=str)
@pytest.mark.parametrize("bad_at", [pytest.param(None, marks=pytest.mark.long), 4])
def test_nothing_is_lost(base: str, options: dict[str, Any], bad_at: int | None) -> None:
    results = run_ranks(2, _balance, base, options, bad_at)
    for result in results:
        # Sums of half precision are rounded on the wire.
        assert result["deviation"] < (1e-2 if base == "bf16" else 1e-12)
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert all(result["nonfinite"])


def _unused(rank: int, cfs: list[float], momentum: float) -> float:
    blocks.force_device_path = True
    return run_unused(rank, cfs, momentum)


@pytest.mark.parametrize("cfs", [[10.0, 10.0, 1.0], [1.0]])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nothing_is_lost_where_parameters_go_unused(cfs: list[float], momentum: float) -> None:
    assert max(run_ranks(2, _unused, cfs, momentum)) < 1e-12


def _train(rank: int, on_device: bool, options: dict[str, Any], sgd: dict[str, Any]) -> Any:
    blocks.force_device_path = on_device
    every_step.joined_nbytes = lambda device: DEVICE_CHUNK  # on both: what is selected as one
    model = DDP(small_net(), bucket_cap_mb=0.004, **options.get("ddp", {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **sgd)
    policy = ByStep([10.0, 3.0, 1.0, 50.0], (20.0,))
    compressor = AdaptiveCompressor(
        "topk+int8",
        (1, 1000),
        policy=policy,
        **options.get("compressor", {}),
    ).attach(model, optimizer=optimizer)
    for step in range(12):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        bad = step in (0, 6, 10) and options.get("bad", True)
        (loss * (float("inf") if bad and rank == 1 else 1.0)).backward()
        if bad:
            assert not any(bool(p.grad.isfinite().any()) for p in model.parameters())
        else:
            optimizer.step()
    compressor.detach()
    errors = {
        (report.step, cf): measured.error
        for report in policy.reports
        for cf, measured in report.measurements.items()
        if isfinite(measured.total)  # not of a nonfinite step
    }
    return flat_parameters(model), errors


@pytest.mark.parametrize(
    "sgd",
    [
        {},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        pytest.param({"momentum": 0.9, "dampening": 0.3}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compressor": {"memory": Momentum(clip_norm=0.1), "granularity": "layer"}},
        {"ddp": {"find_unused_parameters": True}, "bad": False},
        {"compressor": {"dense_below": 50, "memory": Momentum(masking=20.0)}, "bad": False},
    ],
    ids=str,
)
def test_it_trains_as_the_host_path_does(options: dict[str, Any], sgd: dict[str, Any]) -> None:
    memory = options.get("compressor", {}).get("memory")
    if memory is not None and not sgd:
        given = {**options["compressor"], "memory": Residual(clip_norm=memory.clip_norm)}
        options = {**options, "compressor": given}
    host, device = (run_ranks(2, _train, on_device, options, sgd) for on_device in (False, True))
    assert torch.equal(device[0][0], device[1][0])
    torch.testing.assert_close(device[0][0], host[0][0], rtol=1e-9, atol=1e-12)
    assert device[0][1] == pytest.approx(host[0][1], rel=1e-6)


class _NoReading(TorchDispatchMode):
    """Here nothing may wait for a device: no value is read, no shape depends on data."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount"):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def _watched(rank: int, base: str, policy: str, local_steps: int | str) -> int:
    blocks.force_device_path = True
    model = DDP(small_net(torch.float32), bucket_cap_mb=0.004)
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    chosen: Any = policy
    if local_steps == "auto":
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)  # Adam reads its host step
        chosen = Scripted([8.0, 1.0], local_steps=[1, 2, 1])
    timeline = MemoryTimeline()
    compressor = AdaptiveCompressor(
        base,
        (4, 100),
        policy=chosen,
        timeline=timeline,
        sync=None if local_steps == 1 else LocalSteps(local_steps),
    )
    compressor.attach(model, optimizer=optimizer)
    session: Any = compressor._session
    begin = session.controller.begin_step
    gather = session.exchange.gather_objects

    def begin_step() -> None:  # the statistics of two steps before are on the host by now
        with _disable_current_modes():
            begin()

    def watched(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watch(given: Any) -> Any:
            with _NoReading():
                return call(given)

        return watch

    def gather_objects(own: Any) -> list[Any]:
        # Before a dense step that follows compressed ones: which tensors the ranks' optimizers
        # keep, which may differ. This waits.
        with _disable_current_modes():
            return gather(own)

    number = optimizer_sync._number

    def host_number(value: torch.Tensor, of: Any) -> float | None:
        # A count of steps, which lies on the host beside parameters on a device.
        with _disable_current_modes():
            return number(value, of)

    optimizer_sync._number = host_number
    session.controller.begin_step = begin_step
    session.reduce, session.end_backward = watched(session.reduce), watched(session.end_backward)
    session.exchange.gather_objects = gather_objects
    land = Anchor.land

    def watched_landing(self: Anchor, until: int | None = None) -> None:
        with _NoReading():
            land(self, until)

    Anchor.land = watched_landing  # type: ignore[method-assign]
    for step in range(12):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    compressor.detach()
    return len(timeline.steps)


def test_reading_a_value_would_be_noticed() -> None:
    with _NoReading(), pytest.raises(AssertionError, match="_local_scalar_dense waits"):
        float(torch.ones(()))


@pytest.mark.parametrize(
    ("base", "policy", "local_steps", "steps"),
    [
        ("topk", "goodput", 1, 12),
        ("topk", "gravac", 1, 12),
        ("int8", "gravac", 1, 12),
        ("topk", "accordion", 1, 12),
        ("topk", "goodput", 2, 5),  # exchanges after 2, 4, ... steps
        ("topk", "scripted", "auto", 9),  # rounds of one step, and of several
    ],
)
def test_no_hook_call_waits(base: str, policy: str, local_steps: int | str, steps: int) -> None:
    assert run_ranks(2, _watched, base, policy, local_steps) == [steps, 0]  # rank 0 writes


def _corrupt(rank: int) -> str:
    blocks.force_device_path = True
    model = DDP(small_net())
    compressor = AdaptiveCompressor("topk", (10, 100), policy=ByStep([10.0]))
    compressor.attach(model)
    exchange = compressor._session.exchange  # type: ignore[union-attr]
    send = exchange.all_gather

    def flip(payload: torch.Tensor, means: bool = False) -> Any:
        def flipped(future: Any) -> torch.Tensor:
            rows = future.value()
            if rank == 1:  # what has arrived on one rank only
                exchange.count_invalid(torch.tensor(True))
            return rows

        return send(payload, means).then(flipped)

    exchange.all_gather = flip  # type: ignore[method-assign]
    try:
        for step in range(6):
            x, y = batch(step, rank)
            ((model(x) - y) ** 2).mean().backward()
    except Exception as error:
        return f"{step}: {error}"
    return "nothing"


def test_what_is_corrupt_on_one_rank_is_told_on_all_a_few_steps_later() -> None:
    told = run_ranks(2, _corrupt)
    assert told[0] == told[1]
    assert "a payload that no compressor can have sent has arrived on some rank" in told[0]
