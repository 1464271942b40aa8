"""What other people's rules for training with little communication reach on one task: the table in
docs/research/defaults.md.

    python -m docs.studies.peers --model gpt --data DIR/wikitext-2 --steps 600 --batch-size 16 \
        --warmup 50 --lr-schedule cosine --clip-grad 1 --lr 6e-3
    python -m docs.studies.peers --peers demo:k=16,lr=3e-3 diloco:steps=100 sparseloco

Each rule (docs/studies/rules.py, with its paper's settings) moves n replicas in this process,
without the library, on the batches, with the learning rates and the held-out data of `python -m
runs simulate`. Bytes are those of the messages that a rank sends.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any

import torch

from docs.studies.common import columns, write
from docs.studies.rules import FP32, PEERS, Replica, Rule
from runs.build import build_task, check, learning_rate, lr_factor, make_optimizers
from runs.config import TrainConfig
from runs.parser import UsageError
from runs.tasks import Task


@dataclass(frozen=True)
class Contender:
    """A rule with the settings that the user gave. lr: its own, None for --lr."""

    peer: str
    given: dict[str, Any] = field(default_factory=dict)
    lr: float | None = None


def contender(text: str) -> Contender:
    """An argument type: NAME, or NAME:key=value,key=value."""
    name, _, rest = text.partition(":")
    if name not in PEERS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(PEERS)}, got {name!r}")
    usual = {"lr": 0.0, **PEERS[name].settings()}
    given: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, _, value = part.partition("=")
        try:
            given[key] = type(usual[key])(value)
        except (KeyError, ValueError):
            known = ", ".join(usual)
            told = f"{name} takes numbers for {known} as key=value, got {part!r}"
            raise argparse.ArgumentTypeError(told) from None
    return Contender(name, given, given.pop("lr", None))


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
    for step in range(config.steps):
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
    models = [task.build_model() for _ in range(config.workers)]
    replicas = [Replica(model, *make_optimizers(config, task, model)) for model in models]
    return PEERS[one.peer](config, replicas, **one.given)


def compete(one: Contender, config: TrainConfig) -> tuple[str, ...]:
    """Train one contender with one seed; its row of the table."""
    config = replace(config, lr=one.lr or learning_rate(config))
    task = build_task(config)
    settings = {"lr": config.lr, **PEERS[one.peer].settings(), **one.given}
    shown = " ".join(f"{name}={value:g}" for name, value in settings.items())
    print(f"{one.peer}, seed {config.seed}: {shown}", file=sys.stderr, flush=True)
    reached = train(config, make_rule(one, config, task), task)
    quality = f"{reached.quality:.4g}" if isfinite(reached.quality) else "diverged"
    fewer = f"{reached.dense_bits / reached.bits:.4g} times" if reached.bits else "nothing sent"
    return one.peer, shown, str(config.seed), quality, fewer


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    every = [Contender(name) for name in PEERS]
    peers_help = f"some of {', '.join(PEERS)}, each with settings of its own (all)"
    add("--peers", type=contender, nargs="+", default=every, help=peers_help)
    add("--seeds", type=int, nargs="+", default=[0])
    add("--log-dir", type=Path, default=Path("logs/study-peers"), help="where the table goes")
    add(
        "--optimizer", choices=["adamw", "adam"], default="adamw", help="the rules know its moments"
    )
    add("--task", default="text")
    for name in ("--model", "--data"):
        add(name)
    for name in ("--workers", "--steps", "--batch-size", "--warmup"):
        add(name, type=int, default=getattr(TrainConfig, name[2:].replace("-", "_")))
    for name in ("--lr", "--clip-grad", "--weight-decay"):
        add(name, type=float)
    add("--betas", type=float, nargs=2)
    add("--lr-schedule", default="constant", help="constant, cosine or linear")
    given = vars(parser.parse_args(words))
    peers, seeds, folder = given.pop("peers"), given.pop("seeds"), given.pop("log_dir")
    betas = given.pop("betas")
    config = TrainConfig(
        log_dir=str(folder), policy="ddp", base=None, betas=betas and tuple(betas), **given
    )
    if config.optimizer == "adam" and config.weight_decay:
        parser.error("--weight-decay: with adam it is a part of the gradient; accepted: adamw")
    try:
        check(config)
    except UsageError as error:
        parser.error(str(error))
    torch.set_num_threads(config.threads)
    task = build_task(config)
    rows: list[tuple[str, ...]] = [
        ("peer", "settings", "seed", f"held-out {task.quality_name}", "fewer bytes")
    ]
    for one in peers:
        rows += [compete(one, replace(config, seed=seed)) for seed in seeds]
    better = "higher" if task.higher_is_better else "lower"
    note = f"{better} is better; bytes: that a rank sends, against dense fp32"
    write(f"{columns(rows)}\n{note}", folder)


if __name__ == "__main__":
    main()
