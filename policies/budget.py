"""Budget: the largest gain that a budget of bytes or of time allows.

The idea is Kimad's (Xin, Ilin, Zhang, Canini, Richtarik, 2023): compress as much as the bandwidth
measured of late asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isfinite, log, nan
from typing import Any

from policies import checks
from policies.base import DENSE, Context, DeclaredPolicy, Plan, StepReport, change
from policies.ladder import make_ladder
from policies.state import (
    CHILD,
    Stateful,
    by_cf,
    count,
    declare,
    maybe_cf,
    maybe_number,
    number,
    saved_as,
    text,
)
from policies.step_time import StepLine

OPENING = 5
"""Dense steps before the first look: as many as a look has.

A look sends a second CF for a few steps, to tell the time on the network from the rest."""

LOOK = 5
"""Steps of a look. The time of the last of them comes too late to count."""

APART = 4
"""A look sends a CF with about so many times fewer bytes (or more, from the largest CF): the
difference stands out from the noise, and the look is cheap."""

DEFAULT_SHARE = 0.2


class Budget(DeclaredPolicy):
    """A policy that sends the smallest CF, dense included, that keeps to a budget, or the largest
    CF if none does.

    Give one of the first two:

    bytes_per_step: wire bytes of a rank in a step, > 0. Sizes are computed where they can be.
        Where they cannot, they are learned from the largest CF down, and only a size that was
        guessed can exceed the budget, once.
    share: part of the step time, in (0, 1], that may go to communication that does not overlap with
        backward; 0.2 if neither is given.
    window: steps at a CF before its share is judged, >= 5.
    look_every: windows after which the line behind the predictions is found anew by a look, i.e. 5
        steps at a second CF. There is a look before each move too, and one at the start, from
        dense.
    hysteresis: relative to the share. A larger CF is taken if the share is exceeded by more than
        this ratio, a smaller one if it is predicted to stay below the share by this ratio. Twice as
        much, seen between two looks, brings about a look at the end of the window.
    step_size: the candidates are a geometric ladder in cf_range, this factor apart, > 1.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "budget"
    _fields = declare(
        _send=saved_as(number, least=1),
        _look=saved_as(maybe_cf),
        _since=saved_as(count),
        _looked=saved_as(count),
        _reason=saved_as(text),
        _wire=CHILD,
        _line=CHILD,
    )

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
        self._look: float | None = None  # the second CF, during a look
        self._since = 0  # steps since the window or look began
        self._looked = 0  # windows since the last look
        self._reason = ""
        self._send = DENSE
        if self.bytes_per_step is not None:
            self._send = self._cfs[-1]
            self._send = self._within(self.bytes_per_step)
        self._line.restart(self._send)
        self._started = True

    def plan(self) -> Plan:
        self._check_started("plan")
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
        """The smallest CF whose bytes are known to be within the limit; the largest if none is."""
        fitting = (cf for cf in self._cfs if (n := self._wire.at(cf)) is not None and n <= limit)
        return next(fitting, self._cfs[-1])

    def _keep_to_bytes(self, limit: float) -> str:
        """Send the smallest CF within the limit. This cannot flap: once a CF has exceeded it, its
        bytes are known."""
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
        """At the end of a window, begin a look if there is a reason; returns that reason."""
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
                self._line.all_work(self._send)
            self._line.restart(self._send)
            return ""
        self._look = other
        self._line.restart(other)
        return f"looks at CF {other:g} for {LOOK} steps, {why}"

    def _end_look(self, other: float) -> str:
        """At the end of a look, move or go back to the CF before; returns why."""
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
        """The CF to send by the line as it is now: the present one, unless it is clearly wrong."""
        safely = self.share / (1 + hysteresis)
        smaller = any(cf < self._send and self._predicted(cf) <= safely for cf in self._cfs)
        exceeds = self._predicted(self._send) > self.share * (1 + hysteresis)
        if not (exceeds or smaller):
            return self._send
        fitting = (cf for cf in self._cfs if self._predicted(cf) <= self.share)
        return next(fitting, self._cfs[-1])

    def _second(self) -> float | None:
        """The CF for a look: with about APART times fewer bytes, else with more; None if all CFs
        have the same number of bytes."""
        here = self._bytes(self._send)
        others = {cf: n for cf in self._cfs if (n := self._bytes(cf)) != here}
        fewer = {cf: n for cf, n in others.items() if 2 * n <= here}
        wanted, among = (here / APART, fewer) if fewer else (here * APART, others)
        return min(among, key=lambda cf: abs(among[cf] - wanted), default=None)

    def _bytes(self, cf: float) -> float:
        """Bytes at a CF, or, where no size is known, its part of dense."""
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
        """Numbers for the timeline by name, nan where they are not known.

        share: predicted for the CF sent. bandwidth: bytes a second. exploring: 1 at the start and
        in a look, else 0.
        """
        known = self.bytes_per_step is None and self._line.a is not None
        return {
            "share": self._predicted(self._send) if known else nan,
            "bandwidth": 1 / self._line.b if known and self._line.b > 0 else nan,
            "exploring": float(self.bytes_per_step is None and (not known or bool(self._look))),
        }

    def next_move(self) -> str:
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
        """It stays at its CF and takes a look; bytes are kept to at once where sizes can
        be computed."""
        before = self._now
        self._wire, self._line = WireBytes(self._computed), StepLine()
        self._look, self._since, self._looked = None, 0, 0
        if self.bytes_per_step is not None:
            self._send = self._within(self.bytes_per_step)
        self._line.restart(self._send)
        self._reason = change(before, self._now, "the number of ranks has changed")

    def _saved_settings(self) -> dict[str, Any]:
        return {**self._settings, "cfs": list(self._cfs)}


class WireBytes(Stateful):
    """Bytes on the wire by CF: as measured where a CF was sent, else as computed, else guessed.

    The guess is dense / CF, corrected by the nearest CF that was measured. Indices and headers, and
    what an exchange multiplies by the number of ranks, make a compressed step larger than dense /
    CF, by much the same factor at neighbouring CFs.

    computed: returns the bytes at a CF; nan where they are not known.
    """

    _fields = declare(_measured=saved_as(by_cf, least=0), _dense=saved_as(maybe_number, above=0))

    def __init__(self, computed: Callable[[float], float]) -> None:
        self._computed = computed
        self._measured: dict[float, float] = {}
        self._dense: float | None = None

    def observe(self, report: StepReport) -> None:
        """Take in the bytes that the reported step has sent."""
        if isfinite(report.dense_wire_bytes) and report.dense_wire_bytes > 0:
            if report.dense_wire_bytes != self._dense:
                self._measured = {}  # the model has another size now: layers were frozen or freed
            self._dense = report.dense_wire_bytes
        if isfinite(report.wire_bytes) and report.wire_bytes >= 0:
            self._measured[report.cf] = report.wire_bytes

    def at(self, cf: float) -> float | None:
        """Bytes of a step at `cf`; None if they can be neither computed nor guessed."""
        if cf in self._measured:
            return self._measured[cf]
        computed = self._computed(cf)
        if isfinite(computed) and computed >= 0:
            return computed
        if self._dense is None:
            return None
        if cf == DENSE:
            return self._dense
        sent = [other for other in self._measured if other != DENSE]
        if not sent:
            return self._dense / cf
        nearest = min(sent, key=lambda other: abs(log(other / cf)))
        guess = self._measured[nearest] * (nearest / cf)
        return guess if guess < inf else None
