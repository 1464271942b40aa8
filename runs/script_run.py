"""A run of a user's own script, unchanged, with the settings of a contender or of a trial.

They reach the script's `AdaptiveCompressor`. A DDP model that is trained without one gets one, with
the optimizers that the script has made for it. What is recorded goes where the runs of `train` have
it, so that all that reads those reads these.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from adaptive import AdaptiveCompressor, JSONLTimeline, StepRecord, Timeline
from adaptive.model.replicas import ATTRIBUTE
from adaptive.network.pace import Pace
from runs.build import compressor_arguments
from runs.claim import claim
from runs.config import TrainConfig
from runs.expression import PLAIN
from runs.files import known, write_json, write_text
from runs.interrupt import INTERRUPTED, PRUNED
from runs.launch import GRACE, launch
from runs.metric import parse_metric
from runs.netlab.place import ModelSteps, holds, the_place
from runs.parser import UsageError
from runs.records import METRICS_FILE, TIMELINE_FILE
from runs.report.run import Slice
from runs.report.source import SLICES_FILE
from runs.result import RESULT_FILE, title
from runs.script import Script, before_training, run_script
from runs.tasks import quality_of

OUTPUT_FILE = "output.txt"
"""What the workers of a script have printed."""

Reported = Callable[[int, float], bool]
"""Told of each value of the metric with the steps done; whether the run is to end here."""


@dataclass(frozen=True)
class ScriptJob:
    """A run of a script. shown: what it prints goes to stderr, not to a file."""

    config: TrainConfig
    script: Script
    shown: bool
    reported: Reported | None = None


def run_whole(
    config: TrainConfig,
    shown: bool = False,
    reported: Reported | None = None,
    failed: Callable[[str], None] | None = None,
) -> int:
    """The run from its beginning to its end, in worker processes; returns the exit code: PRUNED if
    `reported` has ended it. A run that was interrupted, or has failed, leaves no result."""
    shutil.rmtree(config.folder, ignore_errors=True)
    with claim(config.folder, f"--log-dir: {config.folder}"):
        # Absolute: the script may go elsewhere.
        words = [word.replace("{run}", str(config.folder.absolute())) for word in config.script]
        job = ScriptJob(config, Script.of(words), shown, reported)
        if config.threads > 1:
            os.environ["OMP_NUM_THREADS"] = str(config.threads)
        code = launch(_work, job, config.workers, failed)
        if code not in (0, PRUNED):
            (config.folder / RESULT_FILE).unlink(missing_ok=True)
            if code != INTERRUPTED:  # it has failed, whatever exit code it has given
                return _failed(config, "has failed", shown)
        elif not (config.folder / RESULT_FILE).exists():
            return _failed(config, "has ended its own process (os._exit): no result", shown)
    return code


def _failed(config: TrainConfig, how: str, shown: bool) -> int:
    """Tell of it; the exit code."""
    where = "" if shown else f": what it has printed is in {config.folder / OUTPUT_FILE}"
    print(f"error: {config.script[0]} {how}{where}", file=sys.stderr)
    return 1


def _work(job: ScriptJob, rank: int, world_size: int, init_method: str) -> int:
    """A worker's share, in a process of its own."""
    to = sys.stderr.fileno()  # stdout is for the comparison
    if not job.shown:
        to = os.open(job.config.folder / OUTPUT_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(to, sys.stderr.fileno())
    os.dup2(to, sys.stdout.fileno())
    watched = _Watched(job, rank, job.config.folder.absolute())
    watched.begin()
    code = 1
    try:
        code = run_script(job.script, rank, world_size)
        if code == PRUNED and not watched.pruned:
            code = 1  # the script's own exit code, which says that it has failed
        watched.poll()
    finally:
        watched.close(whole=code == 0)
    if code == 0:
        watched.check()
    if rank == 0 and code in (0, PRUNED):
        watched.save()
    return code


@dataclass
class _Last(Timeline):
    """Keeps the last record."""

    record: StepRecord | None = None

    def step(self, record: StepRecord) -> None:
        self.record = record


@dataclass
class _Watched:
    """A script that runs in this process: what it is given, and what is seen of it.

    folder: the run's; the script may go elsewhere. model: the first DDP model that is trained.
    seconds: of each step. pruned: the run is to end after this step.
    """

    job: ScriptJob
    rank: int
    folder: Path
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    model: DistributedDataParallel | None = None
    compressors: list[AdaptiveCompressor] = field(default_factory=list)
    last: _Last = field(default_factory=_Last)
    pruned: bool = False
    poll: Callable[[], None] = lambda: None  # takes in what the script has written
    _of_optimizers: ModelSteps = field(default_factory=ModelSteps)
    _records: JSONLTimeline | None = None
    _metrics: TextIO | None = None
    _at: float = nan

    def begin(self) -> None:
        """From now on, see and give."""
        config = self.job.config
        build = AdaptiveCompressor.__init__

        def built(
            made: AdaptiveCompressor, base: Any = None, cf_range: Any = None, **own: Any
        ) -> None:
            given = {"base": base, "cf_range": cf_range, **own}
            first, sinks = not self.compressors, own.get("timeline")
            if config.policy != PLAIN:
                given |= compressor_arguments(config)
            if first and self.rank == 0:
                known_sinks = list(sinks) if isinstance(sinks, (list, tuple)) else [sinks]
                self._records = JSONLTimeline(self.folder / TIMELINE_FILE)
                given["timeline"] = [*filter(None, known_sinks), self._records, self.last]
            try:
                build(made, **given)
            except (ValueError, TypeError) as error:
                if config.policy == PLAIN:
                    raise
                raise UsageError(
                    f"{config.contender}: does not go with the script's own AdaptiveCompressor: "
                    f"{error}"
                ) from error
            self.compressors.append(made)

        AdaptiveCompressor.__init__ = built  # type: ignore[assignment, method-assign]
        destroy = dist.destroy_process_group

        def ending(*args: Any, **kwargs: Any) -> None:
            if sys.exc_info()[0] is None:
                self._close_compressors()  # which need the group for their last step
            destroy(*args, **kwargs)

        dist.destroy_process_group = ending
        before_training(self._before_forward)
        register_optimizer_step_post_hook(self._stepped)
        if self.rank == 0:
            config.save()
            if config.metric is not None:
                self.poll = parse_metric(config.metric).listen(self._hear)

    def _before_forward(self, model: DistributedDataParallel) -> None:
        if self.model is None:
            self.model = model
        if self.job.config.policy == PLAIN or getattr(model, ATTRIBUTE, None) is not None:
            return
        hooks = [getattr(hook, "__name__", "?") for hook, _ in getattr(model, "_comm_hooks", ())]
        if hooks:
            raise UsageError(
                f"{self.job.script.path}: its model has a communication hook already ({hooks[0]}), "
                f"so that {self.job.config.contender} cannot reach it; accepted: without the hook, "
                f"or the contender own, the script as it is"
            )
        optimizers = optimizers_of(model)
        if not optimizers:
            print("warning: no optimizer of the model was found", file=sys.stderr, flush=True)
        AdaptiveCompressor().attach(
            model, optimizer=optimizers or None, scaler=enabled_scaler() if optimizers else None
        )

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.model is None or not holds(optimizer, self.model):
            return
        if not self._of_optimizers.begins(optimizer):
            return
        now = time.perf_counter()
        self.steps += 1
        self.seconds.append(now - self._at)
        self._at = now
        self.poll()
        if self.pruned:
            # Its peers wait for it, and so may it, in what it has in `finally`.
            ending = threading.Timer(GRACE, os._exit, (PRUNED,))
            ending.daemon = True
            ending.start()
            raise SystemExit(PRUNED)

    def _hear(self, value: float) -> None:
        if self.model is None:
            return  # an evaluation before the first step
        self.evaluations.append((self.steps, value))
        line = {"step": max(0, self.steps - 1), "quality": known(value)}
        if self._metrics is None:
            path = self.folder / METRICS_FILE
            self._metrics = path.open("w", encoding="utf-8")
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        if self.job.reported is not None and isfinite(value) and not self.pruned:
            self.pruned = self.job.reported(self.steps, value)

    def close(self, whole: bool) -> None:
        """whole: the script has ended as it should, so that a collective is in order."""
        if whole and dist.is_initialized():
            self._close_compressors()
        if self._records is not None:
            self._records.close()
        if self._metrics is not None:
            self._metrics.close()

    def _close_compressors(self) -> None:
        for compressor in self.compressors:
            compressor.close()

    def check(self) -> None:
        """UsageError for a script in which there was nothing to see."""
        path, config = self.job.script.path, self.job.config
        if not self.steps:
            raise UsageError(f"{path}: has ended without a step of a DDP model in training")
        if config.metric is not None and self.rank == 0 and not self.evaluations:
            raise UsageError(
                f"--metric {config.metric}: {path} has reported none in {self.steps} steps, on "
                f"rank 0; what it has printed is in {config.folder / OUTPUT_FILE}"
            )

    def save(self) -> None:
        """What a run's folder has of its end."""
        config, place, last = self.job.config, the_place(), self.last.record
        name, higher = quality_of(config)
        pace = self._own_pace() if last is None else last.pace
        quality = self.evaluations[-1][1] if self.evaluations else nan
        netlab = None
        if place is not None:
            netlab = place.counted(place.reported())
        totals = {} if last is None else {"bytes_sent": last.sent, "dense_bytes": last.dense}
        result = {
            "title": title(config),
            "steps": self.steps,
            "quality_name": name,
            "higher_is_better": higher,
            "quality": known(quality),
            "netlab": netlab,
            "summary": {**totals, "pace": asdict(pace)},
            "log_dir": config.log_dir,
            "command": config.command,
            "config": config.as_json(),
        }
        interface = 0 if netlab is None else netlab["interface_bytes"]
        turn = Slice(0, self.steps, pace, interface)
        write_text(self.folder / SLICES_FILE, json.dumps(asdict(turn)) + "\n")
        write_json(self.folder / RESULT_FILE, result)

    def _own_pace(self) -> Pace:
        """Of a script without a compressor. Its evaluations lie between steps, and do not count."""
        timed = self.seconds[1:]
        if not timed:
            return Pace(untimed=self.steps)
        return Pace(steps=len(timed), seconds=len(timed) * median(timed), untimed=1)


def optimizers_of(model: DistributedDataParallel) -> list[Optimizer]:
    """Those that this process has made of the model's parameters, without wrappers."""
    found = [each for each in _living(Optimizer) if holds(each, model)]
    inside = [each for each in found if not isinstance(_wrapped(each), Optimizer)]
    order = {id(p): i for i, p in enumerate(model.parameters())}

    def first(optimizer: Optimizer) -> int:
        own = (p for group in optimizer.param_groups for p in group["params"])
        return min(order.get(id(p), len(order)) for p in own)

    return sorted(inside, key=first)


def enabled_scaler() -> torch.amp.GradScaler | None:
    """That of the script; None without one, or with several."""
    scalers = [each for each in _living(torch.amp.GradScaler) if each.is_enabled()]
    return scalers[0] if len(scalers) == 1 else None


def _living(kind: type) -> Sequence[Any]:
    """The objects of a class in this process."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _wrapped(optimizer: Optimizer) -> object:
    return getattr(optimizer, "optimizer", None)
