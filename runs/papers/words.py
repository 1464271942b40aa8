"""Word-level language modelling on a text in WikiText-2's format."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from runs.models import make_model
from runs.papers.word_lstm import WordLSTM
from runs.tasks.base import Batch, DataNotFoundError, Task, device_of, evaluating, unwrapped
from runs.tasks.corpus import MAX_BYTES, TEST_NAMES, TRAIN_NAMES, VALID_NAMES, perplexity, windows

UNKNOWN, END = "<unk>", "<eos>"
MAX_WORDS = 300_000
"""In a vocabulary; WikiText-103 has 267,735."""

EVALUATED_WORDS = 32_768  # of validation or test text, unless all of it is asked for
EVALUATION_TRACKS = 16  # pieces of it that are read side by side

Words = NDArray[np.int64]


@dataclass(frozen=True)
class Splits:
    """Three texts as numbers of the words of a vocabulary, which is that of the first.

    train: to learn from. valid: on which decisions rest, such as settings and when to stop. test:
    for the report alone."""

    vocabulary: tuple[str, ...]
    train: Words
    valid: Words
    test: Words


class WordsTask(Task):
    """Predict the next word of a text that is given by `data`, in WikiText-2's format: words are
    parted by white space, the end of a line is a word, and rare words are `<unk>` already.

    The training text is cut into as many tracks as there are rows in all workers' batches. A row
    reads its track from the start to the end of an epoch, `length` words a step, and the model
    carries its state along; an epoch begins with a state of zeros, at a place that is shifted a
    little. Quality is the perplexity a word on the validation text, and with `test` on the test
    text.
    """

    name = "words"
    models = ("lstm-small", "lstm-medium", "lstm-large", "lstm-2x1500")
    quality_name = "perplexity"
    has_test = True
    higher_is_better = False
    learning_rates: ClassVar[dict[str, float]] = dict.fromkeys(models, 1.0)
    default_batch_size = 10
    length = 35

    def _load(self, data: Path | None) -> int:
        self.splits = read_splits(data)
        least = 2 * max(self.length, EVALUATION_TRACKS)
        for part in ("train", "valid", "test"):
            words = len(getattr(self.splits, part))
            if words < least:
                raise ValueError(
                    f"data={str(data)!r} has {words} words of {part} text; accepted: at least "
                    f"{least}"
                )
        return (len(self.splits.train) - 1) // self.length

    def _make_model(self) -> nn.Module:
        return make_model(self.model_name, vocab=len(self.splits.vocabulary))

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        """Two int64 tensors (batch_size, length): words, and the words one place further on; and
        whether an epoch begins with them, a bool of no dimensions."""
        steps = self.steps_per_epoch(world_size)
        epoch, place = divmod(step, steps)
        tracks, text = self.batch_size * world_size, self.splits.train
        spare = len(text) - 1 - steps * self.length * tracks
        shift = int(np.random.default_rng((self.seed, epoch)).integers(spare + 1))
        rows = rank * self.batch_size + np.arange(self.batch_size)
        starts = shift + (rows * steps + place) * self.length
        inputs, targets = windows(text, starts, self.length)
        return inputs, targets, torch.tensor(place == 0)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats, a scalar; the model goes on with the state that it carries,
        and at the start of an epoch with zeros."""
        inputs, targets, begins = batch
        if begins:
            self.restart(model)
        return super().loss(model, (inputs, targets))

    def restart(self, model: nn.Module) -> None:
        _lstm(model).restart()

    def measure(
        self, model: nn.Module, *, full: bool = False, test: bool = False
    ) -> dict[str, float]:
        """Perplexity a word, of tracks that are spread evenly over the text and read side by side,
        each from a state of zeros on."""
        text = self.splits.test if test else self.splits.valid
        longest = (len(text) - 1) // EVALUATION_TRACKS
        words = longest if full else min(longest, EVALUATED_WORDS // EVALUATION_TRACKS)
        starts = np.arange(EVALUATION_TRACKS) * longest
        nats, state = 0.0, None
        with evaluating(model) as inner:
            lstm = _lstm(inner)
            for at in range(0, words, self.length):
                count = min(self.length, words - at)
                batch = windows(text, starts + at, count)
                inputs, targets = (part.to(device_of(inner)) for part in batch)
                logits, state = lstm.continued(inputs, state)
                logits = logits.flatten(0, 1)
                nats += F.cross_entropy(logits, targets.flatten(), reduction="sum").item()
        return {self.quality_name: perplexity(nats / (words * EVALUATION_TRACKS))}


def read_splits(data: Path | None) -> Splits:
    """The user's text in three parts: a folder's train, valid and test (as train.txt, ..., or under
    WikiText's names), else parts of a single file.

    Without a training file the validation file is trained on; without a validation file, or then,
    the last tenth of what is trained on is for validation. Of a single file the last tenth is for
    testing, and the tenth before for validation. DataNotFoundError where there is no such text,
    ValueError for too much of it.
    """
    accepted = (
        "a text file, or a folder with train.txt (else valid.txt) and test.txt, as WikiText-2 has "
        "them"
    )
    if data is None:
        raise DataNotFoundError(
            f"task 'words' needs data, name it with --data; accepted: {accepted}"
        )
    if data.is_file():
        words = _words(data)
        tenth = len(words) // 10
        cut = len(words) - 2 * tenth
        return _numbered(words[:cut], words[cut : cut + tenth], words[cut + tenth :])
    train, valid, test = (
        next((data / name for name in names if (data / name).is_file()), None)
        for names in (TRAIN_NAMES, VALID_NAMES, TEST_NAMES)
    )
    learnt = train or valid
    if learnt is None or test is None:
        raise DataNotFoundError(f"data={str(data)!r} holds no such text; accepted: {accepted}")
    words = _words(learnt)
    cut = len(words) - len(words) // 10
    if train is None or valid is None:
        return _numbered(words[:cut], words[cut:], _words(test))
    return _numbered(words, _words(valid), _words(test))


def _words(file: Path) -> list[str]:
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"data={str(file)!r} is {size:,} bytes of text; accepted: {MAX_BYTES:,}")
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return [word for line in lines for word in (*line.split(), END)]


def _numbered(*texts: list[str]) -> Splits:
    """The first is for training; its words are numbered, the most frequent first."""
    counts = Counter(texts[0])
    counts.setdefault(UNKNOWN, 0)
    if len(counts) > MAX_WORDS:
        raise ValueError(
            f"data: the training text has {len(counts):,} different words; accepted: "
            f"{MAX_WORDS:,}, with rarer ones replaced by {UNKNOWN}"
        )
    vocabulary = sorted(counts, key=lambda word: (-counts[word], word))
    number = {word: i for i, word in enumerate(vocabulary)}
    unknown = number[UNKNOWN]
    train, valid, test = (
        np.array([number.get(word, unknown) for word in text], dtype=np.int64) for text in texts
    )
    return Splits(tuple(vocabulary), train, valid, test)


def _lstm(model: nn.Module) -> WordLSTM:
    inner = unwrapped(model)
    assert isinstance(inner, WordLSTM)
    return inner
