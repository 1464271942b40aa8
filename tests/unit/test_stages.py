"""Progress: a bar on a terminal, plain lines elsewhere, nothing of what is quick."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tqdm import tqdm

from adaptive import JSONLTimeline, StepRecord, StepReport
from runs.progress import make_bar
from runs.records import read_records
from runs.stages import counted


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass."""
    now = [0.0]
    monkeypatch.setattr("runs.stages.time.monotonic", lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def test_long_work_says_where_it_is_in_plain_lines(work: Callable[[float], None]) -> None:
    out = io.StringIO()
    for seconds in counted([1.0, 1.5, 1.0, 6.0, 9.0], 5, "reading", "runs", out):
        work(seconds)
    assert out.getvalue().splitlines() == ["reading 3 of 5 runs", "reading 5 of 5 runs"]


def test_parts_without_names_are_counted(work: Callable[[float], None]) -> None:
    out = io.StringIO()
    found = []
    for part in counted(range(10), 10, "replaying", "steps", out):
        found.append(part)
        work(1.5)
    assert found == list(range(10))
    assert out.getvalue().splitlines() == ["replaying 3 of 10 steps", "replaying 7 of 10 steps"]


def test_quick_work_says_nothing() -> None:
    out, terminal = io.StringIO(), _Terminal()
    assert list(counted(range(3), 3, "replaying", "steps", out)) == [0, 1, 2]
    assert list(counted([1], 1, "reading", "runs", terminal)) == [1]
    assert out.getvalue() == ""
    assert "reading" not in terminal.getvalue()


def test_a_bar_is_closed_when_the_work_fails() -> None:
    def parts() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    before = len(tqdm._instances)
    terminal = _Terminal()
    with pytest.raises(ValueError, match="broken"):
        list(counted(parts(), 2, "replaying", "steps", terminal))
    assert len(tqdm._instances) == before


def test_bars_are_for_terminals_and_leave_no_semaphore() -> None:
    assert make_bar(io.StringIO(), total=2) is None
    bar = make_bar(_Terminal(), total=2, ncols=60, desc="train")
    bar.update(1)
    bar.close()
    assert "train:  50%" in bar.fp.getvalue()
    assert isinstance(tqdm.get_lock(), type(threading.RLock()))  # not one between processes


def test_reading_a_long_record_says_how_far_it_is(
    work: Callable[[float], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "timeline.jsonl"
    timeline = JSONLTimeline(path)
    for step in range(5):
        timeline.step(StepRecord(StepReport(step, 1.0), 0.0, 0.0, 0.0))
    timeline.close()
    loads = json.loads
    monkeypatch.setattr("runs.files.json.loads", lambda text: (work(1.5), loads(text))[1])
    assert len(read_records(path).steps) == 5
    assert capsys.readouterr().err == f"reading {path} 3 of 5 lines\n"
