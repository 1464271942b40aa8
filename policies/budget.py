"""The largest gain that a budget of bytes or of time allows (the idea of Kimad: Xin, Ilin, Zhang,
Canini, Richtarik, 2023: compress as the bandwidth measured of late asks for)."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any

from policies import checks, saved
from policies.base import DENSE, Context, Plan, Policy, StepReport
from policies.ladder import make_ladder
from policies.reasons import change
from policies.step_line import StepLine
from policies.wire_guess import WireBytes

OPENING = 5
"""Dense steps before the first look: as many as a look has."""

LOOK = 5
"""Steps of a look at a second CF: the time of the last one comes too late to count."""

APART = 4
"""A look is at a CF with about so many times fewer bytes (or more, from the largest CF): far
enough apart for the difference to stand out from the noise, and cheap."""

DEFAULT_SHARE = 0.2

_STATE = ("send", "look", "since", "looked", "reason")


class Budget(Policy):
    """Sends the smallest CF, dense included, that keeps to the budget; else the largest.

    bytes_per_step: wire bytes of a rank in a step. As sizes are computed where they can be and
        learned where not, from the largest CF down, only what was guessed can exceed it, once.
    share: part of the step time, in (0, 1], that may go to communication (what of it does not
        overlap with backward); 0.2 if neither is given. One of the two.
    window: steps at a CF before its share is judged.
    look_every: windows after which the line behind the prediction is found anew, from LOOK steps
        at a second CF; also done before each move, and at the start, from dense.
    hysteresis: of the share. A larger CF is taken if it is exceeded by more than this ratio, a
        smaller one if that is predicted to stay below it by this ratio; twice as much, seen
        between two looks, brings one about at the end of the window.
    step_size: CFs are those of a geometric ladder in cf_range, this far apart, > 1.
    """

    name = "budget"

    def __init__(
        self,
        *,
        bytes_per_step: float | None = None,
        share: float | None = None,
        window: int = 20,
        look_every: int = 10,
        hysteresis: float = 0.25,
        step_size: float = 1.25,
    ) -> None:
        if bytes_per_step is not None and share is not None:
            raise ValueError(
                f"share={share!r}: must not be given with bytes_per_step={bytes_per_step!r}"
            )
        self.bytes_per_step = (
            None
            if bytes_per_step is None
            else checks.real("bytes_per_step", bytes_per_step, above=0)
        )
        self.share = checks.fraction("share", DEFAULT_SHARE if share is None else share)
        self.window = checks.whole("window", window, least=LOOK)
        self.look_every = checks.whole("look_every", look_every, least=1)
        self.hysteresis = checks.real("hysteresis", hysteresis, least=0)
        self.step_size = checks.real("step_size", step_size, above=1)
        self._settings = dict(vars(self))
        self._cfs: tuple[float, ...] = ()

    def start(self, context: Context) -> None:
        """Raises ValueError if cf_range is not a range or step_size makes too many CFs."""
        cf_range = checks.cf_range(context.cf_range)
        rungs = make_ladder(cf_range, "geometric", self.step_size)
        known = (context.supported(cf) for cf in rungs)
        self._cfs = tuple(sorted({DENSE, *known} - context.unknown))
        self._computed = context.wire_bytes
        self._wire = WireBytes(self._computed)
        self._line = StepLine()
        self._look: float | None = None  # the second CF, while it is looked at
        self._since = 0  # steps since the window or look began
        self._looked = 0  # windows since the last look
        self._reason = ""
        self._send = DENSE
        if self.bytes_per_step is not None:
            self._send = self._cfs[-1]
            self._send = self._within(self.bytes_per_step)
        self._line.restart(self._send)

    def plan(self) -> Plan:
        if not self._cfs:
            raise RuntimeError("Budget needs start(context) before plan()")
        return Plan(self._now, reason=self._reason)

    @property
    def _now(self) -> float:
        return self._send if self._look is None else self._look

    def observe(self, report: StepReport) -> None:
        before = self._now
        self._wire.observe(report)
        self._line.observe(report)
        self._since += 1
        if self.bytes_per_step is not None:
            why = self._keep_to_bytes(self.bytes_per_step)
        else:
            why = self._keep_to_share() if self._look is None else self._end_look(self._look)
        self._reason = change(before, self._now, why)

    # Bytes

    def _within(self, limit: float) -> float:
        """The smallest CF whose bytes are within the limit; the largest if none is known to be."""
        fitting = (cf for cf in self._cfs if (n := self._wire.at(cf)) is not None and n <= limit)
        return next(fitting, self._cfs[-1])

    def _keep_to_bytes(self, limit: float) -> str:
        """No flapping: of a CF that has once exceeded the limit the bytes are known."""
        before, self._send = self._send, self._within(limit)
        if self._send == before:
            return ""
        had, has = self._wire.at(before), self._wire.at(self._send)
        sizes = (
            f"{had or nan:.4g} bytes a step at CF {before:g}, {has or nan:.4g} at {self._send:g}"
        )
        return f"{sizes}, bytes_per_step {limit:g}"

    # Share of the step time

    def _keep_to_share(self) -> str:
        """At a window's end: is there a reason for a look?"""
        opening = self._line.a is None
        if self._since < (min(OPENING, self.window) if opening else self.window):
            return ""
        self._since = 0
        self._looked += 1
        self._line.follow(self._send, self._bytes(self._send))
        if opening:
            why = "to tell the network from the rest"
        elif self._best(2 * self.hysteresis) != self._send:
            why = f"communication seems to take {self._numbers(self._send)}"
        elif self._looked >= self.look_every:
            why = f"the last look was {self._looked} windows ago"
        else:
            why = ""
        other = self._second() if why and self._line.seconds(self._send) is not None else None
        if other is None:
            if opening:
                self._line.free(self._send)
            self._line.restart(self._send)
            return ""
        self._look = other
        self._line.restart(other)
        return f"looks at CF {other:g} for {LOOK} steps, {why}"

    def _end_look(self, other: float) -> str:
        """Known by now: what the network costs. Move, or go back."""
        if self._since < LOOK:
            return ""
        solved = self._line.solve(self._send, self._bytes(self._send), other, self._bytes(other))
        before = self._send
        if solved:
            self._send = self._best(self.hysteresis)
        self._look, self._since, self._looked = None, 0, 0
        self._line.restart(self._send)
        if not solved:
            return "after a look that told nothing"
        if self._send == before:
            return f"after the look, communication takes {self._numbers(before)}"
        return (
            f"communication takes {self._numbers(before)}; predicted at CF {self._send:g}: "
            f"{self._predicted(self._send):.3g}"
        )

    def _best(self, hysteresis: float) -> float:
        """The CF to send by the line as it is now; the present one, unless clearly wrong."""
        safely = self.share / (1 + hysteresis)
        smaller = any(cf < self._send and self._predicted(cf) <= safely for cf in self._cfs)
        exceeds = self._predicted(self._send) > self.share * (1 + hysteresis)
        if not (exceeds or smaller):
            return self._send
        fitting = (cf for cf in self._cfs if self._predicted(cf) <= self.share)
        return next(fitting, self._cfs[-1])

    def _second(self) -> float | None:
        """The CF to look at: about APART times fewer bytes, else more; None: all have as many."""
        here = self._bytes(self._send)
        others = {cf: n for cf in self._cfs if (n := self._bytes(cf)) != here}
        fewer = {cf: n for cf, n in others.items() if 2 * n <= here}
        wanted, among = (here / APART, fewer) if fewer else (here * APART, others)
        return min(among, key=lambda cf: abs(among[cf] - wanted), default=None)

    def _bytes(self, cf: float) -> float:
        """Bytes at a CF, in units of dense where nothing at all is known."""
        nbytes = self._wire.at(cf)
        return 1 / cf if nbytes is None else nbytes

    def _predicted(self, cf: float) -> float:
        return self._line.share(cf, self._bytes(cf))

    def _numbers(self, cf: float) -> str:
        share = self._predicted(cf)
        sign = ">" if share > self.share else "<="
        return (
            f"{share:.3g} of a step at CF {cf:g}, {sign} share {self.share:g} "
            f"({self._line.a or 0.0:.4g} s + {self._line.b:.3g} s/byte x {self._bytes(cf):.4g})"
        )

    def candidates(self) -> tuple[float, ...]:
        return self._cfs[1:]

    def status(self) -> Mapping[str, float]:
        """share: predicted for the CF sent; bandwidth: bytes a second; nan where not known.
        exploring: 1 at the start and in a look, else 0."""
        known = self.bytes_per_step is None and self._line.a is not None
        return {
            "share": self._predicted(self._send) if known else nan,
            "bandwidth": 1 / self._line.b if known and self._line.b > 0 else nan,
            "exploring": float(self.bytes_per_step is None and (not known or bool(self._look))),
        }

    def outlook(self) -> str:
        if self.bytes_per_step is not None:
            return f"it changes when a step's bytes do; bytes_per_step is {self.bytes_per_step:g}"
        if self._line.a is None:
            return "it changes when it is known what the network costs"
        most, least = self.share * (1 + self.hysteresis), self.share / (1 + self.hysteresis)
        now = f"now, as predicted, {self._predicted(self._send):.3g}"
        return (
            f"it changes when communication takes more than {most:.3g} of a step ({now}), or a "
            f"smaller CF would take less than {least:.3g}"
        )

    def rescale(self) -> None:
        """It stays at its CF and looks what the network costs; a number of bytes it keeps to at
        once, where sizes can be computed."""
        before = self._now
        self._wire, self._line = WireBytes(self._computed), StepLine()
        self._look, self._since, self._looked = None, 0, 0
        if self.bytes_per_step is not None:
            self._send = self._within(self.bytes_per_step)
        self._line.restart(self._send)
        self._reason = change(before, self._now, "the number of ranks has changed")

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": {**self._settings, "cfs": list(self._cfs)},
            **{name: getattr(self, f"_{name}") for name in _STATE},
            "wire": self._wire.state_dict(),
            "line": self._line.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After start(). Raises ValueError if the state is of other settings or another range."""
        if not self._cfs:
            raise RuntimeError("Budget needs start(context) before load_state_dict()")
        settings = saved.part(state, "settings")
        checks.same(self.name, {**self._settings, "cfs": list(self._cfs)}, settings)
        self._send, self._look = saved.number(state, "send", least=1), saved.maybe_cf(state, "look")
        self._since, self._looked = saved.count(state, "since"), saved.count(state, "looked")
        self._reason = saved.text(state, "reason")
        self._wire.load_state_dict(saved.part(state, "wire"))
        self._line.load_state_dict(saved.part(state, "line"))
