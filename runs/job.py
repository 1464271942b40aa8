"""From options to a checked job: a new run, or one to go on with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runs.build import check
from runs.checkpoint import Checkpoint, find_checkpoint, newest_run
from runs.claim import claim
from runs.config import CONFIG_FILE, TrainConfig, holds_several
from runs.netlab.lab import Lab, real_links
from runs.options import RESUME_OPTIONS, make_config
from runs.parser import UsageError, check_writable, option


@dataclass(frozen=True)
class Job:
    """What to train, and the checkpoint to go on from, if any. named: the folder is the one that
    the user gave, and not one of our making."""

    config: TrainConfig
    checkpoint: Checkpoint | None = None
    named: bool = True


def make_job(given: Mapping[str, Any], world_size: int | None, simulated: bool = False) -> Job:
    """The checked job. world_size: that of torchrun, None if we start the workers ourselves.
    simulated: they are to be simulated in one process.

    UsageError names the option, its value and what is accepted.
    """
    options = dict(given)
    resume = options.pop("resume", None)
    workers = options.get("workers", world_size)
    if world_size is not None and workers != world_size:
        raise UsageError(
            f"--workers {workers}: torchrun has started {world_size}; accepted: {world_size}, or "
            f"leave it out"
        )
    if resume is not None:
        job = _resumed(resume, options, workers, simulated)
    else:
        if workers is not None:
            options["workers"] = workers
        config = make_config({**options, "simulated": simulated})
        job = Job(config, named="log_dir" in options)
        if job.named:
            _check_folder(config)
        else:
            check_writable(config.folder)
    check(job.config)
    return job


@contextmanager
def claimed(job: Job) -> Iterator[Job]:
    """The job, for as long as the `with` lasts with its folder to itself; a folder of our naming
    gets another name if a run has it already.

    UsageError if another run has the folder, or has changed what is in it since the job was made.
    """
    config, checkpoint = job.config, job.checkpoint
    if not job.named:
        config = replace(config, log_dir=_made_folder(config.folder))
    what = f"--log-dir {config.log_dir}" if checkpoint is None else f"--resume {config.log_dir}"
    with claim(config.folder, what):
        if checkpoint is None:
            _check_folder(config)
        elif find_checkpoint(config.folder).digests != checkpoint.digests:
            raise UsageError(f"{what}: another run has just gone on there; try again")
        yield replace(job, config=config)


def _made_folder(wanted: Path) -> str:
    """A folder that this call has made: `wanted`, or that with a number."""
    folder, count = wanted, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            count += 1
            folder = wanted.with_name(f"{wanted.name}-{count}")
        except OSError as error:
            raise UsageError(f"--log-dir {folder}: {error.strerror or error}") from error


def _resumed(resume: str, options: dict[str, Any], workers: int | None, simulated: bool) -> Job:
    folder = options.pop("log_dir", None)
    if resume and folder not in (None, resume):
        raise UsageError(f"--log-dir {folder}: --resume {resume} goes on in its own folder")
    for name, value in options.items():
        if name not in RESUME_OPTIONS:
            accepted = ", ".join(map(option, RESUME_OPTIONS))
            raise UsageError(
                f"{option(name)} {value} cannot be given with --resume, which goes on with the "
                f"options of the run; accepted: {accepted}"
            )
    checkpoint = find_checkpoint(Path(resume or folder or newest_run()))
    before, lab = checkpoint.config, Lab.of_environment()
    if before.simulated != simulated:
        raise UsageError(
            f"--resume {before.log_dir}: is a run of python -m runs {before.program}; accepted: "
            f"{before.resume_command}"
        )
    if before.netlab != (None if lab is None else lab.options):
        links = "this machine's own network"
        if before.netlab is not None:
            links = f"netlab's {real_links(before.netlab)}"
        raise UsageError(
            f"--resume {before.log_dir}: is a run over {links}; accepted: {before.resume_command}"
        )
    policy = checkpoint.config.policy
    if options.get("policy", policy) != policy:
        raise UsageError(
            f"--policy {options['policy']}: the run in {checkpoint.config.log_dir} has "
            f"{policy}; accepted: the same, or leave it out"
        )
    workers = checkpoint.world_size if workers is None else workers
    config = replace(checkpoint.config, **{"json": False, **options, "workers": workers})
    if config.steps <= checkpoint.step:
        raise UsageError(
            f"--steps {config.steps}: the run in {config.log_dir} has done {checkpoint.step} "
            f"already, nothing to resume; accepted: --steps above {checkpoint.step}"
        )
    return Job(config, replace(checkpoint, config=config))


def _check_folder(config: TrainConfig) -> None:
    check_writable(config.folder)
    if (config.folder / CONFIG_FILE).exists():
        raise UsageError(
            f"--log-dir {config.log_dir}: holds a run already; accepted: another folder, or "
            f"--resume {config.log_dir} to go on with it"
        )
    if holds_several(config.folder):
        raise UsageError(
            f"--log-dir {config.log_dir}: holds the runs of a comparison or a study; accepted: "
            f"another folder"
        )
