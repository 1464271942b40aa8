"""Goodput among steps that take what they take: backward hides a part of each exchange, which takes
processor time from backward in turn, and each rung codes in its own time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies import DENSE, Context, Goodput, StepReport
from policies.goodput import FALLS
from policies.step_time import BACKWARD

BF16 = 2.0
RUNGS = {BF16: 0.95, 4.0: 0.95, 8.0: 0.95}
LADDER = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1000.0)
GAINS = {DENSE: 1.0, **RUNGS, **{cf: cf**-FALLS for cf in LADDER}}
WORTH = {cf: gain**0.5 for cf, gain in GAINS.items()}
LAST_BUCKET = 0.1  # share of an exchange that nothing hides


@dataclass(frozen=True)
class Machine:
    """Times in seconds. dense: of a dense exchange. hides: the share of work that hides exchanges.
    stolen: the share of hidden time that it takes from backward. coding: by CF of a rung; else of
    all CFs above. known: what is told of the link, as a share of its time; 0: nothing."""

    work: float
    dense: float
    hides: float
    stolen: float
    top_k: float
    coding: dict[float, float]
    known: float = 1.0

    def exchange(self, cf):
        return self.dense / cf * (1.0 if cf in RUNGS or cf == DENSE else 1.3)

    def parts(self, cf):
        """(work, coding, exposed time) of a step."""
        exchange, hides = self.exchange(cf), self.hides * self.work
        coding = 0.0 if cf in (DENSE, BF16) else self.coding.get(cf, self.top_k)
        hidden = min((1 - LAST_BUCKET) * exchange, hides)
        return self.work + self.stolen * hidden, coding, exchange - hidden

    def t_comp(self, cf):
        return WORTH[cf] / sum(self.parts(cf))

    def train(self, steps, noise=0.0):
        """The CFs that are sent."""
        policy, luck, sent = Goodput(goal="time"), Random(0), []
        policy.start(
            Context(
                (10, 1000),
                2,
                assumed=RUNGS,
                uncoded=frozenset({BF16}),
                wire_bytes=lambda cf: 4e7 * self.exchange(cf) / self.dense,
                link=lambda: (0.0, self.known * self.dense / 4e7),
            )
        )
        policy.load_state_dict({**policy.state_dict(), "steps": 1000})  # enough for any CF
        for step in range(steps):
            sent.append(policy.plan().send)
            work, coding, exposed = (
                part * luck.uniform(1 - noise, 1 + noise) for part in self.parts(sent[step])
            )
            seconds = work + coding + exposed
            times = {"seconds": seconds, "median_seconds": seconds, "exchange_seconds": exposed}
            report = StepReport(step, sent[step], timed_cf=sent[step], compress_seconds=coding)
            policy.observe(StepReport(**{**vars(report), **times}))
        return sent


@st.composite
def machines(draw):
    work, top_k = 0.1, 0.1 * 10 ** draw(st.floats(-1.5, 0.3))
    return Machine(
        work,
        work * 10 ** draw(st.floats(-1.5, 2)),
        draw(st.floats(0, BACKWARD)),
        draw(st.floats(0, 0.5)),
        top_k,
        {cf: top_k * draw(st.floats(0.8, 2)) for cf in (4.0, 8.0)},
        draw(st.sampled_from([0.0, 0.7, 1.0])),
    )


# An emulated link of 1 Gbit/s and a GPT of 10.9 M parameters.
GPT = Machine(0.15, 0.348, BACKWARD, 0.3, 0.12, {4.0: 0.09, 8.0: 0.1})
UNKNOWN = Machine(**{**vars(GPT), "known": 0.0})
STEPS = 200


@settings(max_examples=12, deadline=None)
@given(machines())
@example(GPT)
@example(UNKNOWN)
def test_a_run_makes_about_the_progress_of_the_best_fixed_cf(machine):
    sent = machine.train(STEPS)
    made = sum(WORTH[cf] for cf in sent) / sum(sum(machine.parts(cf)) for cf in sent)
    best = max(WORTH, key=machine.t_comp)
    assert made >= machine.t_comp(best) / 1.3
    assert machine.t_comp(sent[-1]) >= machine.t_comp(best) / 1.25
    assert machine.t_comp(sent[-1]) >= machine.t_comp(DENSE) / 1.1


@settings(max_examples=12, deadline=None)
@given(machines())
@example(GPT)
@example(UNKNOWN)
def test_what_a_visit_has_refuted_is_hardly_visited_again(machine):
    """Once more, where an exchange takes time from backward, which the model takes for the
    machine's."""
    sent = machine.train(STEPS)
    stays = [(cf, len(list(same))) for cf, same in groupby(sent)]
    best = max((cf for cf, _ in stays), key=machine.t_comp)
    visits = Counter(cf for cf, _ in stays)
    assert all(visits[cf] <= 2 for cf in visits if machine.t_comp(cf) < machine.t_comp(best) / 1.05)
    assert all(number <= 3 for number in visits.values())
    assert len(stays) <= 12
    assert len(set(sent[STEPS // 2 :])) == 1


def test_a_link_that_is_known_needs_no_visit():
    """CF 10, 4, dense, 4, dense, it was: a dense step was to take 0.18 s, on a link that carries
    its bytes in 0.35."""
    sent = GPT.train(STEPS)
    assert DENSE not in sent
    unknown = UNKNOWN.train(STEPS)
    stays = [(cf, len(list(same))) for cf, same in groupby(unknown)]
    dense = [steps for cf, steps in stays if cf == DENSE]
    assert len(dense) <= 1
    assert GPT.t_comp(sent[-1]) >= max(map(GPT.t_comp, WORTH)) / 1.05
    assert GPT.t_comp(unknown[-1]) >= max(map(GPT.t_comp, WORTH)) / 1.05


@pytest.mark.parametrize("seed", range(3))
def test_noise_costs_few_visits(seed):
    noisy = Machine(**{**vars(UNKNOWN), "work": 0.15 + seed / 50})
    sent = noisy.train(400, noise=0.15)
    best = max(WORTH, key=noisy.t_comp)
    lost = sum(1 - noisy.t_comp(cf) / noisy.t_comp(best) for cf in sent)
    assert lost <= 0.05 * 400 + 10
