"""Running `python -m runs` as a user does: in processes of its own, or in this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runs.__main__ import main

ROOT = Path(__file__).parents[2]
LIMIT = 150  # seconds that a command may take on a busy machine


def python_m(command: str) -> tuple[str, ...]:
    """The words that start it."""
    return (sys.executable, "-m", "runs", command)


def torchrun(command: str) -> tuple[str, ...]:
    """The same on two workers of torchrun."""
    words = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return (*words, "-m", "runs", command)


def write_text_file(folder: Path) -> Path:
    """A text small enough that reading and evaluating it take no time."""
    path = folder / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(1500)))
    return path


class Command:
    """A running command in a process group of its own; what it says goes to files."""

    def __init__(self, words: tuple[str, ...], folder: Path) -> None:
        self._out, self._err = folder / "out", folder / "err"
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                words, cwd=ROOT, stdout=out, stderr=err, env=environment, start_new_session=True
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def until(self, condition: Callable[[], object], limit: float = LIMIT) -> None:
        """Wait for the condition; fails when the time is up or the command ends before."""
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline, f"took over {limit} s:\n{self.out}{self.err}"
            assert self.process.poll() is None or condition(), f"ended:\n{self.out}{self.err}"
            time.sleep(0.05)

    def end(self, limit: float = LIMIT) -> int:
        """Wait for the end; the exit code."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            pytest.fail(f"took over {limit} s:\n{self.out}{self.err}")

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal does it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """Whatever is left of it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()

    def workers(self) -> list[int]:
        """The process ids of the workers (not of multiprocessing's tracker)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [pid for pid in map(int, children.split()) if "spawn_main" in _words_of(pid)]


Start = Callable[..., Command]


@contextmanager
def starting(new_folder: Callable[[str], Path]) -> Iterator[Start]:
    """start(*words): a `Command`; whatever is left of it afterwards is killed."""
    started: list[Command] = []

    def start(*words: object) -> Command:
        started.append(Command(tuple(map(str, words)), new_folder(f"command{len(started)}")))
        return started[-1]

    try:
        yield start
    finally:
        for command in started:
            command.kill()


def alive(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def assert_refused(capfd: Any, command: str, *words: object, parts: list[str]) -> None:
    """Bad options are one line that holds these parts, and exit code 2; nothing else is said."""
    try:
        code = main([command, *map(str, words)])
    except SystemExit as error:  # argparse's way
        code = int(str(error.code))
    out, err = capfd.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"python -m runs {command}: error: ")
    for part in parts:
        assert part in err


def _words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
