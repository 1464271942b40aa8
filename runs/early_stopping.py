"""Early stopping (`--patience`), as in Harris's experiments."""

from __future__ import annotations

from copy import deepcopy
from math import isnan
from typing import Any

import torch.distributed as dist
from torch import nn


class EarlyStopping:
    """This stops a run whose quality has not become better in `patience` evaluations in a row, and
    keeps the model that had the best one (Prechelt 1998). A patience of 0 does neither.

    Rank 0 evaluates, so rank 0 notes, and the others hear from it. stopped: on all ranks, whether
    the run is to end. best, step: the best quality, and after how many steps; on rank 0, which also
    has the model.
    """

    def __init__(self, patience: int, higher_is_better: bool) -> None:
        self.patience = patience
        self.stopped = False
        self.best: float | None = None
        self.step = 0
        self._sign = 1 if higher_is_better else -1
        self._since = 0  # evaluations since the best one
        self._model: dict[str, Any] = {}

    def note(self, step: int, quality: float, model: nn.Module) -> None:
        """The model's quality after so many steps. One that is not a number is no better."""
        if not self.patience:
            return
        better = self.best is None or self._sign * (quality - self.best) > 0
        if better and not isnan(quality):
            self.best, self.step, self._since = quality, step, 0
            self._model = deepcopy(model.state_dict())
        else:
            self._since += 1

    def agree(self) -> None:
        """Tell all ranks whether it stops: a collective, unless the patience is 0."""
        if self.patience:
            said = [self._since]
            dist.broadcast_object_list(said, src=0)
            self._since = said[0]
            self.stopped = self._since >= self.patience

    def take_best(self, step: int, model: nn.Module) -> float | None:
        """Give the model, which has done so many steps, the weights of the best one; the quality
        that it has then, or None if it is the best itself."""
        if self.best is None or self.step == step:
            return None
        model.load_state_dict(self._model)
        return self.best

    def why(self) -> str:
        """Why it has stopped, in words; "" if it has not."""
        if not self.stopped:
            return ""
        times = "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations in a row"
        return f"{times} brought nothing better than that after step {self.step}"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "step": self.step, "since": self._since, "model": self._model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.step, self._since = state["best"], state["step"], state["since"]
        self._model = state["model"]
        self.stopped = 0 < self.patience <= self._since
