"""The report command: its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

from runs.files import not_a_link
from runs.option_types import Number, metavar
from runs.parser import UsageError, options

FOLDER = "report"

HELP = f"""\
Make one page of one or several runs: quality against time, a table, and which CF was sent when.
Nothing is trained; the page opens in a browser without a server, and its pictures, which are in it,
answer to pointing and zooming.

examples:
  python -m runs report logs/mine
      one run, into logs/mine/{FOLDER}/report.html
  python -m runs report logs/dense logs/gravac logs/goodput --target 5.8 --out report
      three runs of one task side by side; the time that each took to a perplexity of 5.8
  python -m runs report logs/compare-text-1a2b3c4d --title "LSTM, 100 Mbit/s"
      all runs of a comparison
  python -m runs report mine.jsonl
      a script of your own: AdaptiveCompressor(timeline=JSONLTimeline("mine.jsonl"))

The target quality of "to target" is, unless --target says otherwise, the final quality of the dense
run: the worst of them if there are several, and the worst of all runs if there is none. Runs that
did not finish set no target while others did.

Seconds are the steps' own times, measured or by a run's fixed clock, without evaluations and
checkpoints. A step that was not timed, such as the first, counts as the mean of the others."""


@dataclass(frozen=True, kw_only=True)
class Showing:
    """What is shown, and where it goes."""

    logdir: Annotated[Positional[tuple[str, ...]], metavar("LOGDIR ...")]
    """Log folder of a run or of a comparison, or timeline file."""
    target: Number | None = None
    """Quality of "to target", see above."""
    title: Annotated[str | None, metavar("TEXT")] = None
    """Heading of the page."""
    out: Annotated[str | None, metavar("DIR")] = None
    """Where the page goes (report/ in LOGDIR; of several, beside the first)."""
    json: bool = False
    """Print the result as JSON on stdout, all else on stderr."""


OPTIONS = {"report": options(Showing)}


def main(given: dict[str, Any]) -> int:
    """Make the report; returns the exit code."""
    folders = list(dict.fromkeys(given["logdir"]))
    if not folders:
        raise UsageError("LOGDIR: must be given, one or more")
    if given.get("out") == "":
        raise UsageError("--out '': must name a folder")
    from runs.report.make import make_report  # torch is imported late

    first = Path(folders[0])
    alone = len(folders) == 1 and first.is_dir()
    usual = (first if alone else first.absolute().parent) / FOLDER
    out = Path(given["out"]) if "out" in given else not_a_link(usual)
    how = given.get("target"), given.get("title"), given.get("json", False)
    return make_report(folders, out, *how)
