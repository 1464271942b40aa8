"""The options of `python -m runs train`, and the configuration that they make."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from runs.choices import (
    ADAGRAD_LR,
    ADAMW_DECAY,
    BETAS,
    COMPRESSORS,
    DDP_HOOKS,
    EXCHANGES,
    GOSSIP_ALGORITHMS,
    LR,
    LR_SCHEDULES,
    OPTIMIZERS,
    OUTER_LR,
    OUTER_MOMENTUM,
    TOPOLOGIES,
)
from runs.config import TrainConfig
from runs.netlab.lab import Lab
from runs.option_rules import check_optimizer, check_together
from runs.parser import (
    below_one,
    number,
    positive,
    switch,
    switch_or_number,
    whole,
    whole_or_auto,
)
from runs.policy_options import (
    POLICY_OPTIONS,
    add_policy_arguments,
    check_expression,
    policy_for,
    set_schedule,
)

RESUME_OPTIONS = ("steps", "eval_every", "checkpoint_every", "workers", "json", "expression")
EMULATED = "emulate a slow network"
NEWEST = ""

HELP = """\
Train a model with adaptive gradient compression, on several workers.

examples:
  python -m runs train
      a byte-level LSTM on Python's own sources, two workers, goodput over top-k
  python -m runs train --link 100mbit --steps 500
      the same as if the workers were joined by 100 Mbit/s (emulated): compression pays
  python -m runs train --cf 100
      one compression factor all along; --policy off is plain DDP without the library
  python -m runs train --model gpt --optimizer adamw --warmup 30 --lr-schedule cosine --clip-grad 1
      as people train transformers: betas 0.9 0.95, weight decay 0.1
  python -m runs train --model gpt --data FILE --init logs/base --lora 8 --optimizer adamw
      fine-tune what the run in logs/base has learnt, with low-rank adapters
  python -m runs train --task cifar10 --data DIR --model resnet20 --policy accordion
  python -m runs train --checkpoint-every 100 --log-dir logs/mine
  python -m runs train --resume logs/mine --steps 1000
      go on where it stopped, with the same options; up to step 1000 in all
  torchrun --nproc-per-node 4 -m runs train --workers 4
      under torchrun the processes are there already; --workers may be left out

Ctrl-C stops all workers after the step they are in and saves a checkpoint (exit code 130); a
second Ctrl-C ends at once. Wrong options end with exit code 2, a failed worker with 1. A run that
diverges, by its loss or its parameters, stops with 3 and keeps the last checkpoint before. One
whose result or last checkpoint cannot be written, on a full disk, trains to the end and ends with
4: records that cannot be written are dropped with a warning."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options; what is not given is not in the namespace."""
    parser.argument_default = argparse.SUPPRESS
    add_task_arguments(parser)
    add_hook_arguments(parser)
    add_policy_arguments(parser)
    output = add_output_arguments(parser)
    add_clock_argument(output)
    add_size_argument(output, "with --fixed-clock, step times")
    add_server_argument(output, "with --fixed-clock,")
    add_one_worker_argument(output)


def add_task_arguments(
    parser: argparse.ArgumentParser, seed: bool = True, workers: str = "processes (2)"
) -> None:
    """What to train and for how long. seed: with the option for one seed. workers: what they
    are."""
    what = parser.add_argument_group("what to train")
    what.add_argument("--task", metavar="TASK", help=_TASK_HELP)
    what.add_argument(
        "--model",
        help="text: lstm, gpt, gpt-10m; images: resnet8, resnet20, ..., resnet101, vgg16; words: "
        "lstm-small, lstm-medium, lstm-large, lstm-2x1500 (the task's first)",
    )
    what.add_argument(
        "--data",
        metavar="DIR",
        help="text file or folder, or the folder of the image data set in its standard format; for "
        "words a folder with train.txt, valid.txt, test.txt, as WikiText-2",
    )
    what.add_argument(
        "--init",
        metavar="RUN",
        help="folder of a run of the same task and model: start with the weights of its checkpoint "
        "(random weights)",
    )
    what.add_argument(
        "--lora",
        type=whole(1),
        metavar="RANK",
        help="freeze all weights, and train adapters of this rank beside the linear layers of a "
        "transformer's blocks (all weights are trained)",
    )
    what.add_argument("--workers", type=whole(1), metavar="N", help=workers)
    what.add_argument("--steps", type=whole(1), metavar="N", help="steps in all (300)")
    what.add_argument("--batch-size", type=whole(1), metavar="N", help="items a worker a step")
    if seed:
        what.add_argument("--seed", type=whole(0), help="of weights, order, augmentation (0)")
    what.add_argument("--threads", type=whole(1), metavar="N", help="CPU threads a worker (1)")
    _add_optimizer_arguments(parser)


def _add_optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    """The optimizer, and how its learning rate goes."""
    how = parser.add_argument_group("how to optimize")
    how.add_argument(
        "--optimizer", choices=list(OPTIMIZERS), help="the class of torch.optim of that name (sgd)"
    )
    how.add_argument(
        "--lr",
        type=positive,
        help="learning rate of the optimizer (sgd: the task's own; "
        f"adagrad: {ADAGRAD_LR:g}; others: {LR:g})",
    )
    how.add_argument(
        "--warmup",
        type=whole(0),
        metavar="STEPS",
        help="the learning rate rises to its value in even steps over so many steps (0)",
    )
    how.add_argument(
        "--lr-schedule",
        choices=LR_SCHEDULES,
        help="how the learning rate goes on after the warm-up: cosine and linear reach 0 at the "
        "last of --steps (constant)",
    )
    how.add_argument(
        "--lr-drop",
        type=whole(1),
        nargs="+",
        metavar="STEP",
        help="a tenth of it from this step on, and again from each further one (never)",
    )
    how.add_argument("--momentum", type=below_one, help="of sgd alone, in [0, 1) (0.9)")
    how.add_argument(
        "--betas",
        type=below_one,
        nargs=2,
        metavar=("B1", "B2"),
        help="of adamw, adam, nadam and radam, in [0, 1) "
        f"({BETAS[0]:g} {BETAS[1]:g}, as people train transformers)",
    )
    how.add_argument(
        "--weight-decay",
        type=_not_negative,
        metavar="X",
        help="of the optimizer; adamw leaves out tensors of fewer than two dimensions (sgd: the "
        f"task's own; adamw: {ADAMW_DECAY:g}; others: 0)",
    )
    how.add_argument(
        "--clip-grad",
        type=positive,
        metavar="NORM",
        help="clip the exchanged gradients before the optimizer's step, by torch's "
        "clip_grad_norm_; with sgd this ends momentum correction, which --clip-norm keeps (none)",
    )
    how.add_argument(
        "--clip-local",
        type=positive,
        metavar="NORM",
        help="clip each worker's gradient, as one vector, to NORM / sqrt(workers) before it is "
        "compressed, as Deep Gradient Compression does; takes a second backward pass (none)",
    )
    how.add_argument(
        "--patience",
        type=whole(0),
        metavar="N",
        help="early stopping: end after N evaluations in a row (--eval-every) that were no better "
        "than the best, and take the best model (0: never)",
    )


def add_hook_arguments(parser: argparse.ArgumentParser, link: str = EMULATED) -> None:
    """How to compress. link: what that option does."""
    how = parser.add_argument_group("how to compress")
    how.add_argument(
        "--policy",
        choices=list(POLICY_OPTIONS),
        help="what chooses the compression factor, CF (the policy whose settings are given, such "
        "as --cf; else goodput, or gravac for a base that does not keep the largest elements); "
        "off: plain DDP, no hook",
    )
    how.add_argument(
        "--ddp-hook",
        choices=DDP_HOOKS,
        help="with --policy off, PyTorch's own hook: bf16 (bf16_compress_hook) or powersgd "
        "(powerSGD_hook of rank 4, dense in its first 2 steps, in one bucket)",
    )
    how.add_argument(
        "--layerwise",
        type=switch,
        metavar="on|off",
        help="share the bytes of the policy's CF out among the layers, so that least waits (off); "
        "--policy layerwise: those of gravac's",
    )
    how.add_argument(
        "--base",
        metavar="NAME",
        help=f"compressor (topk): {', '.join(COMPRESSORS)}; a sparsifier's values "
        "travel in 4 bits, or as its name says: topk+fp32, topk+bf16, ...",
    )
    how.add_argument(
        "--cf-range",
        type=number,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="smallest and largest CF beside dense (10 1000)",
    )
    how.add_argument(
        "--exchange", help=f"how payloads become the mean: {', '.join(EXCHANGES)} (auto)"
    )
    how.add_argument(
        "--down-cf",
        type=number,
        metavar="CF",
        help="with --exchange sharded: of the means on their way back; 1: compressed on the way up "
        "only (that of the gradients)",
    )
    how.add_argument(
        "--server-memory",
        type=switch,
        metavar="on|off",
        help="with --exchange sharded: what compressing a mean loses waits by itself for the next "
        "mean, not in the residual of the worker that has compressed it (off)",
    )
    how.add_argument(
        "--granularity",
        help="compress tensor by tensor (layer), or a whole bucket as one (bucket); auto: bucket "
        "where the base keeps the largest elements of all (auto)",
    )
    how.add_argument(
        "--rungs",
        type=switch,
        metavar="on|off",
        help="of goodput with a sparsifier: below cf-range it also finds CF 2 (bf16) and 4 (int8) "
        "(on)",
    )
    how.add_argument(
        "--local-steps",
        type=whole_or_auto(1),
        metavar="H",
        help="each worker takes H steps by itself between two exchanges; auto: as goodput chooses, "
        "with adamw and others like it (1)",
    )
    how.add_argument(
        "--outer-lr",
        type=positive,
        metavar="LR",
        help=f"of local steps: by how much of their mean all workers move ({OUTER_LR:g})",
    )
    how.add_argument(
        "--outer-momentum",
        type=number,
        metavar="M",
        help=f"of local steps: Nesterov momentum of these moves ({OUTER_MOMENTUM:g})",
    )
    how.add_argument(
        "--overlap",
        type=whole(0),
        metavar="N",
        help="of local steps: so many may pass while an exchange is under way (half of them)",
    )
    how.add_argument(
        "--delay",
        type=whole(0),
        metavar="D",
        help="each worker takes its own step at once, and the mean of all takes the place of that "
        "D steps later: up to D exchanges are under way while they compute (0)",
    )
    how.add_argument(
        "--dense-below",
        type=whole(0),
        metavar="N",
        help="send tensors of fewer elements than this uncompressed (0)",
    )
    how.add_argument(
        "--memory", help="auto, residual, momentum or none: what becomes of what is not sent (auto)"
    )
    how.add_argument(
        "--residual-dtype",
        choices=("float32", "bfloat16"),
        help="what is not sent waits in this; bfloat16 takes half the memory, not with momentum "
        "correction (float32)",
    )
    how.add_argument(
        "--momentum-lag",
        type=number,
        metavar="SHARE",
        help="share of the momentum's lag that velocities keep while gradients are compressed, in "
        "(0, 1] (1.2 / CF^(1/3) where the base keeps the largest elements; with dgc and others 1)",
    )
    how.add_argument(
        "--masking",
        type=switch_or_number,
        metavar="on|off|CF",
        help="momentum factor masking, always, never, or from a CF on (off, with dgc on)",
    )
    how.add_argument(
        "--clip-norm",
        type=positive,
        metavar="NORM",
        help="clip local gradients, each parameter's at NORM / sqrt(workers)",
    )
    how.add_argument(
        "--shadow-sample",
        type=number,
        metavar="SHARE",
        help="of the elements, what the gains of all CFs are told from, in (0, 1] (0.015625)",
    )
    how.add_argument(
        "--checksum",
        type=switch,
        metavar="on|off",
        help="a checksum behind each payload, so that bytes changed on the way end the run (off)",
    )
    how.add_argument(
        "--topology",
        choices=TOPOLOGIES,
        help="with --exchange gossip: who a worker's neighbours are (ring)",
    )
    how.add_argument(
        "--gossip",
        choices=GOSSIP_ALGORITHMS,
        help="with --exchange gossip: how (d-psgd with --base none, dcd-psgd where the base is "
        "unbiased, else choco-sgd)",
    )
    how.add_argument(
        "--consensus-step",
        type=positive,
        metavar="ETA",
        help="of deepsqueeze and choco-sgd: the share of its neighbours' weighted difference that "
        "a worker moves by, in (0, 1] (2 / CF and 5 / CF, at most 1)",
    )
    add_link_argument(how, link)


def add_link_argument(group: argparse._ArgumentGroup, what: str = EMULATED) -> None:
    """The network, and what is done about it."""
    group.add_argument(
        "--link",
        metavar="RATE[,LATENCY]",
        help=f"{what} between the workers, e.g. 100mbit or 1gbit,5ms",
    )


def add_server_argument(group: argparse._ArgumentGroup, what: str) -> None:
    """A parameter server, which nobody has here: it is modelled."""
    group.add_argument(
        "--server",
        metavar="RATE[/RATE]",
        help=f"{what} a server makes the means, and its link, e.g. 1gbit or 1gbit/500mbit (up and "
        "down), carries what all workers send and are sent; --exchange is sharded, or all_reduce "
        "(the workers themselves make them)",
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What is kept; the group of these options."""
    output = parser.add_argument_group("what is kept")
    output.add_argument(
        "--log-dir", metavar="DIR", help="where the files of this run go (logs/TASK-POLICY-TIME)"
    )
    add_eval_argument(output, "0: at the end only")
    output.add_argument(
        "--checkpoint-every",
        type=whole(0),
        metavar="N",
        help="save a checkpoint every N steps and at the end (0: only when interrupted)",
    )
    output.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="LOGDIR",
        help="go on from "
        "the checkpoint in LOGDIR (the newest in logs/), with its options; only "
        "--steps, --eval-every, --checkpoint-every, --json can be given anew, and --workers, to go "
        "on with another number of them; an --expression that "
        "names a class of your own has to be given again",
    )
    output.add_argument(
        "--json", action="store_true", help="print the result as JSON on stdout, all else on stderr"
    )
    add_densities_argument(output)
    return output


def add_densities_argument(group: argparse._ArgumentGroup) -> None:
    """How often gradients are looked at."""
    group.add_argument(
        "--densities",
        type=whole(0),
        metavar="N",
        help="every N steps, keep histograms of the gradient before and after compression, for "
        "`report` (0: never)",
    )


def add_eval_argument(group: argparse._ArgumentGroup, default: str) -> None:
    """How often quality is measured."""
    group.add_argument(
        "--eval-every",
        type=whole(0),
        metavar="N",
        help=f"measure quality on held-out data every N steps ({default})",
    )


def add_clock_argument(group: argparse._ArgumentGroup) -> None:
    """What makes a run repeatable to the bit."""
    group.add_argument(
        "--fixed-clock",
        type=positive,
        metavar="SECONDS",
        help="nothing waits: step times are modelled, so much and what --link takes for the bytes",
    )


def add_size_argument(group: argparse._ArgumentGroup, what: str) -> None:
    """What a small model stands for."""
    group.add_argument(
        "--model-mb",
        type=positive,
        metavar="MB",
        help=f"{what} as if the gradients were so large (ResNet-101 170, VGG-16 528, a large LSTM "
        f"252)",
    )


def add_one_worker_argument(group: argparse._ArgumentGroup) -> None:
    """What scaling efficiency is measured by."""
    group.add_argument(
        "--one-worker-seconds",
        type=positive,
        metavar="SECONDS",
        help="of a step with --workers 1 and the same batch a worker (1 / its steps/s): tells "
        "scaling efficiency",
    )


def make_config(given: dict[str, Any]) -> TrainConfig:
    """The configuration of a new run. UsageError for options that do not go together."""
    given = dict(given)
    policy = given.setdefault("policy", policy_for(given))
    if "server" in given and given.get("exchange", "auto") == "auto":
        given["exchange"] = "all_reduce" if given.get("base") == "none" else "sharded"
    check_together(policy, given)
    if policy == "off":
        given["base"] = None
    if "cf_range" in given:
        given["cf_range"] = tuple(given["cf_range"])
    if "probe" in given:
        given["probe"] = tuple(given["probe"])
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    if isinstance(drops := given.get("lr_drop"), list):
        given["lr_drop"] = drops[0] if len(drops) == 1 else tuple(drops)
    if policy == "schedule":
        set_schedule(given)
    if policy == "expression":
        check_expression(given)
    lab = Lab.of_environment()
    if lab is not None:
        given["netlab"] = lab.options
    given.setdefault("log_dir", _new_folder(f"{given.get('task', 'text')}-{policy}"))
    config = TrainConfig(**given)
    check_optimizer(config)
    return config


def _not_negative(text: str) -> float:
    """An argument type: a number >= 0."""
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text!r}")
    return value


def _new_folder(name: str) -> str:
    """A folder's name; whoever makes it sees whether it is there already."""
    return str(Path("logs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"))


_TASK_HELP = "text (bytes, no download), words, cifar10, cifar100 or fashion-mnist (text)"
