"""GraVAC as published against its rule written a second time, on random traces.

The rule is Algorithm 1 and sections 3.1 and 3.2 of the paper. The second version keeps every gain
that was ever measured, and forms each expectation anew from all of them.
"""

from __future__ import annotations

from math import inf
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import DENSE, Context, Measurement, StepReport
from policies.gravac import GraVAC
from tests.unit.gravac_world import LADDER, RANGE
from tests.unit.plans import sends

STEPS_AFTER = 40
"""Steps of a trace after the last window."""


class Trace:
    """Random energies by step and CF, and seconds by CF: gains fall with the CF, and are noisy."""

    def __init__(self, seed, windows):
        draw = Random(seed)
        means = sorted((draw.uniform(0.05, 1) for _ in LADDER), reverse=True)
        noise = draw.choice([0.02, 0.2, 0.5])
        self.seconds = {cf: draw.uniform(0.5, 2) / (1 + i) for i, cf in enumerate(LADDER)}
        self.seconds[DENSE] = 3.0
        self.steps = []
        for _ in range(windows * len(LADDER) + STEPS_AFTER):
            total = draw.uniform(0.2, 5)
            gains = [min(1.0, max(0.0, mean + draw.uniform(-noise, noise))) for mean in means]
            self.steps.append((total, dict(zip(LADDER, gains, strict=True))))


def by_the_paper(trace, epsilon, omega, window, weight):
    """The CF of every step."""
    seen = {cf: [] for cf in LADDER}  # (energy kept, energy), oldest first
    sent = []
    floor, candidate, waiting = LADDER[0], None, list(LADDER[1:])
    settled = False

    def expected(cf):
        """The exponentially weighted means' ratio; 0 before the first measurement."""
        weights = [(1 - weight) ** age for age in reversed(range(len(seen[cf])))]
        top = sum(w * kept for w, (kept, _) in zip(weights, seen[cf], strict=True))
        bottom = sum(w * total for w, (_, total) in zip(weights, seen[cf], strict=True))
        return top / bottom if bottom else 0.0

    for step, (total, gains) in enumerate(trace.steps):
        if step < window:
            sent.append(floor)
        elif candidate is not None and expected(candidate) >= epsilon:
            sent.append(candidate)
        else:
            sent.append(floor if expected(floor) >= epsilon else DENSE)
        for cf in {floor, candidate} - {None}:
            seen[cf].append((gains[cf] * total, total))
        if settled or (step + 1) % window:
            continue
        if candidate is not None and abs(expected(floor) - expected(candidate)) <= omega * expected(
            floor
        ):
            floor = candidate
        if waiting:
            candidate = waiting.pop(0)
            continue
        settled = True
        timed = set(sent[:-1])  # the last step's time is not known yet
        throughputs = {cf: expected(cf) / trace.seconds[cf] for cf in LADDER if cf in timed}
        candidate = saturated(throughputs, omega) if throughputs else None
    return sent


def saturated(throughputs, omega):
    """The smaller of two CFs that differ by no more than omega, else the one with more."""
    best = None
    for cf in sorted(throughputs):
        change = inf
        if best is not None and throughputs[best] > 0:
            change = abs(throughputs[cf] / throughputs[best] - 1)
        if best is None or (change > omega and throughputs[cf] > throughputs[best]):
            best = cf
    return best


def by_the_policy(trace, epsilon, omega, window, ranks):
    policy = GraVAC.paper(epsilon=epsilon, omega=omega, window=window)
    policy.start(Context(RANGE, ranks, wire_bytes=lambda cf: 1e6 / cf))
    plans = []
    for step, (total, gains) in enumerate(trace.steps):
        plan = policy.plan()
        times = {}
        if plans:
            timed = plans[-1].send
            seconds = trace.seconds[timed]
            times = {"timed_cf": timed, "seconds": seconds, "median_seconds": seconds}
            times |= {"exchange_seconds": seconds, "compress_seconds": 0.0}
        measured = {
            cf: Measurement(error=(1 - gains[cf]) * total, total=total)
            for cf in {plan.send, *plan.probe} - {DENSE}
        }
        policy.observe(StepReport(step, plan.send, measured, **times))
        plans.append(plan)
    return plans


traces = st.tuples(
    st.integers(0, 10**6),
    st.floats(0.05, 0.95),
    st.sampled_from([0.01, 0.1, 0.3]),
    st.integers(1, 12),
    st.sampled_from([1, 2, 8, 32, 64]),
)


@settings(max_examples=300)
@given(traces)
def test_every_step_sends_what_the_paper_sends(drawn):
    seed, epsilon, omega, window, ranks = drawn
    trace = Trace(seed, window)
    sent = [plan.send for plan in by_the_policy(trace, epsilon, omega, window, ranks)]
    assert sent == by_the_paper(trace, epsilon, omega, window, min(0.5, ranks / 100))


def test_the_traces_reach_what_they_are_to_test():
    """Some settle below the largest CF, some fall from the choice, and some send dense."""
    reached = set()
    for seed in range(60):
        window = 1 + seed % 6
        plans = by_the_policy(Trace(seed, window), 0.4, 0.1, window, 32)
        after = plans[window * len(LADDER) :]
        reached |= {"settled" for plan in after[:1] if plan.reason.startswith("settled")}
        reached |= {"falls" for _ in sends(after)[1:]}
        reached |= {"dense" for plan in after if plan.send == DENSE}
        reached |= {"below the top" for plan in after if DENSE < plan.send < LADDER[-1]}
    assert reached == {"settled", "falls", "dense", "below the top"}
