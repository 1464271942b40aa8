"""The layers of a recorded run, as a policy is told of them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from adaptive import Header
from compressors import Compressor
from policies.base import DENSE

LayerBytes = Callable[[str, float], float]


def recorded_layers(
    header: Header | None, base: Compressor | None
) -> tuple[dict[str, int], LayerBytes]:
    """Elements of each layer, and payload bytes of a layer at a CF; no layers without a header.
    base: None for one that is not known, which is taken to send the fewer the larger the CF."""
    shapes = {name: tuple(shape) for name, shape in (header.layers if header else {}).items()}

    def nbytes(layer: str, cf: float) -> float:
        shape = shapes[layer]
        if cf == DENSE or base is None:
            return 4.0 * prod(shape) / cf
        return base.exchanged_nbytes(shape, cf)

    return {name: prod(shape) for name, shape in shapes.items()}, nbytes
