"""The contract of a task: a model, its data, and how quality is measured."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[Tensor, ...]
"""Inputs and targets, and what else a task's own `loss` knows of."""


class DataNotFoundError(FileNotFoundError):
    """The data set is not there; the message says what is expected, from where, and where."""


class Shards:
    """Which items a rank sees in a step, as a pure function, so that resuming needs no state: this
    shuffles `items` anew each epoch and deals them out to the ranks, `batch_size` a step.

    Within an epoch no item is dealt twice, to any rank; the items that do not fill a last step
    for all ranks are left out (others each epoch). Steps count from 0 and never end.
    """

    def __init__(self, items: int, batch_size: int, seed: int) -> None:
        self.items = items
        self.batch_size = batch_size
        self.seed = seed
        self._shuffled: tuple[int, NDArray[np.int64]] | None = None  # the last epoch used

    def steps_per_epoch(self, world_size: int) -> int:
        """Steps in which every rank gets a full batch; ValueError if there is not even one."""
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be >= 1")
        steps = self.items // (self.batch_size * world_size)
        if steps < 1:
            raise ValueError(
                f"batch_size={self.batch_size} x {world_size} workers needs more than the "
                f"{self.items} training items there are; use a smaller batch_size"
            )
        return steps

    def indices(self, step: int, rank: int, world_size: int) -> tuple[int, NDArray[np.int64]]:
        """The epoch of `step`, and the `batch_size` item numbers of this rank in it."""
        steps = self.steps_per_epoch(world_size)
        if step < 0:
            raise ValueError(f"step={step} must be >= 0")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be from 0 to world_size - 1 = {world_size - 1}")
        epoch, place = divmod(step, steps)
        start = (place * world_size + rank) * self.batch_size
        return epoch, self._order(epoch)[start : start + self.batch_size]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._shuffled is None or self._shuffled[0] != epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.items)
            self._shuffled = (epoch, order)
        return self._shuffled[1]


class Task(ABC):
    """What `runs` needs to know of a training problem.

    Arguments: `model` (one of `models`, default the first), `data` (file or folder, what is
    accepted depends on the task), `batch_size` (items a rank a step), `seed` (of the weights, the
    shuffling and the augmentation) and `lr` (overrides the default learning rate). ValueError
    names the argument that is wrong.
    """

    name: str
    models: ClassVar[tuple[str, ...]]
    quality_name: ClassVar[str]
    beside: ClassVar[tuple[str, ...]] = ()  # names of what is measured beside the quality
    has_test: ClassVar[bool] = False  # data of a third kind, which no decision sees
    higher_is_better: ClassVar[bool]
    learning_rates: ClassVar[dict[str, float]]  # by model, for the default batch on two workers
    default_batch_size: ClassVar[int]
    weight_decay: ClassVar[float] = 0.0

    def __init__(
        self,
        *,
        model: str | None = None,
        data: Path | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        lr: float | None = None,
    ) -> None:
        self.model_name = self.models[0] if model is None else model
        self.batch_size = self.default_batch_size if batch_size is None else batch_size
        if self.batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be an integer >= 1")
        self.seed = seed
        if seed < 0:
            raise ValueError(f"seed={seed} must be an integer >= 0")
        self.lr = self.learning_rates[self.model_name] if lr is None else lr
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr={lr} must be a finite number > 0")
        self.data = data
        self.shards = Shards(self._load(data), self.batch_size, seed)
        self.shards.steps_per_epoch(1)  # a batch that can never be filled is refused here

    @abstractmethod
    def _load(self, data: Path | None) -> int:
        """Read the data set; returns the number of training items.

        Raises DataNotFoundError when it is not there, ValueError when it is corrupt.
        """

    @abstractmethod
    def _make_model(self) -> nn.Module:
        """The model named `self.model_name`, its weights drawn from torch's global RNG."""

    @abstractmethod
    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        """Inputs and targets of a rank in a step, on the CPU.

        A pure function of (seed, step, rank, world_size). Within an epoch the ranks see disjoint
        items; step `steps_per_epoch(world_size)` starts the next one.
        """

    @abstractmethod
    def measure(
        self, model: nn.Module, *, full: bool = False, test: bool = False
    ) -> dict[str, float]:
        """What is known of a model: `quality_name` and the names of `beside`, with their values, on
        a fixed subset of the held-out data.

        `full` takes all of it; `test` takes the test data of a task that `has_test`. Deterministic;
        the model is in eval mode meanwhile and in its former mode afterwards. Needs no other rank,
        whether or not `model` is a DDP one.
        """

    def evaluate(self, model: nn.Module, *, full: bool = False) -> float:
        """The quality alone, see `measure`."""
        return self.measure(model, full=full)[self.quality_name]

    def restart(self, model: nn.Module) -> None:
        """The next batch does not follow on those that the model has seen. Nothing is to be done,
        unless the model carries something from one batch to the next."""
        return

    def build_model(self) -> nn.Module:
        """The model on the CPU, the same weights for the same seed; the global RNG is untouched."""
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(self.seed)
            return self._make_model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum 0.9 and the task's learning rate for this model."""
        return torch.optim.SGD(
            trainable(model), lr=self.lr, momentum=0.9, weight_decay=self.weight_decay
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats, a scalar; the batch is moved to the model's device."""
        inputs, targets = (part.to(device_of(model)) for part in batch)
        logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def steps_per_epoch(self, world_size: int) -> int:
        """Steps in an epoch; ValueError if the data is too little for one batch a rank."""
        return self.shards.steps_per_epoch(world_size)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DDP, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters live."""
    return next(model.parameters()).device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Eval mode without gradients, on the module inside DDP; restores the former mode.

    DDP's own forward broadcasts the buffers, which would hang a rank that evaluates alone.
    """
    inner = unwrapped(model)
    modes = [(module, module.training) for module in inner.modules()]
    inner.eval()
    try:
        with torch.no_grad():
            yield inner
    finally:
        for module, training in modes:
            module.training = training
