"""The moments of this rank's optimizers, from one dense step to the next.

While updates are exchanged, moments are those of local gradients, and the momentum share is below
1: the residual has the rest. Before a dense step they become moments of the mean gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.memory.flat_moments import FlatMoments
from adaptive.memory.moments import (
    Run,
    decay_with_share,
    deliver,
    is_adaptive,
    mean_share,
    scale_second_moments,
    undelivered,
)
from adaptive.memory.owners import Owners
from adaptive.model.chunks import Chunk
from policies import state as saved


@dataclass(eq=False)
class MomentState(saved.Stateful):
    """The state of the optimizers' moments since the last dense step.

    ranks_differ: ranks have different moments, and residuals may hold updates. local_squares:
    second moments are those of local gradients, with all of their noise. residuals_hold_gradients:
    residuals hold gradients, not updates, if they are not empty. had_full_momentum: the momentum
    share was 1 in some step. share: the momentum share of the last step, in [0, 1]. muon_steps:
    steps of Muon. uninspected: some optimizer has not been inspected yet (inspection.py).
    gradients_only: some optimizer cannot step with local gradients, so that all steps exchange
    gradients."""

    ranks_differ: bool = saved.saved(False)
    local_squares: bool = saved.saved(False)
    residuals_hold_gradients: bool = saved.saved(False)
    had_full_momentum: bool = saved.saved(False)
    share: float = saved.saved(1.0)
    muon_steps: int = saved.saved(0)
    uninspected: bool = saved.saved(False)
    gradients_only: bool = saved.saved(False)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        saved.require(0 <= self.share <= 1, f"'share' must be in [0, 1], got {self.share!r}")
        steps = self.muon_steps
        saved.require(steps >= 0, f"'muon_steps' must be at least 0, got {steps!r}")


class OwnMoments:
    """First and second moments of the parameters that some optimizer steps.

    owners: the optimizer of each parameter. ranks: world size. old_means: copies of first moments
    (flat) from before a step without momentum, which overwrites first moments with gradients."""

    def __init__(self, owners: Owners, ranks: int) -> None:
        self.state = MomentState()
        self.old_means: dict[Chunk, Tensor] = {}
        self._of, self._ranks = owners, ranks
        self._flats: dict[Chunk, FlatMoments] = {}

    def runs(self, chunk: Chunk) -> list[Run]:
        """The moments of those of a chunk's parameters that have both moments."""
        return self._flat(chunk).runs(self._of.of_chunk(chunk))

    def _all_runs(self) -> Iterator[Run]:
        for chunk in self._of.chunks:
            yield from self.runs(chunk)

    def _flat(self, chunk: Chunk) -> FlatMoments:
        if chunk not in self._flats:  # drop those of chunks that no longer exist
            kept = {each: flat for each, flat in self._flats.items() if each in self._of.chunks}
            self._flats = {**kept, chunk: FlatMoments(chunk)}
        return self._flats[chunk]

    # -- the momentum share --

    def settings_with_share(
        self, optimizer: Optimizer, groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """Parameter groups for a step with the present momentum share; None: `groups`.
        With share 0 first moments are copied first, since they tell the share of noise."""
        if self.state.share == 1 or not is_adaptive(optimizer):
            return None
        if any(self._flat(chunk).left_out(self._of.of_chunk(chunk)) for chunk in self._of.chunks):
            return None
        changed: list[dict[str, Any]] = []
        without = False
        for group in groups:
            beta1, *beta2 = group.get("betas", (0.0,))
            ours = [p for p in group["params"] if p in self._of]
            if not ours or not beta1:
                changed.append(group)
                continue
            betas = (decay_with_share(beta1, self.state.share), *beta2)
            changed.append({**group, "params": ours, "betas": betas})
            others = [p for p in group["params"] if p not in self._of]
            changed += [{**group, "params": others}] if others else []
            without = self.state.share == 0
        if without:
            self._keep_means(optimizer)
        return changed

    def _keep_means(self, optimizer: Optimizer) -> None:
        """Copy the first moments of an optimizer's chunks to a buffer that is free until the step
        has ended."""
        for chunk in self._of.chunks:
            if all(of is not optimizer for of, _ in self._of.of_chunk(chunk)):
                continue
            mean = self._flat(chunk).tensors.get("exp_avg")
            work = chunk.buffer("work")
            self.old_means[chunk] = work.zero_() if mean is None else work.copy_(mean)

    @torch.no_grad()
    def put_back(self) -> None:
        """After a step without momentum: average the gradients, which are in the place of first
        moments, with the old first moments."""
        for chunk, old_mean in self.old_means.items():
            for run in self.runs(chunk):
                average(run, old_mean, run.inside(run.start, run.stop))
        self.old_means = {}

    def begin_own_steps(self, share: float) -> None:
        """From now on moments are of local gradients, and this is the momentum share."""
        self.state.ranks_differ = True
        if not self.state.local_squares:
            self.state.local_squares = True
            for run in self._all_runs():
                # The second moment of the mean gradient holds 1 / N of the noise.
                of_mean = mean_share(run, self._ranks, self.state.share)
                scale = of_mean.mul_(-self._ranks).add_(1 + self._ranks)
                scale_second_moments(run.tensors, scale)
        self._change_share(share)

    def before_sync(self) -> None:
        """Before an optimizer-state sync: second moments are scaled to those of the mean gradient.
        The momentum share is 1, and momentum takes over the residuals."""
        were_own, self.state.local_squares = self.state.local_squares, False
        for run in self._all_runs() if were_own else ():
            of_mean = mean_share(run, self._ranks, self.state.share)
            scale_second_moments(run.tensors, of_mean)
        self._change_share(1.0, syncs=were_own)

    def _change_share(self, share: float, syncs: bool = False) -> None:
        """Changing the momentum share keeps the pending momentum (the part that later steps will
        still apply) unchanged.

        With a smaller share the residual takes over the part that momentum loses. With a larger
        share, and before an optimizer-state sync, momentum takes over the whole residual, and
        applies it over several steps instead of at once.

        Adam's bias correction makes its first steps as large as later ones, and the pending
        momentum comes on top. A run that started without momentum gets this pending momentum when
        momentum share first is 1. Otherwise it would stay behind a dense run by that much."""
        before, self.state.share = self.state.share, share
        first = not self.state.had_full_momentum
        self.state.had_full_momentum = not first or share == 1
        if before == share and not syncs:
            return
        for chunk in self._of.chunks:
            for run in self.runs(chunk):
                beta1 = run.group["betas"][0]
                if not beta1:
                    continue
                of_mean = mean_share(run, self._ranks, before) if self.state.local_squares else 1.0
                if share < before:
                    waiting = undelivered(run, before, of_mean).mul_(before - share)
                    for parameter, piece in chunk.within(waiting, run.start):
                        parameter.open_residual().add_(piece)
                    continue
                had = 1.0 if first and share == 1 else before
                waiting = undelivered(run, before, of_mean).mul_(had)
                for parameter, piece in chunk.within(waiting, run.start):
                    if parameter.unsent is not None:
                        piece.add_(parameter.unsent)
                    parameter.has_residual = False
                deliver(run, waiting, share, of_mean)


def average(run: Run, before: Tensor, elements: slice) -> None:
    """For some elements of a run whose first moment holds a gradient: replace the gradient by
    its average with `before` (the old first moments of the chunk, flat)."""
    mean = run.mean[elements]
    old = before[run.start : run.stop][elements].to(mean.dtype)
    torch.lerp(old, mean, 1 - run.group["betas"][0], out=mean)
