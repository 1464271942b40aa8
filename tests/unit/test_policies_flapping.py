"""The error-fed gain makes a bare send rule flap; GraVAC's must not (DESIGN section 5)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from policies.base import DENSE, Context, Measurement, StepReport
from policies.gravac import GraVAC


class ErrorFeedback:
    """The toy of DESIGN section 5: the error-fed gain is good right after a dense step.

    Of the gradient's energy 1 a CF sends `kept`, of the residual's energy only a tenth.
    """

    def __init__(self):
        self.kept = {10.0: 0.8, 20.0: 0.6}
        self.residual = 0.0

    def measure(self, cf):
        total = 1 + self.residual
        energy = self.kept[cf] + 0.1 * self.residual
        return Measurement(kept=energy, error=total - energy, total=total, grad=1)

    def send(self, cf):
        self.residual = 0.0 if cf == DENSE else self.measure(cf).error


def switches(run_step, steps=600):
    sent = [run_step() for _ in range(steps)]
    return sum(a != b for a, b in pairwise(sent))


def test_the_bare_send_rule_flaps_on_the_toy():
    toy = ErrorFeedback()

    def step():
        gain = toy.measure(10.0).gain("error_fed")
        cf = 10.0 if gain >= 0.7 else DENSE
        toy.send(cf)
        return cf

    assert switches(step) > 100


@pytest.mark.parametrize("allow_dense", [True, False])
@pytest.mark.parametrize("ranks", [2, 50])
@pytest.mark.parametrize(("steps", "most"), [(600, 12), (10_000, 150)])
def test_gravac_switches_a_handful_of_times_on_the_toy(allow_dense, ranks, steps, most):
    """The longer run: with every exploration that the gain's ups and downs open again."""
    toy = ErrorFeedback()
    policy = GraVAC(epsilon=0.7, gain="error_fed", allow_dense=allow_dense)
    policy.start(Context((10.0, 20.0), ranks))

    def step():
        plan = policy.plan()
        measured = {cf: toy.measure(cf) for cf in {plan.send, *plan.probe} - {DENSE}}
        toy.send(plan.send)
        policy.observe(StepReport(0, plan.send, measured, timed_cf=plan.send, median_seconds=1.0))
        return plan.send

    assert 2 <= switches(step, steps) <= most
