"""L-GreCo: each layer has a CF of its own, chosen by what compression loses of it.

    torchrun --standalone --nproc-per-node 2 examples/layer_budget.py

Alimohammadi, Markov, Frantar and Alistarh, "L-GreCo: Layerwise-Adaptive Gradient Compression"
(MLSys 2024), algorithm 1: of all choices of a CF for each layer that lose no more of the gradient
than one CF for all layers does, take the one that sends the fewest elements. A dynamic program over
the layers finds it, with the loss in so many equal parts. CGX (Markov and others 2022) puts the
same question.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Plan, Policy, StepReport
from compressors import kept
from policies import Context


class LayerBudget(Policy):
    """L-GreCo. Errors are measured in the first `window` steps of every `interval`, of what is
    compressed: error-fed gradients of all ranks.

    cf: of all layers, whose error is the budget. cfs: what a layer may have, beside `cf`. parts: of
        the budget.
    """

    name = "l-greco"
    layerwise = True

    def __init__(
        self,
        cf: float = 20.0,
        cfs: Sequence[float] = (10.0, 40.0, 80.0, 160.0),
        interval: int = 200,
        window: int = 5,
        parts: int = 1000,
    ) -> None:
        self.cf, self.cfs, self.parts = cf, tuple(sorted({cf, *cfs})), parts
        self.interval, self.window = interval, window

    def start(self, context: Context) -> None:
        self._numels = {layer: prod(shape) for layer, shape in context.layers.items()}
        self._layers = dict.fromkeys(self._numels, self.cf)
        self._step, self._reason = 0, ""
        self._errors: dict[str, dict[float, float]] = defaultdict(dict)

    def candidates(self) -> Sequence[float]:
        return self.cfs

    def plan(self) -> Plan:
        measures = self._step < self.window
        numel = sum(self._numels.values())
        send = numel / sum(self._elements(layer, cf) for layer, cf in self._layers.items())
        probe = self.cfs if measures else ()
        return Plan(send, probe, self._reason, layers=self._layers, by_layer=measures)

    def observe(self, report: StepReport) -> None:
        self._reason = ""
        for layer in self._numels:
            for cf, measured in report.layer_measurements.get(layer, {}).items():
                of = self._errors[layer]
                of[cf] = of.get(cf, 0.0) + measured.error
        self._step += 1
        if self._step == self.window and self._errors:
            self._layers = self._chosen(self._errors)
            self._reason = f"CFs of layers lose as much as CF {self.cf:g} for all"
        if self._step == self.interval:
            self._step = 0
            self._errors = defaultdict(dict)

    def _chosen(self, errors: Mapping[str, Mapping[float, float]]) -> dict[str, float]:
        """The CF of each layer."""
        # Errors are rounded up, each by less than a part: `cf` for all is one of the choices.
        part = sum(of[self.cf] for of in errors.values()) / (self.parts - len(errors)) or 1.0
        # fewest[e]: elements that the layers so far send, if they lose e parts at most.
        fewest = np.zeros(self.parts + 1)
        choices = []
        for layer, of in errors.items():
            rows = np.full((len(self.cfs), self.parts + 1), np.inf)
            for row, cf in zip(rows, self.cfs, strict=True):
                cost = ceil(of[cf] / part)
                if cost <= self.parts:
                    row[cost:] = fewest[: self.parts + 1 - cost] + self._elements(layer, cf)
            choices.append(rows.argmin(axis=0))
            fewest = rows.min(axis=0)
        chosen, left = {}, self.parts
        for layer, choice in zip([*errors][::-1], choices[::-1], strict=True):
            chosen[layer] = self.cfs[choice[left]]
            left -= ceil(errors[layer][chosen[layer]] / part)
        return chosen

    def _elements(self, layer: str, cf: float) -> int:
        return kept(self._numels[layer], cf)

    def state_dict(self) -> dict[str, Any]:
        errors = {layer: [*of.items()] for layer, of in self._errors.items()}
        return {"step": self._step, "layers": self._layers, "errors": errors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._layers = state["step"], dict(state["layers"])
        self._errors = defaultdict(dict, {k: dict(of) for k, of in state["errors"].items()})


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
    model = DDP(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    policy = LayerBudget(interval=50)
    compressor = AdaptiveCompressor("topk", (10, 160), policy=policy).attach(model)
    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for _ in range(200):
        inputs = torch.randn(64, 100, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"L-GreCo: loss {loss.item():.2f}, CF {compressor.cf:.3g}")
        print(f"CFs of layers: {dict(compressor.layer_cfs)}")
        print(compressor.summary())
    compressor.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
