"""Where the time of a run's steps went."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from math import isfinite, nan
from statistics import median

from adaptive import StepRecord
from runs.build import modelled_clock
from runs.config import TrainConfig
from runs.records import Recorded, exchanges, local_steps


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
        clock.now += clock.step(
            report.wire_bytes, report.statistics_bytes, steps, report.down_bytes
        )
    return clock.now


def pauses(
    records: Sequence[StepRecord], evaluated: Iterable[int], every: int, trained: int
) -> set[int]:
    """Of these records, by their place, those whose time has an evaluation or a checkpoint in it:
    the one before the pause on the rank that makes it, the one after on the others, which wait for
    that rank there.

    evaluated: steps of the optimizer done at each evaluation. every: steps between checkpoints; 0:
    there are none. trained: steps done in all.
    """
    if any(record.local_steps > 1 for record in records):
        place = {step: count - 1 for step, count in enumerate(exchanges(records))}
    else:  # which may lack steps
        place = {record.report.step: i for i, record in enumerate(records)}
    done = {*evaluated}

    def is_before(last: int) -> bool:  # a damaged record may claim 2^53 steps, so none are listed
        return last in done or (every > 0 and last % every == 0 and last < trained)

    before = {i for step, i in place.items() if is_before(step + 1)}
    return before | {i + 1 for i in before}


def step_seconds(records: Sequence[StepRecord], pauses: Collection[int]) -> list[float]:
    """Of each recorded step; nan throughout if none was timed. One with a pause in it counts as the
    median of its CF.

    A step's time comes with the report of the next one, and a pause between is in it."""
    times = [nan] * len(records)
    by_cf: dict[float, list[float]] = {}
    for i, (record, after) in enumerate(pairwise(records)):
        report = after.report
        if report.timed_cf == record.report.cf and i not in pauses:
            times[i] = report.seconds
            if isfinite(report.seconds):
                by_cf.setdefault(record.report.cf, []).append(report.seconds)
    typical = {cf: median(values) for cf, values in by_cf.items()}
    everywhere = median([value for values in by_cf.values() for value in values] or [nan])
    return [
        seconds if isfinite(seconds) else typical.get(record.report.cf, everywhere)
        for record, seconds in zip(records, times, strict=True)
    ]


def server_bytes(config: TrainConfig, recorded: Recorded) -> tuple[float, float] | None:
    """Bytes of the recorded steps that a modelled server takes in from all workers, and that it
    sends to them; None if there is none."""
    numel = recorded.header.numel if recorded.header is not None else 0
    clock = modelled_clock(config, numel) if numel else None
    if clock is None or clock.server is None:
        return None
    reports = [record.report for record in recorded.steps]
    down = sum(report.down_bytes for report in reports)
    up = sum(report.wire_bytes for report in reports) - down
    return up * clock.server.nbytes, down * clock.server.nbytes
