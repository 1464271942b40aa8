"""The inspection of optimizers that are not torch's: what state they keep, found after their first
step.

In parameter space each rank's optimizer steps with the local gradient, and the exchange then moves
the parameters. That is right for an optimizer whose next step depends on the parameters, on
gradients, and on tensors in `optimizer.state[p]`, on which the ranks can agree. It is silently
wrong for an optimizer that keeps copies of the weights (in fp32, or averages) and overwrites the
parameters from these copies, that keeps state made of gradients elsewhere (Prodigy's `d` in its
groups), or that steps only some of the parameters on each rank (a distributed Muon). Names do not
tell such optimizers; their state does. The first step is dense, so that all ranks still keep the
same state."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from adaptive.memory.handover import is_torchs_own
from adaptive.model.parameters import ModelParameters, local, parameters_of
from adaptive.network.collectives import Exchange

NEAR = 0.5
"""A state tensor whose distance from the weights is below this share of their norm counts as a copy
of the weights. A tensor made of gradients is usually farther away than the whole norm."""

TORCHS = ("params", "state", "param_groups", "defaults")
"""Attributes of every optimizer and of every group that are not searched for numbers."""

SHARED_OUT = "state of other parameters on each rank (which shares them out?)"


class Finding(NamedTuple):
    """The result of one rank's inspection of one optimizer.

    name: of the optimizer's class. why: the state that ranks with local steps cannot agree on; ""
    if there is none. with_state: names of the parameters that the optimizer has state of: when it
    was first seen, and after its first step. weights: names, in its state, of copies of weights."""

    name: str
    why: str
    with_state: tuple[frozenset[str], frozenset[str]]
    weights: tuple[str, ...] = ()


class Inspection:
    """Inspects the optimizers of one model: all of their state after the first step, and their
    numbers after every step.

    findings: the result for each inspected optimizer. torch's own optimizers are not inspected.
    seen: all other optimizers, in the order in which the script has used them; for each, names of
    the parameters that it had state of."""

    def __init__(self, parameters: ModelParameters) -> None:
        self.findings: dict[Optimizer, Finding] = {}
        self._parameters = parameters
        self.seen: dict[Optimizer, frozenset[str]] = {}
        self._numbers: dict[Optimizer, dict[str, Any]] = {}  # before the step under way

    def notice(self, optimizer: Optimizer) -> bool:
        """Remember an optimizer, and the state that it may have from before this run. Returns
        whether it needs no inspection any more."""
        known = optimizer in self.findings or is_torchs_own(optimizer)
        if not known:
            self.seen.setdefault(optimizer, self._with_state(optimizer))
        return known

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step."""
        if not is_torchs_own(optimizer):
            self.notice(optimizer)
            self._numbers[optimizer] = _numbers(optimizer, optimizer not in self.findings)

    def after_step(self, optimizer: Optimizer) -> bool:
        """The optimizer has stepped. Returns whether there is a new finding about it."""
        before = self._numbers.pop(optimizer, None)
        if before is None:
            return False
        found = self.findings.get(optimizer)
        if found is not None and found.why:
            return False
        changed = _changed(before, _numbers(optimizer, tensors=found is None))
        why = f"numbers that its steps change ({_few(changed)})" if changed else ""
        if found is None:
            name, with_state = type(optimizer).__name__, self._with_state(optimizer)
            in_state, weights = self._in_state(optimizer)
            both = self.seen[optimizer], with_state
            self.findings[optimizer] = Finding(name, why or in_state, both, weights)
            return True
        self.findings[optimizer] = found._replace(why=why)
        return bool(why)

    def _with_state(self, optimizer: Optimizer) -> frozenset[str]:
        known = self._parameters
        with_state = (p for p, kept in optimizer.state.items() if kept and p in known)
        return frozenset(known[p].name for p in with_state)

    def _in_state(self, optimizer: Optimizer) -> tuple[str, tuple[str, ...]]:
        """(why, weights) of a `Finding`, from `optimizer.state`."""
        stepped = {*parameters_of(optimizer)}
        gaps: dict[str, Any] = {}  # by name, squared norms of (state - parameter) and of parameter
        for p, state in optimizer.state.items():
            if p not in stepped:
                if _hides([state]):
                    return "state that belongs to none of its parameters", ()
                continue
            if hidden := [name for name, kept in state.items() if _hides(kept)]:
                return f"state in other forms than tensors ({_few(hidden)})", ()
            here = local(p).detach().reshape(-1).float()
            for name, kept in state.items():
                if _is_floating(kept) and kept.numel() == p.numel():
                    gap = local(kept).detach().reshape(-1).float() - here
                    squares = torch.stack([gap.square().sum(), here.square().sum()]).double()
                    gaps[name] = gaps.get(name, 0) + squares
        copies = tuple(name for name, (gap, norm) in gaps.items() if 0 <= gap < NEAR**2 * norm)
        return f"weights in its state ({_few(copies)})" if copies else "", copies


def verdict(everyone: Sequence[Sequence[Finding]]) -> str:
    """Why some optimizer must not step with local gradients, and its name; "" if all may. The same
    on all ranks. everyone: for each rank, its findings about the same optimizers."""
    for of in zip(*everyone, strict=True):
        why = next((each.why for each in of if each.why), "")
        if len({each.with_state for each in of}) > 1:
            why = why or SHARED_OUT
        if why:
            which = "on which ranks that step by themselves cannot agree"
            return f"optimizer {of[0].name} keeps {why}, {which}"
    return ""


class MovedBetweenSteps:
    """Refuses optimizers that are wrong if an exchange moves the parameters between their steps.

    With local steps, a delay and gossip an exchange moves the parameters, and each rank's optimizer
    goes on from the new values. An optimizer that keeps copies of the weights overwrites the
    parameters from these copies, so that the exchange is lost. An optimizer that steps only some
    parameters on each rank trains each parameter on one rank's data.

    optimizers: those handed over, the same on all ranks. way: the user's choice of `sync`."""

    def __init__(
        self, parameters: ModelParameters, optimizers: Iterable[Optimizer], way: object
    ) -> None:
        self._inspection, self._way = Inspection(parameters), way
        self._may_differ = parameters.maybe_unused  # a rank has no state of an unused parameter
        self._unknown = [of for of in optimizers if not self._inspection.notice(of)]

    def before_step(self, optimizer: Optimizer) -> None:
        if optimizer in self._unknown:
            self._inspection.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        self._inspection.after_step(optimizer)

    def look(self, exchange: Exchange) -> None:
        """Called on all ranks at the start of an exchange; a collective until every rank has
        stepped every optimizer. RuntimeError on all ranks if an optimizer is refused."""
        if not self._unknown:
            return
        everyone = exchange.gather_objects(
            [self._inspection.findings.get(of) for of in self._unknown]
        )
        for of in zip(*everyone, strict=True):
            found = [each for each in of if each is not None]
            if len(found) < len(of):
                return
            weights = next((each.weights for each in found if each.weights), ())
            why = f"weights in its state ({_few(weights)})" if weights else ""
            if len({each.with_state for each in found}) > 1 and not self._may_differ():
                why = why or SHARED_OUT
            if why:
                raise RuntimeError(
                    f"sync={self._way!r} does not go with optimizer {found[0].name}: it keeps "
                    f"{why}, and would undo what the ranks exchange between its steps"
                )
        self._unknown = []


def take_from_first(optimizer: Optimizer, exchange: Exchange) -> None:
    """Copy an optimizer's state from the first rank to all ranks (a collective): its `state_dict()`
    and numbers in its attributes. RuntimeError on all ranks if states are not equal afterwards."""
    kept: list[Any] = [optimizer.state_dict(), _numbers(optimizer, tensors=False)]
    dist.broadcast_object_list(kept, dist.get_global_rank(exchange.group, 0), exchange.group)
    theirs, numbers = kept
    optimizer.load_state_dict(theirs)  # on the first rank, too, because loading may round
    for prefix, place in _places(optimizer):
        place.update((key, numbers[prefix + key]) for key in place if prefix + key in numbers)
    here = _numbers(optimizer, tensors=True).values()  # keys such as id(parameter) are not compared
    sums = [repr(float(each.double().sum() if isinstance(each, Tensor) else each)) for each in here]
    everyone = exchange.gather_objects(sums)
    if any(each != everyone[0] for each in everyone):
        raise RuntimeError(
            f"{type(optimizer).__name__} has stepped with local gradients on each rank, and keeps "
            f"something in attributes that its state_dict() leaves out: call detach() before its "
            f"first step, and attach a new AdaptiveCompressor with it"
        )


def _numbers(optimizer: Optimizer, tensors: bool) -> dict[str, Any]:
    """All floats in an optimizer's groups and attributes, by name. tensors: also floats in lists
    and dictionaries, and copies of all tensors that are not parameters. (Comparing these copies may
    wait for a device.)"""
    places = _places(optimizer)
    found = {name + key: e for name, of in places for key, e in of.items() if type(e) is float}
    if tensors:
        parameters = {*map(id, parameters_of(optimizer))}
        for name, place in places:
            _copy(name, {k: e for k, e in place.items() if k not in TORCHS}, parameters, found)
    return found


def _copy(name: str, place: Any, parameters: set[int], found: dict[str, Any]) -> None:
    """Add the floats in `place`, and copies of its tensors, to `found`. parameters: their ids."""
    inside = place.items() if isinstance(place, dict) else enumerate(place)
    for key, each in inside:
        if isinstance(each, Tensor) and id(each) not in parameters:
            found[f"{name}{key}"] = each.detach().clone()
        elif isinstance(each, float):
            found[f"{name}{key}"] = each
        elif isinstance(each, dict | list | tuple) and not isinstance(each, OrderedDict):
            _copy(f"{name}{key}.", each, parameters, found)


def _places(optimizer: Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """The dictionaries in which an optimizer may keep numbers: its groups and its attributes."""
    groups = [(f"group {i}.", group) for i, group in enumerate(optimizer.param_groups)]
    return [*groups, ("", vars(optimizer))]


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of the changed numbers: keys of groups, without the group, and attributes."""
    changed = [
        name
        for name, value in after.items()
        if name not in before or not _equal(before[name], value)
    ]
    return list(dict.fromkeys(re.sub(r"^group \d+\.", "", name).split(".")[0] for name in changed))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and a.shape == b.shape and bool((a == b).all())
    return bool(a == b or (a != a and b != b))


def _hides(kept: Any) -> bool:
    """Whether a value of a state is neither a tensor nor a number, and may hold floats."""
    if isinstance(kept, list | tuple | dict):
        inside = kept.values() if isinstance(kept, dict) else kept
        return any(isinstance(each, float) or _is_floating(each) or _hides(each) for each in inside)
    return not (kept is None or isinstance(kept, Tensor | float | int | str | torch.dtype))


def _is_floating(kept: Any) -> bool:
    return isinstance(kept, Tensor) and kept.is_floating_point()


def _few(names: Iterable[str]) -> str:
    first, *more = names
    return ", ".join([first, *more[:2]]) + ", ..." * (len(more) > 2)
