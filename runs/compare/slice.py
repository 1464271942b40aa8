"""One turn of one run: some steps more, in worker processes of their own."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial

import torch.distributed as dist

from runs.checkpoint import Checkpoint, find_checkpoint
from runs.claim import claim
from runs.config import TrainConfig, load_config
from runs.files import write_text
from runs.interrupt import INTERRUPTED, UNSAVED, Interrupt
from runs.launch import launch
from runs.logbook import Logbook, emulated
from runs.parser import UsageError
from runs.progress import Progress
from runs.report.run import Slice
from runs.report.source import SLICES_FILE, read_slices
from runs.result import RESULT_FILE, save_result
from runs.simulate.ranks import simulate
from runs.tasks import Task
from runs.train import Outcome, train
from runs.worker import join

_Part = tuple[TrainConfig, Checkpoint | None, int, bool]
"""A run, what it is at, to how many steps it is to be brought, and whether it tells of them."""


def steps_done(config: TrainConfig) -> int:
    """How far a run got. UsageError if its folder holds another run."""
    if config.script and not is_finished(config):
        return 0  # it begins anew, perhaps as another run: after a slip in --metric, say
    try:
        there = load_config(config.folder)
    except ValueError as error:
        raise UsageError(f"--log-dir: {error}") from error
    if there is None:
        return 0
    for name, value in asdict(config).items():
        other = getattr(there, name)
        if name != "log_dir" and other != value:
            raise UsageError(
                f"--log-dir: {config.folder} holds a run with {name}={other!r}, not {value!r}; "
                f"accepted: the same options, or another folder"
            )
    if is_finished(config):
        return config.steps
    checkpoint = _checkpoint(config)
    return checkpoint.step if checkpoint is not None else 0


def is_finished(config: TrainConfig) -> bool:
    return (config.folder / RESULT_FILE).exists()


def train_until(config: TrainConfig, until: int, verbose: bool = False) -> int:
    """Bring a run that got less far to `until` steps; returns the exit code."""
    checkpoint = _checkpoint(config)
    if checkpoint is None:  # perhaps killed in its first steps
        shutil.rmtree(config.folder, ignore_errors=True)
    part = config, checkpoint, until, verbose
    with claim(config.folder, f"--log-dir: {config.folder}"):
        if config.simulated:
            code = simulate(config, partial(_work, part))
        else:
            code = launch(_run, part, config.workers)
    if is_finished(config):
        shutil.rmtree(config.folder / "checkpoint", ignore_errors=True)
    return code


def _run(part: _Part, rank: int, world_size: int, init_method: str) -> int:
    """A worker's share, in a process of its own."""
    interrupt = join(part[0].threads, rank, world_size, init_method)
    code = _work(part, rank, interrupt)
    dist.destroy_process_group()
    return code


def _work(
    part: _Part,
    rank: int,
    interrupt: Interrupt,
    task: Task | None = None,
    voters: dist.ProcessGroup | None = None,
) -> int:
    """One rank's training of this turn, in a group that is there; the exit code."""
    config, checkpoint, until, verbose = part
    first = checkpoint.step if checkpoint is not None else 0
    progress = Progress(config.steps, emulated(config), quiet=not verbose)
    with closing(Logbook(config, first, progress)) if rank == 0 else nullcontext() as logbook:
        outcome = train(
            config,
            checkpoint=checkpoint,
            interrupt=interrupt,
            logbook=logbook,
            pause_at=until,
            task=task,
            voters=voters,
        )
    if logbook is not None and not _keep(config, outcome, logbook):
        return UNSAVED
    # Also after its last step, or the next contender's turn would come.
    return INTERRUPTED if outcome.interrupted or interrupt.requested else 0


def _keep(config: TrainConfig, outcome: Outcome, logbook: Logbook) -> bool:
    """Write down what this turn has brought; could everything be saved?"""
    unsaved = [outcome.unsaved] if outcome.unsaved else []
    finished = outcome.steps_done == config.steps or outcome.stopped_early
    if finished or outcome.diverged:  # it would diverge again
        _, _, unsaved = save_result(config, outcome, logbook)
    if outcome.diverged:
        print(f"warning: the run has diverged: {outcome.diverged}", file=sys.stderr, flush=True)
    interface = 0 if outcome.netlab is None else outcome.netlab["interface_bytes"]
    made = Slice(outcome.first_step, outcome.steps_done, outcome.pace, interface)
    try:
        # What was made after the checkpoint is made anew.
        kept = [old for old in read_slices(config.folder) if old.last <= made.first]
        lines = (json.dumps(asdict(one)) + "\n" for one in (*kept, made))
        write_text(config.folder / SLICES_FILE, "".join(lines))
    except OSError as error:
        unsaved.append(f"{config.folder / SLICES_FILE} could not be written: {error.strerror}")
    for problem in unsaved:
        print(f"error: {problem}", file=sys.stderr, flush=True)
    return not unsaved


def _checkpoint(config: TrainConfig) -> Checkpoint | None:
    if not (config.folder / "checkpoint" / "meta.json").exists():
        return None
    return find_checkpoint(config.folder)
