"""What rank 0 keeps of a run: timeline, metrics, TensorBoard scalars, and what it prints."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isfinite
from typing import Any, TextIO

from adaptive import (
    Event,
    Header,
    JSONLTimeline,
    LinkSpec,
    StepRecord,
    TensorBoardTimeline,
    Timeline,
)
from adaptive.network.pace import Pace
from adaptive.timeline.sinks import SafeTimeline
from adaptive.timeline.tensorboard import write_scalars
from policies.base import DENSE, GainKind
from policies.words import in_short, named
from runs.build import build_policy
from runs.config import CONFIG_FILE, TrainConfig
from runs.expression import PLAIN
from runs.parser import UsageError
from runs.progress import Progress
from runs.records import METRICS_FILE, TIMELINE_FILE, keep_before, read_header

EVENTS = "TensorBoard's event file"


class Logbook(Timeline):
    """A timeline sink that passes on to the files, and the run's own numbers besides.

    What cannot be written, on a full disk or to a folder that has been removed, is dropped with one
    warning: no record is worth the training. Its files are opened, and made where they are not
    there, by `open`: before, nothing is written.

    first_step: steps done already; the records of later ones are dropped from the files. progress:
    what it says while it runs; None: as train does. opened: called when it is open.
    """

    def __init__(
        self,
        config: TrainConfig,
        first_step: int,
        progress: Progress | None = None,
        opened: Callable[[], object] = lambda: None,
    ) -> None:
        self.config = config
        self.muted = False
        self._opened = opened
        self.last: StepRecord | None = None
        self.notes: list[str] = []
        self.evaluations: list[tuple[int, float]] = []
        self.progress = progress or Progress(config.steps, emulated(config))
        self._metrics: TextIO | None = None
        self._writer: Any = None
        self._first = first_step
        self._board: TensorBoardTimeline | None = None
        self._sinks = SafeTimeline()
        self._dropped: set[str] = set()
        self._rungs: Mapping[float, str] = {}
        self._handler = _Handler(self)
        logging.getLogger("adaptive").addHandler(self._handler)
        logging.getLogger("adaptive").propagate = False

    def open(self) -> None:
        """Training is about to begin: make the folder, config.json and the other files, or go on in
        them. After a checkpoint was found to be good, or its records would be dropped in vain.

        UsageError if not even config.json of a new run can be written: nothing is lost yet.
        """
        config, first = self.config, self._first
        try:
            config.save()
        except OSError as error:
            if not first:
                raise UsageError(f"--log-dir {config.log_dir}: {error.strerror}") from error
            self._drop(CONFIG_FILE, error)
        for name in (TIMELINE_FILE, METRICS_FILE):
            self._try(name, keep_before, config.folder / name, first)
        self._try(METRICS_FILE, self._open_metrics)
        self._try(EVENTS, self._open_events)
        if config.policy != PLAIN:
            if TIMELINE_FILE not in self._dropped:
                path = config.folder / TIMELINE_FILE
                self._sinks.sinks.append(JSONLTimeline(path, append=first > 0))
            if self._writer is not None:
                self._board = TensorBoardTimeline(self._writer)
                self._sinks.sinks.append(self._board)
                with suppress(OSError, ValueError):  # which the compressor does not tell again
                    if first and (header := read_header(config.folder / TIMELINE_FILE)):
                        self._board.start(header)
        self._opened()

    # -- the compressor's timeline -------------------------------------------------------------

    def start(self, header: Header) -> None:
        self._rungs = header.rungs
        if not self.muted:
            self._sinks.start(header)

    def step(self, record: StepRecord) -> None:
        if not self.muted:
            self.last = record
            self._sinks.step(record)

    def event(self, event: Event) -> None:
        if self.muted:
            return
        self._sinks.event(event)
        if event.cf != event.cf_before:
            verdict = "" if self.last is None else self.last.verdict  # it was told already
            why = in_short(event.reason, verdict)
            cf = named(event.cf, self._rungs)
            self.announce(f"step {event.step}: {cf}{': ' if why else ''}{why}")

    def announce(self, text: str) -> None:
        """Tell whoever is watching of a switch or an evaluation."""
        if not self.progress.quiet:
            self.progress.say(text)

    def close(self) -> None:
        """Flush and close everything; also after an error, and twice."""
        self.flush()
        self._sinks.close()
        self._sinks = SafeTimeline()
        if self._metrics is not None:
            with suppress(OSError):  # what it still holds cannot be written, which was said
                self._metrics.close()
            self._metrics = None
        if self._writer is not None:
            self._try(EVENTS, self._writer.close)
            self._writer = None
        self.progress.close()
        logging.getLogger("adaptive").removeHandler(self._handler)

    def flush(self) -> None:
        """Hand the records to the operating system: a checkpoint must not be ahead of them."""
        self._sinks.flush()
        if self._metrics is not None:
            self._try(METRICS_FILE, self._metrics.flush)
            self._try(METRICS_FILE, os.stat, self._metrics.name)  # somebody may have removed it
        if self.last is not None and self.config.policy != PLAIN:
            self._try(TIMELINE_FILE, os.stat, self.config.folder / TIMELINE_FILE)

    # -- the run's own numbers -----------------------------------------------------------------

    def trained(self, done: int, loss: float, plain: Pace) -> None:
        """`done` steps are done, the last with this mean loss over the workers. plain: how fast the
        steps of a run without a compressor were."""
        pace = plain if self.last is None else self.last.pace
        self._metric(done - 1, "loss", loss, "train/loss")
        if self._writer is not None and self.config.policy == PLAIN:  # a row of the CF timeline
            plain_ddp = {"cf/sent": DENSE, "time/total": plain.all_seconds}
            self._try(EVENTS, write_scalars, self._writer, plain_ddp, done - 1)
        self.progress.update(done, loss, self.last, pace.steps_per_second)

    def evaluated(
        self, done: int, name: str, quality: float, beside: Mapping[str, float] | None = None
    ) -> None:
        """After `done` steps the model had this quality on held-out data, and beside it others."""
        self.evaluations.append((done, quality))
        told = {"quality": quality, **(beside or {})}
        for measured, value in told.items():
            tag = f"eval/{re.sub(r'[^a-z0-9]+', '_', measured).strip('_')}"
            self._metric(done - 1, measured, value, tag)
        if done < self.config.steps:
            more = "".join(f", {other} {value:.4g}" for other, value in (beside or {}).items())
            self.announce(f"step {done}: held-out {name} {quality:.4g}{more}")

    def _metric(self, step: int, name: str, value: float, tag: str) -> None:
        """Note a number in metrics.jsonl, and for TensorBoard under its tag."""
        self._line({"step": step, name: value if isfinite(value) else None})
        if self._writer is not None and isfinite(value):
            self._try(EVENTS, self._writer.add_scalar, tag, value, step)

    def _line(self, values: Mapping[str, Any]) -> None:
        if self._metrics is not None:
            self._try(METRICS_FILE, self._metrics.write, json.dumps(values) + "\n")

    # -- what may fail -------------------------------------------------------------------------

    def _try(self, name: str, write: Callable[..., object], *args: object) -> None:
        """Do some of the work for a file, unless that has failed before."""
        if name not in self._dropped:
            try:
                write(*args)
            except Exception as error:  # a full disk, or whatever an event writer has met
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self._dropped.add(name)
        if name == EVENTS and self._board is not None:
            if self._board not in self._sinks.sinks:
                return  # the other user of that file, which has said so
            self._sinks.sinks.remove(self._board)
        self.progress.say(
            f"warning: {name} in {self.config.log_dir} is no longer written, and training goes on: "
            f"{error!r}"
        )

    def _open_metrics(self) -> None:
        path = self.config.folder / METRICS_FILE
        self._metrics = path.open("a" if self._first else "w", encoding="utf-8")

    def _open_events(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.notes.append("no TensorBoard events: tensorboard is not installed")
            return
        self._writer = SummaryWriter(str(self.config.folder), purge_step=self._first or None)


class _Handler(logging.Handler):
    """The library's own messages, above the progress bar."""

    def __init__(self, logbook: Logbook) -> None:
        super().__init__(logging.WARNING)
        self._logbook = logbook

    def emit(self, record: logging.LogRecord) -> None:
        if not self._logbook.muted:
            self._logbook.progress.say(record.getMessage())


def emulated(config: TrainConfig) -> str:
    """What every heading says of the link: "emulated 100 Mbit/s link", or nothing."""
    how = "emulated" if config.fixed_clock is None else "modelled"
    return f"{how} {LinkSpec.parse(config.network)} link" if config.network else ""


def gain_kind(config: TrainConfig) -> GainKind:
    """The gain that the policy decides on."""
    return build_policy(config).gain if config.policy != PLAIN else "gradient"
