"""The options of `python -m runs compare`, and the comparison that they make."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import UseAppendAction

from runs.compare.contender import GRAMMAR, Contender, parse_contender
from runs.config import OWN, TrainConfig
from runs.expression import PLAIN
from runs.needs import check_has, has
from runs.netlab.lab import Lab
from runs.option_types import Count, Positive, Rate, Seeds, Switch, Texts, Whole, metavar
from runs.options import check_measured, check_modelled, check_sends
from runs.parser import UsageError, option, options, shown
from runs.settings import Keeping, Measuring, Modelling, Optimizing, Training
from runs.simulate.command import check_device

if TYPE_CHECKING:
    from adaptive import LinkSpec
    from runs.papers.suites import Plan

OF_SCRIPT = ("dense", "goodput")
CONTENDERS = ("dense", "topk@100", "goodput", "gravac", "accordion")
BANDWIDTHS = ("100mbit", "1gbit")
EVALUATIONS = 10
"""In a run, unless --eval-every says otherwise: the time to a quality is known no finer."""
SLICES = 4
"""In a run, unless --slice says otherwise. A slice costs the start of its processes."""

HELP = f"""\
Train the same task from the same seeds with several contenders, and compare them.

{GRAMMAR}

examples:
  python -m runs compare --network 100mbit
      {", ".join(CONTENDERS)} on the text task
  python -m runs compare --contender dense --contender topk@100 --contender gravac --seeds 0 1 2
  python -m runs compare --contender dense --contender "topk+bf16@50" \\
      --contender "gravac:epsilon=0.5,omega=0.1,base=dgc" --task cifar10 --data DIR
  python -m runs compare --contender dense --contender "accordion:cf_range=10/200,memory=residual"
  python -m runs compare --metric "val loss {{}}" -- my_script.py --epochs 3
      dense and goodput with a script of your own, which need not be changed
  python -m runs compare --suite gravac --data DIR --seeds 0 1
      the table of the GraVAC paper beside its figures, at 0.04 of its steps (--scale) and with a
      small model; --task words: its LSTM. Other options, and further contenders, as ever

Contenders take turns, a slice of steps each (--slice), and who begins goes round, so that a busy
machine slows all alike; with --fixed-clock each run is made in one go.
Ctrl-C saves what was done (exit code 130); the same command goes on from
there and repeats no run that is finished. More contenders, seeds and bandwidths can be added to a
comparison in the same way.

With a script behind -- the contenders' settings reach its AdaptiveCompressor, in place of the
script's own; if it is plain DDP, the command attaches one to the DDP models that it trains, with
their optimizers. The script is started as torchrun starts it, once for each contender and seed, and
runs from its beginning to its end. In its arguments {{seed}} stands for the seed, {{run}} for a
folder of each run's own, {{lr}} for a key lr= of the contenders. A script that goes on by itself
from what it has saved needs {{run}}. --metric finds the quality in what rank 0 prints or logs.

The modelled seconds of a step are compute + compression (both measured) + hops x latency + bytes x
8 / rate, added up along the recorded steps; nothing overlaps. "all" is the whole run, "to target"
the first evaluation that is at least as good as the end of the dense run of the same seed, or as it
was after --goal-step steps ("never": none was).

files in the log folder: compare.json, table.txt, time.png, cfs.png (steps and T_comp at each CF),
techniques.png (of a suite whose entries have their own learning rates), and each run's own in
runs/."""


@dataclass(frozen=True)
class Comparison:
    """What to train: every contender with every seed. slice: steps to a turn. steps: of a run,
    unless the contender has its own.

    common: train's options for all runs. model_mb: for the modelled seconds, the size of the
    model; None: its own. goal_step: the quality to reach is dense's after so many steps; None: at
    its end. smooth: evaluations whose mean is a quality. one_worker_seconds: of a step of one
    worker alone, for scaling efficiency. plan: the paper's table that it is for.
    """

    contenders: tuple[Contender, ...]
    seeds: tuple[int, ...]
    networks: tuple[LinkSpec, ...]
    model_mb: float | None
    goal_step: int | None
    slice: int
    steps: int
    folder: Path
    common: dict[str, Any]
    json: bool
    verbose: bool = False
    smooth: int = 1
    one_worker_seconds: float | None = None
    plan: Plan | None = None

    def config(self, contender: Contender, seed: int) -> TrainConfig:
        """The run of one contender with one seed. UsageError if its options do not fit."""
        folder = self.folder / "runs" / f"{contender.folder}-seed{seed}"
        return contender.config({**self.common, "seed": seed, "log_dir": str(folder)})

    def steps_of(self, contender: Contender) -> int:
        """Of each of its runs; 1 of a script, whose steps are its own."""
        own = {} if self.common.get("script") else contender.given
        return int(own.get("steps", self.steps))


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """What to compare."""

    contender: Annotated[UseAppendAction[tuple[str, ...]], metavar("C")] = ()
    """NAME[@CF][:key=value,...], see above; once for each (dense, topk@100, goodput, gravac,
    accordion)."""
    suite: Annotated[str | None, metavar("PAPER")] = None
    """The contenders of a paper's table, beside its figures: gravac, gravac-randomk,
    accordion, harris, dgc or liu."""
    scale: Annotated[Positive | None, metavar("SHARE")] = None
    """With --suite: of the paper's steps; from 1 on the paper's model, too (some hundred steps of a
    small model)."""
    only: Texts | None = None
    """With --suite: those of its contenders in whose names one of these is (all)."""
    seeds: Seeds | None = None
    """Seeds (0; with --suite as many as the table has)."""
    bandwidths: Annotated[Texts | None, metavar("RATE[,LATENCY] ...")] = None
    """Networks of the modelled seconds (100mbit 1gbit)."""
    goal_step: Count | None = None
    """The quality to reach is that of dense after N steps (at its end)."""
    smooth: Count = 1
    """Take the mean of the last N evaluations for the quality, everywhere."""
    slice: Whole | None = None
    """Steps to a turn; 0: whole runs (a 4th of the steps; 0 with --fixed-clock)."""
    verbose: bool = False
    """Show what the runs say while they train."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How, for all contenders."""

    network: Rate | None = None
    """Emulate a slow network between the workers, e.g. 100mbit or 1gbit,5ms."""
    simulated: Switch | None = None
    """With --fixed-clock: all workers of a run take turns in this process, as `simulate` has them,
    and come to the same results (off)."""
    device: Annotated[str | None, metavar("DEVICE")] = None
    """With --simulated on: of all workers, cpu, cuda or cuda:1 (cpu)."""


OPTIONS = {
    "comparison": options(Comparing),
    "training": options(Training, without=("seed",)),
    "optimizer": options(Optimizing),
    "script": options(Measuring),
    "conditions": options(Conditions),
    "modelling": options(
        Modelling,
        without=("server",),
        told={
            "model_mb": "for modelled seconds, and with --fixed-clock for what policies see of "
            "them, as if the gradients were so large"
        },
    ),
    "output": options(
        Keeping,
        without=("checkpoint_every",),
        told={
            "log_dir": "where the files go (logs/compare-TASK-OPTIONS)",
            "eval_every": "measure quality on held-out data every N steps (a 10th of them)",
        },
    ),
}


def make_comparison(given: dict[str, Any]) -> Comparison:
    """UsageError names the option, its value and what is accepted."""
    given = dict(given)
    check_measured(given)
    words = given.get("script", ())
    plan = None if words else _plan(given)
    usual = OF_SCRIPT if words else CONTENDERS if plan is None else ()
    contenders = tuple(map(parse_contender, given.pop("contender", usual)))
    for one in contenders:
        if (one.given["policy"] == PLAIN) and one.label.startswith(OWN) != bool(words):
            instead = f"{OWN}, the script as it is, or dense" if words else f"{PLAIN}: plain DDP"
            raise UsageError(f"--contender {one.label}: accepted here: {instead}")
    if plan is not None:
        contenders = (*plan.contenders, *contenders)
        given = {**plan.options, **given}
        given.setdefault("bandwidths", (given["network"],))
        given.setdefault("slice", 0)
    folders = [contender.folder for contender in contenders]
    for i, contender in enumerate(contenders):
        if contender.folder in folders[:i]:
            raise UsageError(f"--contender {contender.label}: is given twice; accepted: once")
    usual_seeds = (0,) if plan is None else plan.suite.seeds
    seeds = tuple(dict.fromkeys(given.pop("seeds", usual_seeds)))
    if words and seeds != (0,) and "{seed}" not in " ".join(words):
        raise UsageError(
            f"--seeds {shown(seeds)}: the script's seed is its own; accepted: {{seed}} among its "
            f"arguments, as in -- my_script.py --seed {{seed}}"
        )
    # What the runs take on the link that they have is in the table anyhow.
    others = [rate for rate in BANDWIDTHS if rate != given.get("network")]
    networks = _networks(given.pop("bandwidths", others))
    check_sends(given)
    check_modelled({name: value for name, value in given.items() if name != "model_mb"})
    if given.get("simulated") and "fixed_clock" not in given:
        raise UsageError("--simulated on: needs --fixed-clock, the seconds of a step")
    if "device" in given:
        if not given.get("simulated"):
            raise UsageError(f"--device {given['device']}: needs --simulated on")
        check_device(given["device"])
    alone = given.pop("one_worker_seconds", None)  # for the table alone, not for the runs
    model_mb = given.get("model_mb")
    if "fixed_clock" not in given:  # it then is for the table alone, not for the runs
        given.pop("model_mb", None)
    turn_steps = given.pop("slice", None)
    smooth = given.pop("smooth", 1)
    as_json, verbose = given.pop("json", False), given.pop("verbose", False)
    folder = given.pop("log_dir", None)
    steps = longest = 1  # a turn of a script is all of it
    if not words:
        steps = given.setdefault("steps", TrainConfig.steps)
        given.setdefault("eval_every", max(1, steps // EVALUATIONS))
        longest = max(int(one.given.get("steps", steps)) for one in contenders)
        if turn_steps is None:  # where step times are modelled no run slows another
            turn_steps = 0 if "fixed_clock" in given else ceil(steps / SLICES)
    elif turn_steps:
        raise UsageError(f"--slice {turn_steps}: a script runs from its beginning to its end")
    turn = turn_steps or longest
    for one in contenders:
        if one.given.get("ddp_hook") == "powersgd" and turn < longest:
            raise UsageError(
                f"--slice {turn}: the state of PyTorch's PowerSGD hook is not kept from turn to "
                f"turn; accepted with {one.label}: --slice 0"
            )
    goal = given.pop("goal_step", None)
    if goal is not None and not words and not given["eval_every"] <= goal <= steps:
        raise UsageError(
            f"--goal-step {goal}: must be from --eval-every, {given['eval_every']}, to --steps, "
            f"{steps}"
        )
    lab = Lab.of_environment()
    if lab is not None:
        given["netlab"] = lab.options
    path = Path(folder) if folder is not None else _folder(given, plan)
    sizes = networks, model_mb, goal, turn, steps
    return Comparison(contenders, seeds, *sizes, path, given, as_json, verbose, smooth, alone, plan)


def _networks(texts: Iterable[str]) -> tuple[LinkSpec, ...]:
    """Those of --bandwidths, each once. UsageError if one is none."""
    from adaptive import LinkSpec  # torch is imported late

    found = []
    for text in texts:
        try:
            found.append(LinkSpec.parse(text))
        except ValueError as error:
            raise UsageError(f"--bandwidths {text}: {error}") from error
    return tuple(dict.fromkeys(found))


def _plan(given: dict[str, Any]) -> Plan | None:
    """The paper's table that --suite names; takes what is about it out of the options."""
    for name in ("suite", "scale", "only"):
        if name in given:
            check_has("runs.papers", f"{option(name)} {shown(given[name])}")
    if not has("runs.papers"):
        return None
    from runs.papers.suites import plan_from

    return plan_from(given)


def _folder(common: dict[str, Any], plan: Plan | None) -> Path:
    """The same options find the same folder, so that the same command goes on."""
    digest = hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()
    what = "" if plan is None else f"{plan.suite.name}-"
    task = common.get("task", TrainConfig.task)
    if common.get("script"):
        task = re.sub(r"[^\w.-]+", "-", Path(common["script"][0]).stem)[:80]
    return Path("logs", f"compare-{what}{task}-{digest[:8]}")
