"""Budget: the largest gain that a budget of bytes or of time allows.

The idea is Kimad's (Xin and others, 2023): compress as much as the bandwidth of late asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite, nan

from policies import checks
from policies.base import DENSE, Context, DeclaredPolicy, Plan, StepReport, change, setting
from policies.state import Stateful, saved
from policies.step_time import StepTime
from policies.words import named, percent, seconds_in_words

STEP_SIZE = 1.25
"""The candidates are a geometric ladder in cf_range, this factor apart."""

BRIEF = 5
"""Steps before the first decision, after a move to a smaller CF, whose time may have been predicted
too short, and of a look: a second CF is sent, to tell the network's latency from its rate."""

APART = 4
"""A look sends about so many times fewer bytes (more, from the largest CF): that is cheap, and the
difference stands out from the noise."""


@dataclass(eq=False, kw_only=True)
class Budget(DeclaredPolicy):
    """A policy that sends the smallest CF, dense included, that keeps to a budget, or the largest
    CF if none does. ValueError or TypeError names a setting that is wrong.

    Give one of the first two:

    bytes_per_step: wire bytes of a rank in a step, > 0.
    share: part of the step time, in (0, 1], that may go to sending bytes while backward does not
        hide it; 0.2 if neither is given. Latency, which is the same at any CF, does not count.
    window: steps at a CF before its share is judged, >= 5.
    look_every: windows after which a second CF is sent for 5 steps, to tell latency from rate, if
        no other CF has been sent on the network as it is.
    hysteresis: relative to the share. A larger CF is taken if the share is exceeded by more than
        this ratio, a smaller one if it is predicted to stay below the share by this ratio.
    """

    name = "budget"

    bytes_per_step: float | None = setting(None, checks.real, or_none=True, above=0)
    share: float | None = setting(None, checks.fraction, or_none=True)
    window: int = setting(20, checks.whole, least=BRIEF)
    look_every: int = setting(10, checks.whole, least=1)
    hysteresis: float = setting(0.25, checks.real, least=0)

    _send: float = saved(DENSE)
    _look: float | None = saved(None)  # the second CF, during a look
    _since: int = saved(0)  # steps since the window or look began
    _windows: int = saved(0)  # since the last move or look
    _brief: bool = saved(True)  # the window is a short one: at the start, or after a move down
    _reason: str = saved("")
    _wire: WireBytes = saved()
    _time: StepTime = saved()

    def __post_init__(self) -> None:
        if self.bytes_per_step is not None and self.share is not None:
            raise ValueError(
                f"share={self.share!r}: must not be given with "
                f"bytes_per_step={self.bytes_per_step!r}"
            )
        super().__post_init__()
        self.share = self._limit = 0.2 if self.share is None else self.share

    def start(self, context: Context) -> None:
        """Raises ValueError if cf_range makes too many CFs."""
        ladder = context.ladder(STEP_SIZE)
        self._cfs = tuple(sorted({DENSE, *ladder} - context.unknown))
        self._computed, self._overlap = context.wire_bytes, context.overlap
        self._measure_anew(DENSE)

    def _measure_anew(self, send: float) -> None:
        """Begin to learn the bytes and times of the CFs. send: the CF, if no bytes are given."""
        self._begin()
        self._wire = WireBytes(self._computed)
        self._time = StepTime(self._wire.at, self._overlap)
        within = self.bytes_per_step
        self._send = send if within is None else self._within(within)

    def plan(self) -> Plan:
        return Plan(self._now, reason=self._reason)

    @property
    def _now(self) -> float:
        return self._send if self._look is None else self._look

    def observe(self, report: StepReport) -> None:
        before = self._now
        self._wire.observe(report)
        self._time.observe(report)
        if self.bytes_per_step is not None:
            why = self._keep_to_bytes(self.bytes_per_step)
        else:
            why = self._keep_to_share()
        self._reason = change(before, self._now, why)

    # Bytes

    def _within(self, limit: float) -> float:
        """The smallest CF whose bytes are within the limit; the largest if none is."""
        return next((cf for cf in self._cfs if self._wire.at(cf) <= limit), self._cfs[-1])

    def _keep_to_bytes(self, limit: float) -> str:
        """Send the smallest CF within the limit; returns why, "" if it stays."""
        before, self._send = self._send, self._within(limit)
        if self._send == before:
            return ""
        had, has = self._wire.at(before), self._wire.at(self._send)
        return (
            f"{had:.4g} bytes a step at {named(before)}, {has:.4g} at {named(self._send)}; "
            f"bytes_per_step allows {limit:g}"
        )

    # Share of the step time

    def _keep_to_share(self) -> str:
        """At the end of a window or look, move or look at a second CF; returns why, if so."""
        self._since += 1
        if self._since < (BRIEF if self._brief or self._look is not None else self.window):
            return ""
        looked, self._look, self._since = self._look is not None, None, 0
        before, best = self._send, self._best()
        if best != before:
            self._send = self._time.within_reach(best, before, self._cfs)
            self._windows, self._brief = 0, self._send < before
            on_the_way = f"on the way to {named(best)}: " if self._send != best else ""
            return (
                f"{on_the_way}communication takes {self._described(before)}; "
                f"{named(best)} is predicted to need {percent(self._share(best))}"
            )
        self._brief = False
        if looked:
            return f"after the look, communication takes {self._described(before)}"
        self._windows += 1
        if self._windows < self.look_every or len(self._time.timed()) != 1:
            return ""
        self._windows, self._look = 0, self._second()
        if self._look is None:
            return ""
        return f"looks at CF {self._look:g} for {BRIEF} steps, to tell latency from rate"

    def _best(self) -> float:
        """The CF to send: the present one, unless it is clearly wrong, or only just moved to."""
        if not self._time.timed():
            return self._send
        ratio = 1.0 if self._brief else 1 + self.hysteresis
        exceeds = self._share(self._send) > self._limit * ratio
        smaller = (cf for cf in self._cfs if cf < self._send)
        if not exceeds and not any(self._share(cf) <= self._limit / ratio for cf in smaller):
            return self._send
        fitting = (cf for cf in self._cfs if self._share(cf) <= self._limit)
        return next(fitting, self._cfs[-1])

    def _second(self) -> float | None:
        """The CF for a look; None if all CFs have the same number of bytes."""
        here = self._wire.at(self._send)
        others = {cf: n for cf in self._cfs if (n := self._wire.at(cf)) != here}
        fewer = {cf: n for cf, n in others.items() if 2 * n <= here}
        wanted, among = (here / APART, fewer) if fewer else (here * APART, others)
        return min(among, key=lambda cf: abs(among[cf] - wanted), default=None)

    def _share(self, cf: float) -> float:
        """The part of a step at `cf` that goes to sending its bytes, as predicted."""
        seconds, sending = self._time.seconds(cf), self._time.sending(cf)
        return sending / seconds if seconds and isfinite(seconds) else float(sending > 0)

    def _described(self, cf: float) -> str:
        share = self._share(cf)
        sending, whole = self._time.sending(cf), self._time.seconds(cf) or nan
        times = f"{seconds_in_words(sending)} of {seconds_in_words(whole)}"
        sign = "more than" if share > self._limit else "within"
        step = "a dense step" if cf == DENSE else f"a step at {named(cf)}"
        return f"{percent(share)} of {step} ({times}), {sign} {percent(self._limit)}"

    def candidates(self) -> tuple[float, ...]:
        return self._cfs[1:]

    def status(self) -> Mapping[str, float]:
        """share: of the CF sent. bandwidth: bytes a second. exploring: 1 at first and in a look."""
        by_time = self.bytes_per_step is None
        known = by_time and bool(self._time.timed())
        sending = self._time.sending(self._send) if known else 0.0
        return {
            "share": self._share(self._send) if known else nan,
            "bandwidth": self._wire.at(self._send) / sending if sending > 0 else nan,
            "exploring": float(by_time and (self._brief or self._look is not None)),
        }

    def rescale(self) -> None:
        """It stays at its CF while it measures step times anew, but keeps to bytes at once."""
        before = self._now
        self._measure_anew(self._send)
        self._reason = change(before, self._now, "the number of ranks has changed")


@dataclass(eq=False)
class WireBytes(Stateful):
    """Bytes on the wire by CF: as measured where a CF was sent, else as computed."""

    computed: Callable[[float], float]

    _measured: dict[float, float] = saved({})
    _dense: float | None = saved(None)

    def observe(self, report: StepReport) -> None:
        if isfinite(report.dense_wire_bytes) and report.dense_wire_bytes > 0:
            if report.dense_wire_bytes != self._dense:
                self._measured = {}  # the model has another size now: layers were frozen or freed
            self._dense = report.dense_wire_bytes
        if isfinite(report.wire_bytes) and report.wire_bytes >= 0:
            self._measured[report.cf] = report.wire_bytes

    def at(self, cf: float) -> float:
        """Bytes of a step at `cf`."""
        return self._measured[cf] if cf in self._measured else self.computed(cf)
