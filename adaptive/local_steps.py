"""Local steps: the ranks step by themselves, and now and then exchange how far they have come.

Every H-th backward the *outer gradient* of each parameter, where the ranks stood alike last (the
anchor) minus where this rank stands now, takes the gradient's place in the hook: it is compressed
and exchanged as a gradient would be, while backward goes on. In between nothing is sent. DDP always
gets this rank's own gradient back. Before the optimizer's next step an outer step by the mean moves
the anchor, on all ranks alike (DiLoCo: Douillard and others 2023, algorithm 1), and each rank goes
on from there. Of elements that were not exchanged it keeps what it has come to itself: they do not
wait in the residual, as in CSER ("error reset": Xie and others 2020, algorithm 2). So with a plain
outer step an exchange leaves the mean of the ranks' parameters, less residuals, as it is, and
brings them together. In the residual waits what rounding has lost of elements that were exchanged.

The exchange hides behind one backward, whose gradient is of where the rank stood before. With an
*overlap* it has more time (Streaming DiLoCo: Douillard and others 2025, section 2.2): backward does
not wait for it, and while up to so many further steps are computed the network brings one bucket
after the other. Each moves its part of the model before a step that is fixed beforehand, so that
runs can be repeated; what the rank has done in the meantime it keeps.

Ranks that exchange each step may part, and meet again. In both cases a rank holds something that
the others have not got yet. Those that exchange updates keep it in the residual, as updates that
the optimizer multiplies by the learning rate; those that step by themselves have it in their own
parameters. So it is multiplied by the learning rate on the way there, and divided by it on the way
back; before that a dense exchange takes all but the last step, whose learning rate is this one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.config import Settings
from adaptive.exchange.collectives import Exchange
from adaptive.memory.updates import UpdateMemory
from adaptive.optimizer_states import unite_moments
from adaptive.parameters import ModelParameter
from adaptive.state import check_like, flat_tensors
from adaptive.uniting import averaged, unite
from compressors.kernels import all_finite, squared_norms
from compressors.kernels.blocks import Flag, either, fill_if, is_host
from policies.state import require

log = logging.getLogger("adaptive")

OUTER_LR, OUTER_MOMENTUM = 1.0, 0.0
"""Better than DiLoCo's 0.7 and 0.9 in runs of some hundred steps (docs/defaults.md)."""

NO_STEP = (
    "local_steps: no optimizer of torch's has stepped since the last exchange, which moves the "
    "parameters only now: what has changed them in between is lost"
)

AUTO_IS_ONE = (
    "local_steps='auto' needs memory 'updates': an optimizer of all parameters handed over that is "
    "torch's and divides by a second moment, such as AdamW. Without, the ranks exchange in every "
    "step. A number, as in local_steps=4, goes with any optimizer"
)

CHOICES = (1, 2, 4, 8, 16, 32)
"""Numbers of local steps that "auto" chooses from."""


@dataclass(eq=False)
class Arrival:
    """The mean outer gradient of a bucket, there or under way, and how many steps after the last
    exchange its parameters move. then: where they stood when the rank sent its own; None if it has
    not moved since."""

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


class LocalSteps:
    """The anchor and the outer optimizer of one model.

    every: local steps between two exchanges, H, which may change. settings: of the outer step, SGD
    with Nesterov momentum: m = outer_momentum m + d, anchor -= outer_lr (d + outer_momentum m),
    with d the mean outer gradient. anchors: what all ranks agree on, flat, in float32 (float64 of
    doubles). at_rest: which means move the parameters when the mean of these is wanted: see
    `conclude`.
    """

    at_rest: int | None = None

    def __init__(
        self, parameters: Sequence[ModelParameter], every: int, settings: Settings
    ) -> None:
        self.every = every
        self._lr, self._momentum = settings.outer_lr, settings.outer_momentum
        self._parameters = parameters
        self.anchors = {p: as_flat(p.tensor).to(p.dtype, copy=True) for p in parameters}
        self._moving = {p: p.zeros() for p in parameters} if self._momentum else {}
        self._to_anchor = False  # before the next step, which ends all this
        self._rooms: dict[tuple[int, str], Tensor] = {}
        self._arrived: list[Arrival] = []
        self._sent = 0  # elements, of the exchange that has begun last
        self._stepped = True  # an optimizer has, since then
        self._updates: list[ModelParameter] = []  # whose residuals go with the next step
        self._backwards = 0  # since the last exchange began
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that step the parameters

    @property
    def due(self) -> bool:
        """The backward under way exchanges. Alike on all ranks, which all have done as many."""
        return self._backwards >= self.every

    def backward_ends(self) -> None:
        """At its last bucket."""
        self._backwards = 1 if self.due else self._backwards + 1

    def begin_exchange(self) -> None:
        """Before the first bucket. What the last exchange has brought is taken in, if the steps
        before which that was due have not come."""
        if self._arrived and not self._stepped:
            log.warning("%s", NO_STEP)
        self.conclude()
        self._sent, self._stepped = 0, False

    def outer_gradients(self, index: int, parameters: Sequence[ModelParameter]) -> Tensor:
        """Of the parameters of bucket `index`, in its order: flat, in a buffer of its own. A rank
        that has come so far that squares overflow is thrown back to the anchor, as one that has
        come to what is not finite: then all are nan."""
        unsent = self._unsent(index, parameters)
        most = torch.finfo(unsent.dtype).max
        (energy,) = squared_norms([unsent])
        too_large = not energy <= most if is_host(unsent.device) else ~(energy <= most)
        fill_if(too_large, unsent, nan)
        return unsent

    def _unsent(self, index: int, parameters: Sequence[ModelParameter]) -> Tensor:
        room = self._joined(index, "sent", [self.anchors[p] for p in parameters])
        torch._foreach_sub_(split(room, parameters), [as_flat(p.tensor) for p in parameters])
        return room

    def _joined(self, index: int, what: str, tensors: list[Tensor]) -> Tensor:
        """Flat tensors of bucket `index` as one, in the same buffer every time."""
        room = self._rooms.get((index, what))
        if room is not None and room.numel() == sum(tensor.numel() for tensor in tensors):
            return torch.cat(tensors, out=room)
        room = torch.cat(tensors)
        if is_host(room.device):  # a device's allocator keeps it
            self._rooms[index, what] = room
        return room

    def arrived(self, parameters: Sequence[ModelParameter], mean: Tensor) -> None:
        """The mean outer gradient of a bucket is there; not finite if some rank's was not. Then the
        anchor stays, that rank goes back to it, and the others keep what they have not sent."""
        self._arrived.append(Arrival(parameters, mean))

    def under_way(
        self, index: int, parameters: Sequence[ModelParameter], mean: Future[Tensor], overlap: int
    ) -> None:
        """The mean outer gradient of bucket `index` will be there when it is needed: the buckets
        share the steps of the overlap as they share the elements."""
        self._sent += sum(p.tensor.numel() for p in parameters)
        elements = max(1, sum(p.tensor.numel() for p in self._parameters))
        later = -(-overlap * self._sent // elements)
        then = self._joined(index, "then", [as_flat(p.tensor).to(p.dtype) for p in parameters])
        self._arrived.append(Arrival(parameters, mean, 1 + later, then))

    def wait(self) -> None:
        """Until all that is under way is there. It moves nothing yet."""
        for arrival in self._arrived:
            arrival.wait()

    def settle(self) -> None:
        """Until nothing is under way any more, whether it arrives or fails."""
        for arrival in self._arrived:
            with suppress(Exception):  # whoever needs what has failed is told
                arrival.wait()

    @torch.no_grad()
    def part(self, memory: UpdateMemory) -> None:
        """The ranks, which stand alike, part with the next step: what waits in the residuals of
        `memory` as updates becomes a rank's own."""
        memory.part()
        for p in self._parameters:
            if p.filled and p.residual is not None:
                p.residual.mul_(memory.learning_rate(p))
                self._updates.append(p)

    @torch.no_grad()
    def meet(self, memory: UpdateMemory) -> None:
        """The ranks go back to the anchor with the next step: how far each has come from there
        waits in its residual of `memory`, as updates. Where the learning rate is 0 these could move
        nothing, and that is forgotten."""
        memory.meet()
        self.conclude()
        for p in self._parameters:
            residual = p.open_residual().add_(self.anchors[p]).sub_(as_flat(p.tensor))
            lr = memory.learning_rate(p)
            if isinstance(lr, Tensor):
                residual.mul_(torch.where(lr > 0, 1 / lr, 0.0))
            else:
                residual.mul_(1 / lr if lr > 0 else 0.0)
        self._to_anchor = True

    def before_step(self, optimizer: Optimizer) -> None:
        """Of any optimizer of the parameters, the first moves all of them."""
        self._optimizers.add(optimizer)
        self._stepped = True
        self.conclude(self._backwards)

    @torch.no_grad()
    def conclude(self, due: int | None = None) -> None:
        """Do what comes before the optimizer's next step, if that has not come yet: the outer step
        by the means that have arrived, and whatever else moves the parameters. If no step has come
        for long, that is in the middle of a backward, which autograd must not be told of.

        due: steps since the exchange; None: what is not due yet moves them, too."""
        if self._to_anchor:
            for p, anchor in self.anchors.items():
                p.tensor.data.copy_(anchor.view_as(p.tensor))
            self._to_anchor = False
        updates, self._updates = self._updates, []
        for p in updates:
            assert p.residual is not None
            p.tensor.data.sub_(p.residual.view(p.tensor.shape))
            p.filled = False
        arrived = [each for each in self._arrived if due is None or each.due <= due]
        self._arrived = [each for each in self._arrived if each not in arrived]
        spoilt: Flag = False
        for arrival in arrived:
            parameters, mean = arrival.parameters, arrival.wait()
            anchors = [self.anchors[p] for p in parameters]
            # Nothing moves in a round that is thrown away.
            poisoned = all_finite(mean) ^ True
            spoilt = either(spoilt, poisoned)
            fill_if(poisoned, mean, 0.0)
            exchanged = split(mean != 0, parameters)
            steps = split(mean, parameters)
            if self._moving:
                moving = [self._moving[p] for p in parameters]
                good = torch.as_tensor(poisoned ^ True, device=mean.device)
                share = good.to(mean.dtype).mul_(self._momentum)
                torch._foreach_mul_(moving, torch.where(good, share, 1.0))
                torch._foreach_add_(moving, steps)
                torch._foreach_addcmul_(steps, moving, [share.expand_as(m) for m in moving])
            torch._foreach_add_(anchors, steps, alpha=-self._lr)
            since = self._moved_since(arrival, poisoned)
            for p, anchor, here, moved in zip(parameters, anchors, exchanged, since, strict=True):
                own = anchor
                if p.filled and p.residual is not None:
                    own = anchor - p.residual.masked_fill(here, 0.0)
                    p.residual.mul_(here)
                own = own if moved is None else own + moved
                p.tensor.data.copy_(own.view_as(p.tensor))
        self._bring_back(spoilt)

    def _bring_back(self, spoilt: Flag) -> None:
        """If what some bucket has come to is thrown away: the gradients are of there, too. And with
        an overlap other parameters may have followed it meanwhile, or have not been moved back yet:
        what is not finite goes to the anchor."""
        if spoilt is False:
            return
        for p, anchor in self.anchors.items():
            stays = p.tensor.isfinite() | (torch.as_tensor(spoilt, device=anchor.device) ^ True)
            p.tensor.data.copy_(torch.where(stays, p.tensor, anchor.view_as(p.tensor)))
            if p.tensor.grad is not None:
                fill_if(spoilt, p.tensor.grad, 0.0)

    def _moved_since(self, arrival: Arrival, poisoned: Flag) -> Sequence[Tensor | None]:
        """By how much the rank has moved each parameter since it sent what has arrived, unless all
        of that is thrown away, or leads nowhere."""
        if arrival.then is None:
            return [None] * len(arrival.parameters)
        then = split(arrival.then, arrival.parameters)
        for p, moved in zip(arrival.parameters, then, strict=True):
            torch.sub(as_flat(p.tensor).to(p.dtype), moved, out=moved)
            fill_if(poisoned, moved, 0.0)
            moved.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return then

    def averaged(self, exchange: Exchange) -> AbstractContextManager[None]:
        """The model holds the mean of the ranks' parameters (a collective, dense). What is under
        way moves them now, if that changes their mean."""
        self.conclude(self.at_rest)
        return averaged(self._parameters, exchange)

    def unite(self, exchange: Exchange, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
        """All ranks go on from the mean of their parameters, and of what optimizers keep of them (a
        collective, dense). Nothing is under way then, and the anchor is there. Returns the
        optimizers: these, and those that have stepped."""
        self.conclude()
        unite(self._parameters, exchange)
        for optimizer in optimizers:  # it may not have stepped since a state was loaded
            self._optimizers.add(optimizer)
        optimizers = list(self._optimizers)
        unite_moments(self._parameters, optimizers, exchange)
        for p, anchor in self.anchors.items():
            p.filled = False
            anchor.copy_(as_flat(p.tensor))
        return optimizers

    def state_dict(self) -> dict[str, Any]:
        """By parameter name. Between steps; what is due is taken in first, and what is under way is
        waited for."""
        self.conclude(self._backwards)
        self.wait()
        return {
            "backwards": self._backwards,
            "arrived": {str(i): each.state_dict() for i, each in enumerate(self._arrived)},
            "anchors": {p.name: anchor.clone() for p, anchor in self.anchors.items()},
            "moving": {p.name: moving.clone() for p, moving in self._moving.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The parameters themselves, which are this rank's own, are not part of it."""
        self._backwards, self._updates = state["backwards"], []
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


def check_local_state(
    state: Mapping[str, Any], parameters: Collection[ModelParameter], apart: bool
) -> None:
    """ValueError unless it is a `LocalSteps.state_dict()` of these parameters. apart: the ranks
    stepped by themselves when it was saved; else it has no anchors, and nothing is under way."""
    flat = flat_tensors(parameters)
    like = {"backwards": int, "arrived": Mapping, "anchors": flat, "moving": flat}
    check_like("local", state, like, complete=True)
    arrival = {"due": int, "mean": flat, "then": flat}  # of a bad round not finite
    for each in state["arrived"].values():
        check_like("local: arrived", each, arrival, finite=False, complete=True)
        whole = bool(each["mean"]) and [*each["mean"]] == [*each["then"]]
        require(apart and whole and each["due"] >= 1, "what has arrived has lost something")
    fits = state["anchors"].keys() == (flat.keys() if apart else set())
    fits = fits and state["moving"].keys() in (set(), flat.keys())
    require(fits, "'local' has lost something, or is of ranks that do not step by themselves")


def _on_device(by_name: Mapping[str, ModelParameter], flat: Mapping[str, Tensor]) -> Tensor:
    """Tensors that were loaded, where their parameters are, as one."""
    return torch.cat([each.to(by_name[name].tensor.device) for name, each in flat.items()])


def as_flat(parameter: Tensor) -> Tensor:
    return parameter.detach().reshape(-1)


def split(flat: Tensor, parameters: Sequence[ModelParameter]) -> list[Tensor]:
    return list(flat.split([p.tensor.numel() for p in parameters]))
