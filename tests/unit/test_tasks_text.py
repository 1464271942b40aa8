"""The text task, on the standard library and on the user's files."""

import random
import sysconfig
from math import inf, isnan, nan
from pathlib import Path

import numpy as np
import pytest
import torch

from runs.models import make_model
from runs.tasks import DataNotFoundError, make_task
from runs.tasks import corpus as corpus_module
from runs.tasks.corpus import perplexity, stdlib_corpus, user_corpus
from runs.tasks.text import TextTask


def text_task(length, **arguments):
    return type("Short", (TextTask,), {"length": length})(**arguments)


@pytest.fixture(scope="module")
def task():
    return text_task(16, seed=5, batch_size=4)


@pytest.fixture
def folder(tmp_path):
    for number in range(30):
        (tmp_path / f"file{number:02}.txt").write_text(f"this is file {number}\n" * 40)
    return tmp_path


def test_stdlib_files_are_sorted_and_apart():
    corpus = stdlib_corpus()
    train, held_out = corpus.train_files, corpus.held_out_files
    assert list(train) == sorted(train)
    assert list(held_out) == sorted(held_out)
    assert not set(train) & set(held_out)
    assert 0.08 < len(held_out) / (len(train) + len(held_out)) < 0.12
    names = {*train, *held_out}
    assert {"ast.py", "asyncio/base_events.py", "json/decoder.py"} <= names
    assert {Path(name).parts[0] for name in names if "/" in name} <= set(corpus_module.PACKAGES)
    assert not [name for name in names if "test" in Path(name).parts or "_sysconfig" in name]
    assert 4_000_000 < len(corpus.train) + len(corpus.held_out) <= corpus_module.STDLIB_BYTES


def test_stdlib_bytes_are_the_files_bytes():
    corpus = stdlib_corpus()
    root = Path(sysconfig.get_paths()["stdlib"])
    expected = b"\n".join((root / name).read_bytes() for name in corpus.held_out_files)
    assert corpus.held_out.tobytes() == expected


def test_stdlib_cap_and_missing_sources(monkeypatch, tmp_path):
    everything = {*stdlib_corpus().train_files, *stdlib_corpus().held_out_files}
    monkeypatch.setattr(corpus_module, "STDLIB_BYTES", 500_000)
    corpus = stdlib_corpus()
    assert 250_000 < len(corpus.train) + len(corpus.held_out) <= 500_000
    assert {*corpus.train_files, *corpus.held_out_files} < everything
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataNotFoundError, match="name a text file or folder with --data"):
        stdlib_corpus()


def test_batch_is_pure_and_targets_are_the_next_bytes(task):
    inputs, targets = task.batch(7, 1, 2)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    task.batch(task.steps_per_epoch(2) + 3, 0, 2)
    again = text_task(16, seed=5, batch_size=4).batch(7, 1, 2)
    assert torch.equal(inputs, again[0])
    assert torch.equal(targets, again[1])
    assert not torch.equal(inputs, task.batch(7, 0, 2)[0])


def test_ranks_read_different_text_and_all_of_it(tmp_path):
    symbols = np.random.default_rng(0).permutation(255).astype(np.uint8) + 1  # none twice
    (tmp_path / "train.txt").write_bytes(symbols.tobytes())
    (tmp_path / "test.txt").write_bytes(symbols.tobytes())
    task = text_task(8, data=tmp_path, batch_size=3)
    for epoch in range(3):
        steps = range(epoch * task.steps_per_epoch(2), (epoch + 1) * task.steps_per_epoch(2))
        seen = [task.batch(s, r, 2)[0].flatten() for s in steps for r in range(2)]
        seen = torch.cat(seen).tolist()
        assert len(seen) == len(set(seen)) >= 255 - 8 * (3 * 2 + 1)


def test_user_folder_is_split_by_file(folder):
    (folder / ".hidden").write_text("x")
    (folder / "binary.png").write_bytes(b"\x89PNG\0\0")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "more.md").write_text("more")
    corpus = user_corpus(folder)
    assert len(corpus.held_out_files) == 4
    assert {*corpus.train_files, *corpus.held_out_files} == {
        *(f"file{number:02}.txt" for number in range(30)),
        "deeper/more.md",
    }
    assert user_corpus(folder).held_out_files == corpus.held_out_files


@pytest.mark.parametrize(
    ("present", "train", "held_out"),
    [
        ("train.txt valid.txt test.txt", "train.txt", "test.txt"),
        ("valid.txt test.txt README.md", "valid.txt", "test.txt"),
        ("wiki.train.tokens wiki.valid.tokens wiki.test.tokens", "wiki.train.tokens", None),
    ],
)
def test_wikitext_like_folder(tmp_path, present, train, held_out):
    for name in present.split():
        (tmp_path / name).write_text(name * 3)
    corpus = user_corpus(tmp_path)
    assert corpus.train_files == (train,)
    assert corpus.train.tobytes() == (train * 3).encode()
    assert corpus.held_out_files == (held_out or "wiki.test.tokens",)


def test_single_file_holds_out_its_end(tmp_path):
    text = bytes(range(1, 201))
    (tmp_path / "book.txt").write_bytes(text)
    for path in (tmp_path, tmp_path / "book.txt"):
        corpus = user_corpus(path)
        assert corpus.train.tobytes() == text[:180]
        assert corpus.held_out.tobytes() == text[180:]


def test_missing_and_short_text(tmp_path):
    with pytest.raises(DataNotFoundError, match=r"nowhere.*does not exist"):
        make_task("text", data=tmp_path / "nowhere")
    with pytest.raises(DataNotFoundError, match="holds no text files"):
        make_task("text", data=tmp_path)
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match="5 bytes of training text; accepted: at least 128"):
        make_task("text", data=tmp_path)


def test_evaluate_of_a_model_that_knows_nothing(task):
    model = task.build_model()
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    assert task.evaluate(model) == pytest.approx(256, rel=1e-4)


def test_evaluate_is_deterministic_and_restores_the_mode(folder):
    task = text_task(8, data=folder)
    model = task.build_model().train()
    model.head.eval()
    before = torch.random.get_rng_state()
    assert task.evaluate(model) == task.evaluate(model)
    assert model.training
    assert not model.head.training
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    assert task.evaluate(model, full=True) == pytest.approx(task.evaluate(model), rel=0.5)


@pytest.mark.parametrize("model", ["lstm", "gpt"])
def test_a_few_steps_lower_loss_and_perplexity(model, folder):
    task = make_task("text", model=model, data=folder, batch_size=8)
    shape = {"hidden": 48} if model == "lstm" else {"width": 40}
    task._make_model = lambda: make_model(model, **shape)
    network = task.build_model()
    optimizer = task.optimizer(network)
    before, losses = task.evaluate(network), []
    for step in range(40):
        optimizer.zero_grad()
        loss = task.loss(network, task.batch(step, 0, 1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert task.evaluate(network) < 0.3 * before


@pytest.mark.parametrize("model", ["lstm", "gpt"])
def test_initial_weights_follow_the_seed_alone(model, folder):
    torch.manual_seed(random.randrange(2**31))
    before = torch.random.get_rng_state()
    one, two, other = (
        make_task("text", model=model, data=folder, seed=seed).build_model() for seed in (1, 1, 2)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_a_perplexity_is_one_that_records_hold_or_infinite():
    assert perplexity(0.0) == 1
    assert perplexity(230.0) < 1e100
    assert perplexity(231.0) == perplexity(1e9) == inf
    assert isnan(perplexity(nan))
