"""One rank's training: the usual loop, with a compressor attached."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist

from adaptive import Summary
from adaptive.network.pace import Pace
from runs.checkpoint import (
    Checkpoint,
    NotFiniteError,
    not_finite,
    raise_on_all,
    save_checkpoint,
)
from runs.config import TrainConfig
from runs.interrupt import Stop
from runs.logbook import Logbook
from runs.netlab.place import the_place
from runs.tasks import Task
from runs.trainer import Trainer

HOPELESS = 1e6
"""A loss from which training does not come back: every task's is a cross-entropy, in nats."""

PATIENCE = 3
"""Steps in a row with such a loss, or one that is not finite, after which a run has diverged."""


@dataclass(frozen=True)
class Outcome:
    """How training ended. seconds: of the loop, evaluations and checkpoints not counted. pace: of
    its steps; the summary's is of the whole run, also of the steps before it was resumed.
    quality: on held-out data, on rank 0 (elsewhere, and at a pause, None); with early stopping, of
    the best model, that after `best_step`. beside: what was measured beside it. test: the quality
    on test data, once training is over, of a task that has some. loss: the last, mean over workers.
    saved_at: the step of the last checkpoint, 0 if there is none. diverged: why training has failed
    and ended early, or ""; the checkpoint is from before. stopped_early: why it has ended early as
    it should, or "". unsaved: why the last checkpoint that was due could not be saved, or "".
    netlab: what this worker's interface has sent in these steps (`Place.counted`); None where links
    are not real."""

    steps_done: int
    first_step: int
    interrupted: bool
    seconds: float
    loss: float
    summary: Summary
    quality: float | None
    pace: Pace = field(default_factory=Pace)
    saved_at: int = 0
    diverged: str = ""
    unsaved: str = ""
    beside: dict[str, float] = field(default_factory=dict)
    test: float | None = None
    best_step: int | None = None
    stopped_early: str = ""
    netlab: dict[str, Any] | None = None


def train(
    config: TrainConfig,
    *,
    checkpoint: Checkpoint | None = None,
    interrupt: Stop | None = None,
    logbook: Logbook | None = None,
    pause_at: int | None = None,
    keep: bool = True,
    task: Task | None = None,
    voters: dist.ProcessGroup | None = None,
    test: bool = True,
) -> Outcome:
    """Train to `config.steps`, in an initialised process group; all ranks call this alike.

    checkpoint: where to go on from. interrupt: asks to stop after a step. logbook: rank 0's.
    pause_at: stop after so many steps, with a checkpoint, to go on later; quality is then
    measured only where `config` says so. keep: save a checkpoint when it stops early. task: see
    `Trainer`. voters: see `_Vote`. test: measure the quality on test data, too, in the end.
    """
    trainer = Trainer(config, logbook, task)
    if checkpoint is not None:
        _resume(trainer, checkpoint, logbook)
    if logbook is not None:
        logbook.open()
    vote = _Vote(voters)
    place, before = the_place(), trainer.summary()
    if place is not None:
        place.begin(trainer.step)
    first, loss, stop = trainer.step, float("nan"), False
    keeper = _Keeper(config, trainer, logbook)
    seconds = 0.0
    examiner = _Examiner(trainer, logbook)
    early = trainer.early
    last = config.steps if pause_at is None else min(pause_at, config.steps)
    while trainer.step < last and not (stop or keeper.diverged or early.stopped):
        began = time.perf_counter()
        local = trainer.loss()
        vote.cast(local.item(), interrupt is not None and interrupt.requested)
        trainer.descend(local)
        loss, stop = vote.count()
        keeper.watch(loss)
        if logbook is not None:
            logbook.trained(trainer.step, loss, trainer.stopwatch.pace)
        spent = time.perf_counter() - began
        seconds += spent
        trainer.took(spent)
        done = trainer.step == config.steps
        if config.eval_every and trainer.step % config.eval_every == 0 and not done:
            examiner.evaluate()
            early.agree()
        done = done or early.stopped
        every = config.checkpoint_every
        if (every and trainer.step % every == 0) or (done and (every or checkpoint is not None)):
            keeper.save()
    finished = trainer.step == config.steps or early.stopped
    interrupted = stop and not finished
    if keep and not finished and keeper.saved_at != trainer.step:
        keeper.save()
    if interrupted and keeper.saved_at == trainer.step and logbook is not None:
        logbook.progress.say(f"stopped after step {trainer.step}, checkpoint saved")
    summary = trainer.summary()
    keeper.check_model()  # rank 0 goes on alone from here
    vote.close()
    if pause_at is None or finished:
        examiner.conclude(finished, test)
    quality, diverged = examiner.quality, keeper.diverged
    if quality is not None and not isfinite(quality) and not diverged:
        diverged = f"held-out {trainer.task.quality_name} is {quality} in the end"
    if early.stopped and logbook is not None:
        logbook.announce(f"stopped after step {trainer.step}: {early.why()}")
    return Outcome(
        trainer.step,
        first,
        interrupted,
        seconds,
        loss,
        summary,
        quality,
        summary.pace.since(before.pace),
        keeper.saved_at,
        diverged,
        keeper.unsaved,
        examiner.beside,
        examiner.test,
        early.step if early.best is not None and finished else None,
        early.why(),
        None if place is None else place.counted(summary.bytes_sent - before.bytes_sent),
    )


class _Vote:
    """A tiny all-reduce that is under way while backward runs.

    All ranks see the same, so all of them stop after the same step.
    group: to vote in; None: one of its own, so that no exchange stands in the way.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._own = group is None
        self._group = group or dist.new_group(backend="gloo")
        self._ballot = torch.zeros(2, dtype=torch.float64)
        self._work: dist.Work | None = None

    def cast(self, loss: float, stop: bool) -> None:
        """Start the all-reduce of this rank's loss and wish."""
        self._ballot = torch.tensor([loss, stop], dtype=torch.float64)
        self._work = dist.all_reduce(self._ballot, group=self._group, async_op=True)

    def count(self) -> tuple[float, bool]:
        """The mean loss, and whether any rank was asked to stop."""
        assert self._work is not None
        self._work.wait()
        loss, wishes = self._ballot.tolist()
        return loss / dist.get_world_size(), wishes > 0

    def close(self) -> None:
        """Give its own group's threads and sockets back; on all ranks."""
        if self._own:
            dist.destroy_process_group(self._group)


class _Keeper:
    """Saves checkpoints, and sees to it that no state of a run that has diverged becomes one.

    All ranks come to the same conclusions, since what they rest on is agreed.

    saved_at: the step of the last checkpoint, 0 if there is none. diverged: why the run is to end,
    or "". unsaved: why there is none of the last step at which one was due, or "".
    """

    def __init__(self, config: TrainConfig, trainer: Trainer, logbook: Logbook | None) -> None:
        self.saved_at = trainer.step
        self.diverged = self.unsaved = ""
        self._config, self._trainer, self._logbook = config, trainer, logbook
        self._hopeless = 0  # steps in a row
        self._loss = 0.0

    def watch(self, loss: float) -> None:
        """Take in the mean loss of a step."""
        self._loss = loss
        self._hopeless = 0 if abs(loss) < HOPELESS else self._hopeless + 1
        if self._hopeless >= PATIENCE:
            self.diverged = (
                f"the loss was not finite, or above {HOPELESS:g}, in {self._hopeless} steps in a "
                f"row, {loss:g} in the last"
            )

    def save(self) -> None:
        """Make the present state the checkpoint, unless training seems to have failed. If it cannot
        be written, training goes on with the one before. On all ranks."""
        state = self._trainer.state_dict()  # takes in the last step, which goes on record
        if self._logbook is not None:
            self._logbook.flush()
        step = self._trainer.step
        if self._hopeless:
            self._say("is left out", f"the loss is {self._loss:g}")
            return
        try:
            self.unsaved = save_checkpoint(self._config, step, state)
        except NotFiniteError as error:
            self.diverged = f"there are numbers in {error} that are not finite"
            return
        if not self.unsaved:
            self.saved_at = step
        else:
            self._say("could not be saved", self.unsaved)

    def _say(self, what: str, why: str) -> None:
        """Warn that there is no checkpoint of the present step."""
        if self._logbook is not None:
            left = f"the one of step {self.saved_at} stays" if self.saved_at else "there is none"
            self._logbook.progress.say(
                f"warning: the checkpoint of step {self._trainer.step} {what}, and {left}: {why}"
            )

    def check_model(self) -> None:
        """Training has ended: it has failed, too, if its last step has spoilt the model. On all
        ranks."""
        if self._hopeless and not self.diverged:
            self.diverged = f"the loss of the last step is {self._loss:g}"
        try:
            raise_on_all(not_finite(self._trainer.model.module.state_dict()), NotFiniteError)
        except NotFiniteError as error:
            self.diverged = self.diverged or f"there are numbers in {error} that are not finite"


class _Examiner:
    """Rank 0 measures the model, and the others do not wait before they have to: on them nothing is
    ever known. With gossip, local steps and delayed means no rank has the model that is trained,
    the mean of all, which is then put together on all ranks.

    quality: the last one that was measured, or that of the best model once there is a conclusion.
    beside, test: see `Outcome`."""

    def __init__(self, trainer: Trainer, logbook: Logbook | None) -> None:
        self.quality: float | None = None
        self.beside: dict[str, float] = {}
        self.test: float | None = None
        self._trainer, self._logbook = trainer, logbook
        self._at = -1  # steps done when it was measured last

    def evaluate(self) -> None:
        """Measure the model as it is, and note it for early stopping. On all ranks."""
        trainer = self._trainer
        with trainer.measured():
            if trainer.rank == 0:
                self._measure(note=True)

    def conclude(self, finished: bool, test: bool) -> None:
        """Training ends, for good if it is finished: then with the best model, if there is early
        stopping, and with a look at the test data. On all ranks."""
        with self._trainer.measured():
            if self._trainer.rank == 0:
                self._conclude(finished, test)

    def _conclude(self, finished: bool, test: bool) -> None:
        trainer = self._trainer
        if self._at != trainer.step:
            self._measure(note=finished)
        if not finished:
            return
        task, best = trainer.task, trainer.early.take_best(trainer.step, trainer.model.module)
        if best is not None:
            self.quality, self.beside = best, {}
            if task.beside:
                self.beside = task.measure(trainer.model)
                del self.beside[task.quality_name]
        if test and task.has_test:
            self.test = task.measure(trainer.model, test=True)[task.quality_name]

    def _measure(self, note: bool) -> None:
        trainer, name = self._trainer, self._trainer.task.quality_name
        self.beside = trainer.task.measure(trainer.model)
        self.quality = quality = self.beside.pop(name)
        self._at = trainer.step
        if self._logbook is not None:
            self._logbook.evaluated(trainer.step, name, quality, self.beside)
        if note:
            trainer.early.note(trainer.step, quality, trainer.model.module)


def _resume(trainer: Trainer, checkpoint: Checkpoint, logbook: Logbook | None) -> None:
    """Go on from a checkpoint, or UsageError on all ranks if that is not possible."""
    state, folder, problem = checkpoint.load(), checkpoint.config.log_dir, ""
    if logbook is not None:
        logbook.muted = True  # the throwaway step is no part of the record
    trainer.throw_away_a_step()
    try:
        trainer.load_state_dict(state)
    except Exception as error:  # whatever does not fit, the other ranks must hear of it
        problem = f"--resume {folder}: the checkpoint does not fit this program: {error!r}"
    raise_on_all(problem)
    if trainer.world_size != checkpoint.world_size:
        trainer.task.restart(trainer.model)  # each rank would go on with what rank 0 carried
    if logbook is not None:
        logbook.muted = False
        if trainer.world_size != checkpoint.world_size:
            logbook.progress.say(_rescaled(trainer, checkpoint.world_size))


def _rescaled(trainer: Trainer, before: int) -> str:
    """What another number of workers than before means, in words."""
    now, each = trainer.world_size, trainer.task.batch_size
    return (
        f"goes on with {now} workers instead of {before}: a step has {now * each} samples instead "
        f"of {before * each}, in another order, and the learning rate is not scaled; what the "
        f"{before} had still to send is shared out, and step times are measured anew"
    )
