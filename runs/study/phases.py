"""The gains of a run, phase by phase: early, later, and after the learning rate has dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan, sqrt
from statistics import fmean, stdev
from typing import Any

from adaptive import StepReport

KINDS = ("peers", "next", "gradient", "error_fed", "raw")
"""Signal gain by the ranks' products and by the next step's; the steady-state error-fed gain; the
others as measured while this run's CF was sent."""


def phases(drop: int, steps: int) -> dict[str, range]:
    """Steps of each phase; one that has none is left out."""
    early = max(1, drop // 3)
    parts = {"early": (0, early), "before the drop": (early, drop), "after the drop": (drop, steps)}
    return {name: range(*ends) for name, ends in parts.items() if range(*ends)}


def gains(reports: Sequence[StepReport], cfs: Sequence[float]) -> dict[str, Any]:
    """Ratios of means over these steps (of one run or several), by kind and CF; errors: by how many
    standard errors the denominator of each signal gain exceeds 0."""
    peers = [(r.peers, r.peers_total) for r in reports if _known(r.peers_total)]
    after = [(r.signal, r.signal_total) for r in reports if _known(r.signal_total)]
    found: dict[str, Any] = {"peers": _ratios(peers, cfs), "next": _ratios(after, cfs)}
    found["error_fed"] = {cf: _mean([r.steady.get(cf, nan) for r in reports]) for cf in cfs}
    for kind in ("gradient", "raw"):
        found[kind] = {}
        for cf in cfs:
            terms = [r.measurements[cf].terms(kind) for r in reports if cf in r.measurements]
            tops, bottoms = zip(*terms, strict=True) if terms else ((), ())
            found[kind][cf] = _divided(sum(tops), sum(bottoms))
    found["errors"] = {
        "peers": _errors([total for _, total in peers]),
        "next": _errors([total for _, total in after]),
    }
    return found


def _known(total: float) -> bool:
    """0: there was no step before."""
    return isfinite(total) and total != 0


def _ratios(
    steps: Sequence[tuple[Mapping[float, float], float]], cfs: Sequence[float]
) -> dict[float, float]:
    bottom = sum(total for _, total in steps)
    return {cf: _divided(sum(p.get(cf, nan) for p, _ in steps), bottom) for cf in cfs}


def _divided(top: float, bottom: float) -> float:
    return top / bottom if bottom else nan


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if isfinite(value)]
    return fmean(known) if known else nan


def _errors(totals: Sequence[float]) -> float:
    if len(totals) < 2 or not (spread := stdev(totals)):
        return nan
    return fmean(totals) / spread * sqrt(len(totals))
