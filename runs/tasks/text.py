"""Byte-level language modelling."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import nn
from torch.nn import functional as F

from runs.models import make_model
from runs.tasks.base import Batch, Task, device_of, evaluating
from runs.tasks.corpus import perplexity, stdlib_corpus, user_corpus, windows

EVALUATED_BYTES = 65_536  # of the held-out text, unless all of it is asked for
LARGE = 10_000_000  # parameters; a model of n times as many is measured on an n-th of these bytes
EVALUATION_BATCH = 32  # windows


class TextTask(Task):
    """Predict the next byte of a text: the standard library's sources, or `data`.

    An item is a window of `length` bytes, predicted from the window's own start on. Windows do
    not overlap within an epoch; where they start shifts from epoch to epoch. Quality is the
    perplexity a byte: exp of the mean cross-entropy in nats (256 knows nothing, 1 is perfect).
    """

    name = "text"
    models = ("lstm", "gpt", "gpt-10m", "gpt-121m")
    quality_name = "perplexity"
    higher_is_better = False
    # gpt-10m's: of 0.025, 0.05, 0.1 and 0.2 the best after 60 steps, one seed (the last diverged).
    # gpt-121m's is gpt-10m's.
    learning_rates: ClassVar[dict[str, float]] = {
        **{"lstm": 1.0, "gpt": 0.1},
        **dict.fromkeys(("gpt-10m", "gpt-121m"), 0.05),
    }
    default_batch_size = 8
    length = 64

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
        return make_model(self.model_name)

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        """Two int64 tensors (batch_size, length): bytes, and the bytes one place further on."""
        epoch, items = self.shards.indices(step, rank, world_size)
        shift = int(np.random.default_rng((self.seed, epoch, 1)).integers(self.length))
        return tuple(windows(self.corpus.train, items * self.length + shift, self.length))

    def measure(
        self, model: nn.Module, *, full: bool = False, test: bool = False
    ) -> dict[str, float]:
        """Perplexity a byte on windows spread evenly over the held-out text."""
        text = self.corpus.held_out
        total = (len(text) - 1) // self.length
        times = max(1, sum(p.numel() for p in model.parameters()) // LARGE)
        count = total if full else min(total, max(1, EVALUATED_BYTES // times // self.length))
        starts = np.arange(count) * total // count * self.length
        nats = 0.0
        with evaluating(model) as inner:
            for at in range(0, count, EVALUATION_BATCH):
                batch = windows(text, starts[at : at + EVALUATION_BATCH], self.length)
                inputs, targets = (part.to(device_of(inner)) for part in batch)
                logits = inner(inputs).flatten(0, 1)
                nats += F.cross_entropy(logits, targets.flatten(), reduction="sum").item()
        return {self.quality_name: perplexity(nats / (count * self.length))}
