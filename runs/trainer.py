"""A model on one rank, its optimizers, and what exchanges its gradients: the library's compressor,
plain DDP, or one of PyTorch's own hooks to compare with.

No `from __future__ import annotations` here: DDP compares the annotations of a hook with the
classes themselves.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import nan, sqrt
from statistics import median
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

from adaptive import Summary, Timeline
from adaptive.network.collectives import reduce_wire_bytes
from adaptive.network.pace import Pace
from policies import DENSE
from policies.step_time import LAST
from runs.build import (
    build_compressor,
    build_task,
    lr_factor,
    make_optimizers,
)
from runs.config import TrainConfig
from runs.early_stopping import EarlyStopping
from runs.expression import PLAIN
from runs.tasks import Task, trainable

RANK, START = 4, 2
"""Of PowerSGD, and dense steps before it compresses (it needs 2; by default it sends 1,000)."""

ONE_BUCKET = 10_000
"""MB: with several buckets PowerSGD's hook aborts on gloo, since it sends from callbacks."""


class Trainer:
    """A model, its optimizers and compressor on one rank; `step` counts the steps done.

    With `config.fixed_clock` step times are modelled: on them the policy's decisions depend.
    task: what to train, if it is there already; ranks of one process may share it.
    """

    def __init__(
        self,
        config: TrainConfig,
        timeline: Timeline | None = None,
        task: Task | None = None,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.step = 0
        self.task = task or build_task(config)
        torch.manual_seed(config.seed * self.world_size + self.rank)
        device = torch.device(config.device)
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)  # of this thread
        model = self.task.build_model().to(device)
        self._power: PowerSGDState | None = None
        if config.ddp_hook == "powersgd":
            self._power = PowerSGDState(
                None, matrix_approximation_rank=RANK, start_powerSGD_iter=START
            )
        self.model = DDP(model, bucket_cap_mb=None if self._power is None else ONE_BUCKET)
        if self._power is not None:
            self.model.register_comm_hook(self._power, powerSGD_hook)
        elif config.ddp_hook == "bf16":
            self.model.register_comm_hook(None, _bf16)
        self.optimizers = make_optimizers(config, self.task, self.model)
        self.early = EarlyStopping(config.patience, self.task.higher_is_better)
        self._config = config
        self.compressor = None
        self.stopwatch = PlainStopwatch()
        if config.policy != PLAIN:
            self.compressor = build_compressor(
                config,
                timeline=[timeline] if timeline is not None else [],
                numel=sum(p.numel() for p in trainable(self.model)),
            )
            of_step = self.task.batch_size * self.world_size
            self.compressor.attach(self.model, optimizer=self.optimizers, samples_per_step=of_step)

    def took(self, seconds: float) -> None:
        """The last step is over, that took so long by this process's clock. A compressor has a
        stopwatch of its own."""
        if self.compressor is None:
            self.stopwatch.took(seconds)

    def loss(self) -> torch.Tensor:
        """The loss of this rank's batch in the present step."""
        batch = self.task.batch(self.step, self.rank, self.world_size)
        with self._autocast():
            return self.task.loss(self.model, batch)

    def _autocast(self) -> torch.autocast:
        kind = torch.device(self._config.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=self._config.autocast)

    def descend(self, loss: torch.Tensor) -> None:
        """Backward, with the exchange in it, and the optimizer's step."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.task.lr * lr_factor(self._config, self.step)
        limit = self._config.clip_local
        if limit is not None:
            # The norm of this rank's whole gradient takes another backward pass: DDP's hook has a
            # bucket at a time, and `torch.autograd.grad` does not set it off.
            parameters = trainable(self.model)
            own = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            norm = torch.stack([part.norm() for part in own if part is not None]).norm()
            loss = loss * (limit / sqrt(self.world_size) / norm).clamp(max=1.0)
        loss.backward()
        if self._config.clip_grad is not None:
            clip_grad_norm_(self.model.parameters(), self._config.clip_grad)
        self._move()
        self.step += 1

    def _move(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """A context in which the model is the one whose quality counts, the mean of all ranks'."""
        averaged = nullcontext() if self.compressor is None else self.compressor.averaged()
        with averaged, self._autocast():
            yield

    def summary(self) -> Summary:
        """What was sent so far."""
        if self.compressor is None:
            return self._dense_summary()
        self.compressor.flush()
        return self.compressor.summary()

    def _dense_summary(self) -> Summary:
        """What plain DDP has sent, perhaps with a hook of PyTorch's."""
        dense = self.step * sum(p.numel() for p in trainable(self.model))
        floats = dense
        if self._power is not None:
            _, before, after = self._power.compression_stats()
            floats = round(dense - before + after)
        payload = floats * (2 if self._config.ddp_hook == "bf16" else 4)
        return Summary(
            steps=self.step,
            cf=DENSE,
            steps_at_cf={DENSE: self.step},
            bytes_sent=reduce_wire_bytes(payload, self.world_size),
            payload_bytes=payload,
            floats_sent=floats,
            dense_bytes=reduce_wire_bytes(4 * dense, self.world_size),
            pace=replace(self.stopwatch.pace),
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's whole state, between steps."""
        return {
            "step": self.step,
            "model": self.model.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "compressor": self.compressor.state_dict() if self.compressor is not None else None,
            "rng": torch.get_rng_state(),
            "early": self.early.state_dict(),
            "pace": self.stopwatch.pace.state_dict(),
        }

    def throw_away_a_step(self) -> None:
        """Before `load_state_dict`: DDP orders its buckets anew after the first backward, which
        changes the order of summation, so that one must not count. Whatever it changes is loaded
        afterwards."""
        self.loss().backward()
        self._move()  # without it, the library warns of a step that was left out

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`, bit-identically given the same step times."""
        self.step = state["step"]
        self.model.module.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        if self.compressor is not None:
            self.compressor.load_state_dict(state["compressor"])
        self.early.load_state_dict(state["early"])
        self.stopwatch.pace.load_state_dict(state["pace"])
        if state["rng"] is not None:
            torch.set_rng_state(state["rng"])
        else:  # no worker of the run before had these random numbers
            torch.manual_seed(crc32(repr((self._config.seed, self.step, self.rank)).encode()))


class PlainStopwatch:
    """This times steps as a compressor does, for a run that has none: each counts as the median of
    the last `LAST`, and the first not at all."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._times: deque[float] | None = None

    def took(self, seconds: float) -> None:
        """A step is over, that took so long."""
        if self._times is None:  # a process warms up in its first
            self._times = deque(maxlen=LAST)
            self.pace.add(nan)
            return
        self._times.append(seconds)
        self.pace.add(median(self._times))


def _bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's, under another name: DDP lets it have that one with NCCL alone."""
    return bf16_compress_hook(state, bucket)
