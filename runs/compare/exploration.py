"""What finding out has cost a policy.

A step explores if it was sent while the policy was still finding out (its status says so), at
another CF than the one that it then stayed at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from adaptive import StepRecord


@dataclass(frozen=True)
class Exploration:
    """What a run spent on exploring.

    steps: that explored. nbytes: that a worker sent in them."""

    steps: int
    nbytes: float


def exploration(records: Sequence[StepRecord]) -> Exploration:
    """All explorations of a run together; a policy whose status does not speak of it has none."""
    spent: list[float] = []
    stayed_at = nan  # of what comes after the last step nothing is known
    for i in reversed(range(len(records))):
        before, sent = records[max(0, i - 1)].status, records[i].report
        # A status is that after its step, so it tells of the next one.
        if before.get("exploring") != 1:
            stayed_at = sent.cf
        elif sent.cf != stayed_at:
            spent.append(sent.wire_bytes)
    return Exploration(len(spent), sum(spent))
