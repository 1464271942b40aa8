"""One exchange of all ranks: flat tensors become their mean, compressed at the CF of the step.

A synchroniser (`adaptive/sync/`) decides when the ranks exchange, which tensors they exchange, and
what is done with each mean. The synchroniser calls `begin` before the first tensor, `mean` for each
tensor in the same order on all ranks, and `end` after the last one. The averager holds what an
exchange needs: the controller, the memory, the reducer and the network's pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.exchange.strategies import Strategy
from adaptive.memory.model_memory import ModelMemory
from adaptive.memory.step_watch import CHANGED, FALLEN_BACK, OTHER_OPTIMIZER, UNSCALED, StepWatch
from adaptive.model.parameters import ModelParameter, ModelParameters
from adaptive.network.agreement import compare_replicas
from adaptive.network.collectives import Exchange, drain
from adaptive.network.pipeline import Pipeline
from adaptive.statistics.requested import RequestedStatistics
from adaptive.step.config import Settings
from adaptive.step.controller import Controller
from adaptive.step.reducer import OnGradient, Reducer, SendsItself, Step
from adaptive.step.sizes import Sizes
from compressors.base import InvalidPayload

log = logging.getLogger("adaptive")


@dataclass(eq=False)
class Averager:
    """Averages the flat tensors of one model over the ranks.

    optimizers: the optimizers passed to `attach`. scaler: the `GradScaler` passed to `attach`.
    settling: number of backwards after which DDP no longer rebuilds its buckets.
    failed: (step, error) of the first exchange that failed. in_backward: a backward has handed over
    a bucket, and has not ended: the backward is under way, or has raised.
    """

    settings: Settings
    exchange: Exchange
    parameters: ModelParameters
    optimizers: Sequence[Optimizer]
    scaler: GradScaler | None
    memory: ModelMemory
    watch: StepWatch
    pipeline: Pipeline
    sizes: Sizes
    requested: RequestedStatistics
    controller: Controller
    settling: int
    reducer: Reducer = field(init=False)
    failed: tuple[int, BaseException] | None = None
    in_backward: bool = False

    def __post_init__(self) -> None:
        self.reduce_with(self.settings.memory.options.clip_norm)

    def reduce_with(self, clip_norm: float | None) -> None:
        """Build a new reducer, with the memory in use. clip_norm: the script's limit for the norm
        of a parameter's gradient; None: no limit."""
        if clip_norm is not None:
            clip_norm /= sqrt(self.exchange.world_size)
        self.reducer = Reducer(
            self.sizes.granularity,
            self.memory.now,
            self.exchange,
            self.pipeline,
            self.requested,
            self.settling,
            clip_norm,
        )

    def fall_back(self) -> None:
        """Replace momentum correction by plain error feedback and the optimizer's own momentum."""
        self.memory.fall_back()
        self.reducer.memory = self.memory.now
        self.reducer.layouts.clear()  # velocities are freed

    @property
    def narrow(self) -> torch.dtype | None:
        """The precision in which a dense step sums gradients; None: that of DDP's bucket."""
        rung = self.settings.base.at(self.controller.plan.send)
        return rung.sum_dtype if rung.sent_as_dense else None

    @property
    def compresses(self) -> bool:
        """Whether this step compresses. A step that sums gradients in bfloat16 counts as dense."""
        return not self.controller.is_dense(self.controller.plan.send)

    @property
    def strategy(self) -> Strategy:
        """The exchange strategy of this step."""
        return self.sizes.strategy(self.controller.cfs)

    def begin(
        self, alike: Callable[[], Iterable[tuple[str, Tensor]]], of_gradients: bool = True
    ) -> None:
        """Called before the first tensor: read the statistics of an earlier step, and plan this
        step.

        alike: returns the tensors, by parameter name, that must be the same on all ranks now;
        `debug` compares them. of_gradients: the gradients of one backward are exchanged, or the
        updates of one optimizer step. The handover may then average the optimizers' states first.
        InvalidPayload if some rank has received bytes that no compressor can have sent."""
        controller, memory = self.controller, self.memory
        controller.begin_step()
        if controller.invalid:
            raise InvalidPayload(
                "a payload that no compressor can have sent has arrived on some rank: its "
                "bytes were changed on the way (a device finds this out some steps late)"
            )
        if controller.memory_empty:
            memory.clear()
        if of_gradients:
            may_leave = not (controller.agreed.nonfinite > 0 or controller.cfs.measured)
            cf = controller.plan.send if self.compresses else None
            memory.now.handover.begin_step(self.exchange, cf, may_leave_momentum=may_leave)
        if every := self.settings.debug:
            compared = () if controller.step % every else alike()
            compare_replicas(controller.step, controller.plan, compared, self.exchange.replicas)
            if self.exchange.shards > 1:
                compare_replicas(controller.step, controller.plan, (), self.exchange.everyone)
        # Fall back to plain error feedback if a script changes gradients between backward and the
        # optimizer's step. All ranks decide by the same agreed statistic; each rank warns.
        if controller.changed > 0 and "velocity" in memory.now.keeps:
            other = memory.now.handover.other_optimizer
            why = OTHER_OPTIMIZER.format(other) if other else CHANGED
            controller.note(f"{why}; {FALLEN_BACK}")
            self.fall_back()
        unscaled = controller.agreed.unscaled > 0 and self.scaler is None
        if unscaled and self.watch.is_new(UNSCALED):
            controller.note(UNSCALED)

    def warn_once(self, message: str) -> None:
        """Log a warning on the first rank, unless it is empty or was logged before."""
        if message and self.exchange.first and self.watch.is_new(message):
            log.warning("%s", message)

    def listeners(self) -> tuple[OnGradient | None, OnGradient | None]:
        """(on_mean, on_local) for this `Step`: None, or a callback that adds gradients up for the
        policy. At most one of the two is a callback: the plan asks for sums of mean gradients, or
        of local gradients, or for none."""
        plan = self.controller.plan
        add = self.requested.sums.add if plan.accumulate else None
        return (None, add) if plan.local_sum else (add, None)

    def mean(
        self,
        bucket: dist.GradBucket,
        flat: Tensor,
        parameters: Sequence[ModelParameter],
        scale: Tensor | None = None,
    ) -> Future[Tensor]:
        """A future of the ranks' mean of `flat`, which is overwritten.

        bucket: DDP's bucket, whose index is the index of `flat` in this step. scale: the loss scale
        by which `flat` was divided."""
        controller, plan, cfs = self.controller, self.controller.plan, self.controller.cfs
        on_mean, on_local = self.listeners()
        step = Step(controller.step, cfs, controller.tally, on_mean, on_local)
        rung: Any = self.settings.base.at(plan.send)
        if not self.compresses and isinstance(rung, SendsItself):
            send = partial(rung.send, bucket, scale=scale, exchange=self.exchange)
            return self.reducer.dense(step, flat, parameters, send)
        if not self.compresses:
            return self.reducer.dense(step, flat, parameters, narrow=self.narrow)
        return self.reducer.compressed(step, flat, parameters, self.strategy, bucket.index())

    def end(self) -> None:
        """Called after the last tensor: issue all remaining collectives, and start the all-reduce
        of the statistics."""
        self.pipeline.finish()
        self.controller.end_step(self.watch.take_found())

    def wait(self, done: Future[Tensor]) -> None:
        """Let the current stream wait until this mean has been decoded."""
        stopwatch, waits = self.controller.stopwatch, self.pipeline.waits
        self.pipeline.finish()
        entered = stopwatch.timestamps()
        done.wait()
        waits.append((entered, stopwatch.timestamps()))
        stopwatch.hook_left(entered, drain(waits))

    @contextmanager
    def replica_calls(self, waits: bool) -> Iterator[None]:
        """The context of each call from a replica: work inside goes to the hook's stream. waits:
        backward's stream waits for that work. RuntimeError if an earlier exchange has failed."""
        self._check_exchanged()
        on_stream = self.pipeline.stream.hook_call(waits)
        timed = self.controller.stopwatch.held_up() if waits else nullcontext()
        with timed, on_stream, self.noting_failure():
            yield

    def backward_ended(self) -> None:
        """The replica has received all means of this backward."""
        self.in_backward = False

    @property
    def exchange_now(self) -> tuple[int, object]:
        """(step, `Pipeline.life`) of the present exchange, for `noting_failure` in callbacks."""
        return self.controller.step, self.pipeline.life

    @contextmanager
    def noting_failure(self, of: tuple[int, object] | None = None) -> Iterator[None]:
        """Record an error or an interrupt inside as a failure of exchange `of` (None: of the
        present one). Errors of an exchange that was abandoned are not recorded."""
        step, life = of or self.exchange_now
        try:
            yield
        except BaseException as error:
            if life is self.pipeline.life:
                self.failed = self.failed or (step, error)
            raise

    @property
    def whole(self) -> bool:
        """Parameters and memory are those of the end of a step: no exchange failed or is open."""
        return self.failed is None and not self.in_backward

    def check_whole(self) -> None:
        """RuntimeError after an exchange that failed, or a backward that raised. Then some ranks
        may have a mean that others lack, and the memory may hold half of a step."""
        self._check_exchanged()
        if self.in_backward:
            raise RuntimeError(
                f"the backward of step {self.controller.step} has begun and not ended, so that "
                f"some gradients were exchanged and others not: load a checkpoint on all ranks, or "
                f"detach() the compressor"
            )

    def _check_exchanged(self) -> None:
        if self.failed is not None:
            step, error = self.failed
            cause = str(error) or repr(error)
            raise RuntimeError(
                f"the gradient exchange of step {step} failed, and the ranks may have different "
                f"parameters since: start anew, or load a checkpoint on all ranks ({cause})"
            )

    def abandon(self) -> None:
        """Drop the exchange under way, also a failed one, without waiting for other ranks. The
        memory may hold half of a step afterwards."""
        self.pipeline.abandon()
        self.controller.abandon()
        self.failed, self.in_backward = None, False
