"""After a change of the number of ranks: what a policy keeps, and what it measures again."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest

from policies import (
    DENSE,
    Accordion,
    Context,
    Fixed,
    Goodput,
    GraVAC,
    Measurement,
    Plan,
    Policy,
    Schedule,
    StepReport,
    Warmup,
)

LADDER = (10.0, 20.0, 40.0)


def _context(world_size: int) -> Context:
    return Context(
        (10, 40),
        world_size,
        wire_bytes=lambda cf: 1e6 * (world_size - 1) / cf,
        layers={"w": (90, 10), "b": (100,)},
    )


def _run(policy: Policy, world_size: int, steps: int, norm: float = 1.0) -> list[Plan]:
    plans = []
    for step in range(steps):
        plan = policy.plan()
        plans.append(plan)
        cf, nbytes = plan.send, 1e6 * (world_size - 1) / plan.send
        gain = 0.9 if cf == 10 else 0.8
        measured = {c: Measurement(gain, 1 - gain, 1, 1, 1 - gain, 1) for c in (cf, *plan.probe)}
        policy.observe(
            StepReport(
                step=step,
                cf=cf,
                measurements=measured,
                timed_cf=cf,
                seconds=0.01 + nbytes / 1e7,
                median_seconds=0.01 + nbytes / 1e7,
                compress_seconds=0.0,
                exchange_seconds=nbytes / 1e7,
                network_seconds=nbytes / 1e7,
                wire_bytes=nbytes,
                dense_wire_bytes=1e6 * (world_size - 1),
                timed_bytes=nbytes,
                grad_norm=1.0,
                sum_norm=norm if plan.read_sum else nan,
            )
        )
    return plans


def _rescaled(make: Any, steps: int) -> tuple[Policy, Policy]:
    """After `steps` at 2 ranks, and the same at 4."""
    before, after = make(), make()
    before.start(_context(2))
    _run(before, 2, steps)
    after.start(_context(4))
    after.load_state_dict(before.state_dict())
    after.rescale()
    return before, after


MAKERS = {
    "accordion": lambda: Accordion(interval=4),
    "fixed": lambda: Fixed(cf=20),
    "goodput": lambda: Goodput(opening=2, cooldown=3),
    "gravac": lambda: GraVAC(window=4, dense_window=2),
    "schedule": lambda: Schedule({0: 10, 30: 20}),
    "warmup": lambda: Warmup(GraVAC(window=4, dense_window=2), steps=2, stages=1),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps", [0, 7, 40])
def test_every_policy_goes_on_and_its_state_too(name: str, steps: int) -> None:
    _, after = _rescaled(MAKERS[name], steps)
    again = MAKERS[name]()
    again.start(_context(4))
    again.load_state_dict(after.state_dict())
    assert again.plan() == after.plan()
    assert _run(again, 4, 30) == _run(after, 4, 30)


@pytest.mark.parametrize(("goal", "steps"), [("quality", 40), ("time", 1)])
def test_goodput_stays_at_its_cf_until_the_times_are_known(goal: Any, steps: int) -> None:
    before, after = _rescaled(lambda: Goodput(goal=goal, opening=2, cooldown=3), steps)
    assert after.plan().send == before.plan().send > DENSE
    assert isinstance(after, Goodput)
    assert after.t_comp() == {}
    assert {plan.send for plan in _run(after, 4, 3)} == {before.plan().send}
    assert after.t_comp()


def test_gravac_explores_again_and_measures_all_gains_anew() -> None:
    before, after = _rescaled(MAKERS["gravac"], 60)
    assert before.status()["exploring"] == 0
    assert after.status()["exploring"] == 1
    assert "the number of ranks has changed" in after.plan().reason
    assert before.gain_at(before.plan().send) is not None
    assert [after.gain_at(cf) for cf in LADDER] == [None] * len(LADDER)
    _run(after, 4, 60)
    assert after.status()["exploring"] == 0


def test_a_warm_up_that_is_not_over_leaves_the_next_policy_alone() -> None:
    before, after = _rescaled(lambda: Warmup(GraVAC(window=4), steps=9, stages=1), 3)
    assert after.state_dict() == before.state_dict()


def test_accordion_compares_no_norms_of_different_numbers_of_ranks() -> None:
    before, after = _rescaled(MAKERS["accordion"], 13)
    assert before.plan().send == after.plan().send == 40  # not critical
    plans = _run(after, 4, 20, norm=0.1)
    assert {plan.send for plan in plans} == {40.0}
    assert [i for i, plan in enumerate(plans) if plan.read_sum] == [3, 7, 11, 15, 19]
    _run(before, 2, 4, norm=0.1)  # on the same number of ranks that is a critical regime
    assert before.plan().send == 10


def test_accordion_reads_no_sum_in_mid_interval_if_ranks_are_lost_late_in_one() -> None:
    _, after = _rescaled(lambda: Accordion(interval=20), 35)
    assert [i for i, plan in enumerate(_run(after, 4, 45)) if plan.read_sum] == [19, 39]
