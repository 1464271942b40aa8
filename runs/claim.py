"""Claiming a folder: one process at a time writes its run there, and a second is told so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from runs.files import not_a_link
from runs.parser import UsageError

LOCK_FILE = "lock"


@contextmanager
def claim(folder: Path, what: str) -> Iterator[None]:
    """Hold `folder`, which is made if it is not there, for as long as the `with` lasts.

    The operating system gives the lock back when its holder ends, however that is: a run that was
    killed blocks nobody. what: the option that names the folder, for errors. UsageError if another
    process holds the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(not_a_link(folder / LOCK_FILE))
    except OSError as error:
        raise UsageError(f"{what}: cannot be claimed: {error.strerror or error}") from error
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"{what}: is in use by another process; accepted: another folder, or wait until it ends"
        ) from None
    except (OSError, NotImplementedError) as error:
        print(
            f"warning: {folder} cannot be locked ({error}): see to it that no other run writes "
            f"there",
            file=sys.stderr,
        )
    try:
        yield
    finally:
        with suppress(OSError):  # it may be gone with its folder
            lock.release()
