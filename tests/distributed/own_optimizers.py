"""Optimizers that torch does not have, as their papers write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


def _steps(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each parameter with a gradient, and its group."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                yield group, p


class _Decaying(Optimizer):
    """Two betas, and a decoupled weight decay."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float) -> None:
        given = {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay}
        super().__init__(params, given)


class Lion(_Decaying):
    """Steps by the sign of a momentum (Chen and others 2023, algorithm 2)."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, lr, weight_decay)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in _steps(self):
            beta1, beta2 = group["betas"]
            state = self.state[p]
            if not state:
                state["exp_avg"] = torch.zeros_like(p)
            mean = state["exp_avg"]
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(torch.lerp(p.grad, mean, beta1).sign_(), alpha=group["lr"])
            mean.lerp_(p.grad, 1 - beta2)


class LARS(SGD):
    """Scales each layer's gradient by the ratio of norms before SGD steps (You and others 2017)."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0, trust: float = 0.02) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.trust = trust

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for _, p in _steps(self):
            if p.dim() > 1:
                p.grad.mul_(self.trust * p.norm() / p.grad.norm().clamp(min=1e-9))
        return super().step(closure)


class LAMB(_Decaying):
    """Adam whose step of each layer is as large as the layer (You and others 2020, algorithm 2)."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02, weight_decay: float = 0.01) -> None:
        super().__init__(params, lr, weight_decay)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in _steps(self):
            update = self._adams(p, group).add_(p, alpha=group["weight_decay"])
            sizes = p.norm(), update.norm()
            ratio = torch.where((sizes[0] > 0) & (sizes[1] > 0), sizes[0] / sizes[1], 1.0)
            p.sub_(update * ratio, alpha=group["lr"])

    def _adams(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(p.grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** state["step"])
        square = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
        return mean.div_(square.sqrt_().add_(1e-8))


class Adam8bit(Optimizer):
    """Adam whose moments are kept in 8 bits, as bitsandbytes and torchao keep them: codes of one
    byte, and a scale for each tensor (Dettmers and others 2022; here with even codes)."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean, root = (decoded(state, name, p) for name in ("mean", "root"))
                mean.lerp_(p.grad, 1 - beta1)
                square = root.square_().lerp_(p.grad.square(), 1 - beta2)
                root = square.sqrt_()
                _encode(state, "mean", mean)
                _encode(state, "root", root)
                # A root of less than a code is none: then the step is that of a root of one code.
                p.sub_(mean / root.clamp(min=float(root.max()) / 127 + 1e-8), alpha=group["lr"])


def decoded(state: dict[str, Any], name: str, p: Tensor) -> Tensor:
    """A moment of `Adam8bit`."""
    if f"{name}_codes" not in state:
        return torch.zeros_like(p)
    return (state[f"{name}_codes"].to(p.dtype) - 128) * (state[f"{name}_scale"] / 127)


def _encode(state: dict[str, Any], name: str, moment: Tensor) -> None:
    scale = moment.abs().max().clamp(min=1e-30)
    state[f"{name}_scale"] = scale.reshape(1)
    state[f"{name}_codes"] = (moment / scale * 127).round_().add_(128).to(torch.uint8)
