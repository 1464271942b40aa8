"""Where a study is kept: what is said of a storage that is not there, or not any more."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import OperationalError

from runs.parser import UsageError
from runs.tune import command, storage
from runs.tune.report import make_report
from runs.tune.storage import LostStorageError, needed, open_storage, shown_url
from runs.tune.study import open_study
from runs.tune.tuning import make_tuning

SERVER = "postgresql+psycopg2://me:secret@host/studies"


def _refused() -> OperationalError:
    said = ConnectionError("connection to host failed: refused\n\tIs the server running?\n")
    return OperationalError("SELECT 1", {}, said)


class _Opening:
    """Counts attempts; each fails."""

    def __init__(self, error: Exception, seconds: float = 0.0) -> None:
        self.attempts, self._error, self._seconds = 0, error, seconds
        self._clock = 0.0

    def __call__(self, *args: object, **kwargs: object) -> None:
        self.attempts += 1
        self._clock += self._seconds
        raise self._error

    def monotonic(self) -> float:
        return self._clock


def _missing() -> ImportError:
    error = ImportError("Failed to import DB access module. Please install appropriate one.")
    error.__cause__ = ModuleNotFoundError("No module named 'psycopg2'", name="psycopg2")
    return error


@pytest.mark.parametrize(
    ("opening", "attempts", "said"),
    [
        (_Opening(_refused()), 6, "cannot be opened: connection to host failed: refused;"),
        (_Opening(_refused(), seconds=30.0), 1, "cannot be opened"),
        (_Opening(_missing()), 1, "cannot be opened: No module named 'psycopg2';"),
        (_Opening(ValueError()), 6, "cannot be opened: ValueError;"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_without_the_password(
    opening: _Opening, attempts: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "RDBStorage", opening)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(time, "monotonic", opening.monotonic)
    with pytest.raises(UsageError) as caught:
        open_storage(SERVER)
    message = str(caught.value)
    assert opening.attempts == attempts
    assert said in message
    assert message.startswith("--storage postgresql+psycopg2://me:***@host/studies: ")
    assert "accepted: a URL of Optuna" in message
    assert "\n" not in message


def test_urls_without_a_password_are_shown_as_they_are() -> None:
    for url in (
        "sqlite:///logs/a@b/study.db",
        "sqlite:////logs/***/study.db",
        "postgresql://me@host/x",
        "nonsense",
    ):
        assert shown_url(url) == url


SECRETS = {
    "postgresql://me:hush@host/x": "postgresql://me:***@host/x",
    "postgresql://host/x?user=me&password=hush": "postgresql://host/x?***",
    "postgresql://me:hush@host/x?passfile=/hush": "postgresql://me:***@host/x?***",
    "mysql://host/x?passwd=hush&passwd=hush2": "mysql://host/x?***",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3Dhush": "mssql+pyodbc:///?***",
    "sqlite:///file:x.db?uri=true&password=hush": "sqlite:///file%3Ax.db?***",
    "sqlite+pysqlcipher://:hush@/x.db": "sqlite+pysqlcipher://:***@/x.db",
    "postgresql://me:hush@sh@host/x": "postgresql://***",  # an @ that is not %40
    "postgresql://m/e:hush@host/x": "postgresql://***",
    "postgresql://me:hush@host:port/x": "postgresql://***",
    "me:hush@host/x": "***",
}


@pytest.mark.parametrize("url", SECRETS)
def test_no_secret_of_a_url_is_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_url(url) == SECRETS[url]
    said = ConnectionError(f"cannot open {url}: PWD=hush, password 'hush' is wrong")
    monkeypatch.setattr(storage, "RDBStorage", _Opening(OperationalError("SELECT 1", {}, said)))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(UsageError) as caught:
        open_storage(url)
    if "odbc" not in url:  # whose parts are its driver's business
        assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None  # whose text a traceback would show


def test_a_study_with_a_password_in_its_query_keeps_it_to_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """SQLite is as good as any here: the rest of the URL is not its business."""
    url = f"sqlite:///file:{tmp_path / 'other.db'}?uri=true&password=hush"
    given = {"log_dir": str(tmp_path / "study"), "storage": url, "trials": 1, "steps": 4}
    tuning = make_tuning(given)
    study = open_study(tuning)
    result, text = make_report(tuning, study)
    assert "hush" not in text + json.dumps(result) + repr(tuning)
    for file in tmp_path.rglob("*.*"):
        assert b"hush" not in file.read_bytes(), file
    again = open_study(make_tuning(given))  # the same options, URL and all
    assert again.user_attrs == study.user_attrs


def test_without_a_storage_no_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "RDBStorage", _Opening(_missing()))
    folder = tmp_path / "study"
    with pytest.raises(UsageError, match="--storage"):
        command.main({"log_dir": str(folder), "storage": SERVER, "steps": 5})
    assert not folder.exists()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_lost_storage_is_one_line_and_exit_code_1(
    wrapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    error: Exception = _refused()
    if wrapped:
        error = StorageInternalError("An exception is raised during the commit.")
        error.__cause__ = _refused()

    def lose(*args: object) -> None:
        raise error

    monkeypatch.setattr("runs.tune.study.open_study", lose)
    given: dict[str, object] = {"log_dir": str(tmp_path), "storage": SERVER, "steps": 5}
    assert command.main(given) == 1
    _, err = capfd.readouterr()
    assert err.count("\n") == 1
    assert "--storage postgresql+psycopg2://me:***@host/studies: connection to host failed" in err
    assert "the same command goes on from here" in err
    with pytest.raises(LostStorageError), needed(SERVER):
        lose()
