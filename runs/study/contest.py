"""`python -m runs study peers`: the rules of runs/study/peers.py in turn, on one task."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from dataclasses import asdict, dataclass, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any

import torch

from runs.build import build_task, check
from runs.claim import claim
from runs.config import TrainConfig, write_text
from runs.files import read_json
from runs.initial import initial_model
from runs.interrupt import UNSAVED
from runs.optimizers import learning_rate, lr_factor, make_optimizer
from runs.options import make_config
from runs.parser import UsageError, check_writable, positive, typed
from runs.stages import counted
from runs.study.peers import FP32, PEERS, Replica, Rule
from runs.study.table import STUDY_FILE, TABLE_FILE
from runs.tasks import TASKS, Task

OPTIMIZERS = ("adamw", "adam")
"""What the rules know the moments of."""


NOT_OF_TASK = (
    "log_dir",
    "json",
    "seed",
    "lr",
    "threads",
    "policy",
    "simulated",
    "eval_every",
    "checkpoint_every",
    "patience",
    "clip_local",
    "densities",
)
"""Parts of a configuration in which the runs of one table may differ, or which they do not use."""


@dataclass(frozen=True)
class Contender:
    """A rule with the settings that the user gave. lr: its own, None for --lr."""

    peer: str
    given: tuple[tuple[str, Any], ...] = ()
    lr: float | None = None


def contender(text: str) -> Contender:
    """An argument type: NAME, or NAME:key=value,key=value."""
    name, _, rest = text.partition(":")
    if name not in PEERS:
        raise ArgumentTypeError(f"must be one of {', '.join(PEERS)}, got {name!r}")
    readers = {"lr": positive, **PEERS[name].readers()}
    given: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, _, value = part.partition("=")
        if key not in readers:
            raise ArgumentTypeError(f"{name} takes {', '.join(readers)} as key=value, got {part!r}")
        try:
            given[key] = readers[key](value)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{key} of {name} {error}") from None
    lr = given.pop("lr", None)
    return Contender(name, tuple(given.items()), lr)


@dataclass(frozen=True)
class Contest:
    """The settings of the command. config: of all runs, but for seed and learning rate."""

    config: TrainConfig
    contenders: tuple[Contender, ...]
    seeds: tuple[int, ...]

    def runs(self) -> list[tuple[Contender, TrainConfig]]:
        return [
            (one, replace(self.config, seed=seed, lr=one.lr or learning_rate(self.config)))
            for one in self.contenders
            for seed in self.seeds
        ]


def make_contest(given: dict[str, Any]) -> Contest:
    """UsageError names the option, its value and what is accepted."""
    contenders = tuple(dict.fromkeys(given.pop("peers", map(Contender, PEERS))))
    seeds = tuple(dict.fromkeys(given.pop("seeds", (0,))))
    given = {"optimizer": "adamw", "log_dir": None, **given, "policy": "off"}
    if given["log_dir"] is None:
        given["log_dir"] = str(Path("logs", f"study-peers-{given.get('task', 'text')}"))
    if given["optimizer"] not in OPTIMIZERS:
        raise UsageError(
            f"--optimizer {given['optimizer']}: study peers accepts {' or '.join(OPTIMIZERS)}"
        )
    if given["optimizer"] == "adam" and given.get("weight_decay"):
        raise UsageError(
            f"--weight-decay {given['weight_decay']:g}: study peers takes none with --optimizer "
            f"adam; accepted: adamw, whose decay is no part of the gradient"
        )
    config = make_config(given)
    check(config)
    check_writable(config.folder)
    return Contest(config, contenders, seeds)


def compare(given: dict[str, Any]) -> int:
    """Train every contender with every seed, unless the folder has its result already, and keep
    the table up to date; the exit code. KeyboardInterrupt leaves what is finished."""
    contest = make_contest(given)
    config = contest.config
    torch.set_num_threads(config.threads)
    with claim(config.folder, f"--log-dir {config.folder}", typed()):
        result = _begun(config)
        for one, own in contest.runs():
            row = _row(one, own)
            if any(row.items() <= done.items() for done in result["runs"]):
                continue
            result["runs"].append({**row, **_trained(one, own)})
            try:
                _write(config.folder, result)
            except OSError as error:
                print(f"error: the report could not be written: {error}", file=sys.stderr)
                return UNSAVED
    out = sys.stderr if config.json else sys.stdout
    print(f"\n{make_table(result)}\nfiles in {config.folder}", file=out, flush=True)
    if config.json:
        print(json.dumps(result, allow_nan=False), flush=True)
    return 0


@dataclass(frozen=True)
class Reached:
    """How a run has ended. quality: on held-out data, nan if a loss was not finite. bits: that a
    rank sent. dense_bits: those of its gradients in fp32, in all steps that were done."""

    quality: float
    bits: int
    dense_bits: int


def train(config: TrainConfig, rule: Rule, task: Task) -> Reached:
    """Train by a rule, rank after rank; batches, learning rates and quality are those of
    `runs.train`."""
    dense = FP32 * sum(p.numel() for p in rule.replicas[0].parameters)
    for step in counted(range(config.steps), config.steps, type(rule).__name__, "steps"):
        for rank, replica in enumerate(rule.replicas):
            for group in replica.optimizer.param_groups:
                group["lr"] = task.lr * lr_factor(config, step)
            replica.optimizer.zero_grad()
            loss = task.loss(replica.model, task.batch(step, rank, config.workers))
            if not isfinite(loss.item()):
                return Reached(nan, rule.bits, dense * step)
            loss.backward()
        rule.step(step)
    return Reached(task.evaluate(rule.replicas[0].model), rule.bits, dense * config.steps)


def make_rule(one: Contender, config: TrainConfig, task: Task) -> Rule:
    """The rule, with replicas that are all alike."""
    models = [initial_model(config, task) for _ in range(config.workers)]
    replicas = [Replica(model, make_optimizer(config, task, model)) for model in models]
    return PEERS[one.peer](config, replicas, **dict(one.given))


def _trained(one: Contender, config: TrainConfig) -> dict[str, Any]:
    print(f"{one.peer}, seed {config.seed}, lr {config.lr:g}", file=sys.stderr, flush=True)
    task = build_task(config)
    reached = train(config, make_rule(one, config, task), task)
    finite = isfinite(reached.quality)
    return {
        "quality": reached.quality if finite else None,
        "bytes": reached.bits / 8,
        "times_fewer_bytes": reached.dense_bits / reached.bits if reached.bits else None,
    }


def _row(one: Contender, config: TrainConfig) -> dict[str, Any]:
    """What tells a run from the others of its folder."""
    defaults = {name: getattr(PEERS[one.peer], name) for name in PEERS[one.peer].readers()}
    settings = {"lr": config.lr, **defaults, **dict(one.given)}
    return {"peer": one.peer, "settings": settings, "seed": config.seed}


def _begun(config: TrainConfig) -> dict[str, Any]:
    """The result so far, without runs in a new folder. UsageError if it is of another task."""
    task = TASKS[config.task]
    new: dict[str, Any] = {
        "task": {n: v for n, v in asdict(config).items() if n not in NOT_OF_TASK and v is not None},
        "quality_name": task.quality_name,
        "higher_is_better": task.higher_is_better,
        "runs": [],
    }
    path = config.folder / STUDY_FILE
    if not path.exists():
        return new
    try:
        old = dict(read_json(path))
        same = {**json.loads(json.dumps(new)), "runs": list(old["runs"])} == old
        make_table(old)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"--log-dir: {path} is damaged: {error}; accepted: another folder, or the same without "
            f"that file"
        ) from error
    if not same:
        raise UsageError(
            f"--log-dir {config.folder}: holds a study of another task, or of other options; "
            f"accepted: another folder"
        )
    return old


def _write(folder: Path, result: dict[str, Any]) -> None:
    write_text(folder / STUDY_FILE, json.dumps(result, indent=2, allow_nan=False) + "\n")
    write_text(folder / TABLE_FILE, make_table(result) + "\n")


def make_table(result: dict[str, Any]) -> str:
    """A line for each run. result: as in study.json."""
    better = "higher" if result["higher_is_better"] else "lower"
    rows = [("peer", "settings", "seed", f"held-out {result['quality_name']}", "fewer bytes")]
    for run in result["runs"]:
        settings = " ".join(f"{name}={value:g}" for name, value in run["settings"].items())
        quality, fewer = run["quality"], run["times_fewer_bytes"]
        rows.append(
            (
                run["peer"],
                settings,
                str(run["seed"]),
                "diverged" if quality is None else f"{quality:.4g}",
                "nothing sent" if fewer is None else f"{fewer:.4g} times",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, f"{better} is better; bytes: that a rank sends, against dense fp32"])
