"""One exchange of all ranks: flat tensors become their mean, as the plan of the step says.

A synchroniser (`adaptive/sync/`) decides when there is an exchange, what is exchanged, and what
becomes of the mean. It calls `begin` before the first tensor, `mean` for each tensor in the same
order on all ranks, and `end` after the last one. It knows no compressor, no CF and no network:
these are in here.
"""

from __future__ import annotations

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

from adaptive.bucket.bucket import Granularity
from adaptive.bucket.requested import RequestedStatistics
from adaptive.exchange.choice import ExchangeChoice
from adaptive.exchange.strategies import Strategy
from adaptive.memory.model_memory import ModelMemory
from adaptive.memory.step_watch import CHANGED, FALLEN_BACK, OTHER_OPTIMIZER, UNSCALED, StepWatch
from adaptive.model.parameters import ModelParameter, ModelParameters
from adaptive.network.agreement import compare_replicas
from adaptive.network.collectives import Exchange, drain
from adaptive.network.pipeline import Pipeline
from adaptive.settings.config import Settings
from adaptive.settings.sizes import Sizes
from adaptive.step.controller import Controller
from adaptive.step.reducer import OnGradient, Reducer, SendsItself, Step
from compressors.base import InvalidPayload


@dataclass(eq=False)
class Averager:
    """What an exchange needs of one model.

    optimizers: those that were handed over. scaler: the loss scale in use, if there is one.
    settling: backwards after which DDP no longer rebuilds its buckets.
    """

    settings: Settings
    exchange: Exchange
    parameters: ModelParameters
    optimizers: Sequence[Optimizer]
    scaler: GradScaler | None
    memory: ModelMemory
    watch: StepWatch
    pipeline: Pipeline
    choice: ExchangeChoice
    granularity: Granularity
    sizes: Sizes
    requested: RequestedStatistics
    controller: Controller
    settling: int
    reducer: Reducer = field(init=False)
    failed: tuple[int, BaseException] | None = None
    """The step whose exchange failed first, and why."""
    in_backward: bool = False
    """A backward has handed over a bucket, and has not ended: it is under way, or has raised."""

    def __post_init__(self) -> None:
        self.reduce_with(self.settings.memory.options.clip_norm)

    def reduce_with(self, clip_norm: float | None) -> None:
        """From here on with the memory as it is now."""
        if clip_norm is not None:
            clip_norm /= sqrt(self.exchange.world_size)
        self.requested.follow(self.memory.now)
        self.reducer = Reducer(
            self.granularity,
            self.memory.now,
            self.exchange,
            self.pipeline,
            self.requested,
            self.settling,
            clip_norm,
        )

    def use_memory(self) -> None:
        """The model's memory has become another one."""
        self.reducer.memory = self.memory.now
        self.requested.follow(self.memory.now)

    def fall_back(self) -> None:
        """From the next step on: plain error feedback, and the optimizer's own momentum."""
        self.memory.fall_back()
        self.use_memory()

    @property
    def narrow(self) -> torch.dtype | None:
        """The precision in which a step that is not compressed is summed; None: as it is."""
        rung = self.settings.base.at(self.controller.plan.send)
        return rung.sum_dtype if rung.sent_as_dense else None

    @property
    def compresses(self) -> bool:
        """This step is not dense, in whatever precision."""
        return not self.controller.is_dense(self.controller.plan.send)

    @property
    def strategy(self) -> Strategy:
        """By which payloads become the mean in this step."""
        controller = self.controller
        return self.choice.pick(self.sizes.bucket_nbytes(controller.cfs), controller.plan.send)

    def begin(
        self, alike: Callable[[], Iterable[tuple[str, Tensor]]], of_gradients: bool = True
    ) -> None:
        """Before the first tensor: take in the statistics of the step before, and plan this one.

        alike: returns what must be the same on all ranks now, by parameter name, to be compared
        with `debug`. of_gradients: those of one backward are exchanged, or what their step does.
        Before a mean gradient the ranks may have to agree on what their optimizers keep.
        InvalidPayload if some rank has received what no compressor can have sent."""
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
            may_rest = not (controller.agreed.nonfinite > 0 or controller.cfs.measured)
            cf = controller.plan.send if self.compresses else None
            memory.now.handover.begin_step(self.exchange, cf, may_rest)
        if every := self.settings.debug:
            compared = () if controller.step % every else alike()
            compare_replicas(controller.step, controller.plan, compared, self.exchange.replicas)
            if self.exchange.shards > 1:
                compare_replicas(controller.step, controller.plan, (), self.exchange.everyone)
        self._look_for_changed_gradients()

    def _look_for_changed_gradients(self) -> None:
        """Falling back is decided on an agreed statistic; warnings are each rank's own."""
        controller, memory = self.controller, self.memory.now
        if controller.agreed.changed > 0 and "velocity" in memory.keeps:
            other = memory.handover.other_optimizer
            why = OTHER_OPTIMIZER.format(other) if other else CHANGED
            controller.note(f"{why}; {FALLEN_BACK}")
            self.fall_back()
        unscaled = controller.agreed.unscaled > 0 and self.scaler is None
        if unscaled and self.watch.is_new(UNSCALED):
            controller.note(UNSCALED)

    def listeners(self) -> tuple[OnGradient | None, OnGradient | None]:
        """Who is told the means of this step, and who this rank's own tensors."""
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

        bucket: gives the place among the tensors of the step. scale: that of the loss, by which
        `flat` was divided."""
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

    def mean_as_ddp(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """A future of the mean as DDP itself makes it, of sparse or complex gradients."""
        return self.exchange.mean_as_ddp(bucket.buffer())

    def end(self) -> None:
        """After the last tensor: issue all collectives that are left, and start agreeing on the
        statistics."""
        self.pipeline.finish()
        self.controller.end_step(self.watch.take_found())

    def wait(self, done: Future[Tensor]) -> None:
        """Until a mean is there, for the current stream."""
        stopwatch, waits = self.controller.stopwatch, self.pipeline.waits
        self.pipeline.finish()
        entered = stopwatch.timestamps()
        done.wait()
        waits.append((entered, stopwatch.timestamps()))
        stopwatch.hook_left(entered, drain(waits))

    @contextmanager
    def replica_calls(self, waits: bool) -> Iterator[None]:
        """A replica has called: what is done inside is done on our stream. waits: the replica's
        stream waits for it. RuntimeError once the exchange of an earlier step has failed."""
        self._check_exchanged()
        on_stream = self.pipeline.stream.hook_call(waits)
        timed = self.controller.stopwatch.held_up() if waits else nullcontext()
        with timed, on_stream, self.noting_failure():
            yield

    def backward_ended(self) -> None:
        """The replica has all means."""
        self.in_backward = False

    @property
    def exchange_now(self) -> tuple[int, object]:
        """Which one it is, for `noting_failure` in its callbacks."""
        return self.controller.step, self.pipeline.life

    @contextmanager
    def noting_failure(self, of: tuple[int, object] | None = None) -> Iterator[None]:
        """An error or an interrupt inside is one of this exchange (None: of the present one), and
        of no concern once that was abandoned."""
        step, life = of or self.exchange_now
        try:
            yield
        except BaseException as error:
            if life is self.pipeline.life:
                self.failed = self.failed or (step, error)
            raise

    @property
    def whole(self) -> bool:
        """What this rank holds is that of the end of a step."""
        return self.failed is None and not self.in_backward

    def check_whole(self) -> None:
        """RuntimeError after an exchange that failed, or a backward that raised: some ranks may
        have a mean, others not, and what the memory holds may be neither of the step before nor of
        the step after."""
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
            told = str(error) or repr(error)
            raise RuntimeError(
                f"the gradient exchange of step {step} failed, and what the ranks hold may differ "
                f"since: start anew, or load a checkpoint on all ranks ({told})"
            )

    def abandon(self) -> None:
        """Forget the exchange under way, also one that has failed. Waits for no other rank; what
        the memory holds is whatever has become of it."""
        self.pipeline.abandon()
        self.controller.abandon()
        self.failed, self.in_backward = None, False

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.parameters.device
