"""What frameworks put around models and optimizers is looked through; what cannot be taken over is
said once, with what to do."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, LocalSteps
from adaptive.model.wrappers import unwrap
from tests.distributed.frameworks import launched, needs, net, optimizer_of, rows
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, listen, loss_of, small_net


class Around:
    """A wrapper that is no optimizer, and has none where one would look."""

    def __init__(self, inner: Any) -> None:
        self.inside = inner


class Slow(torch.optim.Optimizer):
    """A wrapper that is an optimizer of nobody's kind, with one inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.base = inner

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def _attached(rank: int) -> dict[str, Any]:
    told = listen()
    found: dict[str, Any] = {}

    def attach(name: str, wrap: Any, model: Any = None, sync: Any = None) -> None:
        ddp = DDP(small_net(torch.float32))
        optimizer = optimizer_of("sgd", ddp.parameters())
        compressor = AdaptiveCompressor(policy="fixed", cf_range=(5, 5), sync=sync)
        try:
            compressor.attach(model(ddp) if model else ddp, optimizer=wrap(optimizer))
        except (TypeError, ValueError) as error:
            found[name] = str(error)
        else:
            for step in range(2):
                optimizer.zero_grad()
                loss_of(ddp, step, rank).backward()
                optimizer.step()
            found[name] = compressor.memory, list(told), compressor.summary().steps_at_cf
        told.clear()

    def zero(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        parameters = optimizer.param_groups[0]["params"]
        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.02, momentum=0.9)

    attach("compiled", lambda optimizer: optimizer, partial(torch.compile, backend="eager"))
    attach("zero", zero)
    attach("zero with local steps", zero, sync=LocalSteps(2))
    attach("slow", Slow)
    attach("around", Around)
    attach("bare", lambda optimizer: optimizer, lambda ddp: torch.nn.Sequential(ddp))
    return found


def test_what_is_not_taken_over_is_said_with_what_to_do() -> None:
    first, second = run_ranks(2, _attached)
    assert first["compiled"] == second["compiled"]
    assert first["compiled"][0] == "momentum"
    assert first["compiled"][1] == []
    assert sum(first["compiled"][2].values()) == 2
    memory, told, _ = first["zero"]
    assert memory == "residual"
    assert len(told) == 1
    assert "use the optimizer itself" in told[0]
    assert second["zero"][1] == []  # rank 0 says it for all
    memory, told, _ = first["slow"]
    assert memory == "updates"  # if it steps by itself, which is seen in its step
    assert ["optimizer Slow: each rank's steps" in each for each in told] == [True]
    for found in (first, second):
        assert "use the optimizer itself" in found["zero with local steps"]
        assert "optimizer" in found["around"]
        assert "torch.optim.Optimizer" in found["around"]
        assert "must be a DistributedDataParallel module, got Sequential" in found["bare"]


class Scaling(Around):
    """As Accelerate's optimizer is, with the `GradScaler` that it uses."""

    def __init__(self, inner: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.optimizer, self.scaler = inner, scaler


def test_the_scaler_of_a_wrapper_is_found() -> None:
    optimizer = optimizer_of("sgd", net().parameters())
    scaler = torch.amp.GradScaler("cpu")
    found = unwrap(None, Scaling(Around(optimizer), scaler))
    assert not isinstance(found.optimizers[0], torch.optim.Optimizer)
    found = unwrap(None, Scaling(optimizer, scaler))
    assert found.optimizers == (optimizer,)
    assert found.scaler is scaler
    assert not found.by_framework


def test_a_model_that_accelerate_has_prepared_is_known_beside_a_bare_optimizer() -> None:
    """Its checkpoints hold rank 0's state, however the optimizer was handed over."""
    model = net()
    assert not unwrap(model, None).by_framework
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    assert unwrap(model, None).by_framework


def _fabric(rank: int, folder: str) -> dict[str, Any]:
    launched(rank)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    from lightning.fabric import Fabric

    def made() -> Any:
        fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
        fabric.launch()
        model = net()
        model, optimizer = fabric.setup(model, optimizer_of("adamw", model.parameters()))
        compressor = AdaptiveCompressor("topk+fp32", (10, 10), policy="fixed", granularity="layer")
        compressor.attach(model, optimizer=optimizer)
        return fabric, model, optimizer, compressor

    def train(run: Any, start: int, stop: int) -> torch.Tensor:
        fabric, model, optimizer, _ = run
        data = rows()
        for step in range(start, stop):
            batch = data[(2 * step + rank) % len(data)]
            optimizer.zero_grad()
            fabric.backward(((model(batch["x"]) - batch["y"]) ** 2).mean())
            optimizer.step()
        return flat_parameters(model)

    def parts(run: Any) -> dict[str, Any]:
        return {"model": run[1], "optimizer": run[2], "compressor": run[3]}

    run = made()
    train(run, 0, 4)
    run[0].save(f"{folder}/fabric.pt", parts(run))
    straight = train(run, 4, 8)
    resumed = made()
    resumed[0].load(f"{folder}/fabric.pt", parts(resumed))
    return {
        "straight": straight,
        "resumed": train(resumed, 4, 8),
        "memory": run[3].memory,
        "wire": run[3].summary().wire_factor,
    }


@pytest.mark.long
@needs("lightning")
def test_fabric_compresses_and_resumes(tmp_path: Path) -> None:
    first, second = run_ranks(2, _fabric, str(tmp_path))
    assert torch.equal(first["straight"], second["straight"])
    assert torch.equal(first["resumed"], second["resumed"])
    torch.testing.assert_close(first["resumed"], first["straight"], rtol=1e-3, atol=1e-4)
    assert first["memory"] == "updates"
    assert first["wire"] > 3
