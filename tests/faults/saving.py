"""What becomes of `runs train` and its checkpoints: the command itself, on ranks that we started as
torchrun would, with a fault in one of them; then `--resume`, held against a run without a fault."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tests.distributed.setting import same
from tests.faults.ranks import Note

STEPS, EVERY = 12, 4
EVENTS = 2500
"""About so many function calls are made while a rank saves: it dies at a random one of them."""


def command(rank: int, ranks: int, folder: Path, given: Mapping[str, Any], note: Note) -> int:
    """`python -m runs` with the words given, as one of torchrun's workers; its exit code.

    fault: "saving": killed in the middle of a save. "kill", "terminate": signalled at a random
    moment. "disk": no file can grow beyond `limit` bytes. None: nothing happens.
    """
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",  # else a rank with a wrong option waits for the first one to say so
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(given["port"]),
        GLOO_SOCKET_IFNAME="lo",
    )
    from runs.__main__ import main

    fault, chance = given.get("fault"), random.Random(given.get("seed", 0))
    if fault == "disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (given["limit"], resource.RLIM_INFINITY))
        note("fault")
    elif rank == given.get("victim") and fault == "saving":
        sys.setprofile(_Killer(chance.randrange(1, 3), chance.randrange(EVENTS), note))
    elif rank == given.get("victim") and fault is not None:
        number = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}[fault]
        threading.Thread(
            target=_strike, args=(Path(given["log_dir"]), number, chance, note), daemon=True
        ).start()
    try:
        code = main(["train", *map(str, given["words"])])
    except SystemExit as error:
        code = int(str(error.code))
    note("exit", code=code)
    return code


class _Killer:
    """Kills its process at a function call or return, the `event`-th inside the `save`-th save."""

    def __init__(self, save: int, event: int, note: Note) -> None:
        self.save, self.event, self.note = save, event, note
        self.inside: FrameType | None = None
        self.saves = self.events = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_name == "save_checkpoint" and event in ("call", "return"):
            if event == "call" and self.inside is None:
                self.inside, self.saves, self.events = frame, self.saves + 1, 0
            elif event == "return" and frame is self.inside:
                if self.saves == self.save:  # fewer calls than that: at the very end
                    self._kill()
                self.inside = None
        if self.inside is not None and self.saves == self.save:
            self.events += 1
            if self.events > self.event:
                self._kill()

    def _kill(self) -> None:
        self.note("fault")
        os.kill(os.getpid(), signal.SIGKILL)


def _strike(log_dir: Path, number: int, chance: random.Random, note: Note) -> None:
    """At a random moment after the first checkpoint."""
    while not (log_dir / "checkpoint" / "meta.json").exists():
        time.sleep(0.002)
    time.sleep(chance.random() * 0.4)
    note("fault")
    os.kill(os.getpid(), number)


def words(
    data: Path, log_dir: Path, steps: int = STEPS, seed: int = 0, every: int | None = EVERY
) -> list:
    """Of a new run."""
    given = ["--data", data, "--log-dir", log_dir, "--steps", steps]
    given += ["--checkpoint-every", every] if every else []
    given += ["--seed", seed, "--fixed-clock", 0.02, "--network", "100mbit", "--batch-size", 1]
    return [*given, "--policy", "GraVAC(window=3)"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def states(log_dir: Path) -> list[dict[str, Any]]:
    """Of all ranks, in the newest checkpoint."""
    files = sorted((log_dir / "checkpoint").glob("step-*/rank*.pt"))
    return [torch.load(path, weights_only=True) for path in files]


def alike(log_dir: Path, right: Path) -> bool:
    """Both runs have ended in the same models, optimizers and compressors, to the bit."""
    ours, theirs = states(log_dir), states(right)
    return bool(theirs) and same(ours, theirs)


def damage(how: str, log_dir: Path, others: Mapping[str, Path], chance: random.Random) -> str:
    """Do that to a run's checkpoint; what was done, in words."""
    folder = log_dir / "checkpoint"
    files = sorted(folder.glob("step-*/rank*.pt"))
    path = chance.choice(files)
    if how in ("a flipped bit", "a flipped bit in meta.json"):
        path = folder / "meta.json" if "meta" in how else path
        content = bytearray(path.read_bytes())
        place = chance.randrange(len(content))
        content[place] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        return f"{path.name}, byte {place} of {len(content)}"
    if how == "truncated":
        size = chance.randrange(path.stat().st_size)
        os.truncate(path, size)
        return f"{path.name} to {size} bytes"
    if how == "missing":
        path = chance.choice([*files, folder / "meta.json"])
        path.unlink()
        return path.name
    if how in ("a rank's file of another seed", "a rank's file of another step"):
        other = others[how]
        source = next((other / "checkpoint").glob(f"step-*/{path.name}"))
        shutil.copy(source, path)
        return path.name
    if how == "a damaged line in the records":
        path = log_dir / chance.choice(["timeline.jsonl", "metrics.jsonl"])
        content = bytearray(path.read_bytes())
        place = chance.randrange(len(content))
        content[place : place + 9] = b"\0\xff{{{,,\n\n"
        path.write_bytes(content)
        return f"{path.name}, at {place}"
    raise ValueError(how)


DAMAGES = (
    "a flipped bit",
    "a flipped bit in meta.json",
    "truncated",
    "missing",
    "a rank's file of another seed",
    "a rank's file of another step",
    "a damaged line in the records",
)
