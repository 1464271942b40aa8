"""Seconds that a recorded run would have taken on another network: a model, step by step.

seconds(step) = compute + compress + latency + bytes x 8 / rate. Compute is what is left of a
step's measured time without compression and without what the (real or emulated) network took (what
ranks wait for each other is in it): the run's median, since single steps have pauses in them.
Compression, which includes decoding, is each step's own. Nothing overlaps, so a run whose exchange
hides behind backward is taken to be slower than it would be.

A small model can stand for a large one: bytes of gradients and compression then count so many
times, compute and statistics once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isfinite, nan
from statistics import median

from adaptive import LinkSpec, StepRecord
from adaptive.exchange.link import imagined_bytes
from runs.records import local_steps, seconds_by_step


def compute_seconds(records: Sequence[StepRecord]) -> float:
    """Of a step of the optimizer, without compression and network; nan if no step was timed."""
    rest = [
        max(0.0, report.seconds - _known(report.coding_seconds) - _known(report.wait_seconds))
        / report.timed_steps
        for report in (record.report for record in records)
        if isfinite(report.seconds)
    ]
    return median(rest) if rest else nan


def compress_seconds(records: Sequence[StepRecord]) -> list[float]:
    """Of each step, decoding included: measured, or the median of its CF where it was not (first
    and last steps).

    A step's times come with the report of the next one.
    """
    measured: list[float] = [
        after.report.coding_seconds if after.report.timed_cf == record.report.cf else nan
        for record, after in pairwise(records)
    ]
    measured += [nan] * (len(records) - len(measured))
    by_cf: dict[float, list[float]] = {}
    for record, seconds in zip(records, measured, strict=True):
        if isfinite(seconds):
            by_cf.setdefault(record.report.cf, []).append(seconds)
    typical = {cf: median(values) for cf, values in by_cf.items()}
    return [
        seconds if isfinite(seconds) else typical.get(record.report.cf, 0.0)
        for record, seconds in zip(records, measured, strict=True)
    ]


def modelled_seconds(
    records: Sequence[StepRecord], network: LinkSpec, times: float = 1.0
) -> list[float]:
    """When each step of the optimizer would have ended; nan throughout if no step was timed.

    times: the size of the model that is imagined, in sizes of the one that was trained.
    """
    compute = compute_seconds(records)
    compress, rate = compress_seconds(records), network.bits_per_second
    rounds = zip((record.report for record in records), compress, local_steps(records), strict=True)
    ends = accumulate(
        compute * steps
        + times * spent
        + network.latency
        + 8 * imagined_bytes(sent.wire_bytes, sent.statistics_bytes, times) / rate
        for sent, spent, steps in rounds
    )
    return seconds_by_step(records, list(ends))


def model_bytes(records: Sequence[StepRecord], workers: int) -> float:
    """Bytes of the gradients in fp32; 0 if nothing is sent (one worker)."""
    if not records or workers < 2:
        return 0.0
    return records[0].report.dense_wire_bytes * workers / (2 * (workers - 1))


def seconds_to(
    quality: float,
    evaluations: Sequence[tuple[int, float]],
    ends: Sequence[float],
    higher_is_better: bool,
) -> float | None:
    """When the first evaluation at least as good as `quality` was due; None: never.

    evaluations: (steps done, quality) in order. ends: of `modelled_seconds`.
    """
    for done, reached in evaluations:
        good = reached >= quality if higher_is_better else reached <= quality
        if good and 0 < done <= len(ends):
            return ends[done - 1]
    return None


def quality_at(
    seconds: float, evaluations: Sequence[tuple[int, float]], ends: Sequence[float]
) -> float:
    """The quality of the last evaluation that was due by then; nan if there was none yet."""
    known = [pair for pair in evaluations if 0 < pair[0] <= len(ends)]
    due = [reached for done, reached in known if ends[done - 1] <= seconds]
    return due[-1] if due else nan


def _known(seconds: float) -> float:
    return seconds if isfinite(seconds) else 0.0
