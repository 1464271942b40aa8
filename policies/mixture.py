"""One CF for a step whose layers have CFs of their own."""

from __future__ import annotations

from collections.abc import Mapping

from policies.base import Plan


def mixture(cfs: Mapping[str, float], numels: Mapping[str, int]) -> Plan:
    """A plan that sends each layer at its CF, in `cfs`; at least one above 1.

    numels: elements of each. The plan's own CF is that of all of them together: elements / elements
    kept."""
    kept = sum(numels[name] / cf for name, cf in cfs.items())
    send = sum(numels[name] for name in cfs) / kept
    return Plan(send, layers={send: dict(cfs)})
