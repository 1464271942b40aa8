"""`python -m runs` itself: its commands, and the bar that they share."""

from __future__ import annotations

import io
from typing import Any

from runs.__main__ import main
from runs.progress import Progress

LINK = "emulated 100 Mbit/s link"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_on_a_terminal_says_what_is_emulated() -> None:
    terminal = _Terminal()
    progress = Progress(0, 3, LINK, stream=terminal)
    for step in range(1, 4):
        progress.update(step, 1.5, None)
    progress.say("a switch")
    progress.close()
    assert "loss=1.500" in terminal.getvalue()
    assert f"a switch  ({LINK})" in terminal.getvalue()
    drawn = [part for part in terminal.getvalue().split("\r") if "%|" in part]
    assert drawn
    assert all(part.startswith(f"{LINK}: ") for part in drawn)


def test_a_wrong_command_names_the_right_ones(capfd: Any) -> None:
    assert main(["trian"]) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert main(["--help"]) == 0
    assert "train" in capfd.readouterr().out
