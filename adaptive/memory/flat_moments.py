"""The moments that adaptive optimizers keep of a chunk's parameters, as flat tensors.

`optimizer.state[p]` holds views of them, so that scripts and checkpoints find what they expect.
What is done with moments in a step is then done to flat tensors, whatever the number of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.chunks import Chunk
from adaptive.memory.handover import Group
from adaptive.memory.moments import SECOND_MOMENTS, Run, is_adaptive
from adaptive.parameters import like, local, shaped

MOMENTS = ("exp_avg", *SECOND_MOMENTS)

Owners = Mapping[Tensor, tuple[Optimizer, Group]]
"""The optimizer of each parameter, and its parameter group."""


class FlatMoments:
    """Of one chunk. tensors: by their names in an optimizer's state, once there are some.

    What no optimizer keeps is zero, and `runs` leaves it out."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.tensors: dict[str, Tensor] = {}
        self._views: dict[str, list[Tensor | None]] = {}  # as optimizers have them
        self._steps: Tensor | None = None

    def runs(self, owners: Owners) -> list[Run]:
        """Neighbouring parameters with both moments whose averages move alike."""
        settings = self._take_in(owners)
        found, start = [], 0
        numbered = zip(self.chunk.sizes, settings, range(len(settings)), strict=True)
        for setting, several in groupby(numbered, key=lambda each: each[1]):
            sizes, _, places = zip(*several, strict=True)
            stop = start + sum(sizes)
            if setting is not None and stop > start:
                group = owners[self.chunk.parameters[places[0]].tensor][1]
                tensors = {name: flat[start:stop] for name, flat in self.tensors.items()}
                found.append(Run(group, self._step(places, sizes), tensors, start, stop))
            start = stop
        return found

    def _step(self, places: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        assert self._steps is not None
        if self._steps.device.type == "cpu":  # where optimizers keep it unless capturable or fused
            return self._steps[places[0]]
        steps = self._steps[places[0] : places[-1] + 1]
        of = torch.tensor(sizes, device=steps.device)
        return steps.repeat_interleave(of, output_size=sum(sizes))

    def _take_in(self, owners: Owners) -> list[tuple[Any, ...] | None]:
        """Make views of what optimizers keep. For each parameter what its averages move by; None
        of one without both moments."""
        present: list[tuple[Any, ...] | None] = []
        for i, parameter in enumerate(self.chunk.parameters):
            optimizer, group = owners[parameter.tensor]
            state = optimizer.state.get(parameter.tensor) if is_adaptive(optimizer) else None
            state = state or {}
            names = [name for name in MOMENTS if self._take(i, name, state)]
            whole = "exp_avg" in names and "exp_avg_sq" in names
            if not whole or not self._take_step(i, state):
                present.append(None)
                continue
            of = (*group["betas"], group["eps"], bool(group.get("amsgrad")))
            present.append((*names, *of))
        if self._steps is None or self._steps.device.type != "cpu":
            return present
        steps = self._steps.tolist()
        return [None if p is None else (*p, n) for p, n in zip(present, steps, strict=True)]

    def _take(self, i: int, name: str, state: Any) -> bool:
        """Whether the optimizer keeps a moment of this name, which now is ours."""
        kept = state.get(name)
        views = self._views.setdefault(name, [None] * len(self.chunk.parameters))
        if kept is not None and kept is views[i]:
            return True
        parameter, flat = self.chunk.parameters[i], self.tensors.get(name)
        start = sum(self.chunk.sizes[:i])
        if kept is None:
            if flat is not None and views[i] is not None:
                flat[start : start + self.chunk.sizes[i]].zero_()
            views[i] = None
            return False
        here = local(kept)
        if flat is None:
            flat = torch.zeros(self.chunk.numel, dtype=here.dtype, device=here.device)
            self.tensors[name] = flat
        if flat.dtype != here.dtype or flat.device != here.device:
            return False
        view = shaped(flat[start : start + self.chunk.sizes[i]], parameter.local.detach())
        view.copy_(here)
        views[i] = state[name] = like(view, parameter.tensor)
        return True

    def _take_step(self, i: int, state: Any) -> bool:
        """The same of the number of steps."""
        kept = state.get("step")
        views = self._views.setdefault("step", [None] * len(self.chunk.parameters))
        if kept is None or kept is views[i]:
            return kept is not None
        if self._steps is None:
            self._steps = torch.zeros(len(views), dtype=kept.dtype, device=kept.device)
        if self._steps.dtype != kept.dtype or self._steps.device != kept.device:
            return False
        view = self._steps[i]
        view.copy_(kept)
        views[i] = state["step"] = view
        return True
