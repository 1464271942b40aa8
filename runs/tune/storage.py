"""Where a study is kept: any database that Optuna can open by a URL."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from urllib.parse import quote, quote_plus

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

HARMLESS = (
    *("host", "port", "user", "dbname", "service", "driver", "unix_socket", "sslmode", "charset"),
    *("timeout", "connect_timeout", "application_name", "isolation_level", "target_session_attrs"),
    *("uri", "mode", "cache", "vfs", "nolock", "immutable", "check_same_thread"),
)
"""Settings after the question mark of a URL that may be shown. The others may be a password by any
name (password, passwd, sslpassword, key, ...)."""


class LostStorageError(UsageError):
    """A storage that was there does not answer any more."""


def open_storage(url: str) -> RDBStorage:
    """UsageError if there is none at `url`, or if its password was taken out of it."""
    if _was_hidden(url):
        raise UsageError(
            f"--storage {shown_url(url)}: {HIDDEN} stands where a password was left out; accepted: "
            f"the URL with the password"
        )
    if _parts(url) is None:
        raise UsageError(
            f"--storage {shown_url(url)}: is no URL, or its password has a character that has to "
            f"be written as %40 (@), %2F (/) or %3A (:); {ACCEPTED}"
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    # We ask and tell, and so give the signs of life ourselves (`Desk`).
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
                raise UsageError(
                    f"--storage {shown_url(url)}: {without_secrets(_why(error), url)}; {ACCEPTED}"
                ) from None  # the cause may hold the URL
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
            f"--storage {shown_url(url)}: {without_secrets(_said(cause or error), url)}; the same "
            f"command goes on from here when it can be reached"
        ) from None  # the cause may hold the URL


def shown_url(url: str) -> str:
    """For people to read and for files, without what may be secret: the password, and all settings
    after the question mark that are not known to be harmless. Of what cannot be told apart, only
    the beginning is left."""
    parts = _parts(url)
    if parts is None:
        kind, colons, _ = url.partition("://")
        return url if not set("@?=") & set(url) else f"{kind}://{HIDDEN}" if colons else HIDDEN
    if parts.password is None and not _secret(parts):
        return url
    query = {name: HIDDEN if name in _secret(parts) else v for name, v in parts.query.items()}
    # As it is written where there is no query, which would have the asterisks as %2A.
    shown = parts.set(query={}).render_as_string(hide_password=True)
    words = [
        f"{name}={one}"
        for name, value in query.items()
        for one in ((value,) if isinstance(value, str) else value)
    ]
    return f"{shown}?{'&'.join(words)}" if words else shown


def without_secrets(text: str, url: str) -> str:
    """What a database's module has said about `url`, which may quote it or a part of it."""
    text = text.replace(url, shown_url(url))
    parts = _parts(url)
    if parts is None:
        return text
    secrets = [] if parts.password is None else [str(parts.password)]
    for value in _secret(parts).values():
        secrets += [value] if isinstance(value, str) else value
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        for written in {secret, quote(secret), quote_plus(secret)}:
            text = text.replace(written, HIDDEN)
    return text


def _parts(url: str) -> URL | None:
    """None for what is no URL, or may have been taken apart in the wrong place: a password with an
    @ or a slash that is not written as %40 or %2F."""
    try:
        parts = make_url(url)
    except (ArgumentError, ValueError):
        return None
    file = parts.drivername.startswith("sqlite") and not parts.host and not parts.username
    mixed_up = not file and "@" in f"{parts.host}{parts.database}{parts.username}"
    return None if mixed_up else parts


def _was_hidden(url: str) -> bool:
    """It was copied from where it is shown without its secrets."""
    return url.endswith(HIDDEN) or f":{HIDDEN}@" in url or f"={HIDDEN}" in url


def _secret(parts: URL) -> dict[str, str | tuple[str, ...]]:
    """The settings after the question mark that may be secret, by name."""
    return {name: v for name, v in parts.query.items() if name.lower() not in HARMLESS}


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
