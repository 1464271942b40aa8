"""`python -m runs bench quality`: runs of recipes in equal steps, and what they may lose."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import ClassVar

import pytest
import torch
from torch import nn

from runs.bench import quality
from runs.bench.command import Benching
from runs.bench.quality import CONTENDERS, DENSE, Job, Outcome, bench_quality, read, rows, train
from runs.bench.recipes import RECIPES, drops, warm_cosine, warm_linear
from runs.parser import UsageError

GPT = RECIPES[0]


class Bytes(nn.Module):
    """Predicts the next byte from the last one."""

    def __init__(self):
        super().__init__()
        self.symbols, self.head = nn.Embedding(256, 24), nn.Linear(24, 256)

    def forward(self, symbols):
        return self.head(self.symbols(symbols))


TINY = replace(GPT, model=Bytes, batch=2, steps=12)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a sentence that is said again and again. " * 400)
    return path


def test_a_run_goes_the_same_way_every_time_and_dense_sends_all(text):
    data = {"text": text}
    dense = [train(TINY, data, CONTENDERS[DENSE], 2, "", 0) for _ in range(2)]
    assert dense[0] == dense[1]
    assert dense[0].fewer == pytest.approx(1, rel=1e-3)
    assert dense[0].cfs == {"1": 12}
    slow = train(TINY, data, CONTENDERS["CF 20"], 2, "100mbit", 0)
    assert slow.fewer > 20
    assert slow.faster > 5
    assert isfinite(slow.quality)
    assert slow.quality != dense[0].quality


def test_it_goes_on_where_it_was_stopped(text, tmp_path, monkeypatch):
    log = tmp_path / "logs" / "runs.jsonl"
    told = {"images": str(text), "text": str(text), "recipe": "GPT", "log": str(log)}
    asked = Benching(**told, seeds=1, ranks=(2,))
    monkeypatch.setattr(quality, "RECIPES", (TINY,))
    monkeypatch.setattr(quality, "ProcessPoolExecutor", _Here)
    first = bench_quality(asked)
    lines = log.read_text().splitlines()
    assert len(lines) == len(read(log)) == 3 + 2 * 2  # Fixed on any link, others on each
    log.write_text("\n".join(lines[:4]) + "\n" + lines[4][:-1])  # the last line is cut short
    _Here.ran.clear()
    assert bench_quality(asked) == first
    assert len(_Here.ran) == 3
    assert read(log).keys() == set(_Here.ran) | {*list(read(log))[:4]}


class _Here:
    """A pool without processes."""

    ran: ClassVar[list[Job]] = []

    def __init__(self, *_):
        self.threads = torch.get_num_threads()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        torch.set_num_threads(self.threads)

    def map(self, run, jobs):
        for job in jobs:
            self.ran.append(job)
            yield run(job)


def test_a_loss_is_divided_by_what_is_allowed():
    recipe = next(each for each in RECIPES if each.measure == "accuracy %")

    def job(contender, link, seed):
        return Job(recipe.name, contender, 2, link, seed)

    def ends(quality):
        return Outcome(quality, 60.0, 5.0, {"10": 100, "20": 200})

    found = {job(DENSE, "", 0): ends(40.0), job(DENSE, "", 1): ends(44.0)}
    found |= {job("default", "100mbit", 0): ends(36.0), job("default", "100mbit", 1): ends(40.0)}
    lost, fewer = rows(found, [recipe])
    assert lost.ratio == pytest.approx(4 / 8**0.5)  # points; a deviation over seeds is allowed
    assert lost.falls_short
    assert (fewer.ratio, fewer.falls_short) == (60, False)
    alike = {**found, job(DENSE, "", 1): ends(40.0)}
    assert rows(alike, [recipe])[0].ratio == pytest.approx(2)  # of one point at least


def test_recipes_of_each_kind_differ_in_what_recipes_differ_in():
    halves = [{each.half for each in RECIPES}, {each.name for each in RECIPES}]
    assert halves[0] == {"development", "held-out", "later"}
    assert len(halves[1]) == len(RECIPES) >= 10
    for half in halves[0]:
        of = [each for each in RECIPES if each.half == half]
        kinds = {type(each.optimizer(each.model())).__name__ for each in of}
        assert len(kinds) >= 3
        assert {each.task for each in of} == {"cifar10", "text"}
        assert len({each.measure for each in of}) == 3


def test_schedules_of_the_learning_rate():
    assert [drops(share) for share in (0.0, 0.6, 0.9)] == [1.0, 0.1, 0.01]
    for schedule in (warm_cosine, warm_linear):
        values = [schedule(step / 100) for step in range(100)]
        assert 0 < values[0] < 0.05
        assert max(values) == pytest.approx(1, abs=0.1)
        assert values[-1] < 0.05


@pytest.mark.parametrize(
    ("given", "told"),
    [({}, "--images"), ({"images": "x", "text": "y", "recipe": "no such"}, "'GPT, AdamW'")],
)
def test_what_is_missing_is_named(given, told):
    with pytest.raises(UsageError, match=told):
        bench_quality(Benching(**given))


def test_data_and_a_log_that_are_not_there_are_named_before_any_run(text, tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "ProcessPoolExecutor", None)
    gone, log = tmp_path / "gone", text / "runs.jsonl"
    told = {"images": str(gone), "text": str(text), "log": str(log)}
    with pytest.raises(UsageError, match=r"^--images .*gone: no CIFAR-10 data"):
        bench_quality(Benching(**told, recipe="ResNet"))
    with pytest.raises(UsageError, match=r"^--text .*gone: .*does not exist"):
        bench_quality(Benching(**{**told, "text": str(gone)}, recipe="GPT"))
    with pytest.raises(UsageError, match=r"^--log .*runs.jsonl: (File exists|Not a directory)"):
        bench_quality(Benching(**told, recipe="GPT"))
