"""What a step costs at any CF, from the steps that were really run, on a network that changes.

A step is work + compress(cf) + exposed(bytes): the exposed part is what backward waits for the
network, as the rank tells it that waits least. What the others wait for a slower one is there at
any CF, and counts as work. Work and compression do not depend on the network, so a change of the
network shows in the exposed time of the CF in use; what was known of the others' is then of another
network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan
from typing import Any

from policies.average import Average
from policies.base import DENSE, StepReport
from policies.step_times import median

WEIGHT = 0.2
"""Of a new step in what does not depend on the network."""

RECENT = 5
"""So many steps in a row show that the network has changed, if all of them waited longer than
before, or all of them less: what single steps wait is noisy on a busy machine."""

QUIET = 20
"""Steps whose median is the exposed time of a CF, and among which there are some that waited for
the network alone."""

SECOND, THIRD = 1, 2
"""Of up to RECENT and of more steps, by size, which one is the network's: a single step may have
waited for nothing, and of many steps two."""

CHANGED = 1.25
"""An exposed time this many times what it was, or less than 1 / this, is another network's."""

PAUSE = 3.0
"""One step this many times its median is a pause (evaluation, a checkpoint), not a step; a second
one in a row is not: the median lags behind a network that has become slow."""

FLOOR = 0.1
"""Exposed times are told apart as if each were longer by this share of the work: less than that is
noise of the machine."""


class Forecast:
    """nbytes: bytes on the wire at a CF."""

    def __init__(self, nbytes: Callable[[float], float]) -> None:
        self._nbytes = nbytes
        self._work = Average(WEIGHT)
        self._compress: dict[float, Average] = {}
        self._decode: dict[float, Average] = {}
        self._exposed: dict[float, float] = {}
        self._quiet: dict[float, float] = {}  # the same, as far as the network alone is waited for
        self._recent: list[float] = []
        self._same = 0  # steps at the CF in use, on the network as it is now
        self._long = 0  # steps in a row that took far longer than their median
        self._cf: float | None = None

    def observe(self, report: StepReport) -> None:
        """Take in one step's times (those of `report.timed_cf`)."""
        cf, seconds, exposed = report.timed_cf, report.seconds, report.wait_seconds
        compress, coding = report.compress_seconds, report.coding_seconds
        if not all(map(isfinite, (cf, seconds, exposed, compress, coding))):
            return
        if seconds <= 0 or exposed < 0 or not 0 <= compress <= coding:
            return
        self._long = self._long + 1 if seconds > PAUSE * report.median_seconds else 0
        if self._long == 1:
            return
        self._work.add(max(0.0, seconds - exposed - coding))
        self._compress.setdefault(cf, Average(WEIGHT)).add(compress)
        self._decode.setdefault(cf, Average(WEIGHT)).add(coding - compress)
        if cf != self._cf:
            self._cf, self._recent, self._same = cf, [], 0
        self._recent = [*self._recent, exposed][-QUIET:]
        self._same += 1
        if self._has_changed(cf):
            # A step or two of them may have been held up on the network as it was.
            self._exposed, self._quiet, self._same = {}, {}, RECENT - 2
        times = sorted(self._settled())
        if self._same <= QUIET:  # from then on it stays, so that a slow change shows, too
            self._exposed[cf] = median(times)
        self._quiet[cf] = times[: (SECOND if self._same <= RECENT else THIRD) + 1][-1]

    def _settled(self) -> list[float]:
        """Exposed times of the CF in use on the network as it is. The last ones may turn out to be
        of another network, and wait for that."""
        times = self._recent[-self._same :]
        return times if self._same < 2 * RECENT else times[:-RECENT]

    def _has_changed(self, cf: float) -> bool:
        """The network, as far as the last steps at the CF in use tell. The first ones only correct
        what was thought of this CF."""
        if self._same <= RECENT:
            return False
        least = FLOOR * self._work.value
        old, last = self._exposed[cf] + least, self._recent[-RECENT:]
        return min(last) + least > CHANGED * old or max(last) + least < old / CHANGED

    def seconds(self, cf: float) -> float | None:
        """Of a step at `cf`, run or not; None before the first step."""
        if not self._work.count:
            return None
        return self._work.value + self._coding(cf) + self._exposure(cf)

    def timed(self) -> tuple[float, ...]:
        """The CFs that were run on the network as it is now."""
        return tuple(self._exposed)

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values."""
        return {
            "work": self._work.state_dict(),
            "compress": [[cf, each.state_dict()] for cf, each in self._compress.items()],
            "decode": [[cf, each.state_dict()] for cf, each in self._decode.items()],
            "exposed": [list(item) for item in self._exposed.items()],
            "quiet": [list(item) for item in self._quiet.items()],
            "recent": list(self._recent),
            "same": self._same,
            "long": self._long,
            "cf": self._cf,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._work.load_state_dict(state["work"])
        self._compress, self._decode = _loaded(state["compress"]), _loaded(state["decode"])
        self._exposed = {float(cf): float(value) for cf, value in state["exposed"]}
        self._quiet = {float(cf): float(value) for cf, value in state["quiet"]}
        self._recent = [float(value) for value in state["recent"]]
        self._same, self._long = int(state["same"]), int(state["long"])
        self._cf = None if state["cf"] is None else float(state["cf"])

    def _coding(self, cf: float) -> float:
        """Of a CF not run yet: with fewer bytes than those that were, on the line through the two
        nearest. With one, or with more bytes, where that line says little: compression, which
        mostly searches, as it was, and decoding in proportion to the bytes. Dense needs neither."""
        if cf == DENSE:
            return 0.0
        if cf in self._compress:
            return self._compress[cf].value + self._decode[cf].value
        near = self._nearest((other for other in self._compress if other != DENSE), cf)
        if not near:
            return 0.0
        if len(near) > 1 and self._nbytes(cf) < min(map(self._nbytes, near)):
            return self._on_line({other: self._coding(other) for other in near}, near, cf)
        decode = self._scaled(self._decode[near[0]].value, near[0], cf)
        return self._compress[near[0]].value + decode

    def _exposure(self, cf: float) -> float:
        """Of a CF not run yet: on the line through the two that were run and have the nearest
        numbers of bytes (latency and bandwidth); with one, in proportion to its bytes.

        What a busy machine holds up is in these times, too, and does not grow with the bytes: what
        counts is the least that was seen at a CF lately, but one or two."""
        known = self._exposed.get(cf)
        if known is not None:
            return known
        near = self._nearest(self._quiet, cf)
        if len(near) > 1:
            return self._on_line(self._quiet, near, cf)
        return self._scaled(self._quiet[near[0]], near[0], cf) if near else 0.0

    def _nearest(self, known: Iterable[float], cf: float) -> list[float]:
        """Up to two, by their bytes, the nearest first."""
        wanted = self._nbytes(cf)
        return sorted(known, key=lambda other: (abs(self._nbytes(other) - wanted), other))[:2]

    def _on_line(self, seconds: Mapping[float, float], near: Sequence[float], cf: float) -> float:
        """At the bytes of a CF, through two that are known; more bytes never take less."""
        (nbytes, value), (other, theirs) = ((self._nbytes(each), seconds[each]) for each in near)
        slope = max(0.0, (theirs - value) / (other - nbytes)) if other != nbytes else 0.0
        predicted = value + slope * (self._nbytes(cf) - nbytes)
        return max(0.0, predicted) if isfinite(predicted) else value

    def _scaled(self, seconds: float, known: float, cf: float) -> float:
        """In proportion to the bytes at two CFs, where that means something."""
        times = self._nbytes(cf) / (self._nbytes(known) or nan)
        return seconds * times if isfinite(times) else seconds


def _loaded(saved: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[float, Average]:
    averages = {float(cf): Average(WEIGHT) for cf, _ in saved}
    for cf, state in saved:
        averages[float(cf)].load_state_dict(state)
    return averages
