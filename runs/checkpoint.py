"""Checkpoints: a file for each rank, and a small meta.json that makes them valid.

Files are written to a temporary name, synced to the disk and renamed; meta.json, which holds the
digest of each, is written last, when every rank's file is there. Only then the step before is
deleted. A crash at any moment leaves the checkpoint before. Nothing is loaded on any rank before
every rank's file has been found to be the one that was saved.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from adaptive import reshard_states
from runs.config import TrainConfig
from runs.files import open_regular, read_json, whole_file, write_json
from runs.parser import UsageError
from runs.records import make

_ACCEPTED = "accepted: the folder of a run that was interrupted or had --checkpoint-every"

_CONTENTS = ("step", "model", "optimizers", "compressor", "rng")
"""What a rank's file holds."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stopped: `step` steps done by `world_size` ranks. digests: SHA-256 of each rank's
    file."""

    folder: Path
    step: int
    world_size: int
    config: TrainConfig
    digests: tuple[str, ...]

    def load(self) -> dict[str, Any]:
        """This rank's state, once every rank's file has been found to be good. A collective.

        With another number of ranks than saved it, everyone reads all files: what the compressors
        hold is shared out (`adaptive.reshard_states`), the model and the optimizers are rank 0's,
        and a rank that is new has no state of the random numbers (None).

        UsageError on all ranks, naming the file, if one of them is missing or not what was saved.
        """
        state, problem = {}, ""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        try:
            same = world_size == self.world_size
            state = self.read(rank) if same else self._resharded(rank, world_size)
        except UsageError as error:
            problem = str(error)
        raise_on_all(problem)
        return state

    def _resharded(self, rank: int, world_size: int) -> dict[str, Any]:
        """The state of one of `world_size` ranks."""
        state = self.read(0)
        compressors, rngs = [state["compressor"]], [state["rng"]]
        for other in range(1, self.world_size):  # one by one: each has the model, too
            read = self.read(other)
            compressors.append(read["compressor"])
            rngs.append(read["rng"])
        compressor = None
        if state["compressor"] is not None:
            try:
                compressor = reshard_states(compressors, world_size)[rank]
            except ValueError as error:
                raise UsageError(f"--resume {self.config.log_dir}: {error}") from error
        rng = rngs[rank] if rank < len(rngs) else None
        return {**state, "compressor": compressor, "rng": rng}

    def read(self, rank: int) -> dict[str, Any]:
        """The state of one rank. UsageError if its file is not what was saved."""
        path = _rank_file(self.folder, self.step, rank)
        try:
            with open_regular(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != self.digests[rank]:
                    raise ValueError(f"its SHA-256 is not the one in {self.folder / 'meta.json'}")
                file.seek(0)
                state = torch.load(file, map_location="cpu", weights_only=True)
            missing = [key for key in _CONTENTS if key not in state]
            if missing:
                raise ValueError(f"it is no state of a run: {', '.join(missing)} missing")
        except Exception as error:  # a damaged file raises almost anything
            raise UsageError(
                f"--resume {self.config.log_dir}: {path} is missing or damaged: {error}"
            ) from error
        return dict(state)


@dataclass(frozen=True)
class _Meta:
    """What is read of meta.json."""

    step: int
    world_size: int
    digests: tuple[str, ...]
    config: Any


class NotFiniteError(Exception):
    """A state holds numbers that are not finite, and so must not take the place of a checkpoint."""


def save_checkpoint(config: TrainConfig, step: int, state: Mapping[str, Any]) -> str:
    """Save this rank's state (a collective: returns when all ranks' are there).

    Returns why it could not be saved, alike on all ranks, or "". NotFiniteError, on all ranks, if
    the state of one is not finite. Both times the checkpoint before is still there and valid.
    """
    rank = dist.get_rank()
    folder = _folder(config.folder)
    path = _rank_file(folder, step, rank)
    problem = digest = ""
    raise_on_all(not_finite(state), NotFiniteError)
    try:
        digest = _write(path, dict(state))
    except OSError as error:
        problem = _told(path, error)
    said = _everyones((problem, digest))
    problem = next((problem for problem, _ in said if problem), "")
    if not problem and rank == 0:
        try:
            _make_valid(config, step, [digest for _, digest in said])
        except OSError as error:
            problem = _told(folder / "meta.json", error)
    problem = _everyones(problem)[0] or problem
    if problem:
        _take_back(path)
    return problem


def find_checkpoint(log_dir: Path) -> Checkpoint:
    """The checkpoint in a run's folder. UsageError if there is none that can be resumed."""
    folder = _folder(log_dir)
    path = folder / "meta.json"
    try:
        meta = make(_Meta, read_json(path))
        config = TrainConfig.from_json(meta.config, log_dir)
        if len(meta.digests) != meta.world_size:
            raise ValueError(f"{len(meta.digests)} digests for {meta.world_size} ranks")
        found = Checkpoint(folder, meta.step, meta.world_size, config, meta.digests)
    except OSError as error:
        raise UsageError(
            f"--resume {log_dir}: there is no checkpoint, {path}: {error.strerror or error}; "
            f"{_ACCEPTED}"
        ) from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"--resume {log_dir}: {path} is damaged: {error}; {_ACCEPTED}") from error
    files = (_rank_file(folder, meta.step, rank) for rank in range(meta.world_size))
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None:
        raise UsageError(f"--resume {log_dir}: {missing} is missing; {_ACCEPTED}")
    return found


def newest_run(logs: Path = Path("logs")) -> Path:
    """The folder in `logs` with the newest checkpoint. UsageError if there is none."""
    metas = sorted(logs.glob("*/checkpoint/meta.json"), key=lambda path: path.stat().st_mtime)
    if not metas:
        raise UsageError(
            f"--resume: no run with a checkpoint in {logs}/; accepted: --resume LOGDIR"
        )
    return metas[-1].parent.parent


def raise_on_all(problem: str, kind: type[Exception] = UsageError) -> None:
    """An error on every rank if one of them has a problem: the first one's. A collective."""
    for theirs in _everyones(problem):
        if theirs:
            raise kind(theirs)


def not_finite(state: Any, name: str = "") -> str:
    """The name of the first tensor in a state that has a NaN or an infinity in it, or a number
    whose square is one: no training comes back from there. "" if none."""
    if isinstance(state, Tensor):
        floating = state.is_floating_point() or state.is_complex()
        finite = not floating or bool(torch.isfinite(state.abs().float().square()).all())
        return "" if finite else name
    parts: Any = ()
    if isinstance(state, Mapping):
        parts = state.items()
    elif isinstance(state, (list, tuple)):
        parts = enumerate(state)
    found = (not_finite(part, f"{name}.{key}" if name else str(key)) for key, part in parts)
    return next(filter(None, found), "")


def _write(path: Path, state: dict[str, Any]) -> str:
    """Write one rank's file, whole or not at all; returns its digest."""
    content = BytesIO()  # an error of the disk would come out of torch's writer as something else
    torch.save(state, content)
    with whole_file(path) as file:
        file.write(content.getbuffer())
    _sync(path.parent)
    return hashlib.sha256(content.getbuffer()).hexdigest()


def _make_valid(config: TrainConfig, step: int, digests: list[str]) -> None:
    """Every rank's file of this step is there: make it the checkpoint."""
    folder = _folder(config.folder)
    _sync(folder)
    meta = {
        "step": step,
        "world_size": len(digests),
        "saved_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "torch": torch.__version__,
        "command": config.command,
        "digests": digests,
        "config": config.as_json(),
    }
    write_json(folder / "meta.json", meta)
    try:
        _sync(folder)
        _sync(config.folder)
    except OSError:
        return  # which of the two a power failure leaves is not known, so both stay
    for old in folder.glob("step-*"):
        if old.name != f"step-{step}":
            shutil.rmtree(old, ignore_errors=True)


def _take_back(path: Path) -> None:
    """Remove what was written of a checkpoint that did not become valid."""
    with suppress(OSError):  # other ranks' files are beside it, or the disk is gone
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def _sync(folder: Path) -> None:
    """Have a folder's entries on the disk, where its file system can do that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def _everyones(mine: _T) -> list[_T]:
    """What each rank says, by rank. A collective."""
    said = [mine] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return said


def _told(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror or error}"


def _folder(log_dir: Path) -> Path:
    return log_dir / "checkpoint"


def _rank_file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step-{step}" / f"rank{rank}.pt"
