"""Signals that ask a command to end: Ctrl-C, SIGTERM, and a terminal that is closed, with real
processes that do nothing else."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runs.interrupt import ASKING, give_signals_back, take_signals

ROOT = Path(__file__).parents[2]
LIMIT = 60.0

WORKERS = """
import sys, time
from pathlib import Path
from runs.claim import claim
from runs.interrupt import Interrupt, raise_when_asked
from runs.launch import launch

def note(text):
    with open("notes", "a") as file:
        file.write(text + "\\n")

def work(argument, rank, world_size, init_method):
    interrupt = Interrupt(own_parent=True)
    note("up")
    while not interrupt.requested:
        time.sleep(0.01)
    time.sleep(0.5)
    print("still talking", flush=True)
    note("saved")
    return 130

if __name__ == "__main__":
    raise_when_asked()
    with claim(Path("run"), "--log-dir run"):
        code = launch(work, None, 2)
    note(f"ended {code}")
    sys.exit(code)
"""

SCRIPT = """
import time
try:
    with open("notes", "a") as file:
        file.write("up\\n")
    time.sleep(60)
finally:
    with open("notes", "a") as file:
        file.write("cleaned up\\n")
"""

OWN_SCRIPT = """
import sys
from runs.launch import launch
from runs.script import Script, run_in_place

if __name__ == "__main__":
    sys.exit(launch(run_in_place, Script.of(["script.py"]), 2))
"""

COMMAND = """
import os, sys, time
from pathlib import Path

HELP, OPTIONS = "Waits.", {}

def wait():
    Path("notes").write_text("up")
    time.sleep(60)

if STAGE == "while it is imported":
    wait()

def main(given):
    from runs.claim import claim
    with claim(Path("run"), "--log-dir run"):
        wait()
    return 0
"""

RUN = """
import sys
from runs import __main__
__main__.COMMANDS["bench"] = ("waiting", "")
sys.argv = ["runs", "bench"]
sys.exit(__main__.run())
"""


class _Process:
    """A script in a folder and a session of its own."""

    def __init__(self, folder: Path, code: str, terminal: int | None = None) -> None:
        (folder / "main.py").write_text(code, encoding="utf-8")
        self._folder = folder

        def as_from_a_terminal() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
            if terminal is not None:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        with (folder / "said").open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "main.py"],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=terminal,
                stdout=said if terminal is None else terminal,
                stderr=said if terminal is None else terminal,
                start_new_session=True,
                preexec_fn=as_from_a_terminal,
            )

    def read(self, name: str = "notes") -> str:
        path = self._folder / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, self.read("said") + self.read()
            assert self.process.poll() is None, self.read("said") + self.read()
            time.sleep(0.02)

    def workers(self) -> int:
        """How many there are."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sum("spawn_main" in Path(f"/proc/{c}/cmdline").read_text() for c in children)

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> int:
        return self.process.wait(LIMIT)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., _Process]]:
    started: list[_Process] = []

    def begin(code: str, terminal: int | None = None) -> _Process:
        started.append(_Process(tmp_path, code, terminal))
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


@pytest.mark.parametrize("number", ASKING)
def test_workers_end_their_step_and_the_folder_is_given_back(
    start: Callable[..., _Process], tmp_path: Path, number: signal.Signals
) -> None:
    """All processes get the signal, as from a terminal; SIGHUP comes twice, as by its shell."""
    process = start(WORKERS)
    process.until(lambda: process.read().count("up") == 2)
    process.signal(number)
    if number == signal.SIGHUP:
        process.until(lambda: "stopping after this step" in process.read("said"))
        process.signal(number)
    assert process.end() == 130
    assert process.read().splitlines()[2:] == ["saved", "saved", "ended 130"]
    assert "Traceback" not in process.read("said")


@pytest.mark.skipif(sys.platform != "linux", reason="terminals of Linux")
def test_a_terminal_that_is_closed_ends_nothing_in_the_middle(
    start: Callable[..., _Process], tmp_path: Path
) -> None:
    """What is then printed goes nowhere."""
    ours, theirs = os.openpty()
    process = start(WORKERS, theirs)
    os.close(theirs)
    process.until(lambda: process.read().count("up") == 2)
    os.close(ours)
    assert process.end() == 130
    assert process.read().splitlines()[2:] == ["saved", "saved", "ended 130"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", ASKING)
@pytest.mark.parametrize("when", ["while workers start", "in mid-run"])
def test_a_script_of_the_users_own_is_interrupted_not_failed(
    start: Callable[..., _Process], tmp_path: Path, number: signal.Signals, when: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    process = start(OWN_SCRIPT)
    if when == "in mid-run":
        process.until(lambda: process.read().count("up") == 2)
    else:
        process.until(lambda: process.workers() == 2)
    process.signal(number)
    assert process.end() == 130, process.read("said")
    assert "failed" not in process.read("said")
    assert "Traceback" not in process.read("said")
    assert process.read().count("cleaned up") == process.read().splitlines().count("up")


@pytest.mark.parametrize("number", ASKING)
@pytest.mark.parametrize("stage", ["while it is imported", "while it works"])
def test_a_command_without_workers_ends_without_a_traceback(
    start: Callable[..., _Process], tmp_path: Path, number: signal.Signals, stage: str
) -> None:
    (tmp_path / "waiting.py").write_text(COMMAND.replace("STAGE", repr(stage)), encoding="utf-8")
    process = start(RUN)
    process.until(lambda: "up" in process.read())
    process.signal(number)
    assert process.end() == 130
    assert process.read("said") == "interrupted\n"


def test_under_nohup_a_terminal_may_be_closed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        taken = take_signals(lambda *_: None, lambda *_: None)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert set(taken) == {signal.SIGINT, signal.SIGTERM}
        give_signals_back(taken)
    finally:
        signal.signal(signal.SIGHUP, before)
