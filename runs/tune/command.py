"""The tune command: its options, and what it does."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from runs.interrupt import GOES_ON, INTERRUPTED
from runs.needs import check_installed
from runs.option_types import Count, Texts, metavar
from runs.options import with_script
from runs.parser import options
from runs.settings import (
    Compressing,
    Keeping,
    Measuring,
    Modelling,
    Optimizing,
    PolicyArguments,
    Training,
)

HELP = """\
Search for the settings that train best, with Optuna. Every trial is a real run of all workers.

examples:
  python -m runs tune --network 100mbit --trials 20
      GraVAC's epsilon and omega: the Pareto front of final quality and bytes sent
  python -m runs tune --network 100mbit --search epsilon=0.1..0.9 lr=0.1..2 base=topk,dgc
      in these ranges, and of these names
  python -m runs tune --policy goodput --objective quality seconds --network 100mbit
      Goodput's margin and power: quality and measured seconds
  python -m runs tune --base topk --cf 50 --objective quality --search lr clip_grad --sampler random
      Harris's procedure (2020): a random search for one compression setting
  python -m runs tune --metric "val loss {}" --trials 20 -- my_script.py --epochs 3
      GraVAC's epsilon and omega on a script of your own, which need not be changed; trials that
      fall behind are pruned with --objective quality
  python -m runs tune --metric "val loss {}" --search epsilon lr=0.01..1 -- my_script.py --lr {lr}

What is searched is written NAME, NAME=LOW..HIGH or NAME=A,B,C. NAME is an argument of the policy or
an option of train. A name alone takes the usual range, which epsilon, omega, eta, cf, margin,
power, lr and clip_grad have.

With a script behind -- a trial is the whole script, whose AdaptiveCompressor gets the trial's
settings; a DDP model without one gets one, as by compare (python -m runs compare --help). --metric
finds the quality in what rank 0 prints or logs; the last value counts.

The first trial runs with the policy's own defaults. If its dense steps hardly wait for the network,
tune says so and ends: there is nothing to tune for. --anyway goes on.

The same command goes on where it was interrupted (Ctrl-C, exit code 130). Several commands can
share a study by --storage. With one objective Optuna's median pruner stops trials that fall behind.
Failed trials are recorded, and do not stop the study; the exit code is 1 if all of them failed.

To look at a study: optuna-dashboard sqlite:///LOGDIR/study.db (pip install optuna-dashboard, which
the extra "tune" has), or optuna.visualization (pip install plotly)."""


@dataclass(frozen=True, kw_only=True)
class Searching:
    """What to search for."""

    trials: Count = 30
    """Finished ones in all, by all processes."""
    objective: Annotated[Texts | None, metavar("WHAT ...")] = None
    """Quality, and what else: bytes, seconds (quality bytes)."""
    search: Annotated[Texts | None, metavar("S ...")] = None
    """Search these, see above (epsilon omega; of another policy than gravac its own)."""
    sampler: Literal["tpe", "random"] = "tpe"
    """Optuna's."""
    storage: Annotated[str | None, metavar("URL")] = None
    """Optuna's, e.g. postgresql+psycopg2://HOST/NAME (sqlite:///LOGDIR/study.db)."""
    anyway: bool = False
    """Go on although there is nothing to tune for."""
    verbose: bool = False
    """Show what the trials say while they train."""


OPTIONS = {
    "search": options(Searching),
    "script": options(Measuring),
    "training": options(Training),
    "optimizer": options(Optimizing),
    "compression": options(
        Compressing,
        told={
            "policy": "The policy whose arguments are searched, as `train` takes it (gravac; with "
            "--cf fixed)"
        },
    ),
    "policy": options(PolicyArguments),
    "output": options(
        Keeping,
        without=("checkpoint_every", "json"),
        told={
            "log_dir": "where the files go (logs/tune-TASK-OPTIONS)",
            "eval_every": "measure quality on held-out data every N steps (a 10th of them)",
        },
    ),
    "modelling": options(Modelling, without=("model_mb", "server", "one_worker_seconds")),
}


def main(given: dict[str, Any]) -> int:
    """Run the study; returns the exit code."""
    check_installed("tune")
    # torch and optuna are imported late, so that help need not wait for them.
    from runs.tune.study import tune

    try:
        return tune(with_script(given))
    except KeyboardInterrupt:
        print(GOES_ON, file=sys.stderr)
        return INTERRUPTED
