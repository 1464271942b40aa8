"""The parameters that DDP reduces, and what is kept for each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from adaptive.residual import Slot


class Slots(dict[Tensor, Slot]):
    """By parameter. model: None when the hook was registered without one; parameters are then
    found one by one, and have no names."""

    def __init__(self, model: DistributedDataParallel | None) -> None:
        super().__init__()
        self._model = model
        if model is not None:
            # DDP looks parameters of the outermost module up as ".name", so never ignores those.
            ignored = model.parameters_to_ignore
            for name, p in model.module.named_parameters():
                if p.requires_grad and (name if "." in name else f".{name}") not in ignored:
                    self[p] = Slot(name, p)

    def find(self, param: Tensor) -> Slot:
        """Of a parameter in a bucket. RuntimeError if the model has it not."""
        slot = self.get(param)
        if slot is None:
            if self._model is not None:
                names = {p: name for name, p in self._model.module.named_parameters()}
                if param in names:
                    raise RuntimeError(
                        f"DDP still reduces {names[param]}, which was frozen when the compressor "
                        f"was attached: freeze parameters before DDP(model)"
                    )
                raise RuntimeError(
                    "the bucket holds a parameter that the bound model has not: one compressor "
                    "serves one model"
                )
            slot = self[param] = Slot(f"parameter{len(self)}", param)
        return slot

    def by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.values()}

    def own(self) -> set[Tensor]:
        """All parameters of the model, also those that DDP ignores."""
        return set(self if self._model is None else self._model.parameters())

    def maybe_unused(self) -> bool:
        """A step may leave some of them without a gradient on all ranks."""
        model = self._model
        return model is None or model.find_unused_parameters or model.static_graph

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self), torch.device("cpu"))
