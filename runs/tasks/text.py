"""Byte-level language modelling."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from runs.models import make_model
from runs.tasks.base import Batch, Task, device_of, evaluating
from runs.tasks.corpus import Bytes, user_corpus
from runs.tasks.stdlib import stdlib_corpus

EVALUATED_BYTES = 65_536  # of the held-out text, unless all of it is asked for
EVALUATION_BATCH = 32  # windows


class TextTask(Task):
    """Predict the next byte of a text: the standard library's sources, or `data`.

    An item is a window of `length` bytes, predicted from the window's own start on. Windows do
    not overlap within an epoch; where they start shifts from epoch to epoch. Quality is the
    perplexity a byte: exp of the mean cross-entropy in nats (256 knows nothing, 1 is perfect).
    """

    name = "text"
    models = ("lstm", "gpt", "gpt-10m")
    quality_name = "perplexity"
    higher_is_better = False
    # gpt-10m's: of 0.025, 0.05, 0.1 and 0.2 the best after 60 steps, one seed (the last diverged).
    learning_rates: ClassVar[dict[str, float]] = {"lstm": 1.0, "gpt": 0.1, "gpt-10m": 0.05}
    default_batch_size = 8

    def __init__(
        self,
        *,
        model: str | None = None,
        data: Path | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        lr: float | None = None,
        length: int = 64,
    ) -> None:
        if length < 1:
            raise ValueError(f"length={length} must be an integer >= 1")
        self.length = length
        super().__init__(model=model, data=data, batch_size=batch_size, seed=seed, lr=lr)

    def _load(self, data: Path | None) -> int:
        self.corpus = stdlib_corpus() if data is None else user_corpus(Path(data))
        for part, text in (("training", self.corpus.train), ("held-out", self.corpus.held_out)):
            if len(text) < 2 * self.length:
                raise ValueError(
                    f"data={str(data)!r} has {len(text)} bytes of {part} text; "
                    f"accepted: at least {2 * self.length} (twice the length of a window)"
                )
        return len(self.corpus.train) // self.length - 1

    def _make_model(self) -> nn.Module:
        return make_model(self.model_name, vocab=256, length=self.length)

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        """Two int64 tensors (batch_size, length): bytes, and the bytes one place further on."""
        epoch, items = self.shards.indices(step, rank, world_size)
        shift = int(np.random.default_rng((self.seed, epoch, 1)).integers(self.length))
        return _windows(self.corpus.train, items * self.length + shift, self.length)

    def measure(
        self, model: nn.Module, *, full: bool = False, test: bool = False
    ) -> dict[str, float]:
        """Perplexity a byte on windows spread evenly over the held-out text."""
        text = self.corpus.held_out
        windows = (len(text) - 1) // self.length
        count = windows if full else min(windows, max(1, EVALUATED_BYTES // self.length))
        starts = np.arange(count) * windows // count * self.length
        nats = 0.0
        with evaluating(model) as inner:
            for at in range(0, count, EVALUATION_BATCH):
                batch = _windows(text, starts[at : at + EVALUATION_BATCH], self.length)
                nats += _total_loss(inner, batch)
        mean = torch.tensor(nats / (count * self.length), dtype=torch.float64)
        return {self.quality_name: mean.exp().item()}


def _windows(text: Bytes, starts: NDArray[np.int64], length: int) -> tuple[Tensor, Tensor]:
    rows = text[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


def _total_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    inputs, targets = (part.to(device_of(model)) for part in batch)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum").item()
