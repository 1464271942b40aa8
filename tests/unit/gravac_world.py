"""GraVAC in a world of hand-made gains and step times."""

from __future__ import annotations

from itertools import pairwise
from math import isnan, nan

from policies.base import DENSE, Context, Measurement, Plan, StepReport
from policies.gravac import GraVAC
from policies.step_time import KEPT

RANGE = (10.0, 1000.0)
LADDER = (10.0, 20.0, 40.0, 160.0, 1000.0)
GOOD = dict.fromkeys(LADDER, 0.9)
"""No candidate loses anything against the floor."""
FALLING = {10.0: 0.9, 20.0: 0.75, 40.0: 0.6, 160.0: 0.45, 1000.0: 0.31}
"""Each candidate loses more than omega = 0.1."""
FASTER = {DENSE: 4.0, 10.0: 1.0, 20.0: 0.9, 40.0: 0.8, 160.0: 0.3, 1000.0: 0.29}
"""Seconds a step."""


class World:
    """Feeds a policy: gain[cf] and seconds[cf] can be changed while it runs.

    Step times come one report late, under timed_cf, as from the controller: all but compression is
    time on the network. probe_seconds: what a dense step that probes takes more, and reports as
    compression. compress: seconds of compression at a very large CF, which `seconds` contains; a
    smaller CF takes longer.
    """

    def __init__(self, policy, gain, seconds=FASTER, *, cf_range=RANGE, ranks=50):
        self.policy, self.gain, self.seconds = policy, dict(gain), dict(seconds)
        self.probe_seconds = 0.0
        self.compress = 0.0
        self.plans: list[Plan] = []
        self.last: Plan | None = None
        policy.start(Context(cf_range, ranks, wire_bytes=lambda cf: 1e6 / cf))

    def measurement(self, cf):
        g = self.gain[cf]
        if isnan(g):
            return Measurement()
        return Measurement(kept=g, error=1 - g, total=1, grad=1, sample_error=1 - g, sample_total=1)

    def step(self):
        plan = self.policy.plan()
        timed = self.last.send if self.last else nan
        seconds = self.seconds.get(timed, nan)
        compress = 0.0
        if timed > DENSE:
            compress = self.compress * (1 + KEPT / timed)
            seconds += compress - self.compress
        if timed == DENSE and self.last.probe:
            seconds, compress = seconds + self.probe_seconds, self.probe_seconds
        self.plans.append(plan)
        self.last = plan
        self.policy.observe(
            StepReport(
                step=len(self.plans) - 1,
                cf=plan.send,
                measurements={
                    cf: self.measurement(cf) for cf in {plan.send, *plan.probe} - {DENSE}
                },
                timed_cf=timed,
                seconds=seconds,
                median_seconds=seconds,
                compress_seconds=compress,
                exchange_seconds=seconds - compress,
                timed_bytes=1e6 / timed,
            )
        )
        return plan

    def run(self, steps):
        return [self.step() for _ in range(steps)]

    def settle(self, limit=1000):
        """Run until there is a verdict; the plan that follows it is the next one."""
        for _ in range(limit):
            if self.policy.verdict():
                return self.policy.plan()
            self.step()
        raise AssertionError("no verdict")


def world(gain, seconds=FASTER, *, cf_range=RANGE, ranks=50, **settings):
    settings = {
        "epsilon": 0.3,
        "omega": 0.1,
        "window": 20,
        "dense_window": 10,
        "hysteresis": 0.1,
        "cooldown": 20,
        **settings,
    }
    return World(GraVAC(**settings), gain, seconds, cf_range=cf_range, ranks=ranks)


def bare(plan):
    return plan.send, plan.probe


def sends(plans):
    """The CFs in the order they were sent, without repetitions."""
    return [plans[0].send, *(b.send for a, b in pairwise(plans) if a.send != b.send)]
