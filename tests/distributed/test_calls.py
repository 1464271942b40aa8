"""How many operations a step takes does not depend on how many tensors a model has."""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import adaptive
from adaptive import AdaptiveCompressor, Fixed
from tests.distributed.processes import run_ranks

ROOT = Path(adaptive.__file__).parents[1]
OURS = tuple(str(ROOT / name) for name in ("adaptive", "compressors"))
MOST = {1.0: 20, 100.0: 450}
"""Operations of the library in a step, by CF, views included. DDP makes two buckets of the model;
in parameter space it is one chunk."""

COLLECTIVES = ("all_reduce", "all_gather_single", "all_gather_into_tensor", "all_to_all_single")


class _Counted(TorchDispatchMode):
    """Operations that the library has asked for, not torch's optimizer or a test."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frames = [frame.filename for frame in traceback.extract_stack(limit=9)]
        asked_by = [name for name in frames[:-1] if "/torch/" not in name]
        self.calls += bool(asked_by) and asked_by[-1].startswith(OURS)
        return func(*args, **(kwargs or {}))


class _Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.randn(400_000 // layers) for _ in range(layers))

    def forward(self) -> torch.Tensor:
        return torch.stack([p.square().sum() for p in self.layers]).sum()


def _wait_for_collectives() -> None:
    """Decode on the thread that counts: a payload that arrives later is decoded on one of gloo's,
    where no operation is seen."""

    def waiting(collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = collective(*args, **kwargs)
            if work is not None:  # asynchronous
                work.wait()
            return work

        return call

    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, waiting(getattr(dist, name)))


def _calls(rank: int, kind: str, cf: float, layers: int, **options: Any) -> int:
    _wait_for_collectives()
    torch.manual_seed(0)
    model = DDP(_Net(layers))
    parameters = model.parameters()
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD(parameters, 1e-3, momentum=0.9, weight_decay=1e-2)
    else:
        optimizer = torch.optim.AdamW(parameters, 1e-3)
    options = {"policy": Fixed(cf), **options}
    AdaptiveCompressor(**options).attach(model, optimizer=optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    for _ in range(12):  # DDP cuts buckets, and SGD rests in dense steps
        step()
    with _Counted() as counted:
        step()
    return counted.calls


@pytest.mark.parametrize("cf", [1.0, 100.0])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_step_takes_as_many_for_hundreds_of_tensors_as_for_ten(kind: str, cf: float) -> None:
    few, many = (run_ranks(2, _calls, kind, cf, layers)[0] for layers in (10, 400))
    assert 0 < few <= MOST[cf]
    assert many <= 1.02 * few  # now and then the watch compares one gradient more


@pytest.mark.parametrize(
    ("options", "most"),
    [({"granularity": "layer"}, MOST[100.0]), ({"policy": "gravac-paper"}, 250)],
)
def test_so_does_a_step_that_selects_from_each_tensor(options: dict[str, Any], most: int) -> None:
    of = "sgd", 100.0
    few, many = (run_ranks(2, partial(_calls, **options), *of, n)[0] for n in (10, 400))
    assert 0 < few <= most
    assert many <= 1.02 * few
