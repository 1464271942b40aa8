"""The netlab command: builds the lab, then runs another command, or a script, inside it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from runs.interrupt import INTERRUPTED
from runs.netlab.lab import Lab, Link
from runs.parser import UsageError, fail, whole

INSIDE = ("train", "compare", "doctor")
"""The commands of `python -m runs` that start workers, which then have their places in the lab."""

HELP = """\
Run workers over real slow links on this machine: Linux, with iproute2, as root or a user who may
have user namespaces. Each worker has a network namespace of its own, joined to the others by a link
that the kernel limits to a rate (tc tbf), both ways; processes talk TCP as over any network.

examples:
  python -m runs netlab --rate 100mbit --workers 4 -- train --steps 200
  python -m runs netlab --rate 1gbit,5ms -- train --policy off
      frames take 5 ms; a process forwards them, some hundred Mbit/s at most
  python -m runs netlab --rate 1gbit --slow-rank 1:100mbit -- train
  python -m runs netlab --rate 1gbit --rate-at 200:10mbit --rate-at 400:1gbit -- train
      rates change after 200 steps of the optimizer, and after 400
  python -m runs netlab --rate 50mbit --workers 2 -- my_script.py --epochs 3
      a script of your own, as torchrun would start it: RANK, WORLD_SIZE, MASTER_ADDR, ... are set
  python -m runs compare --netlab 100mbit --contender off --contender goodput
      every contender that way

What the interface of rank 0 has sent is printed in the end beside what the run reports, and is in
its result.json. Nothing has to be cleaned up: the kernel takes namespaces and links down when the
command ends, also when it is killed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options; what is not given is not in the namespace."""
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "--rate",
        metavar="RATE[,DELAY]",
        required=True,
        help="of each worker's link, each way, as 100mbit or 1gbit,5ms",
    )
    parser.add_argument(
        "--workers", type=whole(1), metavar="N", help="places in the lab (the command's, or 2)"
    )
    parser.add_argument(
        "--slow-rank",
        action="append",
        metavar="RANK:RATE[,DELAY]",
        help="a worker whose link is another; once for each",
    )
    parser.add_argument(
        "--rate-at",
        action="append",
        metavar="STEP:RATE",
        help="the rate of all other links after so many steps; once for each change",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help=f"{', '.join(INSIDE)} with its options, or a script with its arguments",
    )


def main(args: argparse.Namespace) -> int:
    """Build the lab and run the command in it; returns its exit code."""
    try:
        given = vars(args)
        words = [word for i, word in enumerate(given["command"]) if (i, word) != (0, "--")]
        words, given["workers"] = _agree_on_workers(_check_command(words), given.get("workers"))
        lab = make_lab(given)
        lab.opened().tell()
        return _run(words, lab.workers)
    except UsageError as error:
        return fail("python -m runs netlab", error)
    except KeyboardInterrupt:
        return INTERRUPTED


def make_lab(given: dict[str, object]) -> Lab:
    """The lab that the options describe, not built. UsageError names the option, its value and
    what is accepted."""
    workers = given.get("workers", 2)
    assert isinstance(workers, int)
    links = [_link("--rate", str(given["rate"]))] * workers
    slow = {}
    for text in _texts(given, "slow_rank"):
        rank, rest = _numbered("--slow-rank", text, "RANK:RATE, as in 1:10mbit")
        if rank >= workers:
            raise UsageError(f"--slow-rank {text}: there are ranks 0 to {workers - 1}")
        slow[rank] = links[rank] = _link(f"--slow-rank {rank}:", rest)
    changes = {}
    for text in _texts(given, "rate_at"):
        step, rest = _numbered("--rate-at", text, "STEP:RATE, as in 200:10mbit")
        link = _link(f"--rate-at {step}:", rest)
        if link.delay:
            raise UsageError(f"--rate-at {text}: must be a rate alone: delays stay what they are")
        changes[step] = link.rate
    return Lab(tuple(links), tuple(sorted(slow)), tuple(sorted(changes.items())))


def _texts(given: dict[str, object], name: str) -> Sequence[str]:
    texts = given.get(name, ())
    assert isinstance(texts, Sequence)
    return texts


def _numbered(option: str, text: str, accepted: str) -> tuple[int, str]:
    number, colon, rest = text.partition(":")
    if not (colon and number.isdecimal()):
        raise UsageError(f"{option} {text}: must be {accepted}")
    return int(number), rest


def _link(option: str, text: str) -> Link:
    try:
        return Link.parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {error}") from error


def _check_command(words: list[str]) -> list[str]:
    """UsageError unless these words are a command that starts workers, or a script."""
    if not words:
        raise UsageError("-- COMMAND: none given; accepted: netlab --rate RATE -- train ...")
    if words[0] not in INSIDE and Path(words[0]).suffix != ".py":
        raise UsageError(
            f"-- {words[0]}: must be {', '.join(INSIDE)}, or a script whose name ends in .py"
        )
    return words


def _agree_on_workers(words: list[str], given: int | None) -> tuple[list[str], int]:
    """The command's words, and how many workers there are by these or as `given` (2)."""
    name, *options = words
    if name not in INSIDE:
        return words, given or 2
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    own.add_argument("--workers", type=whole(1))
    before = options[: options.index("--")] if "--" in options else options
    try:
        asked: int | None = own.parse_known_args(before)[0].workers
    except argparse.ArgumentError:
        return words, given or 2  # the command says what is wrong with it
    if asked is not None and given is not None and asked != given:
        raise UsageError(
            f"--workers {given}: {name} is told --workers {asked}; accepted: one of them"
        )
    if asked is not None:
        return words, asked
    return [name, "--workers", str(given or 2), *options], given or 2


def _run(words: list[str], workers: int) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of addresses without a name
    if words[0] in INSIDE:
        from runs.__main__ import main as run_command

        return run_command(words)
    from runs.launch import launch
    from runs.script import Script, run_in_place

    return launch(run_in_place, Script.of(words), workers)


def run_again_inside(rate: str, workers: int) -> None:
    """For a command that was given --netlab: start this process anew in a lab, with the same
    command line; returns only inside of it."""
    if Lab.of_environment() is None:
        _link("--netlab", rate)
        lab = ["-m", "runs", "netlab", "--rate", rate, "--workers", str(workers), "--"]
        os.execv(sys.executable, [sys.executable, *lab, *sys.argv[1:]])
