"""Whether compression was worth it, where a dense run was made as well to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from statistics import mean, stdev

from adaptive.headline import DenseStep, headline
from policies.words import percent


@dataclass(frozen=True)
class Ended:
    """How runs of the same settings ended, one for each seed. seconds: of a step. qualities: at the
    end. sent, dense: bytes of a worker, and what they would have been dense. dense_share: of the
    steps, those that were sent dense. modelled: step times are.
    steps: of each."""

    seconds: float
    qualities: Sequence[float]
    sent: float
    dense: float
    dense_share: float = 0.0
    modelled: bool = False
    steps: int = 0


def verdict(run: Ended, dense: Ended, quality_name: str, higher: bool, network: str) -> str:
    """The headline of a run beside a dense one. higher: quality is better if it is. network: an
    emulated or modelled link in words."""
    quality = beside(run.qualities, dense.qualities, quality_name, higher)
    if quality and run.steps != dense.steps:
        quality += f" after {run.steps} steps instead of {dense.steps}"
    return headline(
        run.seconds,
        DenseStep(dense.seconds, measured=not dense.modelled),
        1 - run.sent / run.dense if run.dense else nan,
        dense_share=min(run.dense_share, 0.999),  # what it is called, its twin is dense, too
        network=network,
        quality=quality,
    )


def beside(ours: Sequence[float], dense: Sequence[float], name: str, higher: bool) -> str:
    """How a quality compares with dense's: in per cent, of an accuracy in its own points. "" if
    one of them is not known. A difference within the spread over seeds is none."""
    ours, dense = [[q for q in each if isfinite(q)] for each in (ours, dense)]
    if not ours or not dense:
        return ""
    a, b = mean(ours), mean(dense)
    numbers = f"{a:.4g} against {b:.4g}"
    few = min(len(ours), len(dense)) < 2
    spread = 0.0 if few else sqrt((stdev(ours) ** 2 + stdev(dense) ** 2) / 2)
    seeds = "one seed" if few else f"{min(len(ours), len(dense))} seeds"
    alike = f"{a:.4g}" == f"{b:.4g}"
    if alike or (spread and abs(a - b) <= spread):
        within = "" if alike else ", within the spread"
        return f"{name} as dense's ({numbers}, {seeds}{within})"
    how = "better" if (a > b) == higher else "worse"
    by = f"{abs(a - b):.2g} points" if higher or not b else percent(a / b - 1)
    return f"{name} {by} {how} than dense's ({numbers}, {seeds})"
