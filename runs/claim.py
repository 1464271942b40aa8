"""Claiming a folder: one process at a time writes its run there, and a second is told who does."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runs.files import not_a_link
from runs.parser import UsageError

LOCK_FILE = "lock.json"

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What file systems answer that cannot lock a file."""


@contextmanager
def claim(folder: Path, what: str, command: str) -> Iterator[None]:
    """Hold `folder`, which is made if it is not there, for as long as the `with` lasts.

    The operating system gives the lock back when its holder ends, however that is: a run that was
    killed blocks nobody. what: the option that names the folder, for errors. command: what the next
    one is told of this one. UsageError if another process holds the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _lock(folder / LOCK_FILE, what)
    except OSError as error:
        raise UsageError(f"{what}: cannot be claimed: {error.strerror or error}") from error
    try:
        _sign(handle, command)
        yield
    finally:
        with suppress(OSError):  # it may be gone with its folder
            if _is(folder / LOCK_FILE, handle):
                (folder / LOCK_FILE).unlink()
        os.close(handle)


def _lock(path: Path, what: str) -> int:
    """The handle of the file, locked."""
    while True:
        # Not for child processes, and never by way of a link: the file is emptied.
        handle = os.open(not_a_link(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = _holder(handle)
            os.close(handle)
            raise UsageError(
                f"{what}: is in use by {holder}; accepted: another folder, or wait until it ends"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
            print(
                f"warning: {path.parent} is on a file system without locks ({error.strerror}): "
                f"see to it that no other run writes there",
                file=sys.stderr,
            )
            return handle
        if _is(path, handle):
            return handle
        os.close(handle)  # its holder has ended in between, and removed it


def _is(path: Path, handle: int) -> bool:
    """Is the file that we hold the one of that name?"""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _sign(handle: int, command: str) -> None:
    """Say in the file who holds it."""
    signature = {
        "pid": os.getpid(),
        "host": platform.node(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": command,
    }
    with suppress(OSError):  # with a full disk the lock holds as well
        os.ftruncate(handle, 0)
        os.pwrite(handle, (json.dumps(signature) + "\n").encode(), 0)


def _holder(handle: int) -> str:
    """Who has signed, for people."""
    try:
        by = json.loads(os.pread(handle, 100_000, 0))
        return f"process {by['pid']} on {by['host']} since {by['since']} ({by['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which is about to sign
