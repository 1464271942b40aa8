"""Checkpoints: a file for each rank, and a small meta.json that makes them valid.

Files are written to a temporary name and renamed; meta.json is written last, when every rank's
file is there. A crash at any moment leaves the checkpoint before.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runs.config import TrainConfig, write_text
from runs.files import read_json
from runs.parser import UsageError


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stopped: `step` steps done by `world_size` ranks."""

    folder: Path
    step: int
    world_size: int
    config: TrainConfig

    def load(self, rank: int) -> dict[str, Any]:
        """This rank's state. UsageError if its file is missing or damaged."""
        path = _rank_file(self.folder, self.step, rank)
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file raises almost anything
            raise UsageError(
                f"--resume {self.config.log_dir}: {path} is missing or damaged: {error}"
            ) from error
        return state


def save_checkpoint(config: TrainConfig, step: int, state: dict[str, Any]) -> None:
    """Save this rank's state (a collective: returns when all ranks' are there)."""
    rank = dist.get_rank()
    folder = _folder(config.folder)
    path = _rank_file(folder, step, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    dist.barrier()
    if rank == 0:
        meta = {
            "step": step,
            "world_size": dist.get_world_size(),
            "saved_at": time.strftime("%Y-%m-%d %H:%M:%S"),
            "torch": torch.__version__,
            "command": config.command,
            "config": config.as_json(),
        }
        write_text(folder / "meta.json", json.dumps(meta, indent=2) + "\n")
        for old in folder.glob("step-*"):
            if old != path.parent:
                shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(log_dir: Path) -> Checkpoint:
    """The checkpoint in a run's folder. UsageError if there is none that can be resumed."""
    folder = _folder(log_dir)
    accepted = "accepted: the folder of a run that was interrupted or had --checkpoint-every"
    try:
        meta = read_json(folder / "meta.json")
        config = TrainConfig.from_json({**meta["config"], "log_dir": str(log_dir)})
        found = Checkpoint(folder, int(meta["step"]), int(meta["world_size"]), config)
    except OSError as error:
        raise UsageError(
            f"--resume {log_dir}: nothing to resume, {folder / 'meta.json'}: "
            f"{error.strerror or error}; {accepted}"
        ) from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(
            f"--resume {log_dir}: {folder / 'meta.json'} is damaged: {error}; {accepted}"
        ) from error
    for rank in range(found.world_size):
        path = _rank_file(folder, found.step, rank)
        if not path.exists():
            raise UsageError(f"--resume {log_dir}: {path} is missing; {accepted}")
    return found


def newest_run(logs: Path = Path("logs")) -> Path:
    """The folder in `logs` with the newest checkpoint. UsageError if there is none."""
    metas = sorted(logs.glob("*/checkpoint/meta.json"), key=lambda path: path.stat().st_mtime)
    if not metas:
        raise UsageError(
            f"--resume: no run with a checkpoint in {logs}/; accepted: --resume LOGDIR"
        )
    return metas[-1].parent.parent


def _folder(log_dir: Path) -> Path:
    return log_dir / "checkpoint"


def _rank_file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step-{step}" / f"rank{rank}.pt"
