"""`python -m runs COMMAND`: hands over to the command's module, which alone is imported."""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from runs.interrupt import INTERRUPTED, raise_when_asked
from runs.needs import check_has, check_installed, check_ours
from runs.parser import UsageError, at_dashes, fail, read, split_command
from runs.pipes import outlive_readers

COMMANDS = {
    "train": ("runs.cli", "train a model with adaptive gradient compression on several workers"),
    "compare": ("runs.compare.command", "train with several contenders in turn, and compare them"),
    "tune": ("runs.tune.command", "search for the best settings with Optuna"),
    "netlab": (
        "runs.netlab.command",
        "run a command or a script over real slow links on this machine",
    ),
    "doctor": (
        "runs.doctor.command",
        "say what compression would bring a training script of your own",
    ),
    "simulate": (
        "runs.simulate.command",
        "train on n simulated workers in one process, modelled network",
    ),
    "report": (
        "runs.report.command",
        "make one page of runs that are done: table, pictures, reasons",
    ),
    "bench": ("runs.bench.command", "measure speed and memory of the library, as ratios"),
}

_LINES = "\n".join(f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items())
USAGE = f"""\
usage: python -m runs COMMAND [OPTIONS]

Runnable jobs around the adaptive gradient compression library.

commands:
{_LINES}

"python -m runs COMMAND --help" lists a command's options, with examples;
"python -m runs --version" prints the version."""

WITH_COMMAND = ("netlab", "doctor")
"""Commands whose options are followed by another command or a script."""

WITH_SCRIPT = ("compare", "tune")
"""Commands whose options may be followed by a script, behind a --."""

SAY = 5.0
"""Seconds that the first worker under torchrun gets to say what is wrong."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code (2 for a wrong command line)."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if words and words[0] == "--version":
        print(f"adaptive-compression {_version()}")
        return 0
    if not (words and words[0] in COMMANDS):
        told = f"got {words[0]!r}" if words else "none given"
        accepted = f"COMMAND must be one of {', '.join(COMMANDS)}; {told}"
        return fail("python -m runs", UsageError(f"{accepted} (python -m runs --help says more)"))
    name = words[0]
    try:
        check_ours()
        check_installed("runs")
        if name == "bench":
            check_has("runs.bench", name)
        module = import_module(COMMANDS[name][0])
        if name in WITH_COMMAND:
            own, behind = split_command(words[1:])
            given = {**read(name, module.OPTIONS, module.HELP, own), "command": behind}
        elif name in WITH_SCRIPT:
            own, behind = at_dashes(words[1:])
            given = {**read(name, module.OPTIONS, module.HELP, own), "command": behind}
        else:
            given = read(name, module.OPTIONS, module.HELP, words[1:])
        return int(module.main(given))
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(SAY)  # the first worker says it; torchrun ends all when one has ended
            return 2
        return fail(f"python -m runs {name}", error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _version() -> str:
    """That of `adaptive.__version__`, without an import of torch."""
    try:
        return version("adaptive-compression")
    except PackageNotFoundError:  # a source tree
        return "0+unknown"


def run() -> int:
    """`main` as a process of its own: also the console script `adaptive-runs`."""
    outlive_readers()
    raise_when_asked()
    code = main()
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(run())
