"""The options of `python -m runs tune`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import UseAppendAction

from runs.option_types import Count, Number, Texts, Whole, Wholes, metavar, one_of
from runs.parser import options
from runs.settings import (
    Compressing,
    Keeping,
    Modelling,
    Optimizing,
    PolicyArguments,
    Training,
)

PLANS = ("tpe", "random")
PRUNERS = ("median", "hyperband", "none")
HARRIS_SETTINGS = ("dense", "topk@50", "topk@500", "dgc@50", "dgc@500")
"""The compression settings of --plan random, unless the command says otherwise."""
TRIALS = 30
EVALUATIONS = 10
"""In a trial, unless --eval-every says otherwise."""
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
  torchrun --nproc-per-node 4 -m runs tune --trials 20

The same options find the same study: Ctrl-C gives up the trial under way (exit code 130), the same
command goes on, and several can run at the same time, on other machines with --storage URL. Trials
that fail are recorded and do not stop the study. Optuna does not prune with two objectives.

files in the log folder: {STUDY_FILE}, tune.json, table.txt, report.html, the plots, and each
trial's own in runs/; tensorboard --logdir LOGDIR shows them under HParams."""


@dataclass(frozen=True, kw_only=True)
class Searching:
    """What to search for."""

    trials: Count | None = None
    """In all, by all processes (30)."""
    objective: Annotated[Texts | None, metavar("WHAT ...")] = None
    """Quality, bytes, seconds, quality bytes or quality seconds (quality bytes; with --target
    seconds)."""
    target: Number | None = None
    """Count bytes or seconds until held-out quality is as good as this."""
    bandwidth: Annotated[str | None, metavar("RATE[,LATENCY]")] = None
    """Seconds modelled on this network, as compare does (as measured)."""
    search: Annotated[Texts | None, metavar("S ...")] = None
    """Search exactly these, see above (the policy's own; with --setting lr clip_norm)."""
    also: Annotated[Texts | None, metavar("S ...")] = None
    """Search these too."""
    setting: Annotated[UseAppendAction[tuple[str, ...]], metavar("C")] = ()
    """NAME[@CF][:key=value,...] as compare's contenders; once for each: a study for every one of
    them."""
    plan: Annotated[str | None, one_of(*PLANS)] = None
    """Random: Harris's procedure, see above (tpe)."""
    plan_seed: Whole | None = None
    """Of the plan (0)."""
    pruner: Annotated[str | None, one_of(*PRUNERS)] = None
    """Stop trials whose quality falls behind (median; with two objectives or --plan random
    none)."""
    seeds: Wholes | None = None
    """Training seeds of a trial (0)."""
    storage: Annotated[str | None, metavar("URL")] = None
    """Optuna's storage, e.g. postgresql+psycopg2://HOST/NAME (sqlite:///LOGDIR/study.db)."""


OPTIONS = {
    "search": options(Searching),
    "training": options(Training, without=("seed",)),
    "optimizer": options(Optimizing),
    "compression": options(Compressing),
    "policy": options(PolicyArguments),
    "output": options(
        Keeping,
        without=("checkpoint_every", "densities"),
        told={
            "log_dir": "where the files go (logs/tune-TASK-OPTIONS)",
            "eval_every": "measure quality on held-out data every N steps (a 10th of them)",
        },
    ),
    "modelling": options(Modelling, without=("model_mb", "server", "one_worker_seconds")),
}
