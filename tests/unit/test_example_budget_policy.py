"""`examples/budget_policy.py` on hand-made networks."""

from __future__ import annotations

import pytest

from examples.budget_policy import Budget
from policies import DENSE, Context, StepReport

WORK = 0.1
"""Seconds of a step beside the network."""


class Run:
    """A run whose dense exchange takes so many seconds."""

    def __init__(self, dense: float, policy: Budget | None = None) -> None:
        self.dense, self.policy = dense, policy or Budget(share=0.2, window=5)
        self.policy.start(Context((10.0, 1000.0), 2))
        self.last = DENSE

    def share(self, cf: float) -> float:
        return self.dense / cf / (WORK + self.dense / cf)

    def step(self) -> tuple[float, str]:
        plan, timed = self.policy.plan(), self.last
        waited = self.dense / timed
        self.policy.observe(
            StepReport(0, plan.send, timed_cf=timed, seconds=WORK + waited, exchange_seconds=waited)
        )
        self.last = plan.send
        return plan.send, plan.reason

    def run(self, steps: int) -> list[tuple[float, str]]:
        return [self.step() for _ in range(steps)]


@pytest.mark.parametrize("dense", [0.0, 0.02, 0.5, 5.0, 1e4])
def test_it_settles_at_the_smallest_cf_that_fits(dense: float) -> None:
    run = Run(dense)
    sent = [cf for cf, _ in run.run(40)]
    fitting = [cf for cf in (DENSE, *run.policy.candidates()) if run.share(cf) <= 0.2]
    assert set(sent[10:]) == {min(fitting, default=1000.0)}


def test_it_says_why_and_follows_the_network_both_ways() -> None:
    run = Run(5.0)
    first = run.run(20)
    [reason] = [reason for _, reason in first if reason]
    assert reason.startswith("the network takes 98% of a step at CF 1, and would take ")
    run.dense = 0.01
    assert run.run(20)[-1][0] == DENSE
    run.dense = 5.0
    assert run.run(20)[-1][0] == first[-1][0]


def test_it_goes_on_from_a_saved_state() -> None:
    run, other = Run(5.0), Run(5.0)
    run.run(8)
    other.policy.load_state_dict(run.policy.state_dict())
    other.last = run.last
    assert other.run(10) == run.run(10)
    with pytest.raises(ValueError, match=r"state: cf must be one of .*, got 7"):
        other.policy.load_state_dict({"cf": 7})


@pytest.mark.parametrize("settings", [{"share": 0}, {"share": 2}, {"window": 0}])
def test_wrong_settings_are_named(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be"):
        Budget(**settings)  # type: ignore[arg-type]
