"""What a step costs at any CF, from the steps that were really run, on a network that changes.

A step is work + compress(cf) + exposed(bytes): the exposed part is what backward waits for the
network, as the rank tells it that waits least. What the others wait for a slower one is there at
any CF, and counts as work. Work and compression do not depend on the network, so a change of the
network shows in the exposed time of the CF in use; what was known of the others' is then of another
network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from policies import saved
from policies.average import Average, averages_by_cf
from policies.base import DENSE, StepReport
from policies.by_bytes import ByBytes
from policies.exposure import Exposure

WEIGHT = 0.2
"""Of a new step in what does not depend on the network."""

PAUSE = 3.0
"""One step this many times its median is a pause (evaluation, a checkpoint), not a step; a second
one in a row is not: the median lags behind a network that has become slow."""

FLOOR = 0.1
"""Exposed times are told apart as if each were longer by this share of the work: less than that is
noise of the machine."""


class Forecast:
    """nbytes: bytes on the wire at a CF."""

    def __init__(self, nbytes: Callable[[float], float]) -> None:
        self._by_bytes = ByBytes(nbytes)
        self._exposure = Exposure(nbytes)
        self._work = Average(WEIGHT)
        self._compress: dict[float, Average] = {}
        self._decode: dict[float, Average] = {}
        self._long = 0  # steps in a row that took far longer than their median

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
        self._exposure.observe(cf, exposed, FLOOR * self._work.value)

    def seconds(self, cf: float) -> float | None:
        """Of a step at `cf`, run or not; None before the first step."""
        if not self._work.count:
            return None
        return self._work.value + self._coding(cf) + self._exposure.seconds(cf)

    def timed(self) -> tuple[float, ...]:
        """The CFs that were run on the network as it is now."""
        return self._exposure.timed()

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values."""
        return {
            "work": self._work.state_dict(),
            "compress": [[cf, each.state_dict()] for cf, each in self._compress.items()],
            "decode": [[cf, each.state_dict()] for cf, each in self._decode.items()],
            "exposure": self._exposure.state_dict(),
            "long": self._long,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._work.load_state_dict(saved.part(state, "work"))
        self._compress = averages_by_cf(state, "compress", WEIGHT)
        self._decode = averages_by_cf(state, "decode", WEIGHT)
        both = self._compress.keys() == self._decode.keys()
        saved.together(both, "'compress' and 'decode' are of different CFs")
        self._exposure.load_state_dict(saved.part(state, "exposure"))
        self._long = saved.count(state, "long")

    def _coding(self, cf: float) -> float:
        """Of a CF not run yet: with fewer bytes than those that were, on the line through the two
        nearest. With one, or with more bytes, where that line says little: compression, which
        mostly searches, as it was, and decoding in proportion to the bytes. Dense needs neither."""
        if cf == DENSE:
            return 0.0
        if cf in self._compress:
            return self._compress[cf].value + self._decode[cf].value
        near = self._by_bytes.nearest((other for other in self._compress if other != DENSE), cf)
        if not near:
            return 0.0
        if len(near) > 1 and self._by_bytes.nbytes(cf) < min(map(self._by_bytes.nbytes, near)):
            return self._by_bytes.on_line({other: self._coding(other) for other in near}, near, cf)
        decode = self._by_bytes.scaled(self._decode[near[0]].value, near[0], cf)
        return self._compress[near[0]].value + decode
