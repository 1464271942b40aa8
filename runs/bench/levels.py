"""Multi-level compression against two direct compressions (GraVAC, section 3.2)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from compressors import Compressor, make_compressor
from runs.bench.textbook import KEY, gradient
from runs.bench.timing import Row, describe, interleaved, median_ratio

LOW, HIGH = 10.0, 1000.0
PAPER = {
    "topk": "1.49 to 1.83",
    "dgc": "1.27 to 1.52",
    "redsync": "1.1 to 1.5",
    "randomk": "1.34 to 1.64",
}
"""Of three models (GraVAC, table of multi-level compression)."""


def _direct(compressor: Compressor, grad: Tensor) -> None:
    compressor.compress(grad, LOW, KEY)
    compressor.compress(grad, HIGH, KEY)


def _levels(compressor: Compressor, grad: Tensor) -> None:
    compressor.recompress(compressor.compress(grad, LOW, KEY), HIGH / LOW)


def bench_levels(numel: int, rounds: int, seed: int) -> list[Row]:
    """CF 10 and 1000 of one tensor: both direct / the second from the first."""
    torch.set_num_threads(1)
    grad, rows = gradient(numel, seed), []
    for name in ("topk", "dgc", "redsync", "sidco", "threshold", "randomk"):
        compressor = make_compressor(name)
        times = interleaved(
            {
                "direct": partial(_direct, compressor, grad),
                "levels": partial(_levels, compressor, grad),
            },
            rounds,
        )
        paper = f"; the paper's: {PAPER[name]}" if name in PAPER else ""
        ratio = median_ratio(times["direct"], times["levels"])
        what = f"{name} CF {LOW:g} and {HIGH:g}: two direct / two levels"
        rows.append(Row(what, ratio, "", describe(times) + paper))
    return rows
