"""Where a study is kept: any database that Optuna can open by a URL."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import optuna
from filelock import FileLock
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from runs.parser import UsageError

BEAT, GRACE = 20, 120
"""Seconds between signs of life of a running trial, and without one until it is given up."""

ATTEMPTS = 6
"""To open the storage: processes that make its tables at the same time disturb each other."""

PATIENCE = 5.0
"""Seconds of one attempt from which on there is no other: nobody answers."""

ACCEPTED = "accepted: a URL of Optuna, e.g. sqlite:///study.db or postgresql+psycopg2://HOST/NAME"


class LostStorageError(UsageError):
    """A storage that was there does not answer any more."""


def open_storage(url: str) -> RDBStorage:
    """UsageError if there is none at `url`."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    # We ask and tell, and so give the signs of life ourselves (desk.py).
    warnings.filterwarnings("ignore", message="Heartbeat of storage")
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)  # we say it, in one line
    patient = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    for attempt in range(ATTEMPTS):
        began = time.monotonic()
        try:
            return RDBStorage(
                url, engine_kwargs=patient, heartbeat_interval=BEAT, grace_period=GRACE
            )
        except Exception as error:  # each database has its own
            hopeless = isinstance(error, (ImportError, ArgumentError))
            if hopeless or attempt == ATTEMPTS - 1 or time.monotonic() - began > PATIENCE:
                raise UsageError(
                    f"--storage {shown_url(url)}: {_why(error)}; {ACCEPTED}"
                ) from error
            time.sleep(0.1 * 2**attempt)
    raise AssertionError("unreachable")


def turn(url: str) -> AbstractContextManager[object]:
    """Within, no other process on this machine asks the storage at `url`. SQLite has no row locks:
    two that ask at once would be given the same queued trial. Other databases have."""
    where = make_url(url)
    if where.get_backend_name() != "sqlite" or where.database in (None, "", ":memory:"):
        return nullcontext()
    return FileLock(f"{where.database}.lock")


@contextmanager
def needed(url: str) -> Iterator[None]:
    """Within, the storage at `url` that has been opened must go on working; LostStorageError if
    it does not."""
    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) else error
        raise LostStorageError(
            f"--storage {shown_url(url)}: {_said(cause or error)}; the same command goes on from "
            f"here when it can be reached"
        ) from error


def shown_url(url: str) -> str:
    """For people to read, without the password."""
    try:
        parts = make_url(url)
    except (ArgumentError, ValueError):
        return url
    return url if parts.password is None else parts.render_as_string(hide_password=True)


def _why(error: Exception) -> str:
    """In one line."""
    missing = error.__cause__ if isinstance(error, ImportError) else None
    if isinstance(missing, ModuleNotFoundError):
        return f"needs the Python module {missing.name}, which is not installed"
    return f"cannot be opened: {_said(error)}"


def _said(error: BaseException) -> str:
    """The first line of what the database's own module has said."""
    driver = getattr(error, "orig", None)
    lines = [line.strip() for line in str(driver or error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
