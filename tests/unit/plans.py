"""What to ask of the plans of a run."""

from __future__ import annotations

from itertools import pairwise


def sends(plans):
    """The CFs in the order they were sent, without repetitions."""
    return [plans[0].send, *(b.send for a, b in pairwise(plans) if a.send != b.send)]


def switches(plans):
    """How often the CF changed."""
    return len(sends(plans)) - 1


def reasons(plans):
    """The reasons that were given, in order."""
    return [plan.reason for plan in plans if plan.reason]
