"""Where the time of a run's steps went."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import median

from adaptive import StepRecord
from runs.build import modelled_clock
from runs.config import TrainConfig
from runs.records import Recorded, local_steps


def where_time_went(records: Sequence[StepRecord]) -> dict[str, float]:
    """Milliseconds of a step and of its parts: medians over the run, since single steps have
    pauses in them (so the parts need not add up). Parts that are not known are left out.

    compute: forward and backward. compress, decode: of what is sent and received. exchange:
    waiting for the network and for slower ranks, as far as that is not hidden behind backward;
    network: of that, without the slower ranks. rest: the optimizer, and waiting for input.
    """
    parts: dict[str, list[float]] = {}
    for report in (record.report for record in records):
        timed = {
            "step": report.seconds,
            "compute": report.compute_seconds,
            "compress": report.compress_seconds,
            "decode": report.decode_seconds,
            "exchange": report.exchange_seconds,
            "network": report.network_seconds,
            "rest": report.rest_seconds,
        }
        for name, seconds in timed.items():
            if isfinite(seconds):
                parts.setdefault(name, []).append(1e3 * seconds)
    return {name: median(values) for name, values in parts.items()}


def seconds_by_clock(config: TrainConfig, recorded: Recorded) -> float | None:
    """Seconds that the steps took by the clock of `config`; None if they were measured."""
    numel = recorded.header.numel if recorded.header is not None else 0
    clock = modelled_clock(config, numel) if numel else None
    if clock is None:
        return None
    for record, steps in zip(recorded.steps, local_steps(recorded.steps), strict=True):
        report = record.report
        clock.now += clock.step(report.wire_bytes, report.statistics_bytes, steps)
    return clock.now
