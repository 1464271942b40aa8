"""Exposed time: how long a step waits for the network after backward, at any CF.

It is measured at the CFs that were run and predicted for the others by the bytes that they send.
Networks change. A change shows at the CF in use, and the times of the other CFs are then those of
another network, and are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite, nan

from policies.estimators import median
from policies.state import (
    Stateful,
    by_cf,
    count,
    declare,
    flag,
    maybe_cf,
    numbers,
    saved_as,
    together,
)

RECENT = 5
"""So many steps in a row that all waited longer than before, or all shorter, show that the network
has changed. The time of a single step is noisy on a busy machine."""

MANY, EXCEPTIONS = 20, 7
"""So many steps in a row show it, too, with so many exceptions among them."""

SECOND, THIRD = 1, 2
"""The time that only the network takes is that of the second fastest of up to RECENT steps, and of
the third fastest of more: single steps may have waited for nothing."""

CHANGED = 1.25
"""A network has changed if the exposed time is this many times as long as before, or as short."""


def nearest(nbytes: Callable[[float], float], known: Iterable[float], cf: float) -> list[float]:
    """Up to two of the known CFs, the ones whose bytes are nearest to those of `cf`, nearest first.

    nbytes: returns the bytes on the wire at a CF (here and in the next two functions).
    """
    wanted = nbytes(cf)
    return sorted(known, key=lambda other: (abs(nbytes(other) - wanted), other))[:2]


def on_line(
    nbytes: Callable[[float], float],
    seconds: Mapping[float, float],
    near: Sequence[float],
    cf: float,
) -> float:
    """Seconds at the bytes of `cf`, on the line through two CFs, `near`, whose seconds are known.
    The line never falls: more bytes do not take less time."""
    (x, y), (other_x, other_y) = ((nbytes(each), seconds[each]) for each in near)
    slope = max(0.0, (other_y - y) / (other_x - x)) if other_x != x else 0.0
    predicted = y + slope * (nbytes(cf) - x)
    return max(0.0, predicted) if isfinite(predicted) else y


def scaled(nbytes: Callable[[float], float], seconds: float, known: float, cf: float) -> float:
    """Seconds at the bytes of `cf`, in proportion to those of the CF `known`; the same seconds
    where the bytes have no ratio."""
    times = nbytes(cf) / (nbytes(known) or nan)
    return seconds * times if isfinite(times) else seconds


class ExposedTime(Stateful):
    """The exposed time of a step at any CF, in seconds, on the network as it is now.

    nbytes: returns the bytes on the wire at a CF.
    """

    _fields = declare(
        _typical=saved_as(by_cf, least=0),
        _network=saved_as(by_cf, least=0),
        _recent=saved_as(numbers, least=0),
        _same=saved_as(count),
        _doubted=saved_as(flag),
        _cf=saved_as(maybe_cf),
    )

    def __init__(self, nbytes: Callable[[float], float]) -> None:
        self._nbytes = nbytes
        self._typical: dict[float, float] = {}  # medians by CF, of the CFs that were run
        self._network: dict[float, float] = {}  # by CF, what the network alone takes
        self._recent: list[float] = []  # of the last steps, at the CF in use
        self._same = 0  # steps at the CF in use on the network as it is now
        self._doubted = False  # whether the other CFs were already forgotten on this network
        self._cf: float | None = None  # in use

    def observe(self, cf: float, seconds: float, least: float) -> None:
        """Take in the exposed time of one step.

        least: this is added to times before they are compared, so that small ones do not count.
        """
        if cf != self._cf:
            self._cf, self._recent, self._same = cf, [], 0
        self._recent = [*self._recent, seconds][-MANY:]
        self._same += 1
        if self._has_changed(cf, least):
            # One or two of the last steps may still have been delayed by the network as it was.
            self._typical, self._network, self._same = {}, {}, RECENT - 2
            self._doubted = False
        elif not self._doubted and self._is_doubtful(cf, least):
            self._typical, self._network = {}, {}
            self._doubted = True
        if self._same <= MANY:
            # After that they stay, so that a slow change shows as well.
            times = sorted(self._settled())
            self._typical[cf] = median(times)
            place = SECOND if self._same <= RECENT else THIRD
            self._network[cf] = times[min(place, len(times) - 1)]

    def seconds(self, cf: float) -> float:
        """The exposed time at any CF; 0 before the first step.

        For a CF that was not run: on the line through the two CFs that were run and have the
        nearest numbers of bytes (latency and bandwidth), or with one, in proportion to its bytes.
        Delays of a busy machine do not grow with the bytes, so the line goes through what the
        network alone takes.
        """
        known = self._typical.get(cf)
        return self._predicted(cf, self._network) if known is None else known

    def timed(self) -> tuple[float, ...]:
        """The CFs that were run on the network as it is now."""
        return tuple(self._typical)

    def _predicted(self, cf: float, known: Mapping[float, float]) -> float:
        near = nearest(self._nbytes, known, cf)
        if len(near) > 1:
            return on_line(self._nbytes, known, near, cf)
        return scaled(self._nbytes, known[near[0]], near[0], cf) if near else 0.0

    def _settled(self) -> list[float]:
        """Times of the CF in use on the network as it is now. When there are more than RECENT, the
        last ones do not count yet: they may turn out to be of another network."""
        times = self._recent[-self._same :]
        return times[: max(RECENT, len(times) - RECENT)]

    def _has_changed(self, cf: float, least: float) -> bool:
        """Whether the last steps at the CF in use show another network."""
        if self._same < RECENT:
            return False
        if self._same == RECENT:
            return self._are_beyond(RECENT, 0, *self._bounds(cf), least)
        old = self._typical[cf]
        return self._are_beyond(RECENT, 0, old, old, least) or (
            self._same >= MANY and self._are_beyond(MANY, EXCEPTIONS, old, old, least)
        )

    def _bounds(self, cf: float) -> tuple[float, float]:
        """Smallest and largest time that a CF can take, from the times of other CFs: more bytes do
        not take less time."""
        fewer = [t for other, t in self._typical.items() if self._nbytes(other) < self._nbytes(cf)]
        more = [t for other, t in self._network.items() if self._nbytes(other) > self._nbytes(cf)]
        return max(fewer, default=0.0), min(more, default=inf)

    def _is_doubtful(self, cf: float, least: float) -> bool:
        """Whether the CF in use waits less than the times of the other CFs predict. Backward may
        hide its exchange; or the network was slow for a few steps when the others were run."""
        others = {other: time for other, time in self._network.items() if other != cf}
        if not others or self._same != 2 * RECENT:
            return False
        return self._are_beyond(RECENT, 0, self._predicted(cf, others), inf, least)

    def _are_beyond(
        self, steps: int, exceptions: int, low: float, high: float, least: float
    ) -> bool:
        """Whether the last steps, but for some exceptions, all waited clearly longer than `high` or
        all clearly less than `low`."""
        times = sorted(self._recent[-steps:])
        slower = times[exceptions] + least > CHANGED * (high + least)
        return slower or times[-1 - exceptions] + least < (low + least) / CHANGED

    def _check_loaded(self) -> None:
        alike = self._typical.keys() == self._network.keys()
        together(alike, "'typical' and 'network' are of different CFs")
        together(self._cf is None or self._cf in self._typical, "'cf' has no typical time")
        enough = len(self._recent) >= min(self._same, MANY)
        together(enough, "'recent' has lost some times")
