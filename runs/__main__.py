"""`python -m runs COMMAND`: hands over to the command's module, which alone is imported."""

from __future__ import annotations

import sys
from importlib import import_module
from textwrap import dedent

from runs.parser import OneLineParser
from runs.pipes import outlive_readers

COMMANDS = {
    "train": ("runs.cli", "train a model with adaptive gradient compression on several workers"),
    "compare": ("runs.compare", "train with several contenders in turn, and compare them"),
    "tune": ("runs.tune", "search for the best settings with Optuna, or on a recorded timeline"),
    "replay": ("runs.replay", "run a policy over a recorded timeline, without training"),
    "netlab": ("runs.netlab", "run a command or a script over real slow links on this machine"),
    "doctor": ("runs.doctor", "say what compression would bring a training script of your own"),
    "simulate": ("runs.simulate", "train on n simulated workers in one process, modelled network"),
    "report": ("runs.report", "make one page of runs that are done: table, pictures, reasons"),
    "bench": ("runs.bench", "measure speed and memory of the library, as ratios"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code (2 for a wrong command line)."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in COMMANDS:
        module = import_module(COMMANDS[words[0]][0])
        parser = OneLineParser(f"python -m runs {words[0]}", getattr(module, "HELP", None))
        module.add_arguments(parser)
        return int(module.main(parser.parse_args(words[1:])))
    if words and words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    given = f"got {words[0]!r}" if words else "none given"
    print(
        f"python -m runs: error: COMMAND must be one of {', '.join(COMMANDS)}; {given} "
        f"(python -m runs --help says more)",
        file=sys.stderr,
    )
    return 2


def _usage() -> str:
    lines = "\n".join(f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items())
    text = dedent(
        """\
        usage: python -m runs COMMAND [OPTIONS]

        Runnable jobs around the adaptive gradient compression library.

        commands:
        {}

        "python -m runs COMMAND --help" lists a command's options, with examples."""
    )
    return text.format(lines)


def run() -> int:
    """`main` as a process of its own: also the console script `adaptive-runs`."""
    outlive_readers()
    code = main()
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(run())
