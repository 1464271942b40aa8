"""One own step or several between two exchanges, as the policy chooses while the ranks train.

After a round of one step the ranks exchange what it has done (own_step.py). After a round of
several steps they exchange what all of them have done together. In both, what was not sent is the
residual. The two differ in where the residual is meanwhile:

- before a round of one step it waits, in updates, and all ranks stand alike;
- before a round of several steps it moves the rank's own parameters. All ranks keep the *anchor*,
  where they would stand alike. What a rank has not sent is the anchor less its own parameters.
  (In a round of several steps what waits would be late by all of them; docs/research/defaults.md
  has the measurements.)

So another number of steps takes no state of its own: a round begins with the residual in its place.

An exchange of several steps begins after the last of them, and the ranks go on. The mean arrives
before a step that is fixed beforehand: the next one, or with an *overlap* a later one (Streaming
DiLoCo: Douillard and others 2025, section 2.2). What a rank has done meanwhile it keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.averager import Averager
from adaptive.chunks import Chunk, chunks
from adaptive.exchange.collectives import drain
from adaptive.exchange.pipeline import done_with
from adaptive.memory.updates import inverse
from adaptive.reducer import Step
from adaptive.state import SavedPart, check_like, flat_tensors
from adaptive.step_watch import Groups
from adaptive.sync.local_steps import all_nan_if_too_large
from adaptive.sync.options import LocalSteps
from adaptive.sync.own_step import OwnStepSync
from adaptive.uniting import averaged, unite
from compressors.kernels import all_finite
from compressors.kernels.blocks import Flag, either, fill_if
from policies.state import require
from policies.step_time import overlapped


@dataclass(eq=False)
class _Arriving:
    """The ranks' mean of what a round has done to a chunk, there or under way. sent_at: where this
    rank stood when it sent its own."""

    mean: Future[Tensor]
    sent_at: Tensor


class AutoStepsSync(OwnStepSync):
    """The rounds of one model.

    steps: of the round under way. backwards: of this round; of a round of one step none. open: the
    last backward of a round of several has ended, and its exchange is to come. anchors: in a round
    of several steps, from its first step on. due: the step of the round before which the last
    exchange moves the parameters.
    """

    def __init__(self, averager: Averager, choice: LocalSteps) -> None:
        super().__init__(averager)
        self.handover.always = True  # what waits moves the ranks' own parameters
        self._overlap = choice.overlap
        self._chunks = [Chunk(each) for each in chunks(averager.parameters.values())]
        self._steps, self._backwards, self._due = 1, 0, 0
        self._open = False
        self._to_step: set[Optimizer] = set()  # optimizers, before the exchange
        self._anchors: dict[Chunk, Tensor] = {}
        self._arriving: dict[Chunk, _Arriving] = {}

    # -- a backward --

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self.make_up()
            self._steps = self.averager.controller.local_steps
            if 1 < self._steps == self._backwards + 1:
                self.averager.begin(self.alike, of_gradients=False)  # and plan the next round
        return super().reduce(bucket) if self._steps == 1 else done_with(bucket.buffer())

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        if self._steps == 1:
            return super().end_backward(last)
        self._backwards += 1
        self._open = self._backwards == self._steps
        self._to_step = set(self.averager.optimizers)
        self.averager.controller.skipped += not self._open
        return last

    def _by_gradients(self, why: str) -> None:
        raise RuntimeError(f"sync=LocalSteps('auto') does not go with this optimizer: {why}")

    # -- a step --

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        if self._steps > 1:
            with self.averager.noting_failure():
                self._go_off()
                if self._backwards >= self._due:
                    self._apply_arrived()
        return super().before_step(optimizer, groups)

    def after_step(self, optimizer: Optimizer) -> None:
        super().after_step(optimizer)
        self._to_step.discard(optimizer)
        if self._open and not self._to_step:
            self.make_up()

    def make_up(self) -> None:
        if not self._open:
            super().make_up()
            return
        averager, controller = self.averager, self.averager.controller
        averager.check_whole()
        with averager.noting_failure():
            self._open, self._backwards = False, 0
            self._go_off()
            self._apply_arrived()
        entered = controller.stopwatch.timestamps()
        with averager.replica_calls(waits=True):
            self._send()
            averager.pipeline.finish()
            controller.end_step(averager.watch.take_found())
        controller.stopwatch.hook_left(entered, drain(averager.pipeline.waits))
        self._due = max(1, overlapped(self._overlap, controller.local_steps))
        if controller.local_steps == 1:
            self._apply_arrived(meets=True)

    def _send(self) -> None:
        """Begin to exchange how far each rank has come from the anchor."""
        averager, controller = self.averager, self.averager.controller
        now, send, reducer = averager.exchange_now, controller.plan.send, averager.reducer
        number, cfs, tally = controller.step, controller.cfs, controller.tally
        step = Step(number, cfs, tally, *averager.listeners(), updates=True)

        def arrived(future: Future[Tensor]) -> Tensor:
            with averager.noting_failure(now):
                mean = future.value()
                controller.stopwatch.bucket_done(drain(averager.pipeline.decoded))
                averager.pipeline.stream.keep(mean)
                return mean

        strategy = averager.choice.pick(averager.sizes.bucket_nbytes(cfs), send)
        for i, chunk in enumerate(self._chunks):
            here = chunk.here("sent at")
            done = torch.sub(self._anchors[chunk], here, out=chunk.buffer("done"))
            all_nan_if_too_large(done)
            if averager.compresses:
                mean = reducer.compressed(step, done, chunk.parameters, strategy, i)
            else:
                mean = reducer.dense(step, done, chunk.parameters, narrow=averager.narrow)
            self._arriving[chunk] = _Arriving(mean.then(arrived), here)

    # -- rounds of several steps --

    @torch.no_grad()
    def _go_off(self) -> None:
        """In a round of several steps, from its first step on: the anchor is where all ranks stand,
        and the residual moves this rank's own parameters."""
        self.handover.part()
        if self._anchors:
            return
        self.averager.requested.follow(
            self.averager.memory.now
        )  # what is exchanged is in other units
        for chunk in self._chunks:
            anchor = self._anchors[chunk] = chunk.here("anchor")
            rest = chunk.buffer("done").zero_()
            for p, piece in zip(chunk.parameters, chunk.split(rest), strict=True):
                if p.filled and p.residual is not None:
                    piece.copy_(p.residual).mul_(self.handover.learning_rate(p))
            self._move(chunk, anchor, rest)

    def _move(self, chunk: Chunk, to: Tensor, less: Tensor) -> None:
        """The parameters become `to` less `less`, which is overwritten. No residual is left."""
        chunk.go_to(torch.sub(to, less, out=less))
        for p in chunk.parameters:
            p.filled = False

    @torch.no_grad()
    def _apply_arrived(self, meets: bool = False) -> None:
        """Move the anchor by the mean of the last exchange, if that has not been done. The rank's
        parameters are the anchor, less what was not sent, and what it has done since it sent.

        meets: a round of one step follows at once. All ranks stand at the anchor, and what was not
        sent waits as updates.

        A mean that is not finite moves nothing. A rank that has come to what is not finite goes
        back to the anchor, and its gradients count for nothing."""
        arriving, self._arriving = self._arriving, {}
        any_nonfinite: Flag = False
        for chunk, each in arriving.items():
            mean, anchor = each.mean.wait(), self._anchors[chunk]
            nonfinite = all_finite(mean) ^ True
            any_nonfinite = either(any_nonfinite, nonfinite)
            fill_if(nonfinite, mean, 0.0)
            anchor.sub_(mean)
            if meets:
                chunk.go_to(anchor)
                continue
            less = torch.sub(each.sent_at, chunk.here("now"), out=mean)
            less.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            for p, piece in zip(chunk.parameters, chunk.split(less), strict=True):
                if p.filled and p.residual is not None:
                    piece.add_(p.residual)
            self._move(chunk, anchor, less)
        if any_nonfinite is not False:
            for tensor in self.averager.parameters:
                if tensor.grad is not None:
                    fill_if(any_nonfinite, tensor.grad, 0.0)
        if meets:
            self._anchors = {}
            self.averager.requested.follow(self.averager.memory.now)
            for p in self.averager.parameters.values():
                if p.filled and p.residual is not None:
                    p.residual.mul_(inverse(self.handover.learning_rate(p)))

    # -- between steps --

    def discard(self) -> None:
        if not self._anchors:  # else nothing waits but in the parameters
            super().discard()

    @property
    def owes(self) -> bool:
        return self._open or super().owes

    def start_over(self) -> bool:
        waits = super().start_over() or bool(self._anchors)
        self._arriving = {}
        for chunk in self._anchors:
            self._anchors[chunk] = chunk.here("anchor")
        return waits

    def wait(self) -> None:
        for each in self._arriving.values():
            each.mean.wait()

    def abandon(self) -> None:
        super().abandon()
        self._open, self._arriving = False, {}

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        if self._steps == 1:
            return super().alike()
        anchors = self._anchors or {chunk: chunk.here("now") for chunk in self._chunks}
        return self._by_name(anchors).items()

    def _catch_up(self) -> None:
        """What is under way moves the parameters, and steps that this rank has left out are made
        up for. From here on all ranks have an anchor, or none."""
        self.make_up()
        if self._backwards:
            self._go_off()
        self._apply_arrived()

    def averaged(self) -> AbstractContextManager[None]:
        self._catch_up()
        if not self._anchors:
            return super().averaged()
        return averaged(list(self.averager.parameters.values()), self.averager.exchange)

    def unite(self) -> Sequence[Optimizer] | None:
        self._catch_up()
        if not self._anchors:
            return super().unite()
        unite(list(self.averager.parameters.values()), self.averager.exchange)
        self.handover.agree(self.averager.exchange)
        self._anchors = {chunk: chunk.here("anchor") for chunk in self._chunks}
        return list(self.averager.optimizers)

    def stop(self) -> None:
        self._catch_up()
        if self._anchors:
            self.unite()

    # -- saved --

    def saved(self) -> SavedPart:
        return SavedPart(self._state_dict, self._check, self._load_state_dict)

    def _state_dict(self) -> dict[str, Any]:
        """By parameter name, between steps; what is under way is waited for."""
        means = {chunk: each.mean.wait() for chunk, each in self._arriving.items()}
        sent_at = {chunk: each.sent_at for chunk, each in self._arriving.items()}
        tensors = {"anchors": self._anchors, "means": means, "sent_at": sent_at}
        state = {name: self._by_name(of) for name, of in tensors.items()}
        return {"backwards": self._backwards, "due": self._due, **state}

    def _by_name(self, flat: Mapping[Chunk, Tensor]) -> dict[str, Tensor]:
        pairs = ((c, zip(c.parameters, c.split(x), strict=True)) for c, x in flat.items())
        return {p.name: piece.clone() for _, pieces in pairs for p, piece in pieces}

    def _check(self, state: Mapping[str, Any]) -> None:
        """ValueError unless it is a state of rounds of these parameters."""
        flat = flat_tensors(self.averager.parameters.values())
        like = {"backwards": int, "due": int, "anchors": flat, "means": flat, "sent_at": flat}
        check_like("sync", state, like, finite=False, complete=True)  # of a bad round not finite
        check_like("sync: anchors", state["anchors"], flat)
        keys = [state[name].keys() for name in ("anchors", "means", "sent_at")]
        whole = all(each in (set(), flat.keys()) for each in keys) and keys[1] == keys[2]
        whole = whole and keys[0] >= keys[1] and state["backwards"] >= 0
        require(whole, "'sync' has lost something")

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The parameters themselves, which are this rank's own, are not part of it."""
        self._open, self._backwards, self._due = False, state["backwards"], state["due"]
        self._anchors, self._arriving = {}, {}
        for chunk in self._chunks:
            if state["anchors"]:
                self._anchors[chunk] = self._joined(chunk, state["anchors"], "anchor")
            if state["means"]:
                mean = done_with(self._joined(chunk, state["means"], "done"))
                sent_at = self._joined(chunk, state["sent_at"], "sent at")
                self._arriving[chunk] = _Arriving(mean, sent_at)

    def _joined(self, chunk: Chunk, by_name: Mapping[str, Tensor], use: str) -> Tensor:
        flat = chunk.buffer(use)
        for p, piece in zip(chunk.parameters, chunk.split(flat), strict=True):
            piece.copy_(by_name[p.name])
        return flat
