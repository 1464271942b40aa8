"""Early stopping."""

from __future__ import annotations

from math import nan

import pytest
import torch
from torch import nn

from runs.early_stopping import EarlyStopping
from runs.simulate.ranks import run_ranks
from tests.unit.ranks import simulates


def _stopping(qualities: list[float], patience: int, higher: bool) -> EarlyStopping:
    """After these qualities of a model whose weight is the number of its evaluation."""
    early, model = EarlyStopping(patience, higher), nn.Linear(1, 1, bias=False)
    for number, quality in enumerate(qualities, 1):
        with torch.no_grad():
            model.weight.fill_(number)
        early.note(10 * number, quality, model)
    return early


@pytest.mark.parametrize("higher", [True, False])
def test_the_best_model_is_kept_and_patience_counts_from_it(higher: bool) -> None:
    sign = 1 if higher else -1
    qualities = [sign * quality for quality in (1.0, 3.0, 2.0, nan)]
    early, model = _stopping(qualities, 2, higher), nn.Linear(1, 1, bias=False)
    assert (early.best, early.step) == (sign * 3.0, 20)
    assert early.take_best(40, model) == sign * 3.0
    assert model.weight.item() == 2
    assert early.take_best(20, model) is None  # it is the best one itself

    again = EarlyStopping(2, higher)
    again.load_state_dict(early.state_dict())
    assert again.stopped
    assert (again.best, again.step) == (early.best, early.step)
    assert again.why() == "2 evaluations in a row brought nothing better than that after step 20"
    not_yet = EarlyStopping(3, higher)
    not_yet.load_state_dict(_stopping(qualities, 3, higher).state_dict())
    assert not not_yet.stopped
    assert not_yet.why() == ""


def test_a_first_quality_that_is_not_a_number_is_not_the_best() -> None:
    early = _stopping([nan, 5.0, 4.0], 2, higher=False)
    assert (early.best, early.step, early._since) == (4.0, 30, 0)
    assert _stopping([nan, nan], 2, higher=False).best is None


def test_without_patience_nothing_is_kept() -> None:
    early = _stopping([1.0, 2.0], 0, higher=False)
    early.agree()  # no collective, so it needs no group
    assert early.state_dict() == {"best": None, "step": 0, "since": 0, "model": {}}
    assert early.take_best(9, nn.Linear(1, 1)) is None


@simulates
def test_all_ranks_stop_when_rank_0_says_so() -> None:
    def work(rank: int, group: object) -> list[bool]:
        early, said = EarlyStopping(2, False), []
        for step, quality in enumerate((5.0, 4.0, 4.0, 4.5)):
            if rank == 0:
                early.note(step, quality, nn.Linear(1, 1))
            early.agree()
            said.append(early.stopped)
        return said

    assert run_ranks(3, work) == [[False, False, False, True]] * 3
