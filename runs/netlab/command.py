"""The netlab command: builds the lab, then runs another command, or a script, inside it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from runs.netlab.lab import Lab
from runs.parser import UsageError, options, split_command

INSIDE = ("train", "compare", "tune", "doctor")
"""The commands of `python -m runs` that start workers, which then have their places in the lab."""

HELP = """\
Run workers over real slow links on this machine: Linux, with iproute2, as root or a user who may
have user namespaces. Each worker has a network namespace of its own, joined to the others by a link
that the kernel limits to a rate (tc tbf), both ways; processes talk TCP as over any network.

examples:
  python -m runs netlab --network 100mbit --workers 4 -- train --steps 200
  python -m runs netlab --network 1gbit,5ms -- train --policy ddp
      frames take 5 ms; a process forwards them, some hundred Mbit/s at most
  python -m runs netlab --network 1gbit --slow-rank 1:100mbit -- train
  python -m runs netlab --network 1gbit --per-node 2 --workers 4 -- train
      two nodes of two workers, as torchrun --nnodes 2 --nproc-per-node 2 would have them
  python -m runs netlab --network 1gbit --rate-at 200:10mbit --rate-at 400:1gbit -- train
      rates change after 200 steps of the optimizer, and after 400
  python -m runs netlab --network 50mbit --workers 2 -- my_script.py --epochs 3
      a script of your own, as torchrun would start it: RANK, WORLD_SIZE, MASTER_ADDR, ... are set
  python -m runs netlab --network 100mbit -- compare --contender ddp --contender goodput
      every contender that way

What the interface of rank 0 has sent is printed in the end beside what the run reports, and is in
its result.json. Nothing has to be cleaned up: the kernel takes namespaces and links down when the
command ends, also when it is killed."""


OPTIONS = {"links": options(Lab, without=("holder", "inside", "switch"))}


def main(given: dict[str, Any]) -> int:
    """Build the lab and run the command, given["command"], in it; returns its exit code."""
    if "network" not in given:
        raise UsageError("--network: must be given, as in --network 100mbit")
    words = _check_command(given.pop("command"))
    usual = 2 * given.get("per_node", 1)
    words, given["workers"] = _agree_on_workers(words, given.get("workers"), usual)
    lab = Lab(**given)
    lab.links()  # what is wrong with them is said before anything is built
    lab.opened().tell()
    return _run(words, lab.workers)


def _check_command(words: list[str]) -> list[str]:
    """UsageError unless these words are a command that starts workers, or a script."""
    if not words:
        raise UsageError("-- COMMAND: none given; accepted: netlab --network RATE -- train ...")
    if words[0] not in INSIDE and Path(words[0]).suffix != ".py":
        raise UsageError(
            f"-- {words[0]}: must be {', '.join(INSIDE)}, or a script whose name ends in .py"
        )
    return words


def _agree_on_workers(words: list[str], given: int | None, usual: int = 2) -> tuple[list[str], int]:
    """The command's words, and how many workers there are by these, as `given`, or `usual`."""
    name, *own = words
    before = own[: own.index("--")] if "--" in own else own
    before = split_command(own)[0] if name == "doctor" else before  # its script needs no --
    found = re.findall(r"(?<!\S)--workers[= ](\d+)(?!\S)", " ".join(before))
    if name not in INSIDE or not found:
        many = given or usual
        return ([name, "--workers", f"{many}", *own] if name in INSIDE else words), many
    if given not in (None, int(found[-1])):
        raise UsageError(
            f"--workers {given}: {name} is told --workers {found[-1]}; accepted: one of them"
        )
    return words, int(found[-1])


def _run(words: list[str], workers: int) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of addresses without a name
    if words[0] in INSIDE:
        from runs.__main__ import main as run_command

        return run_command(words)
    from runs.launch import launch
    from runs.script import Script, run_in_place

    return launch(run_in_place, Script.of(words), workers)
