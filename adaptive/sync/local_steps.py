"""Local steps: each rank takes H steps by itself, then the ranks exchange how far they have come.

The *anchor* is where all ranks would stand alike. The *outer gradient* of a parameter is the anchor
minus the parameter of this rank. In every H-th backward it is compressed and exchanged in the place
of the gradient. Other backwards send nothing. Autograd always gets the rank's own gradient.

Before the optimizer's next step an outer step by the mean moves the anchor, alike on all ranks
(DiLoCo: Douillard and others 2023, algorithm 1). Elements that were exchanged go to the anchor.
Elements that were not stay where the rank has come to, and do not wait in the residual ("error
reset", CSER: Xie and others 2020, algorithm 2). The residual holds what rounding has lost of
elements that were exchanged. So with a plain outer step an exchange does not move the mean of the
ranks' parameters, less residuals.

The exchange hides behind one backward, whose gradient is of where the rank stood before. With an
*overlap* it hides behind so many further steps, too (Streaming DiLoCo: Douillard and others 2025,
section 2.2). One bucket arrives after the other. Each moves its parameters before a step that is
fixed beforehand, so that runs can be repeated. What the rank has done meanwhile is added.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.averager import Averager
from adaptive.exchange.collectives import drain
from adaptive.exchange.pipeline import done_with
from adaptive.memory.inspection import MovedBetweenSteps
from adaptive.memory.optimizer_sync import unite_moments
from adaptive.memory.rule import RuledMemory
from adaptive.parameters import ModelParameter
from adaptive.state import SavedPart, check_like, flat_tensors
from adaptive.step_watch import Groups
from adaptive.sync.base import Synchroniser
from adaptive.sync.options import LocalSteps
from adaptive.uniting import averaged, unite
from compressors.kernels import all_finite, kernels_for, squared_norms
from compressors.kernels.blocks import Flag, either, fill_if, reused
from policies.state import require
from policies.step_time import overlapped

log = logging.getLogger("adaptive")

NO_STEP = (
    "local steps: no optimizer of torch's has stepped since the last exchange, which moves the "
    "parameters only now: what has changed them in between is lost"
)


@dataclass(eq=False)
class Arrival:
    """The mean outer gradient of a bucket, there or under way.

    due: its parameters move before this step after the exchange. then: where they stood when the
    rank sent its own outer gradient; None if they have not moved since."""

    parameters: Sequence[ModelParameter]
    mean: Tensor | Future[Tensor]
    due: int = 1
    then: Tensor | None = None

    def wait(self) -> Tensor:
        """The mean, once it is there."""
        if not isinstance(self.mean, Tensor):
            self.mean = self.mean.wait()
        return self.mean

    def state_dict(self) -> dict[str, Any]:
        """Of one that is not due yet."""
        assert self.then is not None
        names = [p.name for p in self.parameters]
        mean, then = (split(flat.clone(), self.parameters) for flat in (self.wait(), self.then))
        return {
            "due": self.due,
            "mean": dict(zip(names, mean, strict=True)),
            "then": dict(zip(names, then, strict=True)),
        }


class LocalStepsSync(Synchroniser):
    """The anchor and the outer optimizer of one model.

    choice: of the outer step, SGD with Nesterov momentum: m = outer_momentum m + d, anchor -=
    outer_lr (d + outer_momentum m), with d the mean outer gradient. anchors: by parameter, flat, in
    float32 (float64 of doubles). at_rest: which means move the parameters when the mean of these is
    wanted: see `apply_arrived`.
    """

    at_rest: int | None = None
    _stays = False

    def __init__(self, averager: Averager, choice: LocalSteps) -> None:
        super().__init__(averager)
        (every,) = choice.numbers
        self._begin(every, choice.outer_lr, choice.outer_momentum)
        self._overlap = choice.overlap
        # By a user's rule what is not sent stays in the residual, and all ranks go to the anchor.
        self._stays = isinstance(averager.memory.now, RuledMemory)

    def _begin(self, every: int, outer_lr: float, outer_momentum: float) -> None:
        """From parameters that are alike on all ranks."""
        self._every = every
        self._lr, self._momentum = outer_lr, outer_momentum
        self._parameters = list(self.averager.parameters.values())
        self.anchors = {p: as_flat(p.tensor).to(p.dtype, copy=True) for p in self._parameters}
        self._moving = {p: p.zeros() for p in self._parameters} if self._momentum else {}
        self._buffers: dict[tuple[int, str], Tensor] = {}
        self._arrived: list[Arrival] = []
        self._sent = 0  # elements, of the exchange that has begun last
        self._stepped = True  # an optimizer has, since then
        self._backwards = 0  # since the last exchange began
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that step the parameters
        averager = self.averager
        self._moved = MovedBetweenSteps(
            averager.parameters, averager.optimizers, averager.settings.sync
        )

    # -- a backward --

    @property
    def _due(self) -> bool:
        """The backward under way exchanges. Alike on all ranks, which all have done as many."""
        return self._backwards >= self._every

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        averager = self.averager
        if not self._due:
            return done_with(bucket.buffer())
        if bucket.index() == 0:
            self._moved.look(averager.exchange)
            self._begin_exchange()
            averager.begin(self.alike)
        stopwatch = averager.controller.stopwatch
        entered, now = stopwatch.timestamps(), averager.exchange_now
        parameters = [averager.parameters.find(p) for p in bucket.parameters()]
        flat = self._outer_gradients(bucket.index(), parameters)
        done = self._mean(bucket, flat, parameters)
        stopwatch.hook_left(entered, drain(averager.pipeline.waits))

        def finish(future: Future[Tensor]) -> Tensor:
            with averager.noting_failure(now):
                mean = future.value()
                self._mean_is_there()
                averager.pipeline.stream.keep(flat)
                return mean

        return self._incoming(bucket, parameters, done.then(finish))

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        averager, controller = self.averager, self.averager.controller
        if not self._due:
            self._backwards += 1
            controller.skipped += 1
            return last
        entered = controller.stopwatch.timestamps()
        averager.end()
        self._backwards = 1
        controller.stopwatch.hook_left(entered, drain(averager.pipeline.waits))
        return last

    def _mean(
        self, bucket: dist.GradBucket, flat: Tensor, parameters: Sequence[ModelParameter]
    ) -> Future[Tensor]:
        return self.averager.mean(bucket, flat, parameters)

    def _mean_is_there(self) -> None:
        """On a thread of the process group, once a bucket's mean has been decoded."""
        decoded = drain(self.averager.pipeline.decoded)
        self.averager.controller.stopwatch.bucket_done(decoded)

    def _incoming(
        self, bucket: dist.GradBucket, parameters: Sequence[ModelParameter], mean: Future[Tensor]
    ) -> Future[Tensor]:
        """Keep a bucket's mean outer gradient. Returns a future of this rank's gradients.

        The mean is not finite if some rank's outer gradient was not. Then the anchor stays, that
        rank goes back to it, and the others keep what they have not sent."""
        buffer = bucket.buffer()
        overlap = overlapped(self._overlap, self._every)
        if overlap:
            self._under_way(bucket.index(), parameters, mean, overlap)
            return done_with(buffer)

        def arrived(future: Future[Tensor]) -> Tensor:
            self._arrived.append(Arrival(parameters, future.value()))
            return buffer

        return mean.then(arrived)

    def _begin_exchange(self) -> None:
        """Before the first bucket. Means of the last exchange whose step has not come are
        applied."""
        if self._arrived and not self._stepped:
            log.warning("%s", NO_STEP)
        self.apply_arrived()
        self._sent, self._stepped = 0, False

    def _outer_gradients(self, index: int, parameters: Sequence[ModelParameter]) -> Tensor:
        """Of the parameters of bucket `index`, in its order: flat, in a buffer of its own."""
        unsent = self._unsent(index, parameters)
        all_nan_if_too_large(unsent)
        return unsent

    def _unsent(self, index: int, parameters: Sequence[ModelParameter]) -> Tensor:
        buffer = self._joined(index, "sent", [self.anchors[p] for p in parameters])
        torch._foreach_sub_(split(buffer, parameters), [as_flat(p.tensor) for p in parameters])
        return buffer

    def _joined(self, index: int, what: str, tensors: list[Tensor]) -> Tensor:
        """Flat tensors of bucket `index` as one, in the same buffer every time."""
        buffers = reused(self._buffers, tensors[0].device)
        buffer = buffers.get((index, what))
        if buffer is not None and buffer.numel() == sum(tensor.numel() for tensor in tensors):
            return torch.cat(tensors, out=buffer)
        buffers[index, what] = torch.cat(tensors)
        return buffers[index, what]

    def _under_way(
        self, index: int, parameters: Sequence[ModelParameter], mean: Future[Tensor], overlap: int
    ) -> None:
        """The mean outer gradient of bucket `index` arrives later. The buckets share the steps of
        the overlap as they share the elements."""
        self._sent += sum(p.tensor.numel() for p in parameters)
        elements = max(1, sum(p.tensor.numel() for p in self._parameters))
        later = -(-overlap * self._sent // elements)
        then = self._joined(index, "then", [as_flat(p.tensor).to(p.dtype) for p in parameters])
        self._arrived.append(Arrival(parameters, mean, 1 + later, then))

    def wait(self) -> None:
        for arrival in self._arrived:
            arrival.wait()

    def abandon(self) -> None:
        self._arrived = []

    def start_over(self) -> bool:
        self._arrived = []
        for p, anchor in self.anchors.items():
            p.filled = False
            anchor.copy_(as_flat(p.tensor))
        for moving in self._moving.values():
            moving.zero_()
        return True

    # -- a step --

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        """The first optimizer that steps has all parameters moved by the means."""
        self._optimizers.add(optimizer)
        self._stepped = True
        with self.averager.noting_failure():
            self.apply_arrived(self._backwards)
        self._moved.before_step(optimizer)
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        self._moved.after_step(optimizer)

    @torch.no_grad()
    def apply_arrived(self, due: int | None = None) -> None:
        """Take the outer step by the means that are due. If no step has come for long, that is in
        the middle of a backward, which autograd must not be told of.

        due: steps since the exchange; None: all means are due."""
        arrived = [each for each in self._arrived if due is None or each.due <= due]
        self._arrived = [each for each in self._arrived if each not in arrived]
        any_nonfinite: Flag = False
        for arrival in arrived:
            parameters, mean = arrival.parameters, arrival.wait()
            anchors = [self.anchors[p] for p in parameters]
            # Nothing moves in a round that is thrown away.
            nonfinite = all_finite(mean) ^ True
            any_nonfinite = either(any_nonfinite, nonfinite)
            fill_if(nonfinite, mean, 0.0)
            exchanged = split(mean != 0, parameters)
            steps = split(mean, parameters)
            if self._moving:
                moving = [self._moving[p] for p in parameters]
                good = torch.as_tensor(nonfinite ^ True, device=mean.device)
                share = good.to(mean.dtype).mul_(self._momentum)
                torch._foreach_mul_(moving, torch.where(good, share, 1.0))
                torch._foreach_add_(moving, steps)
                torch._foreach_addcmul_(steps, moving, [share.expand_as(m) for m in moving])
            torch._foreach_add_(anchors, steps, alpha=-self._lr)
            since = self._moved_since(arrival, nonfinite)
            for p, anchor, here, moved in zip(parameters, anchors, exchanged, since, strict=True):
                own = anchor
                if p.filled and p.residual is not None and not self._stays:
                    own = anchor - p.residual.masked_fill(here, 0.0)
                    p.residual.mul_(here)
                own = own if moved is None else own + moved
                p.tensor.data.copy_(own.view_as(p.tensor))
        self._bring_back(any_nonfinite)

    def _bring_back(self, any_nonfinite: Flag) -> None:
        """After a mean that is not finite: all that is not finite goes to the anchor. With an
        overlap other buckets' parameters may have become so meanwhile. Gradients become zero."""
        if any_nonfinite is False:
            return
        for p, anchor in self.anchors.items():
            stays = p.tensor.isfinite() | (
                torch.as_tensor(any_nonfinite, device=anchor.device) ^ True
            )
            p.tensor.data.copy_(torch.where(stays, p.tensor, anchor.view_as(p.tensor)))
            if p.tensor.grad is not None:
                fill_if(any_nonfinite, p.tensor.grad, 0.0)

    def _moved_since(self, arrival: Arrival, nonfinite: Flag) -> Sequence[Tensor | None]:
        """By how much the rank has moved each parameter since it sent its part of a mean. Zero
        where that is not finite."""
        if arrival.then is None:
            return [None] * len(arrival.parameters)
        then = split(arrival.then, arrival.parameters)
        for p, moved in zip(arrival.parameters, then, strict=True):
            torch.sub(as_flat(p.tensor).to(p.dtype), moved, out=moved)
            fill_if(nonfinite, moved, 0.0)
            moved.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return then

    # -- between steps --

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        return ((p.name, anchor) for p, anchor in self.anchors.items())

    def averaged(self) -> AbstractContextManager[None]:
        """Means that are under way move the parameters now, if that changes their mean."""
        self.apply_arrived(self.at_rest)
        return averaged(self._parameters, self.averager.exchange)

    def unite(self) -> Sequence[Optimizer]:
        """The optimizers are those that were handed over (which may not have stepped since a state
        was loaded), and all that stepped."""
        self.apply_arrived()
        unite(self._parameters, self.averager.exchange)
        for optimizer in self.averager.optimizers:
            self._optimizers.add(optimizer)
        optimizers = list(self._optimizers)
        unite_moments(self._parameters, optimizers, self.averager.exchange)
        for p, anchor in self.anchors.items():
            p.filled = False
            anchor.copy_(as_flat(p.tensor))
        return optimizers

    def stop(self) -> None:
        self.unite()

    # -- saved --

    def saved(self) -> SavedPart:
        check = partial(check_local_state, parameters=self._parameters)
        return SavedPart(self.state_dict, check, self.load_state_dict)

    def state_dict(self) -> dict[str, Any]:
        """By parameter name, between steps. Means that are due are applied first, others are waited
        for."""
        self.apply_arrived(self._backwards)
        self.wait()
        return {
            "backwards": self._backwards,
            "arrived": {str(i): each.state_dict() for i, each in enumerate(self._arrived)},
            "anchors": {p.name: anchor.clone() for p, anchor in self.anchors.items()},
            "moving": {p.name: moving.clone() for p, moving in self._moving.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The parameters themselves, which are this rank's own, are not part of it."""
        self._backwards = state["backwards"]
        by_name = {p.name: p for p in self._parameters}
        self._arrived = [
            Arrival(
                [by_name[name] for name in of_bucket["mean"]],
                _on_device(by_name, of_bucket["mean"]),
                of_bucket["due"],
                _on_device(by_name, of_bucket["then"]),
            )
            for of_bucket in state["arrived"].values()
        ]
        for p, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][p.name])
        for p, moving in self._moving.items():  # zero of a run without outer momentum
            before = state["moving"].get(p.name)
            moving.zero_() if before is None else moving.copy_(before)


def check_local_state(state: Mapping[str, Any], parameters: Collection[ModelParameter]) -> None:
    """ValueError unless it is a `LocalSteps.state_dict()` of these parameters."""
    flat = flat_tensors(parameters)
    like = {"backwards": int, "arrived": Mapping, "anchors": flat, "moving": flat}
    check_like("sync", state, like, complete=True)
    arrival = {"due": int, "mean": flat, "then": flat}  # of a bad round not finite
    for each in state["arrived"].values():
        check_like("sync: arrived", each, arrival, finite=False, complete=True)
        whole = bool(each["mean"]) and [*each["mean"]] == [*each["then"]]
        require(whole and each["due"] >= 1, "what has arrived has lost something")
    fits = state["anchors"].keys() == flat.keys()
    fits = fits and state["moving"].keys() in (set(), flat.keys())
    require(fits, "'sync' has lost something")


def _on_device(by_name: Mapping[str, ModelParameter], flat: Mapping[str, Tensor]) -> Tensor:
    """Tensors that were loaded, where their parameters are, as one."""
    return torch.cat([each.to(by_name[name].tensor.device) for name, each in flat.items()])


def all_nan_if_too_large(unsent: Tensor) -> None:
    """A rank that has come so far that squares overflow is thrown back to the anchor, as one that
    has come to what is not finite."""
    most = torch.finfo(unsent.dtype).max
    (energy,) = squared_norms([unsent])
    fill_if(kernels_for(unsent).flag(~(energy <= most)), unsent, nan)


def as_flat(parameter: Tensor) -> Tensor:
    return parameter.detach().reshape(-1)


def split(flat: Tensor, parameters: Sequence[ModelParameter]) -> list[Tensor]:
    return list(flat.split([p.tensor.numel() for p in parameters]))
