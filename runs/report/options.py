"""The options of `python -m runs report`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptive import LinkSpec
from runs.compare.options import BANDWIDTHS, parse_network
from runs.parser import UsageError, number

FOLDER = "report"

HELP = f"""\
Make one page of one or several runs: quality against time, a table, and which CF was sent when.
Nothing is trained; the page opens in a browser without a server, and its pictures, which are in it,
answer to pointing and zooming.

examples:
  python -m runs report logs/demo
      one run, into logs/demo/{FOLDER}/report.html
  python -m runs report logs/dense logs/gravac logs/goodput --target 5.8 --out report
      three runs side by side; the time that each took to a perplexity of 5.8
  python -m runs report logs/compare-text-1a2b3c4d --title "LSTM, 100 Mbit/s"
      all runs of a comparison
  python -m runs report mine.jsonl
      a script of your own: AdaptiveCompressor(timeline=JSONLTimeline("mine.jsonl")), or a
      TensorBoardTimeline, whose folder is then named
  python -m runs report logs/demo --bandwidths 50mbit 1gbit,1ms --json

The target quality of "time to target" is, unless --target says otherwise, the final quality of the
dense run: the worst of them if there are several, and the worst of all runs if there is none. Runs
that did not finish set no target while others did.

Seconds are measured: the steps' own times, without evaluations, checkpoints and a run's first
step (a step that was not timed counts as the median of its CF). Modelled seconds are those of
python -m runs compare: compute + compression (both measured) + latency + bytes x 8 / rate.

files in the folder: report.html, report.json."""


@dataclass(frozen=True)
class ReportOptions:
    """The options of `python -m runs report`.

    given: log folders as the user wrote them. target: None is chosen from the runs.
    networks: of the modelled seconds; empty: the runs' own links, and others. json: the result on
    stdout.
    """

    given: tuple[str, ...]
    out: Path
    target: float | None
    networks: tuple[LinkSpec, ...]
    title: str | None
    json: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options; what is not given is not in the namespace."""
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "logdir",
        nargs="+",
        metavar="LOGDIR",
        help="log folder of a run or of a comparison, timeline file, or folder of event files",
    )
    what = parser.add_argument_group("what is shown")
    what.add_argument(
        "--target", type=number, metavar="VALUE", help='quality of "time to target" (see below)'
    )
    what.add_argument(
        "--bandwidths",
        nargs="+",
        metavar="RATE[,LATENCY]",
        help=f"networks of the modelled seconds (the runs' own links, {' '.join(BANDWIDTHS)})",
    )
    what.add_argument("--title", metavar="TEXT", help="heading of the page")
    output = parser.add_argument_group("what is kept")
    output.add_argument(
        "--out",
        metavar="DIR",
        help=f"where the files go ({FOLDER}/ in LOGDIR; of several, beside the first)",
    )
    output.add_argument(
        "--json", action="store_true", help="print the result as JSON on stdout, all else on stderr"
    )


def make_options(given: dict[str, Any]) -> ReportOptions:
    """UsageError names the option, its value and what is accepted."""
    folders = tuple(dict.fromkeys(given["logdir"]))
    out = given.get("out")
    if out == "":
        raise UsageError("--out '': must name a folder")
    return ReportOptions(
        given=folders,
        out=Path(out) if out is not None else _out(folders),
        target=given.get("target"),
        networks=tuple(dict.fromkeys(map(parse_network, given.get("bandwidths", ())))),
        title=given.get("title"),
        json=given.get("json", False),
    )


def _out(given: tuple[str, ...]) -> Path:
    first = Path(given[0])
    if len(given) == 1 and first.is_dir():
        return first / FOLDER
    return first.absolute().parent / FOLDER
