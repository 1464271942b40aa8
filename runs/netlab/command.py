"""The netlab command: builds the lab, then runs another command, or a script, inside it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import UseAppendAction

from runs.netlab.lab import Lab, Link
from runs.option_types import Count, metavar
from runs.parser import UsageError, options

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


@dataclass(frozen=True, kw_only=True)
class LabOptions:
    """The links, and how many there are. What is run follows them: -- COMMAND."""

    rate: Annotated[str | None, metavar("RATE[,DELAY]")] = None
    """Of each worker's link, each way, as 100mbit or 1gbit,5ms."""
    workers: Count | None = None
    """Places in the lab (the command's, or 2)."""
    slow_rank: Annotated[UseAppendAction[tuple[str, ...]], metavar("RANK:RATE[,DELAY]")] = ()
    """A worker whose link is another; once for each."""
    rate_at: Annotated[UseAppendAction[tuple[str, ...]], metavar("STEP:RATE")] = ()
    """The rate of all other links after so many steps; once for each change."""


OPTIONS = {"links": options(LabOptions)}


def main(given: dict[str, Any]) -> int:
    """Build the lab and run the command, given["command"], in it; returns its exit code."""
    if "rate" not in given:
        raise UsageError("--rate: must be given, as in --rate 100mbit")
    words, given["workers"] = _agree_on_workers(
        _check_command(given["command"]), given.get("workers")
    )
    lab = make_lab(given)
    lab.opened().tell()
    return _run(words, lab.workers)


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
    name, *own = words
    if name not in INSIDE:
        return words, given or 2
    before = own[: own.index("--")] if "--" in own else own
    found = re.findall(r"(?<!\S)--workers[= ](\S+)", " ".join(before))
    if found and not (found[-1].isdecimal() and int(found[-1])):
        return words, given or 2  # the command says what is wrong with it
    asked = int(found[-1]) if found else None
    if asked is not None and given is not None and asked != given:
        raise UsageError(
            f"--workers {given}: {name} is told --workers {asked}; accepted: one of them"
        )
    if asked is not None:
        return words, asked
    return [name, "--workers", str(given or 2), *own], given or 2


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
