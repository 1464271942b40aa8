"""Progress: a bar on a terminal."""

from __future__ import annotations

import io
import threading
from math import nan

import pytest
from tqdm import tqdm

from runs.progress import Progress, make_bar, time_left


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_are_for_terminals_and_leave_no_semaphore() -> None:
    assert make_bar(io.StringIO(), total=2) is None
    bar = make_bar(_Terminal(), total=2, ncols=60, desc="train")
    bar.update(1)
    bar.close()
    assert "train:  50%" in bar.fp.getvalue()
    assert isinstance(tqdm.get_lock(), type(threading.RLock()))  # not one between processes


@pytest.mark.parametrize(
    ("seconds", "done", "to_do", "told"),
    [
        (60.0, 1, 29, ", about 29 min left"),
        (600.0, 5, 5, ", about 10 min left"),
        (10.0, 1, 3, ", about 30 s left"),
        (7200.0, 2, 5, ", about 5 h left"),
        (0.0, 0, 30, ""),
        (60.0, 30, 0, ""),
    ],
)
def test_what_is_left_is_told_by_what_was_done(
    seconds: float, done: float, to_do: float, told: str
) -> None:
    assert time_left(seconds, done, to_do) == told


def test_a_quiet_run_says_only_what_somebody_should_know() -> None:
    for quiet in (False, True):
        stream = io.StringIO()
        progress = Progress(2, "", "note", stream, quiet)
        progress.update(1, 0.5, None, nan)
        progress.update(2, 0.5, None, nan)
        assert ("step 2/2" in stream.getvalue()) != quiet
        progress.say("warning: a sentence")
        assert stream.getvalue().endswith("warning: a sentence  (note)\n")
