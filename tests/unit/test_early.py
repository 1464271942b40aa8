"""Early stopping, and histograms of gradients."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import nan
from pathlib import Path

import pytest
import torch
from torch import nn

from runs.densities import BINS, Densities, Density, density, edges
from runs.records import read_metrics
from runs.simulate.ranks import run_ranks
from runs.trainer import EarlyStopping
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


def test_a_density_counts_every_value_once(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(999, generator=generator) * 10 ** torch.linspace(-12, 4, 999)
    values[::9] = 0
    values[5] = nan
    found = density([values[:400].view(20, 20), None, values[400:]])
    assert found.values == 998
    assert found.zeros == 111
    assert sum(found.negative) == int((values < 0).sum())
    for i in range(1, BINS - 1):
        low, high = edges()[i : i + 2]
        assert abs(found.positive[i] - int(((values > low) & (values <= high)).sum())) <= 1
    assert found.positive[0] >= int(((values > 0) & (values < edges()[0])).sum()) > 0
    assert found.positive[-1] >= int((values > edges()[-1]).sum()) > 0
    assert sum(found.shares(found.positive)) == pytest.approx(sum(found.positive) / 998)

    pair = Densities(7, found, density([torch.zeros(3)]))
    line = {"step": 7, "densities": {"before": asdict(pair.before), "after": asdict(pair.after)}}
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert read_metrics(path).densities == (pair,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "must be a valid dictionary"),
        ({"before": 3}, "before must be a valid dictionary"),
        ({"before": {"negative": [1]}}, "before.zeros is missing"),
        ({"before": {"zeros": 0, "negative": [1], "positive": []}}, f"must be {BINS} numbers"),
        (
            {"before": {"zeros": 0, "negative": [0] * BINS, "positive": [-1] * BINS}},
            "before.positive.0 must be greater than or equal to 0, got -1",
        ),
    ],
)
def test_damaged_densities_are_left_out(value: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 7, "densities": value}) + "\n" + '{"step": 8}\n')
    found = read_metrics(path)
    assert found.densities == ()
    assert found.trained == 9
    assert message in found.damage
    assert Density(1, (0,) * BINS, (0,) * BINS).values == 1
