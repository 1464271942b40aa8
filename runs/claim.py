"""Claiming a folder: one process at a time writes its run there, and a second is told who does."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from runs.files import not_a_link, read_json
from runs.parser import UsageError

LOCK_FILE = "lock"
SIGNATURE = "lock.json"
"""Says who holds the lock."""


@contextmanager
def claim(folder: Path, what: str, command: str) -> Iterator[None]:
    """Hold `folder`, which is made if it is not there, for as long as the `with` lasts.

    The operating system gives the lock back when its holder ends, however that is: a run that was
    killed blocks nobody. what: the option that names the folder, for errors. command: what the next
    one is told of this one. UsageError if another process holds the folder.
    """
    signature = folder / SIGNATURE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(not_a_link(folder / LOCK_FILE))
    except OSError as error:
        raise UsageError(f"{what}: cannot be claimed: {error.strerror or error}") from error
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"{what}: is in use by {_holder(signature)}; accepted: another folder, or wait until "
            f"it ends"
        ) from None
    except (OSError, NotImplementedError) as error:
        print(
            f"warning: {folder} cannot be locked ({error}): see to it that no other run writes "
            f"there",
            file=sys.stderr,
        )
    by = {"pid": os.getpid(), "host": platform.node(), "command": command}
    by["since"] = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        with suppress(OSError):  # with a full disk the lock holds as well
            not_a_link(signature).write_text(json.dumps(by) + "\n")
        yield
    finally:
        with suppress(OSError):  # it may be gone with its folder
            signature.unlink()
        with suppress(OSError):
            lock.release()


def _holder(signature: Path) -> str:
    """Who has signed, for people."""
    try:
        by = read_json(signature)
        return f"process {by['pid']} on {by['host']} since {by['since']} ({by['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which is about to sign
