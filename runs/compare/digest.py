"""What a finished run comes down to, read from its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite, nan
from statistics import fmean as mean

from adaptive import LinkSpec, StepRecord
from runs.compare.network import model_bytes, modelled_seconds
from runs.compare.slice import read_slices
from runs.config import TrainConfig
from runs.files import read_json
from runs.parser import UsageError
from runs.records import (
    METRICS_FILE,
    TIMELINE_FILE,
    Recorded,
    Stretch,
    bytes_by_step,
    read_metrics,
    read_records,
    seconds_by_step,
    stretches,
)
from runs.result import RESULT_FILE
from runs.times import pauses, step_seconds


@dataclass(frozen=True)
class Exploration:
    """What a run spent on exploring. A step explores if it was sent while the policy was still
    finding out (its status says so), at another CF than the one that it then stayed at.

    steps: that explored. nbytes: that a worker sent in them."""

    steps: int
    nbytes: float


def exploration(records: Sequence[StepRecord]) -> Exploration:
    """All explorations of a run together; a policy whose status does not speak of it has none."""
    spent: list[float] = []
    stayed_at = nan  # of what comes after the last step nothing is known
    for i in reversed(range(len(records))):
        before, sent = records[max(0, i - 1)].status, records[i].report
        # A status is that after its step, so it tells of the next one.
        if before.get("exploring") != 1:
            stayed_at = sent.cf
        elif sent.cf != stayed_at:
            spent.append(sent.wire_bytes)
    return Exploration(len(spent), sum(spent))


@dataclass(frozen=True)
class Digest:
    """One run. evaluations: (steps done, quality) in order, smoothed; quality: the last one;
    bytes_sent, dense_bytes: a worker's;
    sent: bytes a worker has sent by the end of each step; ends: modelled seconds by then, by
    network (empty for a run without records); explored: what finding out has cost; diverged: why
    it ended early, if it did. modelled_step: seconds of a step by a modelled clock. clock:
    when each step ended on the network that the run had, without evaluations. floats_sent: elements
    that a worker sent, indices not counted. beside: what was measured beside the quality in the
    end. test: the quality on test data, nan for a task without. interface_bytes: that a worker's
    interface has sent, where links are real."""

    seed: int
    quality: float
    evaluations: tuple[tuple[int, float], ...]
    bytes_sent: float
    dense_bytes: float
    steps_per_second: float
    history: tuple[Stretch, ...]
    sent: tuple[float, ...]
    ends: tuple[tuple[float, ...], ...]
    explored: Exploration
    diverged: str = ""
    modelled_step: float = nan
    clock: tuple[float, ...] = ()
    floats_sent: float = nan
    beside: Mapping[str, float] = field(default_factory=dict)
    test: float = nan
    interface_bytes: float = nan

    def quality_after(self, steps: int | None) -> float:
        """Of the last evaluation by then; None: at the end."""
        if steps is None:
            return self.quality
        return next((q for done, q in reversed(self.evaluations) if done <= steps), nan)

    @property
    def wire_factor(self) -> float:
        """Bytes of dense fp32 all-reduce / bytes sent; 1 if nothing was sent."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0


def read_digest(
    config: TrainConfig,
    networks: Sequence[LinkSpec],
    model_mb: float | None = None,
    smooth: int = 1,
) -> Digest:
    """The digest of a finished run. model_mb: for the modelled seconds, the size of its model.
    smooth: evaluations whose mean is a quality. UsageError if its files are damaged."""
    try:
        return _read(config, networks, model_mb, smooth)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"--log-dir: the run in {config.folder} is damaged: {error}; accepted: the same "
            f"command without that folder, to train it again"
        ) from error


def _read(
    config: TrainConfig, networks: Sequence[LinkSpec], model_mb: float | None, smooth: int
) -> Digest:
    folder = config.folder
    result = read_json(folder / RESULT_FILE)
    timeline = folder / TIMELINE_FILE
    recorded = read_records(timeline) if timeline.exists() else Recorded([], [])
    summary = result["summary"]
    slices = read_slices(folder)
    turns = [(part.last - part.first - 1, part.seconds) for part in slices]
    evaluations, final = smoothed(_evaluations(config), smooth), _known(result["quality"])
    best = result.get("best_step") is not None  # early stopping: the last one is not what counts
    clock = _clock(recorded.steps, evaluations, config)
    own = model_bytes(recorded.steps, config.workers)
    times = 1.0 if model_mb is None or not own else model_mb * 1e6 / own
    return Digest(
        seed=config.seed,
        quality=final if best or not evaluations or not isfinite(final) else evaluations[-1][1],
        evaluations=tuple(evaluations),
        bytes_sent=summary["bytes_sent"],
        dense_bytes=summary["dense_bytes"],
        steps_per_second=len(clock) / clock[-1] if clock and clock[-1] > 0 else rate(turns),
        history=tuple(stretches(recorded)),
        sent=sent_by(recorded.steps, summary["bytes_sent"], result["steps"]),
        ends=tuple(
            tuple(modelled_seconds(recorded.steps, network, times)) if recorded.steps else ()
            for network in networks
        ),
        explored=exploration(recorded.steps),
        diverged=str(result.get("diverged") or ""),
        clock=clock,
        modelled_step=_known(result.get("modelled_seconds")) / max(1, result["steps"]),
        floats_sent=float(summary["floats_sent"]),
        beside={name: _known(value) for name, value in result.get("beside", {}).items()},
        test=_known(result.get("test")),
        interface_bytes=sum(part.interface_bytes for part in slices) if config.netlab else nan,
    )


def _clock(
    records: Sequence[StepRecord], evaluations: Sequence[tuple[int, float]], config: TrainConfig
) -> tuple[float, ...]:
    paused = pauses(records, [done for done, _ in evaluations], 0, config.steps)
    ends = list(accumulate(step_seconds(records, paused)))
    return tuple(seconds_by_step(records, ends))


def rate(parts: Sequence[tuple[int, float]]) -> float:
    """Steps a second over parts of so many (steps, seconds)."""
    spent = sum(seconds for _, seconds in parts)
    return sum(steps for steps, _ in parts) / spent if spent > 0 else nan


def smoothed(evaluations: Sequence[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """Each quality as the mean of so many evaluations, itself the last of them; of as many as there
    are at the beginning."""
    values = [quality for _, quality in evaluations]
    parts = (values[max(0, end - count) : end] for end in range(1, len(values) + 1))
    return [(done, mean(part)) for (done, _), part in zip(evaluations, parts, strict=True)]


def sent_by(records: Sequence[StepRecord], total: float, steps: int) -> tuple[float, ...]:
    """Bytes sent by the end of each step of the optimizer; without records (plain DDP) all steps
    send alike."""
    if not records:
        return tuple(total * (i + 1) / steps for i in range(steps))
    return tuple(bytes_by_step(records))


def _evaluations(config: TrainConfig) -> list[tuple[int, float]]:
    found = read_metrics(config.folder / METRICS_FILE).evaluations
    return [(done, quality) for done, quality in found if isfinite(quality)]


def _known(value: float | None) -> float:
    return nan if value is None else value
