"""Delayed averaging: each rank applies its own step at once. D steps later the mean of all ranks'
steps takes the place of its own.

What a step has done to the parameters is sent with the next backward. Up to D exchanges are under
way while the ranks compute. Before step t + D: p <- p + own(t) - mean(t). That is "Delayed Gradient
Averaging" (Zhu and others, NeurIPS 2021, algorithm 1) with steps in the place of gradients. So it
goes with any optimizer, learning rate and weight decay.

All ranks have one anchor, which moves by the means alone. The parameters of a rank are the anchor,
less what it has sent that is still under way, less what it has not sent. So a rank knows what it
has not sent from its parameters and the first two, whatever has moved the parameters. Nothing is
lost, not even by rounding, and no residual is kept: what compression does not send stays in the
rank's own parameters, as with local steps ("error reset": Xie and others 2020).

An exchange that is not finite on some rank moves nothing. The other ranks send their parts again,
and that rank goes on from the anchor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.averager import Averager
from adaptive.bucket import LARGEST
from adaptive.exchange.collectives import Exchange, drain
from adaptive.exchange.pipeline import done_with
from adaptive.exchange.strategies import Outgoing, Rounds, Strategy, Wrapped
from adaptive.parameters import ModelParameter
from adaptive.reducer import OnGradient
from adaptive.step_watch import Groups
from adaptive.sync.local_steps import Arrival, LocalStepsSync, as_flat, split
from adaptive.sync.options import OUTER_LR, OUTER_MOMENTUM, Delayed
from compressors.kernels import all_finite
from compressors.kernels.blocks import Flag, either, fill_if


class DelayedSync(LocalStepsSync):
    """The anchor, and the exchanges that are under way, of ranks that step with a delay.

    Of an `Arrival`, `due` is how many backwards remain until its mean moves the parameters, the
    present one included. `then` is what this rank has sent. With memory "none" all that a rank had
    to send counts as sent.
    """

    at_rest = 1  # means that are under way stay so

    def __init__(self, averager: Averager, choice: Delayed) -> None:
        super(LocalStepsSync, self).__init__(averager)
        self._begin(1, OUTER_LR, OUTER_MOMENTUM)
        self._delay = choice.steps
        self._feeds_back = averager.memory.now.name != "none"
        self._on_mean: OnGradient | None = None  # told when a mean moves its parameter
        self._own: dict[int, Tensor] = {}  # by bucket, of the round that begins
        self._rounds = 0
        self._of_rounds: list[dict[tuple[int, str], Tensor]] = [{} for _ in range(self._delay)]

    def _begin_exchange(self) -> None:
        """Before the first bucket. Means whose step has not come are applied."""
        for arrival in self._arrived:
            arrival.due -= 1
        self.apply_arrived(0)
        self._rounds += 1  # the round of `delay` rounds ago is over, and its buffers are free
        self._buffers = self._of_rounds[self._rounds % self._delay]

    def _mean(
        self, bucket: dist.GradBucket, flat: Tensor, parameters: Sequence[ModelParameter]
    ) -> Future[Tensor]:
        self._on_mean, _ = self.averager.listeners()
        return self.averager.mean(
            bucket, flat, parameters, strategy_of=self._remembering, tell_mean=False
        )

    def _mean_is_there(self) -> None:
        """The step that waits for the mean takes the time: see `before_step`."""

    def _incoming(
        self, bucket: dist.GradBucket, parameters: Sequence[ModelParameter], mean: Future[Tensor]
    ) -> Future[Tensor]:
        own = self._own.pop(bucket.index())
        self._arrived.append(Arrival(parameters, mean, self._delay, own))
        return done_with(bucket.buffer())

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        super().before_step(optimizer, groups)
        decoded = drain(self.averager.pipeline.decoded)
        self.averager.controller.stopwatch.bucket_done(decoded)  # so long the step has waited
        return None

    def _unsent(self, index: int, parameters: Sequence[ModelParameter]) -> Tensor:
        """What this rank has not sent yet, of the parameters of bucket `index`: flat, in a buffer
        of its own."""
        unsent = super()._unsent(index, parameters)
        places = dict(zip(parameters, split(unsent, parameters), strict=True))
        for arrival in self._arrived:
            assert arrival.then is not None
            sent = zip(arrival.parameters, split(arrival.then, arrival.parameters), strict=True)
            for p, own in sent:
                if p in places:  # buckets may have been others then
                    places[p].sub_(own)
        self._own[index] = _finite(unsent)
        return unsent

    def _remembering(self, strategy: Strategy) -> Strategy:
        """The strategy; what this rank hands to it is remembered as sent."""
        return _Remembered(strategy, self._own) if self._feeds_back else strategy

    @torch.no_grad()
    def apply_arrived(self, due: int | None = None) -> None:
        """Let the means that are due take the place of what this rank has sent of them. due: see
        the class; None: all that are under way are."""
        arrived = [each for each in self._arrived if due is None or each.due <= due]
        self._arrived = [each for each in self._arrived if each not in arrived]
        any_nonfinite: Flag = False
        for arrival in arrived:
            parameters, mean, own = arrival.parameters, arrival.wait(), arrival.then
            assert own is not None
            nonfinite = all_finite(mean) ^ True
            any_nonfinite = either(any_nonfinite, nonfinite)
            for each in (mean, own):
                fill_if(nonfinite, each, 0.0)
            means, moves = split(mean, parameters), split(own.sub_(mean), parameters)
            torch._foreach_sub_([self.anchors[p] for p in parameters], means)
            for p, each, move in zip(parameters, means, moves, strict=True):
                p.tensor.data.copy_(move.add_(as_flat(p.tensor)).view_as(p.tensor))
                if self._on_mean is not None:
                    self._on_mean(p, each, nonfinite)
        self._bring_back(any_nonfinite)

    def _bring_back(self, any_nonfinite: Flag) -> None:
        """If what some rank has sent was not finite, or too large: that rank goes on from the
        anchor, and its gradients, which are of where it stood, count for nothing."""
        if any_nonfinite is False:
            return
        for p, anchor in self.anchors.items():
            good = torch.as_tensor(any_nonfinite, device=anchor.device) ^ True
            here, grad = p.tensor.data, p.tensor.grad
            anchor = anchor.view_as(here)
            near = (here.to(anchor.dtype) - anchor).abs() < LARGEST[anchor.dtype]  # nan is not
            here.copy_(torch.where(near | good, here, anchor))
            if grad is not None:
                grad.copy_(torch.where(grad.isfinite() | good, grad, 0.0))


class _Remembered(Wrapped):
    """A strategy; what this rank hands to it is written to `own`, by bucket."""

    def __init__(self, inner: Strategy, own: dict[int, Tensor]) -> None:
        super().__init__(inner)
        self._own = own

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        own = self._own[outgoing.index].zero_()
        for unit, payload in zip(outgoing.units, outgoing.payloads, strict=True):
            sent = payload.as_zeros(outgoing.bucket.nonfinite)
            unit.compressor.add_to(own[unit.start : unit.stop], sent)
        return self.inner.rounds(exchange, outgoing)


def _finite(x: Tensor) -> Tensor:
    """A copy; what is not finite was not sent."""
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
