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

The exchange hides behind one backward, whose gradient is of where the rank stood before.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adaptive.exchange.collectives import Exchange
from adaptive.parameters import ModelParameter
from compressors.kernels import all_finite
from compressors.kernels.blocks import fill_if, is_host

log = logging.getLogger("adaptive")

OUTER_LR, OUTER_MOMENTUM = 1.0, 0.0
"""Better than DiLoCo's 0.7 and 0.9 in runs of some hundred steps (docs/defaults.md)."""

NO_STEP = (
    "local_steps: no optimizer of torch's has stepped since the last exchange, which moves the "
    "parameters only now: what has changed them in between is lost"
)


class LocalSteps:
    """The anchor and the outer optimizer of one model.

    every: local steps between two exchanges, H. outer_lr, outer_momentum: of the outer step, SGD
    with Nesterov momentum: m = outer_momentum m + d, anchor -= outer_lr (d + outer_momentum m),
    with d the mean outer gradient. anchors: what all ranks agree on, flat, in float32 (float64 of
    doubles).
    """

    def __init__(
        self,
        parameters: Sequence[ModelParameter],
        every: int,
        outer_lr: float,
        outer_momentum: float,
    ) -> None:
        self.every = every
        self._lr, self._momentum = outer_lr, outer_momentum
        self._parameters = parameters
        self._own = {p.tensor for p in parameters}
        self.anchors = {p: _flat(p.tensor).to(p.dtype, copy=True) for p in parameters}
        self._moving = {p: p.zeros() for p in parameters} if outer_momentum else {}
        self._rooms: dict[int, Tensor] = {}
        self._arrived: list[tuple[Sequence[ModelParameter], Tensor]] = []
        self._backwards = 0  # since the last exchange began
        me = weakref.proxy(self)  # torch's hook must not keep it alive
        handle: Any = register_optimizer_step_pre_hook(lambda *args: me._before_step(*args))
        self._take_off = weakref.finalize(self, handle.remove)

    @property
    def due(self) -> bool:
        """The backward under way exchanges. Alike on all ranks, which all have done as many."""
        return self._backwards >= self.every

    def backward_ends(self) -> None:
        """At its last bucket."""
        self._backwards = 1 if self.due else self._backwards + 1

    def outer_gradients(self, index: int, parameters: Sequence[ModelParameter]) -> Tensor:
        """Of the parameters of bucket `index`, in its order: flat, in a buffer of its own."""
        if index == 0 and self._arrived:
            log.warning("%s", NO_STEP)
            self._outer_step()
        anchors = [self.anchors[p] for p in parameters]
        room = self._rooms.get(index)
        if room is None or room.numel() != sum(anchor.numel() for anchor in anchors):
            room = torch.cat(anchors)
            if is_host(room.device):  # a device's allocator keeps it
                self._rooms[index] = room
        else:
            torch.cat(anchors, out=room)
        torch._foreach_sub_(_split(room, parameters), [_flat(p.tensor) for p in parameters])
        return room

    def arrived(self, parameters: Sequence[ModelParameter], mean: Tensor) -> None:
        """The mean outer gradient of a bucket is there; not finite if some rank's was not, and then
        its parameters go back to the anchor."""
        self._arrived.append((parameters, mean))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Of any optimizer, the first of this model's moves all of it. args: as torch hands them to
        step hooks, the optimizer first; a closure runs backward before the step."""
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        if not any(p in self._own for p in stepped):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._outer_step()
            return None

        def then_outer_step() -> Any:
            loss = closure()
            self._outer_step()
            return loss

        return args[:1], {**kwargs, "closure": then_outer_step}

    @torch.no_grad()
    def _outer_step(self) -> None:
        """By the means that have arrived, if this is the step after an exchange."""
        arrived, self._arrived = self._arrived, []
        for parameters, mean in arrived:
            anchors = [self.anchors[p] for p in parameters]
            # Nothing moves in a round that is thrown away.
            poisoned = all_finite(mean) ^ True
            fill_if(poisoned, mean, 0.0)
            exchanged = _split(mean != 0, parameters)
            steps = _split(mean, parameters)
            if self._moving:
                moving = [self._moving[p] for p in parameters]
                good = torch.as_tensor(poisoned ^ True, device=mean.device)
                share = good.to(mean.dtype).mul_(self._momentum)
                torch._foreach_mul_(moving, torch.where(good, share, 1.0))
                torch._foreach_add_(moving, steps)
                torch._foreach_addcmul_(steps, moving, [share.expand_as(m) for m in moving])
            torch._foreach_add_(anchors, steps, alpha=-self._lr)
            for p, anchor, here in zip(parameters, anchors, exchanged, strict=True):
                own = anchor
                if p.filled and p.residual is not None:
                    own = anchor - p.residual.masked_fill(here, 0.0)
                    p.residual.mul_(here)
                p.tensor.copy_(own.view_as(p.tensor))
                if p.tensor.grad is not None:  # of where a round has led that is thrown away
                    fill_if(poisoned, p.tensor.grad, 0.0)

    @contextmanager
    def averaged(self, exchange: Exchange) -> Iterator[None]:
        """The model holds the mean of the ranks' parameters (a collective, dense)."""
        self._outer_step()
        own = [p.tensor.detach().clone() for p in self._parameters]
        self._unite(exchange)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, before in zip(self._parameters, own, strict=True):
                    p.tensor.copy_(before)

    def end(self, exchange: Exchange) -> None:
        """All ranks go on from the mean of their parameters (a collective, dense), and without
        local steps."""
        self._take_off()
        self._outer_step()
        self._unite(exchange)
        for p in self._parameters:
            p.filled = False

    @torch.no_grad()
    def _unite(self, exchange: Exchange) -> None:
        for p in self._parameters:
            own = _flat(p.tensor).to(p.dtype, copy=True)
            if p.filled and p.residual is not None:
                own -= p.residual
            own /= exchange.world_size
            exchange.count_floats(own.numel())
            p.tensor.copy_(exchange.all_reduce(own).wait().view_as(p.tensor))

    def state_dict(self) -> dict[str, Any]:
        """By parameter name. Between steps; what has arrived is taken in first."""
        self._outer_step()
        return {
            "backwards": self._backwards,
            "anchors": {p.name: anchor.clone() for p, anchor in self.anchors.items()},
            "moving": {p.name: moving.clone() for p, moving in self._moving.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The parameters themselves, which are this rank's own, are not part of it."""
        self._backwards, self._arrived = state["backwards"], []
        for p, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][p.name])
        for p, moving in self._moving.items():  # zero of a run without outer momentum
            before = state["moving"].get(p.name)
            moving.zero_() if before is None else moving.copy_(before)


def _flat(parameter: Tensor) -> Tensor:
    return parameter.detach().reshape(-1)


def _split(flat: Tensor, parameters: Sequence[ModelParameter]) -> list[Tensor]:
    return list(flat.split([p.tensor.numel() for p in parameters]))
