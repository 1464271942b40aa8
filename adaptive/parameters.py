"""The parameters that DDP reduces, and what is kept for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Scratch:
    """Named buffers, each as large as the largest that was asked for under its name."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: object, numel: int, like: Tensor) -> Tensor:
        """A flat buffer of `numel` elements with the dtype and device of `like`; contents are
        whatever was left there."""
        key = (name, like.dtype, like.device)
        held = self._buffers.get(key)
        if held is None or held.numel() < numel:
            held = self._buffers[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return held[:numel]


@dataclass(eq=False)
class ModelParameter:
    """What is kept for one parameter, flat. Half-precision parameters are kept in float32.

    residual: allocated at the first compressed step; meaningless unless `filled`.
    velocity: with momentum correction only. started: the velocity has had its first step.
    fresh: that first step was this one (SGD does not dampen it). Both are this rank's own: a rank
    that has not used the parameter has no velocity. stepped: the optimizer has stepped with a mean
    gradient of it, which is so on all ranks or on none. lag: the share of the momentum's lag that
    the velocity moves with (`MomentumRule.with_lag`).
    arrived: when its gradient was ready in the first backward, among all. places: where residual
    and velocity go, if they are to lie next to others'.
    """

    name: str
    tensor: Tensor
    residual: Tensor | None = None
    filled: bool = False
    velocity: Tensor | None = None
    started: bool = False
    fresh: bool = False
    stepped: bool = False
    lag: float = 1.0
    arrived: float = inf
    places: dict[str, Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.tensor.dtype == torch.float64 else torch.float32

    def zeros(self, what: str = "") -> Tensor:
        """what: "residual" or "velocity", if it is to be that."""
        place = self.places.get(what)
        if place is not None:
            return place.zero_()
        return torch.zeros(self.tensor.numel(), dtype=self.dtype, device=self.tensor.device)

    def open_residual(self) -> Tensor:
        """The residual, zero if it was empty."""
        if self.residual is None:
            self.residual = self.zeros("residual")
        elif not self.filled:
            self.residual.zero_()
        self.filled = True
        return self.residual


class ModelParameters(dict[Tensor, ModelParameter]):
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
                    self[p] = ModelParameter(name, p)

    def find(self, param: Tensor) -> ModelParameter:
        """Of a parameter in a bucket. RuntimeError if the model has it not."""
        parameter = self.get(param)
        if parameter is None:
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
            parameter = self[param] = ModelParameter(f"parameter{len(self)}", param)
        return parameter

    def by_name(self) -> dict[str, ModelParameter]:
        return {parameter.name: parameter for parameter in self.values()}

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
