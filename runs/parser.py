"""An argument parser whose errors are one line, and argument types that say what is accepted."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn


class UsageError(Exception):
    """What the user asked for cannot be done; the message names the option and what is accepted."""


class OneLineParser(argparse.ArgumentParser):
    """Prints `PROG: error: ...` without the usage, and exits with 2."""

    def __init__(self, prog: str, description: str | None = None) -> None:
        text, _, epilog = (description or "").partition("\n\n")
        super().__init__(
            prog=prog,
            description=text or None,
            epilog=epilog or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message.removeprefix('argument ')}\n")


def fail(prog: str, error: Exception) -> int:
    """Print `error` as one line on stderr; returns the exit code 2. What it quotes of a file may
    hold anything, also what would steer a terminal."""
    line = " ".join(str(error).split())
    shown = "".join(char if char.isprintable() else "?" for char in line)
    print(f"{prog}: error: {shown}", file=sys.stderr)
    return 2


def check_writable(folder: Path) -> None:
    """UsageError unless --log-dir `folder` can be made, or is there and can be written to."""
    above = folder
    while not above.exists():
        above = above.parent
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UsageError(f"--log-dir {folder}: {above} is not a folder that can be written to")
    try:
        with TemporaryDirectory(dir=above):
            pass
    except OSError as error:  # /proc looks as if it could be written to
        raise UsageError(f"--log-dir {folder}: {above}: {error.strerror}") from error


def whole(least: int) -> Callable[[str], int]:
    """An argument type: an integer >= `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text!r}")
        return value

    return parse


def whole_or_auto(least: int) -> Callable[[str], int | str]:
    """An argument type: an integer >= `least`, or auto."""

    def parse(text: str) -> int | str:
        if text == "auto":
            return text
        try:
            return whole(least)(text)
        except argparse.ArgumentTypeError:
            told = f"must be an integer >= {least} or auto, got {text!r}"
            raise argparse.ArgumentTypeError(told) from None

    return parse


def number(text: str) -> float:
    """An argument type: a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")
    return value


def positive(text: str) -> float:
    """An argument type: a finite number > 0."""
    try:
        value = number(text)
    except argparse.ArgumentTypeError:
        value = 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a finite number > 0, got {text!r}")
    return value


def below_one(text: str) -> float:
    """An argument type: a number in [0, 1)."""
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be a number in [0, 1), got {text!r}")
    return value


def switch(text: str) -> bool:
    """An argument type: on or off."""
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"must be on or off, got {text!r}")
    return text == "on"


def piece(text: str) -> str:
    """An argument type: STEP:CF, the CF that a schedule has from a step on; as it was written."""
    step, colon, cf = text.partition(":")
    try:
        if not colon or whole(0)(step) < 0 or number(cf) < 1:
            raise argparse.ArgumentTypeError
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be STEP:CF with a step >= 0 and a CF >= 1, as in 100:10, got {text!r}"
        ) from None
    return text


def switch_or_number(text: str) -> bool | float:
    """An argument type: on, off, or a number."""
    if text in ("on", "off"):
        return text == "on"
    try:
        return number(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be on, off or a CF >= 1, got {text!r}") from None


def typed() -> str:
    """The command line that this process was started with, to be shown."""
    return shlex.join(["python", "-m", "runs", *sys.argv[1:]])


def option(name: str) -> str:
    """The option for an argument: cf_range is --cf-range."""
    return "--" + name.replace("_", "-")


def shown(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, (list, tuple)):
        return " ".join(part if isinstance(part, str) else f"{part:g}" for part in value)
    if isinstance(value, bool):
        return ("off", "on")[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
