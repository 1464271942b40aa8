"""Before a mean gradient moves the parameters: what the ranks' optimizers keep becomes the same on
all ranks, and what waits in residuals of updates goes to them.

First moments take it (own_moments.py). What no first moment can take (of RMSprop, Adagrad, Muon) is
*late*: the ranks' mean of it moves the parameters in the optimizers' next step, dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adaptive.chunks import Chunk
from adaptive.exchange.collectives import Exchange
from adaptive.memory.owners import Owners
from adaptive.optimizer_states import agree_on_states
from adaptive.parameters import ModelParameter, ModelParameters, like, local, shaped
from compressors.kernels.blocks import Scalar


class Meeting:
    """Meetings of the ranks that step one model.

    owners: who steps a parameter. late: updates by parameter, the same on all ranks."""

    def __init__(self, parameters: ModelParameters, owners: Owners) -> None:
        self._parameters, self._of = parameters, owners
        self.late: dict[Tensor, Tensor] = {}

    def meet(self, exchange: Exchange) -> None:
        """Collectives. First moments have taken what they can."""
        ours = [(p, parameter) for p, parameter in self._parameters.items() if p in self._of]
        states = {parameter: self.state(p) for p, parameter in ours}
        agree_on_states(states, exchange)
        for parameter, state in states.items():
            self._keep(parameter.tensor, state)
        if any(exchange.gather_objects(any(parameter.filled for _, parameter in ours))):
            for chunk in self._of.chunks:
                self._take(chunk, exchange)

    def state(self, p: Tensor) -> dict[str, Any]:
        """The optimizer's of a parameter; of a sharded one with the shards that are here."""
        of = self._of.get(p)
        state: dict[str, Any] = {} if of is None else dict(of[0].state.get(p, {}))
        if not hasattr(p, "to_local"):
            return state
        return {name: local(kept) for name, kept in state.items()}

    @torch.no_grad()
    def deliver(self, learning_rate: Callable[[ModelParameter], Scalar]) -> None:
        """Move the parameters by what is late. learning_rate: that updates are told in."""
        for p in list(self.late):
            late, here = self.late.pop(p), local(p)
            here.sub_(shaped(late, here).to(here.dtype) * learning_rate(self._parameters[p]))

    def put_back(self) -> bool:
        """What is late waits in residuals again; whether there was anything."""
        late, self.late = self.late, {}
        for p, piece in late.items():
            self._parameters[p].open_residual().add_(piece)
        return bool(late)

    def _keep(self, p: Tensor, state: dict[str, Any]) -> None:
        """What another rank's optimizer had, and this rank's has not; numbers."""
        if not state:
            return
        own = self._of[p][0].state[p]
        for name, kept in state.items():
            if name in own and not isinstance(kept, float):
                continue
            own[name] = like(kept, p) if isinstance(kept, Tensor) and kept.dim() else kept

    def _take(self, chunk: Chunk, exchange: Exchange) -> None:
        waiting = chunk.room("work")
        for parameter, piece in zip(chunk.parameters, chunk.split(waiting), strict=True):
            if parameter.filled and parameter.residual is not None:
                piece.copy_(parameter.residual)
            else:
                piece.zero_()
            parameter.filled = False
        mean = exchange.total(waiting.div_(exchange.world_size)).wait().clone()
        means = zip(chunk.parameters, chunk.split(mean), strict=True)
        self.late |= {parameter.tensor: piece for parameter, piece in means}
