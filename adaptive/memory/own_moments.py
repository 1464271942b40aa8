"""The moments of this rank's optimizers, from one dense step to the next.

While updates are exchanged, moments are those of local gradients, and the momentum share is below
1: the residual has the rest of the pending momentum. Before a dense step they become moments of the
mean gradient.

`FlatMoments` are the moments of a chunk's parameters as flat tensors. `optimizer.state[p]` holds
views of the flat tensors, so that scripts and checkpoints find the tensors that they expect. The
operations of a step act on flat tensors, so their number does not grow with that of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.optim import NAdam, Optimizer, RAdam

from adaptive.memory.handover import Group, Groups, steps_as, with_settings
from adaptive.memory.moments import (
    SECOND_MOMENTS,
    Run,
    assumed_share,
    decay_of,
    decay_with_share,
    deliver,
    have_noise,
    is_adaptive,
    keeps_no_mean,
    mean_share,
    pending,
    scale_second_moments,
    scale_without_mean,
    weight_of_mean,
)
from adaptive.memory.optimizer_steps import Owner, Owners
from adaptive.model.chunks import Chunk
from adaptive.model.parameters import like, local, shaped
from adaptive.network.pipeline import read_here
from policies import state as saved

MOMENTS = ("step", "exp_avg", *SECOND_MOMENTS)
"""Names in an optimizer's state of a parameter: the number of steps, and averages over steps."""


NO_MOMENTUM = 1e-30
"""RMSprop's momentum in a step without momentum. With 0 it would keep no buffer for later steps."""


class FlatMoments:
    """The moments of one chunk's parameters.

    tensors: the flat tensors, by their names in an optimizer's state. The elements of parameters
    without this moment are zero, and `runs` leaves them out."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.tensors: dict[str, Tensor] = {}
        self._ends = [0, *accumulate(chunk.sizes)]
        self._views: list[dict[str, Tensor]] = []  # for each parameter, by name
        self._seen: list[dict[str, Tensor]] = []  # the views, and tensors that are left out
        self._lengths: list[int] = []  # of the states that `_take_in` has read
        self._left_out = False
        self._steps: Tensor | None = None
        self._runs: list[Run] = []
        self._runs_for: tuple[Any, ...] = ()  # all that the runs depend on

    def runs(self, owners: Sequence[Owner]) -> list[Run]:
        """The runs of the chunk: neighbouring parameters that have both moments, with equal decays,
        settings and step counts. owners: the owner of each of the chunk's parameters."""
        self._take_in(owners)
        if self._steps is None:
            return []
        groups = {id(group): (of, group) for of, group in owners if "betas" in group}
        grouped = [id(group) for _, group in owners]  # `==` of groups would compare tensors
        settings = {
            each: (
                *(group["betas"], group["eps"], bool(group.get("amsgrad"))),
                *(steps_as(of, RAdam), steps_as(of, NAdam), group.get("momentum_decay")),
            )
            for each, (of, group) in groups.items()
        }
        # On a device every parameter has its own step count, which the host does not read.
        counts = self._steps.tolist() if self._counts_on_host else [0.0] * len(owners)
        ahead = [count - counts[0] for count in counts]
        runs_for = (grouped, settings, ahead)
        if runs_for != self._runs_for:
            self._runs, self._runs_for = self._find(owners, settings, counts), runs_for
        return self._runs

    @property
    def _counts_on_host(self) -> bool:
        """Step counts are on the host, unless an optimizer is capturable or fused."""
        return self._steps is not None and self._steps.device.type == "cpu"

    def _find(
        self, owners: Sequence[Owner], settings: Mapping[int, object], counts: Sequence[float]
    ) -> list[Run]:
        moves_by: list[object] = []
        for (_, group), views, count in zip(owners, self._views, counts, strict=True):
            both = have_noise(views) and "step" in views
            moves_by.append((settings[id(group)], count) if both else None)
        found = []
        for setting, several in groupby(range(len(owners)), key=moves_by.__getitem__):
            places = [*several]
            start, stop = self._ends[places[0]], self._ends[places[-1] + 1]
            if setting is not None and stop > start:
                tensors = {name: flat[start:stop] for name, flat in self.tensors.items()}
                (of, group), first, last = owners[places[0]], places[0], places[-1] + 1
                more: dict[str, Any] = {
                    "rectified": steps_as(of, RAdam),
                    "nesterov": steps_as(of, NAdam),
                }
                more |= self._counted(first, last)
                found.append(Run(group, start=start, stop=stop, tensors=tensors, **more))
        return found

    def _counted(self, first: int, last: int) -> dict[str, Any]:
        """The fields of a `Run` about step counts: `step`; if a device counts steps, also `sizes`
        and `ends`."""
        assert self._steps is not None
        if self._counts_on_host:
            return {"step": self._steps[first]}
        ends = torch.tensor(self._ends[first + 1 : last + 1], device="cpu") - self._ends[first]
        return {
            "step": self._steps[first:last],
            "sizes": self.chunk.sizes[first:last],
            "ends": ends.to(self._steps.device, non_blocking=True),
        }

    def left_out(self, owners: Sequence[Owner]) -> bool:
        """Whether an optimizer keeps a first moment that is not in `tensors`, because its precision
        or its device is not that of the first parameter's moment."""
        self._take_in(owners)
        return self._left_out

    def _take_in(self, owners: Sequence[Owner]) -> None:
        """Copy the optimizers' moments to `tensors`, and replace them by views of `tensors`. Does
        nothing if the optimizers still hold the tensors that they held after the last call."""
        optimizer, adaptive = None, False
        states: list[dict[str, Any]] = []
        for (of, _), parameter in zip(owners, self.chunk.parameters, strict=True):
            if of is not optimizer:
                optimizer, adaptive = of, is_adaptive(of)
            states.append(of.state.get(parameter.tensor, {}) if adaptive else {})
        if [*map(len, states)] == self._lengths and self._were_seen(states):
            return
        self.tensors, self._steps, self._left_out, self._runs_for = {}, None, False, ()
        self._views, self._seen = [{} for _ in states], [{} for _ in states]
        for i, state in enumerate(states):
            for name in MOMENTS:
                if isinstance(state.get(name), Tensor):
                    self._take(i, name, state)
        self._lengths = [*map(len, states)]

    def _were_seen(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these states hold the tensors that they held after the last `_take_in`."""
        for state, seen in zip(states, self._seen, strict=True):
            for name, tensor in seen.items():
                if state.get(name) is not tensor:
                    return False
        return True

    def _take(self, i: int, name: str, state: dict[str, Any]) -> None:
        """Replace the tensor of this name in the state of parameter i by a view of a flat one."""
        here, parameter = local(state[name]), self.chunk.parameters[i]
        if name == "step":
            if self._steps is None:
                self._steps = here.new_zeros(len(self._views))
            flat, view = self._steps, self._steps[i]
        else:
            if name not in self.tensors:
                self.tensors[name] = here.new_zeros(self.chunk.numel)
            flat = self.tensors[name]
            view = shaped(flat[self._ends[i] : self._ends[i + 1]], parameter.local.detach())
        if (flat.dtype, flat.device) == (here.dtype, here.device):
            view.copy_(here)
            read_here(here)  # the optimizer's stream has allocated it
            state[name] = view if name == "step" else like(view, parameter.tensor)
            self._views[i][name] = state[name]
        elif name == "exp_avg":
            self._left_out = True
        self._seen[i][name] = state[name]


@dataclass(eq=False)
class MomentState(saved.Stateful):
    """The state of the optimizers' moments since the last dense step.

    ranks_differ: ranks have different moments, and residuals may hold updates. local_squares:
    second moments are those of local gradients, with all of their noise. residuals_hold_gradients:
    residuals hold gradients, not updates, if they are not empty. had_full_momentum: the momentum
    share was 1 in some step. share: the momentum share of the last step, in [0, 1]. muon_steps:
    steps of Muon. uninspected: some optimizer has not been inspected yet (inspection.py).
    gradients_only: some optimizer cannot step with local gradients, so that all steps exchange
    gradients. units: see `OptimizerSteps`."""

    ranks_differ: bool = saved.saved(False)
    local_squares: bool = saved.saved(False)
    residuals_hold_gradients: bool = saved.saved(False)
    had_full_momentum: bool = saved.saved(False)
    share: float = saved.saved(1.0)
    muon_steps: int = saved.saved(0)
    uninspected: bool = saved.saved(False)
    gradients_only: bool = saved.saved(False)
    units: dict[str, float] = saved.saved({})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        saved.require(0 <= self.share <= 1, f"'share' must be in [0, 1], got {self.share!r}")
        fits = all(isfinite(unit) and unit >= 0 for unit in self.units.values())
        saved.require(fits, f"'units' must be learning rates, got {self.units!r}")
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
        """The moments of a chunk's parameters that have both moments."""
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

    def settings_with_share(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        """Parameter groups for a step with the present momentum share; None: `groups`.
        With share 0 first moments are copied first, since they tell the share of noise."""
        if self.state.share == 1 or not is_adaptive(optimizer):
            return None
        if any(self._flat(chunk).left_out(self._of.of_chunk(chunk)) for chunk in self._of.chunks):
            return None
        changed: Groups = []
        without = False
        for group in groups:
            decay = decay_of(group)
            if not decay or not any(p in self._of for p in group["params"]):
                changed.append(group)
                continue
            decay = decay_with_share(decay, self.state.share)
            settings: Group = {"betas": (decay, *group["betas"][1:])} if "betas" in group else {}
            settings = settings or {"momentum": max(decay, NO_MOMENTUM)}
            changed += with_settings(group, settings, self._of)
            without = without or (self.state.share == 0 and "betas" in group)
        if without:
            self._keep_means(optimizer)
        return changed

    def _keep_means(self, optimizer: Optimizer) -> None:
        """Copy the first moments of an optimizer's chunks to a buffer that nothing else uses until
        the step has ended."""
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
        before = self._update_scales()
        if not self.state.local_squares:
            self.state.local_squares = True
            for run in self._all_runs():
                # The second moment of the mean gradient holds 1 / N of the noise.
                of_mean = mean_share(run, self._ranks, self.state.share)
                scale = of_mean.mul_(-self._ranks).add_(1 + self._ranks)
                scale_second_moments(run.tensors, scale)
            self._scale_without_mean(1 / assumed_share(self._ranks))
        had = self.state.share
        self._change_share(share)
        self._change_update_momentum(before, had, takes_over=share > had)

    def before_sync(self) -> None:
        """Before an optimizer-state sync: second moments are scaled to those of the mean gradient.
        The momentum share is 1, and momentum takes over the residuals."""
        before, had = self._update_scales(), self.state.share
        were_own, self.state.local_squares = self.state.local_squares, False
        for run in self._all_runs() if were_own else ():
            of_mean = mean_share(run, self._ranks, self.state.share)
            scale_second_moments(run.tensors, of_mean)
        if were_own:
            self._scale_without_mean(assumed_share(self._ranks))
        self._change_share(1.0, syncs=were_own)
        self._change_update_momentum(before, had, takes_over=were_own or had < 1)

    def update_scale(self, of: Optimizer, group: Group) -> float:
        """The factor of the updates of a group without first moments (RMSprop, Adagrad); 1 with
        first moments.

        It corrects the noise in second moments of local gradients, by an assumed share, and keeps
        the sum of a gradient's contributions where RMSprop's momentum is smaller."""
        if not keeps_no_mean(of):
            return 1.0
        decay, local_ = decay_of(group), self.state.local_squares
        of_noise = assumed_share(self._ranks) ** -0.5 if local_ else 1.0
        return of_noise * (1 - decay_with_share(decay, self.state.share)) / (1 - decay)

    def _update_scales(self) -> dict[int, float]:
        """Of each group of an optimizer without first moments, by the group's id."""
        owners = (owner for owner in self._of.distinct if keeps_no_mean(owner[0]))
        return {id(group): self.update_scale(of, group) for of, group in owners}

    def _change_update_momentum(
        self, before: Mapping[int, float], had: float, takes_over: bool
    ) -> None:
        """As `_change_share`, of RMSprop's momentum, a decaying sum of updates. It has no bias
        correction, so a run that began without it is not behind.

        before, had: the update scales and the momentum share until now. takes_over: momentum takes
        over the whole residual."""
        share, scales = self.state.share, self._update_scales()
        if not takes_over and (scales, share) == (before, had):
            return
        for p, (of, group) in self._of.items():
            decay = decay_of(group) if id(group) in scales else 0.0
            momentum = of.state[p].get("momentum_buffer") if decay and p in of.state else None
            if momentum is None:
                continue
            parameter, momentum = self._of.parameter(p), local(momentum)
            old, new, length = before[id(group)], scales[id(group)], decay / (1 - decay)
            if takes_over:
                waiting = momentum * (old * had * length)
                if parameter.unsent is not None:
                    waiting.add_(shaped(parameter.unsent, parameter.local.detach()))
                parameter.has_residual = False
                momentum.copy_(waiting.div_(new * share * length))
                continue
            if share < had:
                residual = shaped(parameter.open_residual(), parameter.local.detach())
                residual.add_(momentum, alpha=old * (had - share) * length)
            momentum.mul_(old / new)

    def _scale_without_mean(self, factor: float) -> None:
        for p, (of, _) in self._of.items():
            if keeps_no_mean(of):
                scale_without_mean(of.state.get(p, {}), factor)

    def _change_share(self, share: float, syncs: bool = False) -> None:
        """Changing the momentum share keeps the pending momentum (the part that later steps will
        still apply) unchanged.

        With a smaller share the residual takes over the part that momentum loses. With a larger
        share, and before an optimizer-state sync, momentum takes over the whole residual, and
        applies it over several steps instead of at once.

        Adam's bias correction makes its first steps as large as later ones, and the pending
        momentum comes on top. A run that started without momentum gets this pending momentum when
        its momentum share first is 1. Otherwise it would stay behind a dense run by that much."""
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
                    lost = weight_of_mean(run, before) - weight_of_mean(run, share)
                    for parameter, piece in chunk.within(pending(run, lost, of_mean), run.start):
                        parameter.open_residual().add_(piece)
                    continue
                had = weight_of_mean(run, 1.0 if first and share == 1 else before)
                waiting = pending(run, had, of_mean)
                for parameter, piece in chunk.within(waiting, run.start):
                    if parameter.unsent is not None:
                        piece.add_(parameter.unsent)
                    parameter.has_residual = False
                deliver(run, waiting, weight_of_mean(run, share), of_mean)


def average(run: Run, before: Tensor, elements: slice) -> None:
    """For some elements of a run whose first moment holds a gradient: replace the gradient by
    its average with `before` (the old first moments of the chunk, flat)."""
    mean = run.mean[elements]
    old = before[run.start + elements.start : run.start + elements.stop].to(mean.dtype)
    torch.lerp(old, mean, 1 - run.group["betas"][0], out=mean)
