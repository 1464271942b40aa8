"""The words task: its three texts, its tracks, and what the model carries along them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runs.models import make_model
from runs.papers.words import END, UNKNOWN, WordsTask, read_splits
from runs.tasks import DataNotFoundError, make_task

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "off", "with", UNKNOWN, "it")


def _line(number: int) -> str:
    return f" {' '.join(WORDS[(number * i) % len(WORDS)] for i in range(1, 12))} w{number % 7} \n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, lines, last in (
        ("train", range(400), ""),
        ("valid", range(60), "zebra"),
        ("test", range(3, 63), "yak"),
    ):
        (tmp_path / f"{name}.txt").write_text("".join(map(_line, lines)) + last)
    return tmp_path


def _task(folder: Path, **arguments: int) -> WordsTask:
    short = type("Short", (WordsTask,), {"length": 5})
    task: WordsTask = short(data=folder, **{"batch_size": 3, **arguments})
    task._make_model = lambda: make_model(  # type: ignore[method-assign]
        "lstm-small", vocab=len(task.splits.vocabulary), hidden=8
    )
    return task


def test_the_vocabulary_is_that_of_the_training_text(folder: Path) -> None:
    splits = read_splits(folder)
    number = {word: i for i, word in enumerate(splits.vocabulary)}
    assert {UNKNOWN, END, "w6", *WORDS} == {*splits.vocabulary} - {f"w{i}" for i in range(6)}
    counts = np.bincount(splits.train)
    assert (np.diff(counts) <= 0).all()  # the most frequent words first
    assert [splits.vocabulary[i] for i in splits.train[:13]] == [*_line(0).split(), END]
    assert splits.valid[-2] == splits.test[-2] == number[UNKNOWN]  # zebra and yak
    assert len(splits.valid) == len(splits.test) == 60 * 13 + 2


def test_what_is_not_there_is_a_tenth_of_the_text_before_it(folder: Path) -> None:
    whole = read_splits(folder)
    (folder / "valid.txt").unlink()
    splits = read_splits(folder)
    assert len(splits.valid) == len(whole.train) // 10
    parts = np.concatenate([splits.train, splits.valid])
    words = [
        [one.vocabulary[i] for i in text] for one, text in ((splits, parts), (whole, whole.train))
    ]
    assert words[0] == words[1]
    (folder / "train.txt").rename(folder / "wiki.valid.tokens")
    again = read_splits(folder)
    assert all(
        np.array_equal(getattr(again, part), getattr(splits, part))
        for part in ("train", "valid", "test")
    )
    alone = read_splits(folder / "wiki.valid.tokens")
    assert [len(alone.train), len(alone.valid), len(alone.test)] == [4160, 520, 520]
    (folder / "test.txt").unlink()
    with pytest.raises(DataNotFoundError, match=r"holds no such text; accepted: a text file, or"):
        read_splits(folder)


def test_rows_go_on_where_they_stopped_and_no_two_read_the_same(folder: Path) -> None:
    task = _task(folder, seed=4)
    steps = task.steps_per_epoch(2)
    assert steps == 5199 // 5 // 6
    for epoch in (0, 1):
        read = []
        for rank in (0, 1):
            batches = [task.batch(epoch * steps + step, rank, 2) for step in range(steps)]
            assert [bool(begins) for _, _, begins in batches] == [True] + [False] * (steps - 1)
            read.append(torch.cat([inputs for inputs, _, _ in batches], dim=1))
            targets = torch.cat([targets for _, targets, _ in batches], dim=1)
            assert torch.equal(read[-1][:, 1:], targets[:, :-1])
        rows = torch.cat(read).flatten().numpy()  # track after track
        first = int(np.random.default_rng((4, epoch)).integers(5199 - len(rows) + 1))
        assert np.array_equal(rows, task.splits.train[first : first + len(rows)])
    assert torch.equal(task.batch(7, 1, 2)[0], _task(folder, seed=4).batch(7, 1, 2)[0])


def test_training_carries_the_state_and_an_epoch_begins_without(folder: Path) -> None:
    task = _task(folder)
    model = task.build_model().eval()
    batches = [task.batch(step, 0, 1) for step in range(3)]
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.lstm.dropout = 0.0
    with torch.no_grad():
        losses = [task.loss(model, batch).item() for batch in batches]
        inputs, targets = (torch.cat([b[i] for b in batches], dim=1) for i in (0, 1))
        logits, _ = model.continued(inputs, None)
        whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert np.mean(losses) == pytest.approx(whole.item(), rel=1e-5)
        assert task.loss(model, batches[0]).item() == losses[0]  # the first of an epoch
        assert task.loss(model, batches[2]).item() != losses[2]
        task.restart(model)
        carried = model.get_extra_state()
        assert carried.numel() == 0


def test_measuring_reads_the_text_once_and_leaves_the_model_alone(folder: Path) -> None:
    task = _task(folder)
    model = task.build_model()
    task.loss(model, task.batch(0, 0, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measured = task.measure(model)
    assert measured == task.measure(model, full=True) == {"perplexity": task.evaluate(model)}
    assert task.measure(model, test=True) != measured
    assert model.training
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())

    tracks, words = 16, (len(task.splits.valid) - 1) // 16
    text = torch.from_numpy(task.splits.valid)
    rows = torch.stack([text[i * words : (i + 1) * words + 1] for i in range(tracks)])
    with torch.no_grad():
        logits, _ = model.eval().continued(rows[:, :-1], None)
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert measured["perplexity"] == pytest.approx(nats.exp().item(), rel=1e-4)


def test_bad_data(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"'words' needs data, name it with --data"):
        make_task("words")
    (tmp_path / "short.txt").write_text("a b c " * 40)
    with pytest.raises(ValueError, match=r"short.txt' has 12 words of valid text; .* at least 70"):
        make_task("words", data=tmp_path / "short.txt")
    with pytest.raises(ValueError, match=r"model='lstm'.*accepted: lstm-small, lstm-medium"):
        make_task("words", data=folder, model="lstm")
