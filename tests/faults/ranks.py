"""Processes of one trial: started together, watched from outside, and never left behind.

What a rank has seen it notes in a file, line by line, at once: a killed process has told all.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.distributed.processes import PRELOAD

Note = Callable[..., None]
"""note(what, **more): one line of a rank's notes."""

Work = Callable[[int, int, Path, Mapping[str, Any], Note], Any]
"""work(rank, ranks, folder, given, note): at module level."""

START = 120.0
"""Seconds that a rank may take before it does what the trial is about: the machine may be busy."""


class Ranks:
    """So many processes in a folder of their own.

    notes: a rank's, each a mapping with "what" and "at" (seconds, monotonic).
    """

    def __init__(self, work: Work, ranks: int, given: Mapping[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.processes = [
            context.Process(target=_live, args=(work, rank, ranks, self.folder, dict(given)))
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.daemon = True
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def notes(self, rank: int) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / f"notes{rank}").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def last(self, rank: int, what: str) -> dict[str, Any] | None:
        """The rank's last note of that kind."""
        return next((n for n in reversed(self.notes(rank)) if n["what"] == what), None)

    def said(self, rank: int) -> str:
        """What it printed, stderr too."""
        try:
            return (self.folder / f"out{rank}").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def until(self, condition: Callable[[], Any], limit: float) -> bool:
        """Wait for the condition; False if the time was up."""
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def ended(self, ranks: list[int]) -> bool:
        return all(not self.processes[rank].is_alive() for rank in ranks)

    def stopped(self, rank: int) -> bool:
        """By SIGSTOP."""
        try:
            state = Path(f"/proc/{self.processes[rank].pid}/stat").read_text()
        except OSError:
            return False
        return state.rpartition(") ")[2][0] == "T"

    def go_on(self, rank: int) -> None:
        os.kill(self.processes[rank].pid or 0, signal.SIGCONT)


def _live(work: Work, rank: int, ranks: int, folder: Path, given: Mapping[str, Any]) -> None:
    out = os.open(folder / f"out{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    file = os.open(folder / f"notes{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(what: str, **more: Any) -> None:
        line = json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n"
        os.write(file, line.encode())

    torch.set_num_threads(1)
    try:
        found = work(rank, ranks, folder, given, note)
        note("done", found=found)
    except BaseException as error:
        note("error", error=f"{type(error).__name__}: {error}"[:400])
        traceback.print_exc()
        raise SystemExit(1) from None
