"""The statistics of one step: added up locally, then agreed by one small all-reduce.

The vector's layout follows from the plan, which is the same on every rank, so its size is too.
After the sum every rank holds the same bits (measured for gloo and NCCL rings), which makes every
number here an agreed statistic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan, sqrt

import torch
from torch import Tensor

from policies import Measurement

_HEAD = 9


@dataclass
class Tally:
    """Sums of squared norms over this rank's tensors, and this rank's times.

    cfs: the CFs measured in this step, in the order of the vector.
    kept, error, sample_error: a number for each of `cfs`.
    """

    cfs: tuple[float, ...] = ()
    grad: float = 0.0
    total: float = 0.0
    sample_total: float = 0.0
    kept: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    sample_error: list[float] = field(default_factory=list)
    seconds: float = nan
    median_seconds: float = nan
    compress_seconds: float = 0.0
    exchange_seconds: float = nan
    lr: float = nan
    sum_norm: float = nan

    def __post_init__(self) -> None:
        self.kept = [0.0] * len(self.cfs)
        self.error = [0.0] * len(self.cfs)
        self.sample_error = [0.0] * len(self.cfs)

    def vector(self) -> Tensor:
        """float64, shape (9 + 3 * len(cfs),): to be summed over the ranks."""
        head = [self.grad, self.total, self.sample_total, self.seconds, self.median_seconds]
        head += [self.compress_seconds, self.exchange_seconds, self.lr, self.sum_norm]
        return torch.tensor(head + self.kept + self.error + self.sample_error, dtype=torch.float64)


@dataclass(frozen=True)
class Agreed:
    """What `Tally.vector` became after the sum: norms summed over ranks, the rest averaged."""

    measurements: dict[float, Measurement]
    grad_norm: float
    seconds: float
    median_seconds: float
    compress_seconds: float
    exchange_seconds: float
    lr: float
    sum_norm: float

    @classmethod
    def read(cls, vector: Tensor, cfs: tuple[float, ...], world_size: int) -> Agreed:
        values = vector.tolist()
        grad, total, sample_total = values[:3]
        rest = [value / world_size for value in values[3:_HEAD]]
        n = len(cfs)
        kept, error, sample = (values[_HEAD + i * n : _HEAD + (i + 1) * n] for i in range(3))
        measurements = {
            cf: Measurement(
                kept=kept[i],
                error=error[i],
                total=total,
                grad=grad,
                sample_error=sample[i],
                sample_total=sample_total,
            )
            for i, cf in enumerate(cfs)
        }
        return cls(measurements, sqrt(grad / world_size) if grad >= 0 else nan, *rest)
