"""The watch over gradients between `backward()` and `optimizer.step()`.

With momentum correction `p.grad` holds velocities. A script that clips or unscales `p.grad` expects
gradients in it. The watch notices such a change by comparing `p.grad` at the end of backward and
before the step. A script that runs a second backward before the step expects gradients, too: the
watch notices that `p.grad` still holds velocities when a gradient arrives. No comparison waits for
a device. torch's hooks around every optimizer's step call the watch, which calls the session.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from adaptive.memory.handover import (
    closure_of,
    is_torchs_own,
    stand_in_for,
    when_gradients_are_there,
)
from adaptive.model.parameters import is_dense, local, parameters_of, storage_of
from compressors.kernels import kernels_for
from policies.state import read

log = logging.getLogger("adaptive")

CHANGED = (
    "p.grad was changed between backward() and optimizer.step() (clip_grad_norm_, GradScaler, "
    "weight decay by hand, a second backward() outside no_sync(), as SAM's?), where with momentum "
    "correction it holds velocities, not gradients"
)
OTHER_OPTIMIZER = (
    "{} has stepped parameters of the SGD that was handed over, and cannot take its place, because "
    "with momentum correction p.grad holds velocities, not gradients"
)
FALLEN_BACK = (
    "from now on plain error feedback is used and the optimizer applies its momentum itself (an "
    "SGD a shorter one while gradients are compressed). To keep momentum correction, clip by "
    "memory=Momentum(clip_norm=...), hand a GradScaler over, attach(..., scaler=scaler), and run "
    "all but the last backward() of a step under no_sync()"
)
UNSCALED = (
    "gradients were divided by a power of two between backward() and optimizer.step(), as a "
    "GradScaler does: hand it over, attach(..., scaler=scaler), or the residual stays in the scale "
    "of an earlier step"
)
_WATCHES: dict[int, weakref.ref[StepWatch]] = {}
"""The watches that have started and not ended, by id."""

_HOOKS: list[Any] = []
"""Handles of torch's hooks around every optimizer's step, while there is a watch."""

FEW = 3
"""About how many parameters have their gradients compared in every step."""

SAMPLE = 4096
"""How many elements of each gradient are compared: the first ones in memory."""

FAR = 0.1
"""A move of the parameters between two steps by more than this share of their norm means that the
script has replaced them (by a checkpoint, say)."""

_TOLERANCE = 1e-5
"""Relative change of a norm that counts as a change: above rounding, below any deliberate one."""

_EXACT = 1e-9
"""How near a power of two a quotient of norms (float64) must be, by its logarithm. A scaler's
division rounds nothing. Clipping, whose factor may be anything, comes as near as `_TOLERANCE` in
one of 50,000 steps."""


class StepWatch:
    """Watches the gradients of one model, from the end of a synchronised backward to the step.

    parameters: those that DDP reduces. few: those whose gradients are compared in every step. ours:
    this library's hook has made the gradients in `p.grad`; False once a gradient arrives after they
    were cleared, until the hook is called again.
    listener: called in the steps of optimizers that have some of these parameters:
    `step_begins(optimizer)` if the step has a closure; `before_step(optimizer, groups)` when the
    gradients are there, which returns other groups for this step (of an optimizer of torch's own),
    or None; `after_step(optimizer)`.
    """

    def __init__(self, parameters: Collection[Tensor], listener: Any) -> None:
        self._parameters, self._listener = parameters, listener
        self._said: set[str] = set()

    def start(self, moving: Sequence[Tensor]) -> None:
        """Watch, until `end()` is called. moving: the parameters that have momentum to correct."""
        self.ours = False
        self._norms: dict[Tensor, Tensor] = {}  # of the gradients' samples after backward
        # Ids and write counts of the gradients after backward. Writes to `grad.data` are not
        # counted, so the norms of a few gradients are compared in any case.
        self._written: dict[Tensor, tuple[int, int]] = {}
        self._writes = False  # a script has written to gradients: all norms are compared
        # Norms before the hooks of the optimizer's own, which torch calls after this library's.
        self._before_hooks: dict[Tensor, Tensor] = {}
        # The few parameters with a velocity in `p.grad` since backward. Value: whether the velocity
        # was still there when a gradient arrived (0-dim); None: no gradient has arrived.
        self._velocities: dict[Tensor, Tensor | None] = {}
        parameters = list(self._parameters)
        self.few = parameters[:: max(1, len(parameters) // FEW)]
        if {*self.few}.isdisjoint(moving):  # of a group without momentum all, say
            self.few += moving[:1]
        self._scale: Tensor | None = None
        self._found: Tensor | None = None
        # Samples and write counts of a few parameters after the last step.
        together = [p for p in self.few if p.device == self.few[0].device]
        self._sampled = [p for p in together if is_dense(local(p))]
        self._after_last: tuple[Tensor, list[int]] | None = None
        self._samples: list[Tensor] = []  # views, as bytes
        self._places: list[Any] = []  # addresses of these parameters' memory
        self._moved = True  # the script moved parameters far before the last step, or may have
        me = weakref.ref(self)  # torch's hooks must not keep the watch alive

        def arrives(p: Tensor) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                watch = me()
                if watch is not None:
                    watch.gradient_arrives(p)

            return hook

        # The last parameter is among the first that get gradients: it shows that a backward began.
        self._witness = parameters[-1] if parameters else None
        self._device = None if self._witness is None else self._witness.device
        handles: list[Any] = [p.register_hook(arrives(p)) for p in {*self.few, *parameters[-1:]}]
        _WATCHES[id(self)] = me
        if not _HOOKS:
            # If a script has compiled its optimizer's step, the hooks run outside the graph.
            before, after = map(torch.compiler.disable, (before_any_step, _after_any_step))
            _HOOKS.append(register_optimizer_step_pre_hook(before))
            _HOOKS.append(register_optimizer_step_post_hook(after))
        self.end = weakref.finalize(self, _end, id(self), handles)

    def backward_ends(
        self,
        scale: Tensor | None,
        compare: bool,
        waited: Callable[[], None],
        moving: Collection[Tensor] = (),
    ) -> None:
        """To be called in the hook of the last bucket. scale: the loss scale, if the memory knows
        it. compare: remember the gradients, to notice a change before the step. waited: is called
        once DDP has waited for the means. moving: those of `few` with a velocity in `p.grad`."""
        self._scale, self.ours = scale, True
        engine = Variable._execution_engine
        # DDP queues its own callback, which writes the means to the gradients, after this call.
        engine.queue_callback(
            lambda: engine.queue_callback(lambda: self._remember(compare, waited, moving))
        )

    def take_found(self) -> Tensor | None:
        """Called at the end of a backward. Returns a tensor of two numbers, on the gradients'
        device: how often, since the last call, gradients were changed, or added to velocities; and
        how often they were changed as by a `GradScaler` that was not handed over. None if nothing
        was compared."""
        still = [each for each in self._velocities.values() if each is not None]
        if still:
            self._find(torch.stack(still).any())
        found, self._found = self._found, None
        return found

    def state_dict(self) -> dict[str, float]:
        """The two numbers that the next `take_found` returns, of this rank."""
        found = [0.0, 0.0] if self._found is None else self._found.tolist()
        return {"changed": found[0], "unscaled": found[1]}

    def check(self, state: Mapping[str, Any]) -> None:
        """ValueError unless this is a `state_dict()`."""
        for name in ("changed", "unscaled"):
            read(state, name, float)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load a state that `check` has accepted. The script may move the parameters before the
        next step, so they are not compared."""
        found = [state["changed"], state["unscaled"]]
        there = torch.tensor(found, dtype=torch.float64, device=self._device)
        self._found = there if any(found) else None
        self._after_last = None

    def is_new(self, message: str) -> bool:
        """Whether this is the first call with this message."""
        new = message not in self._said
        self._said.add(message)
        return new

    def _remember(
        self, compare: bool, waited: Callable[[], None], moving: Collection[Tensor]
    ) -> None:
        waited()
        self._velocities = dict.fromkeys(moving) if compare else {}
        grads = ((p, p.grad) for p in self._parameters if compare and p.grad is not None)
        self._written = {p: (id(grad), grad._version) for p, grad in grads}
        looked_at = self._parameters if self._writes else self.few
        self._norms = _norms(looked_at) if compare else {}

    def _compare(self, optimizer: Optimizer) -> None:
        """Called before an optimizer reads its gradients: notice gradients that were changed since
        backward. A script may still change the gradients of other optimizers before their steps."""
        stepped = [*parameters_of(optimizer)]
        written = [(p.grad, *self._written.pop(p)) for p in stepped if p in self._written]
        for grad, which, count in written:
            if grad is None or id(grad) != which or grad._version != count:
                self._writes = True
        # A step without any gradient does nothing, as a step that is left out.
        dropped = [grad is None for grad, *_ in written]
        if any(dropped) and not all(dropped):
            self.note_change()
        compared = [p for p in stepped if p in self._norms]
        now = _norms(compared)
        remembered = {p: self._norms.pop(p) for p in compared}
        if not now:
            return
        if self._scale is None and getattr(optimizer, "grad_scale", None) is not None:
            # A fused optimizer divides by the loss scale inside its step.
            both = torch.ones((), device=self._device)
            self._find(both, both)
            return
        before, after = torch.stack([remembered[p] for p in now]), torch.stack(list(now.values()))
        if kernels_for(before).look(lambda: torch.equal(before, after), False):
            return  # as almost always
        same = _same(after, before)
        if self._scale is not None:  # the scaler divides by the scale, before or in the step
            same |= _same(after, before / self._scale)
        halved = _divided_by_a_power_of_two(before, after) & (self._scale is None)
        self._find((~same).any(), halved)

    def note_change(self, times: float = 1.0) -> None:
        """Count an event as a change of gradients, which ends momentum correction on all ranks
        (`take_found`). times: the number to add to the agreed statistic `changed`."""
        self._find(torch.full((), times, dtype=torch.float64, device=self._device))

    def _find(self, changed: Tensor, unscaled: Tensor | None = None) -> None:
        """Add to the numbers that `take_found` returns (both 0-dim; None: 0)."""
        unscaled = torch.zeros_like(changed) if unscaled is None else unscaled
        found = torch.stack([changed, unscaled]).to(torch.float64)
        self._found = found if self._found is None else self._found + found

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self.is_ours(optimizer):
            return when_gradients_are_there(lambda: self._compare(optimizer), args, kwargs)
        self._after_last, self._before_hooks = None, {}
        if closure_of(args, kwargs) is not None:
            self._listener.step_begins(optimizer)
        stepping = args[0]  # may be the stand-in of another watch's hook
        stand_in, replaced = stand_in_for(stepping), False

        def act() -> None:
            nonlocal replaced
            compares = bool(self._norms)
            self._compare(optimizer)
            groups = stepping.param_groups
            changed = self._listener.before_step(optimizer, groups)
            replaced = changed is not None
            if compares and optimizer._optimizer_step_pre_hooks:
                stepped = [p for p in parameters_of(optimizer) if p in self._parameters]
                self._before_hooks = _norms(stepped)
            if (wanted := changed or groups) is not stand_in.param_groups:
                stand_in.param_groups = wanted  # only if needed: read-only in some wrappers

        changed = when_gradients_are_there(act, args, kwargs)
        if changed is not None and is_torchs_own(optimizer):
            # Whether groups are replaced is known only after the closure has run.
            return (stand_in, *changed[0][1:]), changed[1]
        return ((stand_in, *args[1:]), kwargs) if replaced else changed

    def _after_step(self, optimizer: Optimizer) -> None:
        if self.is_ours(optimizer):
            self._compare_after_hooks(optimizer)
            self._listener.after_step(optimizer)
            self._after_last = self._snapshot()

    def _compare_after_hooks(self, optimizer: Optimizer) -> None:
        """Called after a step: notice gradients that a hook of the optimizer's own has changed. An
        SGD leaves them as they are, unless it unscales them itself. A hook may clear them."""
        before, self._before_hooks = self._before_hooks, {}
        now = _norms(before)
        if not now or getattr(optimizer, "grad_scale", None) is not None:
            return
        was, after = torch.stack([before[p] for p in now]), torch.stack(list(now.values()))
        self._find((~_same(after, was) & (after != 0)).any())

    # -- parameters that the script moves --

    def _snapshot(self) -> tuple[Tensor, list[int]] | None:
        """Samples (as bytes) and write counts of a few parameters."""
        if not self._sampled:
            return None
        if self._places != (places := [*map(storage_of, self._sampled)]):
            self._places = places
            self._samples = [sample(local(p).detach()).view(torch.uint8) for p in self._sampled]
        writes = [getattr(p, "_local_tensor", p)._version for p in self._sampled]
        return torch.cat(self._samples), writes

    def we_move(self) -> None:
        """This library has just moved the parameters."""
        self._after_last = self._after_last and self._snapshot()

    def moved_far(self) -> bool:
        """Called at the next forward: whether the script has moved the parameters far since the
        last step, as by loading a checkpoint. False for a script that does so between any two
        steps. Waits for a device if there were writes to the parameters."""
        last, self._after_last = self._after_last, None
        here = last and self._snapshot()
        if last is None or here is None:
            return False
        (then, before), (now, writes) = last, here
        # Writes to `p.data` are not counted.
        same = kernels_for(now).look(lambda: torch.equal(now, then), writes == before)
        moved_before, self._moved = self._moved, not same and self._far(now, then)
        return self._moved and not moved_before

    def _far(self, now: Tensor, then: Tensor) -> bool:
        """Whether `now` is `FAR` from `then`. Every move from or to a nonfinite value is far."""
        sizes = [*map(len, self._samples)]
        dtypes = [p.dtype for p in self._sampled]
        moved = stood = 0.0
        for dtype, *pair in zip(dtypes, now.split(sizes), then.split(sizes), strict=True):
            a, b = (each.clone().view(dtype).double() for each in pair)
            moved += float((a - b).square().sum())
            stood += float(b.square().sum())
        return not moved <= FAR**2 * stood

    def is_ours(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has one of the watched parameters."""
        return any(p in self._parameters for p in parameters_of(optimizer))

    def gradients_arrive(self, parameters: Iterable[Tensor]) -> None:
        """Called for a model that FSDP shards, before FSDP adds new gradients to `p.grad`: FSDP
        calls none of torch's hooks."""
        for p in parameters:
            if p in self._velocities:
                self.gradient_arrives(p)

    def gradient_arrives(self, p: Tensor) -> None:
        """One of the few parameters, or the witness, has a new gradient, which is not yet added to
        `p.grad`."""
        if p is self._witness and _is_empty(p.grad):
            self.ours = False  # until this library's hook is called
        if p.grad is None:
            self._velocities.pop(p, None)
        elif p in self._velocities:
            before, still = self._velocities[p], local(p.grad).any()  # False once set to zero
            self._velocities[p] = still if before is None else still & before


def _end(watch: int, handles: Sequence[Any]) -> None:
    """Called when a watch ends or is garbage-collected. The last watch removes torch's hooks,
    unless an optimizer is stepping in this thread: torch then iterates over its hooks."""
    for handle in handles:
        handle.remove()
    _WATCHES.pop(watch, None)
    frame = None if _WATCHES else sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == optimizer_module.__file__:
            return
        frame = frame.f_back
    while _HOOKS and not _WATCHES:
        _HOOKS.pop().remove()


def _same(after: Tensor, before: Tensor) -> Tensor:
    """Which norms are equal, but for rounding."""
    return torch.isclose(after, before, rtol=_TOLERANCE, atol=0.0, equal_nan=True)


def before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """The pre-hook of all optimizers: (args, kwargs) to step with instead; None: as they are."""
    changed = None
    for watch in _watching():
        found = watch._before_step(optimizer, args, kwargs)
        if found is not None:
            changed = args, kwargs = found
    return changed


def _after_any_step(optimizer: Optimizer, *_: Any) -> None:
    for watch in _watching():
        watch._after_step(optimizer)


def _watching() -> list[StepWatch]:
    """The watches that are alive. `copy()` is atomic: simulated ranks are threads, and another
    thread or the garbage collector may end a watch at any time."""
    return [watch for ref in _WATCHES.copy().values() if (watch := ref()) is not None]


def _norms(parameters: Collection[Tensor]) -> dict[Tensor, Tensor]:
    """The norm of a sample of each existing gradient, as 0-dim float64 tensors."""
    found = ((p, local(p.grad).detach()) for p in parameters if p.grad is not None)
    grads = {p: grad for p, grad in found if grad.numel()}
    samples = [*map(sample, grads.values())]
    if not samples:
        return {}
    return dict(zip(grads, torch._foreach_norm(samples, 2, dtype=torch.float64), strict=True))


def sample(x: Tensor) -> Tensor:
    """The first elements of a tensor in memory, flat."""
    if is_dense(x):
        return x.as_strided((min(SAMPLE, x.numel()),), (1,), x.storage_offset())
    return x.reshape(-1)[:SAMPLE]


def _divided_by_a_power_of_two(before: Tensor, after: Tensor) -> Tensor:
    """Whether all norms were divided by the same power of two above 1, as a `GradScaler` does:
    0-dim, bool."""
    known = (before > 0) & (after > 0) & before.isfinite() & after.isfinite()
    exact = torch.log2(before / after)
    power = exact.round()
    fits = (exact - power).abs() < _EXACT
    largest = power.where(known, -torch.inf).max()
    least = power.where(known, torch.inf).min()
    return known.any() & (fits | ~known).all() & (largest == least) & (least >= 1)


def _is_empty(grad: Tensor | None) -> bool:
    """Whether a gradient is None or, on a CPU, where reading costs little, all zero."""
    if grad is None:
        return True
    own = local(grad)
    return kernels_for(own).look(lambda: not bool(own.any()), False)
