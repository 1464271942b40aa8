"""How much it takes the ranks to agree on what their optimizers keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from adaptive.memory.optimizer_sync import agree_on_states
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


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 11])
def test_counts_of_steps_that_are_alike_stay_so(ranks: int) -> None:
    for count in (1.0, 11.0, 13.0, 1001.0):
        parameter = ModelParameter("p", torch.ones(4))
        step = torch.tensor(count)
        agree_on_states({parameter: {"step": step}}, Alike(ranks))  # type: ignore[arg-type]
        assert step == count
