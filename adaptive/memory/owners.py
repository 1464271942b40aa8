"""Which optimizer steps each parameter of a model, by which of its parameter groups, and how large
its steps are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from adaptive.memory.muon import is_muon, rate_scale
from adaptive.model.chunks import Chunk, chunked
from adaptive.model.parameters import ModelParameters

Owner = tuple[Optimizer, dict[str, Any]]
"""An optimizer, and its parameter group."""


class Owners(dict[Tensor, Owner]):
    """The owner of each parameter: the optimizer that has stepped it last.

    The lookup is remembered until an optimizer's groups change.
    rate_scales: of parameters whose updates are told in another learning rate than their group's,
    that rate as a multiple of the group's."""

    def __init__(self, parameters: ModelParameters, optimizers: Sequence[Optimizer]) -> None:
        super().__init__()
        self._parameters = parameters
        self._groups: dict[Optimizer, list[tuple[int, int]]] = {}  # as they were learned
        self._of_chunk: dict[Chunk, list[Owner]] = {}
        self._groups_of: dict[Chunk, list[dict[str, Any]]] = {}
        self.rate_scales: dict[Tensor, float] = {}
        self.distinct: list[Owner] = []
        self._chunks: list[Chunk] = []
        self._chunked = 0  # the number of their parameters
        for optimizer in optimizers:
            self.learn(optimizer)

    def learn(self, optimizer: Optimizer) -> None:
        """It is about to step its parameters."""
        groups = [(id(group), len(group["params"])) for group in optimizer.param_groups]
        if self._groups.get(optimizer) == groups:
            return
        for group in optimizer.param_groups:
            ours = [p for p in group["params"] if p in self._parameters]
            for p in ours:
                if p in self:
                    self._groups.pop(self[p][0], None)
                self[p] = optimizer, group
                self.rate_scales.pop(p, None)
                if is_muon(optimizer):
                    self.rate_scales[p] = rate_scale(group, p.shape)
        self._groups[optimizer] = groups
        self._of_chunk.clear()
        self._groups_of.clear()
        self.distinct = list({id(group): (of, group) for of, group in self.values()}.values())

    def relearn(self) -> None:
        """Optimizers may have other parameter groups now, as after `load_state_dict`."""
        for optimizer in {of for of, _ in self.distinct}:
            self.learn(optimizer)

    @property
    def known(self) -> Collection[Optimizer]:
        """Those that have been learned."""
        return self._groups.keys()

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The parameters that some optimizer steps, as they are exchanged. Alike on all ranks."""
        if self._chunked != len(self):
            self._chunked = len(self)
            ours = [parameter for p, parameter in self._parameters.items() if p in self]
            self._chunks = chunked(ours)
        return self._chunks

    def of_chunk(self, chunk: Chunk) -> list[Owner]:
        """Of each of its parameters."""
        found = self._of_chunk.get(chunk)
        if found is None:
            found = self._of_chunk[chunk] = [self[p.tensor] for p in chunk.parameters]
        return found

    def groups_of(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The parameter groups of a chunk's parameters, each once."""
        found = self._groups_of.get(chunk)
        if found is None:
            groups = {id(group): group for _, group in self.of_chunk(chunk)}
            found = self._groups_of[chunk] = list(groups.values())
        return found
