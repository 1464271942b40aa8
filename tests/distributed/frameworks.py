"""What the tests of the frameworks share: they find the processes of `run_ranks` as those of a
launcher, and train a small model on data of their own."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROWS = 40


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips, and says so, where one of them is missing; none is imported, which takes seconds."""
    missing = ", ".join(package for package in packages if find_spec(package) is None)
    return pytest.mark.skipif(
        bool(missing), reason=f"not installed: {missing} (make long-test installs it)"
    )


def launched(rank: int, world_size: int = 2) -> None:
    """As `torchrun` tells its processes; the process group is there already."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    told |= {"LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="test")
    os.environ.update(CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")


def rows() -> list[dict[str, Tensor]]:
    """Inputs (12) and targets (3), the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 12, generator=generator)
    return [{"x": x[i], "y": torch.sin(x[i, :3])} for i in range(ROWS)]


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 60), nn.Tanh(), nn.Linear(60, 20), nn.Linear(20, 3))


def optimizer_of(name: str, parameters: object) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)  # type: ignore[arg-type]
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)  # type: ignore[arg-type]


def lightning_module(optimizer: str) -> Any:
    """`net`, trained on `rows` by Lightning."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, _: int) -> Any:
            return ((self.net(batch["x"]) - batch["y"]) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return optimizer_of(optimizer, self.parameters())

    return Module()


class TrainerModel(nn.Module):
    """`net` as Hugging Face's `Trainer` wants it: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.net(x) - y) ** 2).mean()}
