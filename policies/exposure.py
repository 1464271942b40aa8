"""How long a step waits for the network at any CF, from the CFs that were run.

Networks change: that shows at the CF in use, and what was known of the others is then of another
network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from policies import saved
from policies.by_bytes import ByBytes
from policies.step_times import median

RECENT = 5
"""So many steps in a row show that the network has changed, if all of them waited longer than
before, or all of them less: what single steps wait is noisy on a busy machine."""

LATELY, EXCEPTIONS = 20, 7
"""So many show it, too, with so many exceptions among them."""

SECOND, THIRD = 1, 2
"""Of up to RECENT and of more steps, by size, which one is the network's: a single step may have
waited for nothing, and of many steps two."""

CHANGED = 1.25
"""An exposed time this many times what it was, or less than 1 / this, is another network's."""


class Exposure:
    """Exposed times, in seconds: what backward waits for the network.

    nbytes: bytes on the wire at a CF.
    """

    def __init__(self, nbytes: Callable[[float], float]) -> None:
        self._by_bytes = ByBytes(nbytes)
        self._typical: dict[float, float] = {}  # medians, of the CFs that were run
        self._quiet: dict[float, float] = {}  # the same, as far as only the network is waited for
        self._recent: list[float] = []
        self._same = 0  # steps at the CF in use, on the network as it is now
        self._doubted = False  # on this network the other CFs were forgotten once
        self._cf: float | None = None

    def observe(self, cf: float, seconds: float, least: float) -> None:
        """Take in what one step waited. least: times are told apart as if longer by this."""
        if cf != self._cf:
            self._cf, self._recent, self._same = cf, [], 0
        self._recent = [*self._recent, seconds][-LATELY:]
        self._same += 1
        if self._has_changed(cf, least):
            # A step or two of the last ones may have been held up on the network as it was.
            self._typical, self._quiet, self._same = {}, {}, RECENT - 2
            self._doubted = False
        elif not self._doubted and self._is_doubtful(cf, least):
            self._typical, self._quiet = {}, {}
            self._doubted = True
        if self._same <= LATELY:
            # From then on they stay, so that a change that comes slowly shows, too.
            times = sorted(self._settled())
            self._typical[cf] = median(times)
            place = SECOND if self._same <= RECENT else THIRD
            self._quiet[cf] = times[min(place, len(times) - 1)]

    def seconds(self, cf: float) -> float:
        """At any CF; 0 before the first step. Of a CF not run yet: on the line through the two that
        were run and have the nearest numbers of bytes (latency and bandwidth); with one, in
        proportion to its bytes.

        What a busy machine holds up is in these times, too, and does not grow with the bytes: what
        counts is the least that was seen at a CF, but one or two."""
        known = self._typical.get(cf)
        return self._predicted(cf, self._quiet) if known is None else known

    def timed(self) -> tuple[float, ...]:
        """The CFs that were run on the network as it is now."""
        return tuple(self._typical)

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values."""
        return {
            "typical": [list(item) for item in self._typical.items()],
            "quiet": [list(item) for item in self._quiet.items()],
            "recent": list(self._recent),
            "same": self._same,
            "doubted": self._doubted,
            "cf": self._cf,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._typical = saved.by_cf(state, "typical", least=0)
        self._quiet = saved.by_cf(state, "quiet", least=0)
        self._recent = saved.numbers(state, "recent", least=0)
        self._same, self._doubted = saved.count(state, "same"), saved.flag(state, "doubted")
        self._cf = saved.maybe_cf(state, "cf")
        alike = self._typical.keys() == self._quiet.keys()
        saved.together(alike, "'typical' and 'quiet' are of different CFs")
        saved.together(self._cf is None or self._cf in self._typical, "'cf' has no typical time")
        enough = len(self._recent) >= min(self._same, LATELY)
        saved.together(enough, "'recent' has lost some times")

    def _predicted(self, cf: float, known: Mapping[float, float]) -> float:
        near = self._by_bytes.nearest(known, cf)
        if len(near) > 1:
            return self._by_bytes.on_line(known, near, cf)
        return self._by_bytes.scaled(known[near[0]], near[0], cf) if near else 0.0

    def _settled(self) -> list[float]:
        """Times of the CF in use on the network as it is. Beyond RECENT of them the last ones may
        turn out to be of another network, and wait for that."""
        times = self._recent[-self._same :]
        return times[: max(RECENT, len(times) - RECENT)]

    def _has_changed(self, cf: float, least: float) -> bool:
        """The network, as far as the last steps at the CF in use tell."""
        if self._same < RECENT:
            return False
        if self._same == RECENT:
            return self._are_beyond(RECENT, 0, *self._bounds(cf), least)
        old = self._typical[cf]
        return self._are_beyond(RECENT, 0, old, old, least) or (
            self._same >= LATELY and self._are_beyond(LATELY, EXCEPTIONS, old, old, least)
        )

    def _bounds(self, cf: float) -> tuple[float, float]:
        """Of the time at a CF, from the others': more bytes never take less."""
        nbytes = self._by_bytes.nbytes
        fewer = [t for other, t in self._typical.items() if nbytes(other) < nbytes(cf)]
        more = [t for other, t in self._quiet.items() if nbytes(other) > nbytes(cf)]
        return max(fewer, default=0.0), min(more, default=inf)

    def _is_doubtful(self, cf: float, least: float) -> bool:
        """What is known of the others: the CF in use waits less than they would have it. Backward
        may hide its exchange; or the network was slow for a few steps, then and no longer."""
        others = {other: time for other, time in self._quiet.items() if other != cf}
        if not others or self._same != 2 * RECENT:
            return False
        return self._are_beyond(RECENT, 0, self._predicted(cf, others), inf, least)

    def _are_beyond(
        self, steps: int, exceptions: int, low: float, high: float, least: float
    ) -> bool:
        """The last steps, but for exceptions, waited clearly less than `low`, or clearly longer
        than `high`."""
        times = sorted(self._recent[-steps:])
        slower = times[exceptions] + least > CHANGED * (high + least)
        return slower or times[-1 - exceptions] + least < (low + least) / CHANGED
