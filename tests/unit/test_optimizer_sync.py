"""How much it takes the ranks to agree on what their optimizers keep."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from math import inf, nan
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Adagrad, Optimizer, RMSprop

from adaptive.memory.optimizer_sync import agree_on_states, unite_moments
from adaptive.model.parameters import ModelParameter

RANKS = 4


class Name(str):
    """This counts how often names are compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)


class Alike:
    """The first of several ranks that have all the same."""

    rank = 0

    def __init__(self, ranks: int = RANKS) -> None:
        self.ranks = ranks

    def gather_objects(self, own: Any) -> list[Any]:
        return [own] * self.ranks

    def total(self, own: Tensor) -> Future[Tensor]:
        done: Future[Tensor] = Future()
        done.set_result(sum((own for _ in range(self.ranks)), torch.zeros_like(own)))
        return done


def test_agreeing_takes_no_more_a_parameter_where_there_are_many() -> None:
    counts = []
    for count in (20, 200):
        parameters = [ModelParameter(Name(f"p{i}"), torch.ones(4)) for i in range(count)]
        states = {
            p: {"step": torch.tensor(3.0), "exp_avg": torch.full((4,), float(i))}
            for i, p in enumerate(parameters)
        }
        Name.compared = 0
        agree_on_states(states, Alike())  # type: ignore[arg-type]
        counts.append(Name.compared / count)
        for i, kept in enumerate(states.values()):
            assert torch.equal(kept["exp_avg"], torch.full((4,), float(i)))
            assert kept["step"] == 3
    assert counts[1] <= counts[0]


@pytest.mark.parametrize(("kind", "name"), [(Adagrad, "sum"), (RMSprop, "square_avg")])
@pytest.mark.parametrize("of_means", [False, True])
def test_united_second_moments_are_those_of_the_gradients_that_come(
    kind: type[Optimizer], name: str, of_means: bool
) -> None:
    """Of mean gradients, which have less noise, or of local ones as before."""
    p = nn.Parameter(torch.ones(4))
    optimizer = kind([p], lr=0.1)
    p.grad = torch.ones(4)
    optimizer.step()
    before = optimizer.state[p][name].clone()
    exchange: Any = Alike()
    exchange.world_size, exchange.take_traffic = RANKS, lambda: None
    unite_moments([ModelParameter("p", p)], [optimizer], exchange, of_means)
    share = 0.05 + 0.95 / RANKS if of_means else 1.0
    torch.testing.assert_close(optimizer.state[p][name], share * before)


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 11])
def test_counts_of_steps_that_are_alike_stay_so(ranks: int) -> None:
    for count in (1.0, 11.0, 13.0, 1001.0):
        parameter = ModelParameter("p", torch.ones(4))
        step = torch.tensor(count)
        agree_on_states({parameter: {"step": step}}, Alike(ranks))  # type: ignore[arg-type]
        assert step == count


class OneOf:
    """One of several ranks that differ, each in a thread."""

    def __init__(self, rank: int, given: list[Any], barrier: Barrier) -> None:
        self.rank, self._given, self._barrier = rank, given, barrier

    def gather_objects(self, own: Any) -> list[Any]:
        self._given[self.rank] = own
        self._barrier.wait()
        everyone = deepcopy(self._given)
        self._barrier.wait()
        return everyone

    def total(self, own: Tensor) -> Future[Tensor]:
        done: Future[Tensor] = Future()
        done.set_result(torch.stack(self.gather_objects(own)).sum(0))
        return done


def _agreed(*states: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """What each rank keeps of a parameter once the ranks have agreed."""
    given, barrier = [None] * len(states), Barrier(len(states), timeout=60)

    def agree(rank: int) -> None:
        parameter = ModelParameter("p", torch.ones(4))
        agree_on_states(
            {parameter: states[rank]},
            OneOf(rank, given, barrier),  # type: ignore[arg-type]
        )

    with ThreadPoolExecutor(len(states)) as pool:
        list(pool.map(agree, range(len(states))))
    return states


@pytest.mark.usefixtures("either_path")
def test_a_rank_without_a_state_gets_the_mean_of_the_others() -> None:
    first = {"step": torch.tensor(4.0), "exp_avg": torch.full((4,), 1.0), "eta": 1.0}
    second = {"step": torch.tensor(8.0), "exp_avg": torch.full((4,), 3.0), "eta": 3.0}
    calls = torch.tensor(7)  # a whole number is no code
    for kept in _agreed({}, {**first, "calls": calls}, {**second, "calls": calls.clone()}):
        assert (kept["step"], kept["eta"], kept["calls"]) == (6, 2, 7)
        assert torch.equal(kept["exp_avg"], torch.full((4,), 2.0))


@pytest.mark.usefixtures("either_path")
def test_codes_and_all_that_belongs_to_them_are_those_of_the_first_rank_that_has_them() -> None:
    def coded(number: int) -> dict[str, Any]:
        codes = torch.full((4,), number, dtype=torch.uint8)
        return {
            "step": torch.tensor(float(number)),
            "codes": codes,
            "scale": torch.ones(1) / number,
        }

    for kept in _agreed({}, coded(3), coded(200)):
        expected = coded(3)
        assert kept.keys() == expected.keys()
        assert all(torch.equal(kept[name], expected[name]) for name in kept)


@pytest.mark.usefixtures("either_path")
def test_what_is_not_finite_on_one_rank_is_so_on_none() -> None:
    states = [
        {"step": torch.tensor(step), "exp_avg": torch.tensor([bad, 1.0, 2.0, 3.0])}
        for step, bad in ((inf, nan), (inf, -inf), (nan, 3.0))
    ]
    for kept in _agreed(*states):
        assert bool(kept["step"].isfinite())
        assert bool(kept["exp_avg"].isfinite().all())
        assert kept["step"] > 1e37
        assert torch.allclose(kept["exp_avg"][1:], torch.tensor([1.0, 2.0, 3.0]))
