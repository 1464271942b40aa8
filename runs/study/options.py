"""The options of `python -m runs study`, and the runs that they make."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from policies.base import GainKind
from runs.config import TrainConfig
from runs.options import (
    add_clock_argument,
    add_eval_argument,
    add_link_argument,
    add_size_argument,
    add_task_arguments,
    make_config,
)
from runs.parser import UsageError, number, option, whole
from runs.study.contest import contender
from runs.study.gossip import LINKS, SIZES
from runs.study.peers import PEERS

DROP = 0.6
"""Share of the steps after which the learning rate is a tenth."""

LINK = "2mbit"
BASE = "topk+fp32"
"""Nothing is rounded: what is lost is what was not kept."""

EPSILONS = (0.3,)
CFS = (10.0, 100.0, 1000.0)

HELP = f"""\
Experiments behind the notes in docs/. There are three. signal: which part of the true gradient gets
through at each CF (docs/signal-gain.md). peers: what other people's rules for training with little
communication reach on the same task (docs/defaults.md). gossip: the time to a quality on many
networks, for all-reduce and for exchanges with neighbours only (docs/gossip.md).

examples:
  python -m runs study signal
      on the text task
  python -m runs study signal --task cifar10 --model resnet8 --data DIR --steps 400 --seeds 0 1
  python -m runs study peers --model gpt --warmup 30 --lr-schedule cosine --clip-grad 1 --lr 6e-3
      dense, bf16, 1-bit Adam, DeMo, DiLoCo and SparseLoCo with AdamW, on the text task
  python -m runs study gossip --sizes 8 16 --steps 200 --links 100mbit,1ms 10mbit,50ms
  python -m runs study peers --peers demo:k=32,lr=3e-3 diloco:steps=100 sparseloco --lr 6e-3

signal: it trains, with each seed, (a) dense and at each of --cfs all along, with plain error
feedback and with momentum correction (adamw and those like it: with updates), recording every gain
of every CF; (b) with the latter, the two largest CFs in one run, each first, changing where the
learning rate drops; (c) GraVAC with each of the gains, and each of --epsilons, over an emulated
link ({LINK}), so that compression pays. The learning rate drops to a tenth after {DROP:.0%} of the
steps (--lr-drop).

peers: it trains n replicas in one process, one after the other, without the library, on the same
batches, with the same learning rates and held-out data as `simulate`. Each rule has its paper's
settings (runs/study/peers.py) where --peers does not say otherwise; bytes are those of the messages
that a rank sends. The optimizer is adamw, or adam.

gossip: it trains each of --contenders (as of `compare`) with each of --sizes of simulated workers.
Steps to the quality and bytes a step do not depend on the network; what a step takes on each of
--links is reckoned from these, as the lecture of Liu and Zhang does (N alpha + N B beta with a
server, alpha + B beta with neighbours), and as rings take it. With --model-mb bytes count as if the
gradients were so large.

Ctrl-C saves what was done (exit code 130), of peers the runs that are finished; the same command
with the same --log-dir goes on from there and repeats no run that is finished. peers keeps what
earlier commands on the same task have left there, so contenders can come one by one.

files in the log folder: study.json, table.txt, and of signal: signal.png, of gossip gossip.png, and
of both each run's own in runs/."""


@dataclass(frozen=True)
class Run:
    """A training run of the study.

    part: "fixed", "moved" or "chosen". label: of the runs that differ in the seed alone."""

    part: str
    label: str
    config: TrainConfig


@dataclass(frozen=True)
class Study:
    """The settings of `python -m runs study`.

    drop: step from which on the learning rate is a tenth."""

    runs: tuple[Run, ...]
    cfs: tuple[float, ...]
    drop: int
    folder: Path
    json: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options; what is not given is not in the namespace."""
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "experiment", choices=["signal", "peers", "gossip"], help="which experiment"
    )
    parser.add_argument("--seeds", type=whole(0), nargs="+", metavar="N", help="seeds (0)")
    parser.add_argument(
        "--cfs", type=number, nargs="+", metavar="CF", help="at least two, > 1 (10 100 1000)"
    )
    parser.add_argument(
        "--epsilons", type=number, nargs="+", metavar="E", help="of GraVAC, in (0, 1] (0.3)"
    )
    parser.add_argument(
        "--window", type=whole(1), metavar="N", help="of GraVAC (a twentieth of the steps)"
    )
    parser.add_argument(
        "--peers",
        type=contender,
        nargs="+",
        metavar="NAME[:KEY=VALUE,...]",
        help=f"of the experiment of that name: {', '.join(PEERS)}, each with settings of its own, "
        "as in demo:k=32,lr=3e-3 (all)",
    )
    parser.add_argument(
        "--sizes",
        type=whole(2),
        nargs="+",
        metavar="N",
        help=f"of gossip: numbers of workers ({' '.join(map(str, SIZES))})",
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        metavar="NAME[@CF][:KEY=VALUE,...]",
        help="of gossip: what is trained, as compare's --contender (dense, compressed, gossip)",
    )
    parser.add_argument(
        "--links",
        nargs="+",
        metavar="RATE,LATENCY",
        help=f"of gossip: networks of the table ({' '.join(LINKS)})",
    )
    parser.add_argument(
        "--target",
        type=number,
        metavar="Q",
        help="of gossip: the quality (the worst that is reached in the end uncompressed)",
    )
    add_task_arguments(parser, seed=False)
    add_link_argument(parser.add_argument_group("the network of the GraVAC runs"))
    output = parser.add_argument_group("what is kept")
    output.add_argument(
        "--log-dir",
        metavar="DIR",
        help="where the files go (logs/study-TASK, peers: logs/study-peers-TASK)",
    )
    output.add_argument(
        "--json", action="store_true", help="print the result as JSON on stdout, all else on stderr"
    )
    add_eval_argument(output, "of gossip: an eighth of the steps")
    add_clock_argument(output)
    add_size_argument(output, "of gossip: bytes")


OWN_OPTIONS = {
    "signal": ("cfs", "epsilons", "window", "link"),
    "peers": ("peers",),
    "gossip": ("sizes", "contenders", "links", "target", "model_mb", "eval_every"),
}


def of_experiment(given: dict[str, Any]) -> dict[str, Any]:
    """The options without the experiment's name. UsageError if one is another experiment's."""
    experiment, rest = given["experiment"], dict(given)
    del rest["experiment"]
    for owner, names in OWN_OPTIONS.items():
        for name in names:
            if owner != experiment and name in rest:
                raise UsageError(f"{option(name)} is for study {owner}, got study {experiment}")
    if experiment == "peers" and "fixed_clock" in rest:
        raise UsageError("--fixed-clock is for study signal and gossip, got study peers")
    if experiment == "gossip" and "seeds" in rest:
        raise UsageError("--seeds is for study signal and peers, got study gossip")
    return rest


def make_study(given: dict[str, Any]) -> Study:
    """UsageError names the option, its value and what is accepted."""
    given = of_experiment(given)
    cfs = tuple(sorted(set(given.pop("cfs", CFS))))
    if len(cfs) < 2 or cfs[0] <= 1:
        listed = " ".join(f"{cf:g}" for cf in cfs)
        raise UsageError(f"--cfs {listed}: must be at least two different CFs > 1")
    seeds = tuple(dict.fromkeys(given.pop("seeds", (0,))))
    epsilons = tuple(dict.fromkeys(given.pop("epsilons", EPSILONS)))
    steps = given.setdefault("steps", TrainConfig.steps)
    drop = given.setdefault("lr_drop", [max(1, round(DROP * steps))])[0]
    link, window = given.pop("link", LINK), given.pop("window", max(5, steps // 20))
    folder = Path(given.pop("log_dir", None) or Path("logs", f"study-{given.get('task', 'text')}"))
    as_json = given.pop("json", False)
    corrected = "momentum" if given.get("optimizer", "sgd") == "sgd" else "updates"
    named = {
        **_fixed(cfs, corrected),
        **_moved(cfs, drop, corrected),
        **_chosen(cfs, epsilons, {"link": link, "window": window}),
    }
    runs = [
        Run(part, label, _config(given, options, folder, label, seed))
        for seed in seeds
        for (part, label), options in named.items()
    ]
    return Study(tuple(runs), cfs, drop, folder, as_json)


_Named = dict[tuple[str, str], dict[str, Any]]


def _fixed(cfs: tuple[float, ...], corrected: str) -> _Named:
    common = {"policy": "fixed", "gain": "signal", "probe": cfs}
    named: _Named = {("fixed", "dense"): {**common, "cf": 1.0, "memory": corrected}}
    for memory in ("residual", corrected):
        for cf in cfs:
            named["fixed", f"{memory} {cf:g}"] = {**common, "cf": cf, "memory": memory}
    return named


def _moved(cfs: tuple[float, ...], drop: int, corrected: str) -> _Named:
    named: _Named = {}
    for first, then in (cfs[-2:], cfs[:-3:-1]):
        named["moved", f"{first:g} then {then:g}"] = {
            "policy": "schedule",
            "schedule": (f"0:{first:g}", f"{drop}:{then:g}"),
            "gain": "signal",
            "memory": corrected,
            "cf_range": (cfs[0], cfs[-1]),
        }
    return named


def _chosen(cfs: tuple[float, ...], epsilons: tuple[float, ...], how: dict[str, Any]) -> _Named:
    return {
        ("chosen", f"{gain} {epsilon:g}"): {
            "policy": "gravac",
            "gain": gain,
            "epsilon": epsilon,
            "cf_range": (cfs[0], cfs[-1]),
            **how,
        }
        for gain in get_args(GainKind)
        for epsilon in epsilons
    }


def _config(
    common: dict[str, Any], options: dict[str, Any], folder: Path, label: str, seed: int
) -> TrainConfig:
    name = f"{options['policy']} {label} seed{seed}".replace(" ", "-")
    own = {
        "base": BASE,
        "granularity": "layer",
        "seed": seed,
        "log_dir": str(folder / "runs" / name),
    }
    return make_config({**common, **options, **own})
