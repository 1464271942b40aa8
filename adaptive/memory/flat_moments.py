"""The moments that adaptive optimizers keep of a chunk's parameters, as flat tensors.

`optimizer.state[p]` holds views of them, so that scripts and checkpoints find what they expect.
What is done with moments in a step is then done to flat tensors, whatever the number of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from adaptive.memory.moments import SECOND_MOMENTS, Run, have_noise, is_adaptive
from adaptive.memory.owners import Owner
from adaptive.model.chunks import Chunk
from adaptive.model.parameters import like, local, shaped

MOMENTS = ("step", "exp_avg", *SECOND_MOMENTS)
"""Names in an optimizer's state of a parameter: how many steps it was, and averages over them."""


class FlatMoments:
    """The moments of one chunk's parameters.

    tensors: the flat tensors, by their names in an optimizer's state. Where an optimizer keeps no
    moment of a parameter the elements are zero, and `runs` leaves them out."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.tensors: dict[str, Tensor] = {}
        self._ends = [0, *accumulate(chunk.sizes)]
        self._views: list[dict[str, Tensor]] = []  # for each parameter, by name
        self._seen: list[dict[str, Tensor]] = []  # the same, and tensors that are left out
        self._lengths: list[int] = []  # of the states that were taken in
        self._left_out = False
        self._steps: Tensor | None = None
        self._runs: list[Run] = []
        self._runs_for: tuple[Any, ...] = ()  # all that the runs depend on

    def runs(self, owners: Sequence[Owner]) -> list[Run]:
        """Neighbouring parameters with both moments whose averages move alike. owners: of each of
        the chunk's parameters."""
        self._take_in(owners)
        if self._steps is None:
            return []
        groups = {id(group): group for _, group in owners if "betas" in group}
        settings = {each: _settings(group) for each, group in groups.items()}
        # On a device every parameter has a count of its own, which the host need not know.
        counts = self._steps.tolist() if self._counts_on_host else [0.0] * len(owners)
        ahead = [count - counts[0] for count in counts]
        runs_for = (owners, settings, ahead)
        if runs_for != self._runs_for:
            self._runs, self._runs_for = self._find(owners, settings, counts), runs_for
        return self._runs

    @property
    def _counts_on_host(self) -> bool:
        """Optimizers count their steps there, unless they are capturable or fused."""
        return self._steps is not None and self._steps.device.type == "cpu"

    def _find(
        self, owners: Sequence[Owner], settings: Mapping[int, object], counts: Sequence[float]
    ) -> list[Run]:
        moves_by: list[object] = []
        for (_, group), views, count in zip(owners, self._views, counts, strict=True):
            both = have_noise(views) and "step" in views
            moves_by.append((settings[id(group)], count) if both else None)
        found = []
        for setting, several in groupby(range(len(owners)), key=moves_by.__getitem__):
            places = [*several]
            start, stop = self._ends[places[0]], self._ends[places[-1] + 1]
            if setting is not None and stop > start:
                tensors = {name: flat[start:stop] for name, flat in self.tensors.items()}
                group, first, last = owners[places[0]][1], places[0], places[-1] + 1
                counted = self._counted(first, last)
                found.append(Run(group, start=start, stop=stop, tensors=tensors, **counted))
        return found

    def _counted(self, first: int, last: int) -> dict[str, Any]:
        """How many steps of these parameters there were: `step` of a `Run`, and where a device
        counts them its `sizes` and `ends`."""
        assert self._steps is not None
        if self._counts_on_host:
            return {"step": self._steps[first]}
        ends = torch.tensor(self._ends[first + 1 : last + 1]) - self._ends[first]
        return {
            "step": self._steps[first:last],
            "sizes": self.chunk.sizes[first:last],
            "ends": ends.to(self._steps.device, non_blocking=True),
        }

    def left_out(self, owners: Sequence[Owner]) -> bool:
        """An optimizer keeps a first moment that is not in `tensors`, since its precision or its
        device is not that of the first parameter's."""
        self._take_in(owners)
        return self._left_out

    def _take_in(self, owners: Sequence[Owner]) -> None:
        """Let `tensors` hold what the optimizers keep, and the optimizers keep views of them. All
        of it is made anew if an optimizer keeps another tensor than when it was made last."""
        optimizer, adaptive = None, False
        states: list[dict[str, Any]] = []
        for (of, _), parameter in zip(owners, self.chunk.parameters, strict=True):
            if of is not optimizer:
                optimizer, adaptive = of, is_adaptive(of)
            states.append(of.state.get(parameter.tensor, {}) if adaptive else {})
        if [*map(len, states)] == self._lengths and self._were_seen(states):
            return
        self.tensors, self._steps, self._left_out, self._runs_for = {}, None, False, ()
        self._views, self._seen = [{} for _ in states], [{} for _ in states]
        for i, state in enumerate(states):
            for name in MOMENTS:
                if isinstance(state.get(name), Tensor):
                    self._take(i, name, state)
        self._lengths = [*map(len, states)]

    def _were_seen(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """These states hold the tensors that they held when they were taken in."""
        for state, seen in zip(states, self._seen, strict=True):
            for name, tensor in seen.items():
                if state.get(name) is not tensor:
                    return False
        return True

    def _take(self, i: int, name: str, state: dict[str, Any]) -> None:
        """Replace the tensor of this name in the state of parameter i by a view of a flat one."""
        here, parameter = local(state[name]), self.chunk.parameters[i]
        if name == "step":
            if self._steps is None:
                self._steps = here.new_zeros(len(self._views))
            flat, view = self._steps, self._steps[i]
        else:
            if name not in self.tensors:
                self.tensors[name] = here.new_zeros(self.chunk.numel)
            flat = self.tensors[name]
            view = shaped(flat[self._ends[i] : self._ends[i + 1]], parameter.local.detach())
        if (flat.dtype, flat.device) == (here.dtype, here.device):
            view.copy_(here)
            state[name] = view if name == "step" else like(view, parameter.tensor)
            self._views[i][name] = state[name]
        elif name == "exp_avg":
            self._left_out = True
        self._seen[i][name] = state[name]


def _settings(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*group["betas"], group["eps"], bool(group.get("amsgrad")))
