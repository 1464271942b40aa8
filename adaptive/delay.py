"""Delayed averaging: each rank takes its own step at once, and the others' part of it comes later.

What a rank's optimizer has just done to its parameters is sent with the next backward, and while
up to D such exchanges are under way the ranks compute. The mean of what was done in step t takes
the place of the rank's own part of it before step t + D: p <- p + own(t) - mean(t), as in Zhu and
others, "Delayed Gradient Averaging" (NeurIPS 2021, algorithm 1), with what the optimizer made of
the gradient in the gradient's stead. So it goes with any optimizer, learning rate and weight decay.

All ranks have one anchor, which moves by the means alone. The parameters of a rank are the anchor,
less what it has sent that is still under way, less what it has not sent yet. So what it has to send
is whatever its parameters tell beside the first two, who or what may have moved them: nothing can
be lost, roundings neither, and no residual is kept. What compression does not send stays in the
rank's own parameters, as with local steps ("error reset": Xie and others 2020).

A round that is not finite on some rank leads nowhere: what the others had sent of it they send
again, and the rank that has failed goes on from the anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.bucket import LARGEST
from adaptive.config import Settings
from adaptive.exchange.choice import Strategy
from adaptive.exchange.collectives import Exchange
from adaptive.exchange.strategies import Outgoing, Rounds
from adaptive.local_steps import Arrival, LocalSteps, as_flat, split
from adaptive.memory.error_feedback import NoMemory, Residual
from adaptive.parameters import ModelParameter
from adaptive.reducer import OnGradient
from compressors.kernels import all_finite
from compressors.kernels.blocks import Flag, either, fill_if


class KeptByParameters(NoMemory):
    """Error feedback whose residual is in the rank's own parameters: there is no other to keep."""

    name = Residual.name


class DelayedAveraging(LocalSteps):
    """The anchor, and the exchanges that are under way, of ranks that step with a delay.

    Of what has arrived or will, `due` is how many backwards there are from the one under way until
    the step that it comes before, this one included; `then` what this rank has sent of it.

    feeds_back: what is not sent waits. Otherwise all that a rank had to send counts as sent.
    on_mean: is told the mean of each parameter when that moves it, if it is to be.
    """

    at_rest = 1  # what is under way stays so, whoever wants the mean of the parameters

    def __init__(
        self, parameters: Sequence[ModelParameter], settings: Settings, feeds_back: bool
    ) -> None:
        super().__init__(parameters, 1, settings)
        self._delay, self._feeds_back = settings.delay, feeds_back
        self.on_mean: OnGradient | None = None
        self._own: dict[int, Tensor] = {}  # by bucket, of the round that begins
        self._rounds = 0
        self._of_rounds: list[dict[tuple[int, str], Tensor]] = [{} for _ in range(self._delay)]

    def begin_exchange(self) -> None:
        """Before the first bucket. What was due before a step that has not come is taken in."""
        for arrival in self._arrived:
            arrival.due -= 1
        self.conclude(0)
        self._rounds += 1  # the round of `delay` rounds ago is over, and its buffers are free
        self._rooms = self._of_rounds[self._rounds % self._delay]

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

    def remembering(self, strategy: Strategy) -> Strategy:
        """The strategy; what this rank hands to it is remembered as sent."""
        if not self._feeds_back:
            return strategy

        def start(exchange: Exchange, out: Outgoing) -> Rounds:
            own = self._own[out.index].zero_()
            for unit, payload in zip(out.units, out.payloads, strict=True):
                sent = unit.compressor.void(payload, out.bucket.poisoned)
                unit.compressor.add_to(own[unit.start : unit.stop], sent)
            return strategy.start(exchange, out)

        return replace(strategy, start=start)

    def under_way(
        self, index: int, parameters: Sequence[ModelParameter], mean: Future[Tensor], overlap: int
    ) -> None:
        """The mean of bucket `index` will be there when it is needed, `overlap` backwards on."""
        self._arrived.append(Arrival(parameters, mean, overlap, self._own.pop(index)))

    @torch.no_grad()
    def conclude(self, due: int | None = None) -> None:
        """Let the means that are due take the place of what this rank has sent of them. due: see
        the class; None: all that are under way are."""
        arrived = [each for each in self._arrived if due is None or each.due <= due]
        self._arrived = [each for each in self._arrived if each not in arrived]
        spoilt: Flag = False
        for arrival in arrived:
            parameters, mean, own = arrival.parameters, arrival.wait(), arrival.then
            assert own is not None
            poisoned = all_finite(mean) ^ True
            spoilt = either(spoilt, poisoned)
            for each in (mean, own):
                fill_if(poisoned, each, 0.0)
            means, moves = split(mean, parameters), split(own.sub_(mean), parameters)
            torch._foreach_sub_([self.anchors[p] for p in parameters], means)
            for p, each, move in zip(parameters, means, moves, strict=True):
                p.tensor.data.copy_(move.add_(as_flat(p.tensor)).view_as(p.tensor))
                if self.on_mean is not None:
                    self.on_mean(p, each, poisoned)
        self._bring_back(spoilt)

    def _bring_back(self, spoilt: Flag) -> None:
        """If what some rank has sent was not finite, or too large: that rank goes on from the
        anchor, and its gradients, which are of where it stood, count for nothing."""
        if spoilt is False:
            return
        for p, anchor in self.anchors.items():
            good = torch.as_tensor(spoilt, device=anchor.device) ^ True
            here, grad = p.tensor.data, p.tensor.grad
            anchor = anchor.view_as(here)
            near = (here.to(anchor.dtype) - anchor).abs() < LARGEST[anchor.dtype]  # nan is not
            here.copy_(torch.where(near | good, here, anchor))
            if grad is not None:
                grad.copy_(torch.where(grad.isfinite() | good, grad, 0.0))


def _finite(x: Tensor) -> Tensor:
    """A copy; what is not finite was not sent."""
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
