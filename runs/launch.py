"""Local worker processes: started together, ended together.

Each worker gets its rank, the rendezvous and a pipe on which it says what went wrong. A worker
that fails ends them all; they end by themselves when this process is killed (see `_follow`).

torch's elastic launcher does less of what is needed here: its workers meet by a TCP store of the
parent's, which places in a lab do not reach; the first Ctrl-C ends them, where these end the step
and save; and what a worker raises comes back as a text.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from runs.interrupt import (
    ASKING,
    INTERRUPTED,
    PRUNED,
    STOPPING,
    give_signals_back,
    say,
    take_signals,
)
from runs.netlab.place import enter_lab
from runs.parser import UsageError
from runs.pipes import outlive_readers

GRACE = 2.0
"""Seconds that the other workers get, after one failed, to say what they saw."""

Work = Callable[[Any, int, int, str], int]
"""work(argument, rank, world_size, init_method) -> exit code; at module level."""


def launch(
    work: Work, argument: Any, workers: int, failed: Callable[[str], None] | None = None
) -> int:
    """Run `work` in so many processes; returns the exit code of the whole.

    0 if all returned 0; 130 if interrupted; 1 after printing what the first failing one said;
    PRUNED if that is what rank 0 returned, which the others then are ended for.
    UsageError if that is what a worker raised. failed: is told the cause in one line.
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="runs-") as folder:
        rendezvous = f"file://{Path(folder, 'rendezvous')}"
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        requests = 0

        def stop(number: int, frame: FrameType | None) -> None:
            """The first signal asks the workers to stop, the second kills them. SIGHUP is never
            the second: a terminal and its shell may both deliver it."""
            nonlocal requests
            if requests and number == signal.SIGHUP:
                return
            requests += 1
            for process in processes:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGTERM if requests == 1 else signal.SIGKILL)
            if requests == 1:
                say(STOPPING)

        # Children inherit the mask, so that a signal waits until they are ready for it. (The
        # tracker that multiprocessing starts with the first of them would lift it again.)
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
        before = take_signals(stop, stop)
        try:
            for rank in range(workers):
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=_run, args=(work, argument, rank, workers, rendezvous, theirs)
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
            said = _wait(processes, pipes)
            codes = [process.exitcode for process in processes]  # before we kill what is left
        finally:
            for process in processes:
                process.kill()
                process.join()
            give_signals_back(before)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    if codes[0] == PRUNED:
        return PRUNED
    if requests > 1 or (requests and -signal.SIGTERM in codes):  # its script has reset the handler
        return INTERRUPTED
    return _verdict(codes, [process.pid for process in processes], said, failed or (lambda _: None))


def _wait(processes: list[BaseProcess], pipes: list[Connection]) -> dict[int, tuple[float, Any]]:
    """Until all have ended, or one failed and the grace is over; what they said, by rank."""
    said: dict[int, tuple[float, Any]] = {}
    deadline = float("inf")
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        alive = [process.sentinel for process in processes if process.is_alive()]
        connection.wait(alive, timeout=min(1.0, max(0.0, deadline - time.monotonic())))
        _collect(pipes, said)
        failed = said or any(p.exitcode not in (None, 0, INTERRUPTED) for p in processes)
        if failed and deadline == float("inf"):
            deadline = time.monotonic() + GRACE
    _collect(pipes, said)
    return said


def _collect(pipes: list[Connection], said: dict[int, tuple[float, Any]]) -> None:
    for rank, pipe in enumerate(pipes):
        try:
            if rank not in said and pipe.poll():
                said[rank] = pipe.recv()
        except (EOFError, OSError):  # it ended without a word
            continue


def _verdict(
    codes: list[int | None],
    pids: list[int | None],
    said: dict[int, tuple[float, Any]],
    failed: Callable[[str], None],
) -> int:
    """The exit code, after telling the cause. codes: None for those that had not ended."""
    ended = {rank: signal.Signals(-code) for rank, code in enumerate(codes) if code and code < 0}
    for rank, number in ended.items():
        if number == signal.SIGABRT and said:
            continue  # the process group's way to take a peer's failure
        cause = f"worker {rank} (pid {pids[rank]}) was ended by {number.name}"
        print(f"error: {cause}; all ended", file=sys.stderr)
        failed(cause)
        return 1
    if said:
        rank, (_, what) = min(said.items(), key=lambda item: item[1][0])
        if isinstance(what, UsageError):
            raise what
        print(f"{what}error: worker {rank} failed (traceback above); all ended", file=sys.stderr)
        failed(f"worker {rank} failed: {what.strip().splitlines()[-1]}")
        return 1
    first, *others = (code or 0 for code in codes)
    return first or max(others, default=0)  # rank 0 knows best


def _run(
    work: Work, argument: Any, rank: int, workers: int, init_method: str, pipe: Connection
) -> None:
    """The life of a worker."""
    outlive_readers()
    threading.Thread(target=_follow, name="follow-parent", daemon=True).start()
    try:
        enter_lab(rank, workers)
        code = work(argument, rank, workers, init_method)
    except UsageError as error:
        pipe.send((time.monotonic(), error))
        code = 2
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException:  # whatever it is, the parent must learn of it
        pipe.send((time.monotonic(), traceback.format_exc()))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not waiting for threads of a broken process group


def _follow() -> None:
    """Die with the parent, whatever this process is waiting for."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
