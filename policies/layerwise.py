"""Layerwise: CFs for single layers that leave the least gradient energy unsent, for the same bytes.

What is not sent of a layer waits in its residual, in steady state with the energy E / gain - E,
where E is that of the gradient. Summed over the layers this is the energy that is delayed, which
costs progress: on the language model at CF 300, 400 steps, perplexity 6.03 this way, 6.19 with all
layers alike, 6.53 where the most energy of the present gradients is kept.

Which layer gets which CF is a knapsack problem (`allocate`), as in L-GreCo (Alimohammadi, Markov,
Frantar, Alistarh, 2023). On the upper concave hull of a layer's options, bytes against worth, every
further byte adds less. So bytes are spent greedily where they add most, which is exact up to the
last option that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple

from policies import checks
from policies.base import (
    DENSE,
    Context,
    LayerReport,
    Plan,
    Policy,
    StepReport,
    WrappingPolicy,
    counted_steps,
    setting,
)
from policies.gravac import GraVAC
from policies.state import declare, saved, together
from policies.words import percent

FREE = 1e-9
"""Relative difference of bytes or energies that is only rounding."""

LEAST = 1e-6
"""Smallest gain of a layer, for those whose sample had nothing sent: residuals are finite."""


@dataclass(eq=False)
class Layerwise(WrappingPolicy):
    """A policy that lets another one set the CF, and so the bytes of a step, and divides these
    bytes among the layers, by the gains that the shadow ladder shows. Before these are known, and
    where no division leaves less energy unsent, all layers have the same CF.

    then: the policy that sets the CF for the whole model; None: GraVAC with its defaults.
    window: steps that a solution rests on, and steps between two, >= 1.
    step_size: layers get 1 or a CF of a geometric ladder in cf_range, this factor apart, > 1.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "layerwise"
    shadow = True
    layerwise = True

    then: Policy | None = None
    _: KW_ONLY
    window: int = setting(50, checks.whole, least=1)
    step_size: float = setting(2.0, checks.real, above=1)

    _step: int = saved(0)
    _unsent: dict[str, dict[float, float]] = saved({})  # energy in residuals, by layer and CF
    _told: str = saved("")
    _fields = declare(_then=Policy)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.then is not None and not isinstance(self.then, Policy):
            raise TypeError(f"then must be a Policy object or None, got {self.then!r}")
        self._then = GraVAC() if self.then is None else self.then
        if self._then.layerwise:
            raise ValueError(f"then={self._then.name!r}: must be a policy for the whole model")
        self.gain = self._then.gain

    def start(self, context: Context) -> None:
        """Raises ValueError if the layers are not known, or cf_range does not suit `then`."""
        if not context.layers:
            raise ValueError("layerwise: the layers are not known")
        self._begin()
        self._then.start(context)
        self.gain = self._then.gain
        self._layers = tuple(context.layers)
        self._nbytes = context.layer_bytes
        self._solved: dict[float, dict[str, float]] = {}
        self._cfs = tuple(sorted({DENSE, *context.ladder(self.step_size)}))

    @property
    def _active(self) -> Policy:
        return self._then

    def plan(self) -> Plan:
        plan = self._then.plan()
        layers = {cf: self._solve(cf) for cf in (plan.send, *plan.probe)}
        return replace(
            plan,
            reason="; ".join(filter(None, (plan.reason, self._told))),
            layers={cf: of_layers for cf, of_layers in layers.items() if of_layers},
            read_layers=self._step % self.window == self.window - 1,
            rest=False,  # what is read of layers is of every step
        )

    def observe(self, report: StepReport) -> None:
        before = self._solve(self._then.plan().send)
        self._then.observe(report)
        self._step += 1
        if report.layers:
            self._unsent = {name: waiting(layer) for name, layer in report.layers.items()}
            self._solved = {}
        # The reason is about the CF of the next step, which `then` may just have changed.
        cf = self._then.plan().send
        now = self._solve(cf)
        self._told = ""
        if now != before and cf != DENSE:
            what = "layer CFs solved anew" if report.layers else "layer CFs"
            least, most = min(now.values(), default=cf), max(now.values(), default=cf)
            self._told = f"{what}: {least:g} to {most:g} for the bytes of CF {cf:g}"
            if spared := self._spared(cf, now):
                self._told += f", with which {percent(spared)} less is left unsent"

    def _solve(self, cf: float) -> dict[str, float]:
        """Each layer's CF, for as many bytes as with `cf`; empty if all had best have `cf`."""
        if cf == DENSE or not self._unsent:
            return {}
        if cf not in self._solved:
            options = {name: self._options(name, cf) for name in self._layers}
            alike = [of_layer[0] for of_layer in options.values()]
            budget = sum(option.nbytes for option in alike) * (1 + FREE)
            unsent = -sum(option.worth for option in alike) * (1 - FREE)
            found = allocate(options, budget)
            fits = sum(option.nbytes for option in found.values()) <= budget
            better = fits and -sum(option.worth for option in found.values()) < unsent
            self._solved[cf] = {name: each.cf for name, each in found.items()} if better else {}
        return self._solved[cf]

    def _spared(self, cf: float, chosen: Mapping[str, float]) -> float:
        """By which share less energy is left unsent with the chosen CFs than with one for all."""
        options = {name: self._options(name, cf) for name in chosen}
        alike = sum(each[0].worth for each in options.values())
        found = sum(next(o.worth for o in options[n] if o.cf == its) for n, its in chosen.items())
        return 1 - found / alike if alike else 0.0

    def _options(self, name: str, cf: float) -> list[Option]:
        """The CFs that a layer may have, first that of the whole model; no other if nothing is
        known of it. Where a CF was not measured, the next larger one stands for it."""
        unsent = self._unsent.get(name, {})
        if not any(known >= cf for known in unsent):
            return [Option(cf, self._nbytes(name, cf), 0.0)]
        options = []
        for each in (cf, *self._cfs):
            above = [known for known in unsent if known >= each]
            if above:
                options.append(Option(each, self._nbytes(name, each), -unsent[min(above)]))
        return options

    def candidates(self) -> tuple[float, ...]:
        return tuple(sorted({*self._cfs, *self._then.candidates()} - {DENSE}))

    def next_move(self) -> str:
        left = self.window - self._step % self.window
        rest = f"the layers' CFs are solved anew in {counted_steps(left)}"
        return "; ".join(filter(None, (self._then.next_move(), rest)))

    def _saved_settings(self) -> dict[str, Any]:
        then, layers = self._then.name, list(self._layers)
        return {**super()._saved_settings(), "then": then, "layers": layers}

    def _check_loaded(self) -> None:
        self._solved = {}
        together(self._unsent.keys() <= set(self._layers), "'unsent' is of other layers")


def waiting(layer: LayerReport) -> dict[float, float]:
    """The energy in a layer's residual in steady state, by CF; empty if it is not known."""
    if not isfinite(layer.energy / LEAST) or layer.energy < 0:
        return {}
    gains = {cf: min(1.0, gain) for cf, gain in layer.steady.items() if isfinite(gain)}
    unsent = {cf: layer.energy * (1 / max(LEAST, gain) - 1) for cf, gain in gains.items()}
    return {DENSE: 0.0, **unsent}


class Option(NamedTuple):
    """A CF that a layer may have, its payload bytes, and its worth, which may be negative."""

    cf: float
    nbytes: float
    worth: float


def allocate(options: Mapping[str, Sequence[Option]], budget: float) -> dict[str, Option]:
    """One option for each layer, worth most together for at most `budget` bytes, or the cheapest if
    not even these fit. Each layer has an option, and all numbers are finite."""
    hulls = {name: hull(of_layer) for name, of_layer in options.items()}
    chosen = {name: points[0] for name, points in hulls.items()}
    left = budget - sum(option.nbytes for option in chosen.values())
    steps = [
        ((after.worth - before.worth) / (after.nbytes - before.nbytes), name, place)
        for name, points in hulls.items()
        for place, (before, after) in enumerate(pairwise(points))
    ]
    for _, name, place in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        before, after = hulls[name][place : place + 2]
        if chosen[name] is before and after.nbytes - before.nbytes <= left:
            left -= after.nbytes - before.nbytes
            chosen[name] = after
    return chosen


def hull(options: Sequence[Option]) -> list[Option]:
    """The upper concave hull, from the cheapest option on: bytes and worth both grow, and a byte
    adds ever less worth."""
    points: list[Option] = []
    for option in sorted(options, key=lambda each: (each.nbytes, -each.worth, each.cf)):
        if points and option.worth <= points[-1].worth:
            continue
        while len(points) > 1:
            a, b = points[-2:]
            if (b.worth - a.worth) * (option.nbytes - b.nbytes) >= (option.worth - b.worth) * (
                b.nbytes - a.nbytes
            ):
                break
            points.pop()
        points.append(option)
    return points
