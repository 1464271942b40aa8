"""Scaling efficiency, T_N / (N T_1): how much N workers do of what N lone ones would.

T is samples a second. At the same batch a worker, a step of N workers has N times the samples of a
step of one, so it comes down to seconds of a step alone / seconds of a step of N.
"""

from __future__ import annotations

from math import isfinite

from runs.config import TrainConfig


def one_worker_seconds(config: TrainConfig) -> float | None:
    """Of a step of one worker, which sends nothing: as it was given, else that of the modelled
    clock; None if it is not known."""
    return config.fixed_clock if config.one_worker_seconds is None else config.one_worker_seconds


def scaling_efficiency(one_worker: float | None, steps_per_second: float | None) -> float | None:
    """One worker's seconds a step times the steps/s of all; 1 is perfect, and None if one of them
    is not known."""
    if one_worker is None or steps_per_second is None or not isfinite(steps_per_second):
        return None
    return one_worker * steps_per_second
