"""How much a step sends at any CF: elements, payload bytes, bytes on the wire."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from adaptive.bucket import StepCFs
from adaptive.exchange.collectives import gather_wire_bytes, reduce_wire_bytes
from adaptive.exchange.strategies import GATHERED, ExchangeChoice
from adaptive.parameters import ModelParameter
from compressors import Compressor
from policies import DENSE

BUCKET = 25 * 2**20
"""Bytes of gradients in one of DDP's buckets, by default."""


_ONE = torch.Size([1])


class _Unit(NamedTuple):
    """A tensor at a CF. exact: it travels uncompressed in a step that compresses."""

    shape: torch.Size
    cf: float
    exact: bool


class Sizes:
    """How many elements and bytes a step sends at each CF.

    parameters: may still be found one by one. joined: those of a bucket are compressed as one;
    policies are told the bytes of a model that is a single bucket, which is next to the same and
    never changes. dense_below: elements. hooks: the CFs that foreign hooks send. named: all
    parameters are known.
    """

    def __init__(
        self,
        parameters: Mapping[Tensor, ModelParameter],
        base: Compressor,
        joined: bool,
        dense_below: int,
        hooks: Collection[float],
        choice: ExchangeChoice,
        world_size: int,
        named: bool,
    ) -> None:
        self._parameters = parameters
        self._base = base
        self._joined = joined
        self._buckets: dict[int, Sequence[ModelParameter]] = {}
        self._dense_below = dense_below
        self._hooks = hooks
        self._choice = choice
        self._world_size = world_size
        self._named = named
        self._payload_bytes: dict[float, float] = {}
        self._by_name: dict[str, ModelParameter] = {}

    def see(self, index: int, parameters: Sequence[ModelParameter], joined: bool) -> None:
        """What a bucket of this step holds, and whether it is compressed as one."""
        if index == 0:
            self._buckets = {}
        self._buckets.update({index: parameters} if joined else {})

    def numel(self) -> int:
        """Elements of all gradients."""
        return sum(p.numel() for p in self._parameters)

    def floats(self, cfs: StepCFs) -> float:
        """Elements that a step sends, indices not counted."""
        if self._elsewhere(cfs.send):
            return self.numel() / cfs.send
        return sum(
            float(unit.shape.numel()) if unit.exact else self._base.floats_for(unit.shape, unit.cf)
            for unit in self._units(cfs, self._buckets.values())
        )

    def layers(self) -> dict[str, int]:
        """Elements of each parameter that is compressed by itself, by name; empty if they are not
        known."""
        parameters = self._parameters.values() if self._named and not self._joined else ()
        numels = {parameter.name: parameter.tensor.numel() for parameter in parameters}
        return {name: numel for name, numel in numels.items() if numel >= max(1, self._dense_below)}

    def shapes(self, layers: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Of the parameters with these names."""
        parameters = self._parameters.values()
        return {
            parameter.name: tuple(parameter.tensor.shape)
            for parameter in parameters
            if parameter.name in layers
        }

    def layer_nbytes(self, layer: str, cf: float) -> float:
        """Payload bytes of one parameter at `cf`."""
        if layer not in self._by_name:
            self._by_name = {parameter.name: parameter for parameter in self._parameters.values()}
        return self._nbytes(self._unit(self._by_name[layer], cf))

    def payload_nbytes(self, cf: float) -> float:
        """Bytes handed to the collectives in a step that the base compresses by `cf`, all layers
        alike."""
        nbytes = self._payload_bytes.get(cf)
        if nbytes is None:
            nbytes = sum(map(self._nbytes, self._units(StepCFs(cf), self._whole())))
            if self._named:
                self._payload_bytes[cf] = nbytes
        return nbytes

    def bucket_nbytes(self, cfs: StepCFs) -> float:
        """Bytes of a bucket's payloads in a step, roughly."""
        nbytes = self.payload_nbytes(cfs.send)
        for layer, cf in cfs.sent_layers.items():
            nbytes += self.layer_nbytes(layer, cf) - self.layer_nbytes(layer, cfs.send)
        return nbytes / ceil(max(1, 4 * self.numel() / BUCKET))

    def wire_bytes(self, cf: float) -> float:
        """Bytes a rank puts on the wire in a step at `cf`, statistics not counted."""
        if self._elsewhere(cf):
            return reduce_wire_bytes(4 * self.numel() / cf, self._world_size)
        gathered = self._choice.pick(self.bucket_nbytes(StepCFs(cf))) is GATHERED
        on_wire = gather_wire_bytes if gathered else reduce_wire_bytes
        return on_wire(self.payload_nbytes(cf), self._world_size)

    def supported(self, cf: float) -> float:
        """The nearest CF that the base or a hook can really do; the base on the largest that it
        compresses, where it matters most."""
        if self._elsewhere(cf):
            return cf
        shapes = [unit.shape for unit in self._units(StepCFs(cf), self._whole()) if not unit.exact]
        largest = max(shapes, key=lambda shape: shape.numel(), default=_ONE)
        return self._base.supported_for(cf, largest)

    def _elsewhere(self, cf: float) -> bool:
        """The base has no part in a step at `cf`."""
        return cf == DENSE or cf in self._hooks

    def _whole(self) -> Sequence[Collection[ModelParameter]]:
        return [self._parameters.values()] if self._joined else []

    def _units(
        self, cfs: StepCFs, joined: Collection[Collection[ModelParameter]]
    ) -> Iterator[_Unit]:
        """What a step compresses or sends as it is, one by one. joined: what is compressed as one;
        if nothing is, all parameters are by themselves."""
        for parameters in joined or [[parameter] for parameter in self._parameters.values()]:
            units = [self._unit(parameter, cfs.sent(parameter.name)) for parameter in parameters]
            yield from (unit for unit in units if unit.exact or len(parameters) == 1)
            together = sum(u.shape.numel() for u in units if not u.exact and len(parameters) > 1)
            if together:
                yield _Unit(torch.Size([together]), cfs.send, False)

    def _unit(self, parameter: ModelParameter, cf: float) -> _Unit:
        exact = cf == DENSE or parameter.tensor.numel() < self._dense_below
        return _Unit(parameter.tensor.shape, cf, exact)

    def _nbytes(self, unit: _Unit) -> float:
        if unit.exact:
            return 4.0 * unit.shape.numel()
        return self._base.payload_nbytes_for(unit.shape, unit.cf)
