"""The options of `python -m runs tune`."""

from __future__ import annotations

import argparse

from runs.options import (
    add_clock_argument,
    add_eval_argument,
    add_hook_arguments,
    add_task_arguments,
)
from runs.parser import number, whole
from runs.policy_options import add_policy_arguments

PLANS = ("tpe", "random")
PRUNERS = ("median", "hyperband", "none")
HARRIS_SETTINGS = ("dense", "topk@50", "topk@500", "dgc@50", "dgc@500")
"""The compression settings of --plan random, unless the command says otherwise."""
TRIALS = 30
EVALUATIONS = 10
"""In a trial, unless --eval-every says otherwise."""
REPLAYS, KEPT = 1000, 8
"""Screened on a record, and handed to real runs, unless the command says otherwise."""

STUDY_FILE = "study.db"

ACCEPTED = {
    ("quality",): False,
    ("bytes",): True,
    ("seconds",): True,
    ("quality", "bytes"): False,
    ("quality", "seconds"): False,
}
"""The objectives that there are, and whether they need a target."""

OBJECTIVES = ", ".join(" ".join(names) for names in ACCEPTED)

GRAMMAR = """\
What is searched is written NAME, NAME=LOW..HIGH or NAME=A,B,C: lr, epsilon=0.1..0.9, base=topk,dgc.
A policy's own settings are searched by default; base, memory, lr and clip_norm on request. A
setting that is given as an option (--epsilon 0.4) is fixed, and not searched."""

HELP = f"""\
Search for the settings that train best, with Optuna. Every trial is a real run of all workers.

{GRAMMAR}

examples:
  python -m runs tune --link 100mbit --trials 20
      the settings of goodput, as train takes it by default: the Pareto front of final quality and
      bytes sent
  python -m runs tune --link 100mbit --search epsilon omega
      GraVAC's, whose settings these are; so does --epsilon 0.3, or --policy gravac
  python -m runs tune --objective quality seconds --bandwidth 1gbit --also base lr
  python -m runs tune --target 8.5 --objective seconds --link 100mbit --pruner hyperband
      the least time to perplexity 8.5; poor trials are stopped early
  python -m runs tune --plan random --trials 60
      Harris's procedure (2020): for each compression setting ({", ".join(HARRIS_SETTINGS)})
      a random search of 60 runs over learning rate and clipping, and the best of each
  python -m runs tune --setting dense --setting topk@100 --setting "gravac:epsilon=0.3" --search lr
      the same with settings of your own (as compare's contenders) and Optuna's sampler
  python -m runs train --policy goodput --link 100mbit --log-dir logs/recorded
  python -m runs tune --proxy replay --timeline logs/recorded --link 100mbit --trials 8
      {REPLAYS} settings on the record first, then the best of them for real
  torchrun --nproc-per-node 4 -m runs tune --trials 20

The same options find the same study: Ctrl-C gives up the trial under way (exit code 130), the same
command goes on, and several can run at the same time, on other machines with --storage URL. Trials
that fail are recorded and do not stop the study. Optuna does not prune with two objectives.

files in the log folder: {STUDY_FILE}, tune.json, table.txt, report.html, the plots, and each
trial's own in runs/; tensorboard --logdir LOGDIR shows them under HParams."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options; what is not given is not in the namespace."""
    parser.argument_default = argparse.SUPPRESS
    _add_study_arguments(parser)
    _add_screen_arguments(parser)
    add_task_arguments(parser, seed=False)
    add_hook_arguments(parser)
    add_policy_arguments(parser)
    output = parser.add_argument_group("what is kept")
    output.add_argument(
        "--log-dir", metavar="DIR", help="where the files go (logs/tune-TASK-OPTIONS)"
    )
    output.add_argument(
        "--storage",
        metavar="URL",
        help=f"Optuna's storage, e.g. postgresql+psycopg2://HOST/NAME (sqlite:///LOGDIR/{STUDY_FILE})",
    )
    add_eval_argument(output, f"a {EVALUATIONS}th of the steps")
    output.add_argument(
        "--json", action="store_true", help="print the result as JSON on stdout, all else on stderr"
    )
    add_clock_argument(output)


def _add_study_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to search for")
    what.add_argument(
        "--trials", type=whole(1), metavar="N", help=f"in all, by all processes ({TRIALS})"
    )
    what.add_argument(
        "--objective",
        nargs="+",
        metavar="WHAT",
        help=f"{OBJECTIVES} (quality bytes; with --target seconds)",
    )
    what.add_argument(
        "--target",
        type=number,
        metavar="QUALITY",
        help="count bytes or seconds until held-out quality is as good as this",
    )
    what.add_argument(
        "--bandwidth",
        metavar="RATE[,LATENCY]",
        help="seconds modelled on this network, as compare does (as measured)",
    )
    what.add_argument(
        "--search",
        nargs="+",
        metavar="S",
        help="search exactly these, see above (the policy's own; with --setting lr clip_norm)",
    )
    what.add_argument("--also", nargs="+", metavar="S", help="search these too")
    what.add_argument(
        "--setting",
        action="append",
        metavar="C",
        help="NAME[@CF][:key=value,...] as compare's contenders; once for each: a study for every "
        "one of them",
    )
    what.add_argument("--plan", choices=PLANS, help="random: Harris's procedure, see below (tpe)")
    what.add_argument("--plan-seed", type=whole(0), metavar="N", help="of the plan (0)")
    what.add_argument(
        "--pruner",
        choices=PRUNERS,
        help="stop trials whose quality falls behind (median; none with two objectives or "
        "--plan random)",
    )
    what.add_argument(
        "--seeds", type=whole(0), nargs="+", metavar="N", help="training seeds of a trial (0)"
    )


def _add_screen_arguments(parser: argparse.ArgumentParser) -> None:
    screen = parser.add_argument_group("screening on a recorded timeline")
    screen.add_argument(
        "--proxy",
        choices=("replay",),
        help="replay many settings of the policy on --timeline first, by modelled compression "
        "throughput: a proxy, a replay has no quality",
    )
    screen.add_argument("--timeline", metavar="LOGDIR", help="log folder or timeline.jsonl")
    screen.add_argument(
        "--replays", type=whole(1), metavar="N", help=f"settings to replay ({REPLAYS})"
    )
    screen.add_argument("--keep", type=whole(1), metavar="N", help=f"for real runs ({KEPT})")
