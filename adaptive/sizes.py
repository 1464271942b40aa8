"""How much a step sends at any CF: elements, payload bytes, bytes on the wire."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import ceil

import torch
from torch import Tensor

from adaptive.exchange import gather_wire_bytes, reduce_wire_bytes
from adaptive.exchanges import GATHERED
from adaptive.exchanges.choice import ExchangeChoice
from adaptive.residual import Slot
from compressors import Compressor
from policies import DENSE

BUCKET = 25 * 2**20
"""Bytes of gradients in one of DDP's buckets, by default."""


class Sizes:
    """slots: of the parameters, which may still be found one by one. dense_below: elements.

    hooks: the CFs that foreign hooks send. named: all parameters are known.
    """

    def __init__(
        self,
        slots: Mapping[Tensor, Slot],
        base: Compressor,
        dense_below: int,
        hooks: Collection[float],
        ways: ExchangeChoice,
        world_size: int,
        named: bool,
    ) -> None:
        self._slots = slots
        self._base = base
        self._dense_below = dense_below
        self._hooks = hooks
        self._ways = ways
        self._world_size = world_size
        self._named = named
        self._payload_bytes: dict[float, float] = {}

    def numel(self) -> int:
        """Elements of all gradients."""
        return sum(p.numel() for p in self._slots)

    def floats(self, cf: float) -> float:
        """Elements that a step at `cf` sends, indices not counted."""
        if self._elsewhere(cf):
            return self.numel() / cf
        return self._sum(float, lambda shape: self._base.floats_for(shape, cf))

    def payload_nbytes(self, cf: float) -> float:
        """Bytes handed to the collectives in a step that the base compresses by `cf`."""
        nbytes = self._payload_bytes.get(cf)
        if nbytes is None:
            nbytes = self._sum(
                lambda numel: 4.0 * numel, lambda shape: self._base.payload_nbytes_for(shape, cf)
            )
            if self._named:
                self._payload_bytes[cf] = nbytes
        return nbytes

    def bucket_nbytes(self, cf: float) -> float:
        """Of that, what a bucket has, roughly."""
        return self.payload_nbytes(cf) / ceil(max(1, 4 * self.numel() / BUCKET))

    def wire_bytes(self, cf: float) -> float:
        """Bytes a rank puts on the wire in a step at `cf`, statistics not counted."""
        if self._elsewhere(cf):
            return reduce_wire_bytes(4 * self.numel() / cf, self._world_size)
        gathered = self._ways.pick(self.bucket_nbytes(cf)) is GATHERED
        on_wire = gather_wire_bytes if gathered else reduce_wire_bytes
        return on_wire(self.payload_nbytes(cf), self._world_size)

    def supported(self, cf: float) -> float:
        """The nearest CF that the base or a hook can really do; the base on its largest tensor,
        where it matters most."""
        if self._elsewhere(cf):
            return cf
        largest = max(self._slots, key=Tensor.numel, default=torch.empty(1))
        return self._base.supported_for(cf, tuple(largest.shape))

    def _elsewhere(self, cf: float) -> bool:
        """The base has no part in a step at `cf`."""
        return cf == DENSE or cf in self._hooks

    def _sum(
        self, dense: Callable[[int], float], compressed: Callable[[tuple[int, ...]], float]
    ) -> float:
        """Over the parameters: of the small ones by number of elements, of the others by shape."""
        return sum(
            dense(p.numel()) if p.numel() < self._dense_below else compressed(tuple(p.shape))
            for p in self._slots
        )
