"""What is kept of the parameters of a model that is not there."""

from __future__ import annotations

from collections.abc import Sequence

from adaptive.model.parameters import ModelParameter, ModelParameters


class Parameters(ModelParameters):
    """unused: a step may leave some of them unused."""

    def __init__(self, parameters: Sequence[ModelParameter], unused: bool = False) -> None:
        dict.__init__(self)
        self.update({parameter.tensor: parameter for parameter in parameters})
        self._unused = unused

    def maybe_unused(self) -> bool:
        return self._unused
