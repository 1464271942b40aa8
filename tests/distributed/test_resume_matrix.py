"""Resuming to the bit, for every policy, memory, exchange and granularity that go together.

On simulated ranks, which are as real ones to the bit (test_simulated.py), and for some on real
ones. What does not go together is left out by asking the library, not by a list of ours. `make
test` runs a part in which every choice is, `make long-test` one in which all pairs of choices are.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from adaptive import (
    Accordion,
    AdaptiveCompressor,
    Fixed,
    Goodput,
    GraVAC,
    Policy,
    Schedule,
    Summary,
    Warmup,
)
from adaptive.exchange.choice import EXCHANGES
from adaptive.memory.options import NAMED
from adaptive.step.config import GRANULARITIES
from compressors import compressor_names
from policies import policy_names
from runs.simulate.ranks import WorkerError
from runs.simulate.ranks import run_ranks as simulate
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, same
from tests.distributed.test_resume import Run

STOP, STEPS = 7, 18


def _gravac(**settings: Any) -> Policy:
    return GraVAC(epsilon=0.05, omega=0.2, window=3, dense_window=2, cooldown=2, **settings)


POLICIES: dict[str, Callable[[], Policy]] = {
    "accordion": lambda: Accordion(interval=3, eta=0.01),
    "fixed": lambda: Fixed(5.0),
    "goodput": lambda: Goodput(goal="time", opening=2, cooldown=2),
    "gravac": _gravac,
    "schedule": lambda: Schedule({0: 1.0, 3: 8.0, 9: 20.0, 12: 1.0, 14: 4.0}),
    "warmup": lambda: Warmup(_gravac(), steps=10),
    # What policies of one name decide on makes a difference, too.
    "gravac, error_fed": lambda: _gravac(gain="error_fed"),
    "gravac-paper": lambda: GraVAC.paper(epsilon=0.3, omega=0.3, window=3, gain="raw"),
    "accordion-paper": lambda: Accordion.paper(4, 20, interval=4, epoch=2, eta=0.01),
    "accordion, layers": lambda: Accordion(interval=3, eta=0.01, per_layer=True),
}
BASES = (*compressor_names(), "topk+fp32", "dgc+qsgd", "redsync+bf16")
CHOICES = (
    tuple(POLICIES),
    [name for name in NAMED if name != "auto"],
    EXCHANGES,
    [name for name in GRANULARITIES if name != "auto"],
)


@dataclass(frozen=True)
class Combination:
    policy: str
    memory: str
    exchange: str
    granularity: str
    base: str

    def __str__(self) -> str:
        return "-".join(vars(self).values()).replace(", ", "_")

    @property
    def choices(self) -> tuple[str, ...]:
        return self.policy, self.memory, self.exchange, self.granularity

    def run(self) -> Run:
        options = {"memory": self.memory, "granularity": self.granularity}
        return Run(POLICIES[self.policy](), self.base, self.exchange, **options)


@cache
def combinations() -> tuple[Combination, ...]:
    """All that the library accepts, each with the base, of those that go with it, that has had the
    fewest turns."""
    turns = dict.fromkeys(BASES, 0)
    found = []
    for policy, memory, exchange, granularity in itertools.product(*CHOICES):
        for base in sorted(BASES, key=turns.__getitem__):
            made = Combination(policy, memory, exchange, granularity, base)
            if _accepted(made):
                found.append(made)
                turns[base] += 1
                break
    return tuple(found)


def _accepted(made: Combination) -> bool:
    """By the library: most is known to the compressor, the rest to `attach`."""
    policy = POLICIES[made.policy]()
    try:
        AdaptiveCompressor(
            made.base,
            (2, 100),
            policy=policy,
            memory=made.memory,
            exchange=made.exchange,
            granularity=made.granularity,
        )
    except ValueError:
        return False
    return _attaches(made.base, made.memory, made.granularity)


@cache
def _attaches(base: str, memory: str, granularity: str) -> bool:
    made = Combination("fixed", memory, "auto", granularity, base)
    try:
        simulate(1, lambda rank, _: made.run())
    except WorkerError as error:
        if isinstance(error.__cause__, ValueError):
            return False
        raise
    return True


def _covering(proven: Callable[[Combination], set[tuple[str, ...]]]) -> tuple[Combination, ...]:
    """So many that all is proven that all combinations would."""
    missing = set().union(*map(proven, combinations()))
    chosen: list[Combination] = []
    while missing:
        chosen.append(max(combinations(), key=lambda made: len(proven(made) & missing)))
        missing -= proven(chosen[-1])
    return tuple(chosen)


@cache
def quick() -> tuple[Combination, ...]:
    """A few in which every policy and base is, and every memory with every exchange and
    granularity that it goes with."""

    def proven(made: Combination) -> set[tuple[str, ...]]:
        policy, *others = made.choices
        return {(policy,), ("base", made.base), *itertools.combinations(others, 2)}

    return _covering(proven)


@cache
def pairs() -> tuple[Combination, ...]:
    """Those in which every two choices that go together are."""

    def proven(made: Combination) -> set[tuple[str, ...]]:
        return {(made.base, made.exchange), *itertools.combinations(made.choices, 2)}

    return _covering(proven)


def straight_and_resumed(rank: int, made: Combination) -> str:
    """What differs between a run that never stopped and one that did; "" if nothing does."""
    straight = made.run()
    straight.train(rank, 0, STEPS)
    stopped = made.run()
    stopped.train(rank, 0, STOP)
    file = io.BytesIO()
    torch.save(stopped.state(), file)
    file.seek(0)
    resumed = made.run()
    resumed.load(rank, torch.load(file, weights_only=True))
    recorded = len(resumed.timeline.steps)  # of the backwards that were thrown away
    resumed.train(rank, STOP, STEPS)
    compared = {
        "CFs and bytes": [
            [(r.report.step, r.report.cf, r.layer_cfs, r.report.wire_bytes) for r in records]
            for records in (
                [r for r in straight.timeline.steps if r.report.step >= STOP],
                [r for r in resumed.timeline.steps[recorded:] if r.report.step >= STOP],
            )
        ],
        "parameters": [flat_parameters(run.model) for run in (straight, resumed)],
        "optimizer": [run.optimizer.state_dict() for run in (straight, resumed)],
        "summary": [_untimed(run.compressor.summary()) for run in (straight, resumed)],
        "state": [run.compressor.state_dict() for run in (straight, resumed)],
    }
    return ", ".join(what for what, (a, b) in compared.items() if not same(a, b))


def _untimed(summary: Summary) -> dict[str, Any]:
    """What was counted: the first step after a start is not timed."""
    return {name: value for name, value in vars(summary).items() if name != "pace"}


def _check(found: Iterable[str]) -> None:
    differing = [f"rank {rank}: {what} differ" for rank, what in enumerate(found) if what]
    assert not differing, "; ".join(differing)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("made", quick(), ids=str)
def test_resuming_to_the_bit_every_choice(made: Combination) -> None:
    _check(simulate(2, lambda rank, _: straight_and_resumed(rank, made)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("made", "ranks"), [*zip(pairs(), itertools.cycle([1, 2]), strict=False)], ids=str
)
def test_resuming_to_the_bit_every_pair(made: Combination, ranks: int) -> None:
    _check(simulate(ranks, lambda rank, _: straight_and_resumed(rank, made)))


def _several(rank: int, several: tuple[Combination, ...]) -> dict[str, str]:
    return {str(made): straight_and_resumed(rank, made) for made in several}


@pytest.mark.long
@pytest.mark.parametrize(("part", "ranks"), [*zip(range(6), itertools.cycle([2, 4]))])
@pytest.mark.timeout(600)
def test_resuming_to_the_bit_on_real_ranks(part: int, ranks: int) -> None:
    for found in run_ranks(ranks, _several, quick()[part::6], limit=550):
        assert not [f"{made}: {what} differ" for made, what in found.items() if what]


def test_the_matrix_holds_every_choice() -> None:
    for position, choices in enumerate(CHOICES):
        assert {made.choices[position] for made in combinations()} == set(choices)
    assert {made.base for made in combinations()} == set(BASES)
    names = {name for name in policy_names() if not name.endswith("-paper")}  # of the same classes
    assert {POLICIES[made.policy]().name for made in combinations()} == names
    assert len(combinations()) > 200
