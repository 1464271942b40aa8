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
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from runs.parser import UsageError

BEAT, GRACE = 10, 60
"""Seconds between signs of life of a running trial, and without one until it is given up."""

with warnings.catch_warnings():
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    RETRY = RetryHeartbeatStaleTrialCallback()
"""Queues the parameters of a trial that was given up."""

ATTEMPTS = 6
"""To open the storage: processes that make its tables at the same time disturb each other."""

PATIENCE = 5.0
"""Seconds of one attempt from which on there is no other: nobody answers."""

ACCEPTED = "accepted: a URL of Optuna, e.g. sqlite:///study.db or postgresql+psycopg2://HOST/NAME"

HIDDEN = "***"
"""Stands for a secret, as in SQLAlchemy."""


class LostStorageError(UsageError):
    """A storage that was there does not answer any more."""


def open_storage(url: str) -> RDBStorage:
    """UsageError if there is none at `url`."""
    if _parts(url) is None:
        raise UsageError(
            f"--storage {shown_url(url)}: is no URL, or its password has a character that has to "
            f"be written as %40 (@), %2F (/) or %3A (:); {ACCEPTED}"
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    # We ask and tell, and so give the signs of life ourselves.
    warnings.filterwarnings("ignore", message="Heartbeat of storage")
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)  # we say it, in one line
    patient = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    for attempt in range(ATTEMPTS):
        began = time.monotonic()
        try:
            return RDBStorage(
                url,
                engine_kwargs=patient,
                heartbeat_interval=BEAT,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=RETRY,
            )
        except Exception as error:  # each database has its own
            hopeless = isinstance(error, (ImportError, ArgumentError))
            if hopeless or attempt == ATTEMPTS - 1 or time.monotonic() - began > PATIENCE:
                # The cause may hold the URL.
                raise UsageError(
                    f"--storage {shown_url(url)}: cannot be opened: {_said(error, url)}; {ACCEPTED}"
                ) from None
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
            f"--storage {shown_url(url)}: {_said(cause or error, url)}; the same command goes on "
            f"from here when it can be reached"
        ) from None  # the cause may hold the URL


def shown_url(url: str) -> str:
    """For people to read: without the password, and without the settings after the question mark,
    which may be secret, too. Of what cannot be told apart, only the beginning is left."""
    parts = _parts(url)
    if parts is None:
        kind, colons, _ = url.partition("://")
        return url if not set("@?=") & set(url) else f"{kind}://{HIDDEN}" if colons else HIDDEN
    if parts.password is None and not parts.query:
        return url
    shown = parts.set(query={}).render_as_string(hide_password=True)
    return f"{shown}?{HIDDEN}" if parts.query else shown


def _parts(url: str) -> URL | None:
    """None for what is no URL, or may have been taken apart in the wrong place: a password with an
    @ or a slash that is not written as %40 or %2F."""
    try:
        parts = make_url(url)
    except (ArgumentError, ValueError):
        return None
    return None if parts.host and "@" in f"{parts.host}{parts.database}" else parts


def _said(error: BaseException, url: str) -> str:
    """The first line of what the database's own module has said, which may quote the URL."""
    if isinstance(error, ImportError):  # Optuna's; its cause names the module
        error = error.__cause__ or error
    text = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    text = text.splitlines()[0].replace(url, shown_url(url))
    parts = make_url(url)
    secrets = {str(parts.password or "")}.union(*parts.normalized_query.values())
    for secret in sorted(secrets, key=len, reverse=True):
        # Shorter ones are numbers and switches, and in many a word.
        text = text.replace(secret, HIDDEN) if len(secret) > 3 else text
    return text
