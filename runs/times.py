"""Where the time of a run's steps went, and what it would have been on another network or alone.

The model of another network: seconds(step) = compute + compress + hops x latency + bytes x 8 /
rate. Compute is what is left of a step's measured time without compression and without what the
(real or emulated) network took (what ranks wait for each other is in it): the run's median, since
single steps have pauses in them. Compression, which includes decoding, is each step's own. Nothing
overlaps, so a run whose exchange hides behind backward is taken to be slower than it would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isfinite, nan
from statistics import median

from adaptive import LinkSpec, StepRecord
from runs.build import modelled_clock
from runs.config import TrainConfig
from runs.modelled_clock import imagined_bytes
from runs.records import Recorded, local_steps, seconds_by_step


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
            report.wire_bytes,
            report.statistics_bytes,
            steps,
            report.down_bytes,
            report.cf,
            report.hops,
        )
    return clock.now


def step_seconds(records: Sequence[StepRecord]) -> list[float]:
    """Of each recorded step, or round of local steps, as `Pace` counts them: the report of the next
    one tells. One that was not timed counts as the mean; nan throughout if none was."""
    if not records:
        return []
    typical = records[-1].pace.step_seconds
    after = [*(record.report.median_seconds for record in records[1:]), nan]
    return [
        seconds if isfinite(seconds) else typical * steps
        for seconds, steps in zip(after, local_steps(records), strict=True)
    ]


def coding_seconds(records: Sequence[StepRecord]) -> list[float]:
    """What compressing and decoding took in each step, which the report of the next one tells; else
    the median of its CF, and 0 for a CF of which that is not known."""
    times = [nan] * len(records)
    by_cf: dict[float, list[float]] = {}
    for i, (record, after) in enumerate(pairwise(records)):
        if after.report.timed_cf == record.report.cf:
            times[i] = after.report.coding_seconds
            if isfinite(times[i]):
                by_cf.setdefault(record.report.cf, []).append(times[i])
    typical = {cf: median(values) for cf, values in by_cf.items()}
    return [
        spent if isfinite(spent) else typical.get(record.report.cf, 0.0)
        for record, spent in zip(records, times, strict=True)
    ]


def compute_seconds(records: Sequence[StepRecord]) -> float:
    """Of a step of the optimizer, without compression and network; nan if no step was timed."""

    def known(seconds: float) -> float:
        return seconds if isfinite(seconds) else 0.0

    rest = [
        max(0.0, report.seconds - known(report.coding_seconds) - known(report.wait_seconds))
        / report.timed_steps
        for report in (record.report for record in records)
        if isfinite(report.seconds)
    ]
    return median(rest) if rest else nan


def modelled_seconds(
    records: Sequence[StepRecord],
    network: LinkSpec,
    times: float = 1.0,
    coded: float | None = None,
) -> list[float]:
    """When each step of the optimizer would have ended on that network; nan throughout if no step
    was timed.

    times: the size of the model that is imagined, in sizes of the one that was trained. Bytes of
    gradients and compression count so many times, compute and statistics once. coded: how many
    times compression counts instead, where its seconds are those of a larger model already.
    """
    coded = times if coded is None else coded
    compute, rate = compute_seconds(records), network.bits_per_second
    reports = [record.report for record in records]
    rounds = zip(reports, coding_seconds(records), local_steps(records), strict=True)
    ends = accumulate(
        compute * steps
        + coded * spent
        + network.latency * sent.hops
        + 8 * imagined_bytes(sent.wire_bytes, sent.statistics_bytes, times) / rate
        for sent, spent, steps in rounds
    )
    return seconds_by_step(records, list(ends))


def model_bytes(records: Sequence[StepRecord], workers: int) -> float:
    """Bytes of the gradients in fp32; 0 if nothing is sent (one worker)."""
    if not records or workers < 2:
        return 0.0
    return records[0].report.dense_wire_bytes * workers / (2 * (workers - 1))


def one_worker_seconds(config: TrainConfig) -> float | None:
    """Of a step of one worker, which sends nothing: as it was given, else that of the modelled
    clock; None if it is not known."""
    return config.fixed_clock if config.one_worker_seconds is None else config.one_worker_seconds


def scaling_efficiency(one_worker: float | None, steps_per_second: float | None) -> float | None:
    """T_N / (N T_1), T in samples/s: how much N workers do of what N lone ones would; None if that
    is not known. At the same batch a worker, a step of N workers has N times the samples of a step
    of one, so it comes down to one worker's seconds a step times the steps/s of all."""
    if one_worker is None or steps_per_second is None or not isfinite(steps_per_second):
        return None
    return one_worker * steps_per_second


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
