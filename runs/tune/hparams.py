"""A trial's parameters and results for TensorBoard's HParams page."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from runs.tune.parameter import Value


def write_hparams(writer: Any, params: Mapping[str, Value], metrics: Mapping[str, float]) -> None:
    """Add them to a run's own event files (a `SummaryWriter`), not to a folder besides."""
    from torch.utils.tensorboard.summary import hparams

    known = {f"hparam/{name}": value for name, value in metrics.items() if isfinite(value)}
    for summary in hparams(dict(params), known):
        writer.file_writer.add_summary(summary)
    for name, value in known.items():
        writer.add_scalar(name, value)
