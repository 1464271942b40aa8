"""The settings of a run: each once, with its type, its default and its help, in groups that the
commands share. `TrainConfig` has them all; `parser.options` makes a command's options of them.

None takes the default of the task or the library. Names of the library and of torch are written
down here, so that help need not wait for torch; a test holds them to what the library has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from runs.expression import Typed
from runs.option_types import (
    BelowOne,
    Count,
    NotNegative,
    Number,
    Pair,
    Positive,
    Rate,
    Seed,
    Switch,
    TwoBelowOne,
    Whole,
    at_least,
    metavar,
    spec,
)

OptimizerName = Literal["sgd", "adamw", "adam", "nadam", "radam", "rmsprop", "adagrad", "muon"]
WITH_MOMENTUM = ("sgd", "muon")
WITH_BETAS = ("adamw", "adam", "nadam", "radam", "muon")
BETAS = (0.9, 0.95)
"""As people train transformers; torch's own second one is 0.999."""

DECAY = 0.1
"""Of adamw and muon."""

LR, ADAGRAD_LR = 1e-3, 1e-2
"""Of every optimizer but SGD, for which each task has its own."""

COMPRESSORS = (
    *("adacomp", "bf16", "dgc", "fp16", "int4", "int8", "natural", "none", "onebit", "powersgd"),
    *("qsgd", "randomk", "redsync", "sidco", "signsgd", "sketch", "terngrad", "threshold", "topk"),
    "twobit",
)
DEFAULT_CF = 10.0
"""Of policy fixed."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What to train, and for how long."""

    task: str = "text"
    """Text (bytes, no download), words, cifar10, cifar100 or fashion-mnist."""
    model: str | None = None
    """Text: lstm, gpt, gpt-10m, gpt-121m; images: resnet8, resnet20, ..., resnet101, vgg11, vgg16;
    words: lstm-small, lstm-medium, lstm-large, lstm-2x1500 (the task's first)."""
    data: Annotated[str | None, metavar("DIR")] = None
    """Text file or folder, or the folder of the image data set in its standard format; for words a
    folder with train.txt, valid.txt, test.txt, as WikiText-2."""
    workers: Count = 2
    """Processes."""
    steps: Count = 300
    """Steps in all."""
    batch_size: Count | None = None
    """Items a worker a step (the task's)."""
    seed: Seed = 0
    """Of weights, order, augmentation."""
    threads: Count = 1
    """CPU threads a worker."""
    autocast: Switch = False
    """Forward and backward compute in bfloat16 where autocast does; parameters, gradients and what
    is exchanged stay float32."""


@dataclass(frozen=True, kw_only=True)
class Optimizing:
    """The optimizer, and how its learning rate goes."""

    optimizer: OptimizerName = "sgd"
    """The class of torch.optim of that name; muon: for the matrices of layers but the last, with
    adamw for all other parameters, at one learning rate (adjust_lr_fn="match_rms_adamw")."""
    lr: Positive | None = None
    """Learning rate (sgd: the task's own; adagrad: 0.01; others: 0.001)."""
    warmup: Whole = 0
    """The learning rate rises to its value in even steps over so many steps."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate goes on after the warm-up: cosine and linear reach 0 at the last of
    --steps."""
    lr_drop: Annotated[int | tuple[int, ...] | None, spec("STEP ...", at_least(1), "*")] = None
    """A tenth of it from this step on, and again from each further one (never)."""
    momentum: BelowOne | None = None
    """Of sgd and muon, in [0, 1) (sgd: 0.9; muon: 0.95)."""
    betas: TwoBelowOne | None = None
    """Of adamw, adam, nadam, radam and the adamw beside muon, in [0, 1) (0.9 0.95, as people train
    transformers)."""
    weight_decay: NotNegative | None = None
    """Of the optimizer; adamw leaves out tensors of fewer than two dimensions (sgd: the task's own;
    adamw and muon: 0.1; others: 0)."""
    clip_grad: Annotated[Positive | None, metavar("NORM")] = None
    """Clip the exchanged gradients, as one vector, before the optimizer's step, by torch's
    clip_grad_norm_; with sgd this ends momentum correction, which Momentum(clip_norm=...) keeps
    (none)."""
    clip_local: Annotated[Positive | None, metavar("NORM")] = None
    """Clip each worker's gradient, as one vector, to NORM / sqrt(workers) before it is compressed,
    as Deep Gradient Compression does; takes a second backward pass (none)."""
    patience: Whole = 0
    """Early stopping: end after N evaluations in a row (--eval-every) that were no better than the
    best, and take the best model (0: never)."""


@dataclass(frozen=True, kw_only=True)
class Compressing:
    """How gradients are compressed and exchanged: the arguments of AdaptiveCompressor
    (docs/settings.md)."""

    policy: Annotated[str, spec("POLICY", Typed)] = "goodput"
    """What chooses the compression factor, CF: goodput, gravac, accordion, ... by name, or with
    settings as Python writes it: "GraVAC(window=20)", "Warmup(steps=50, then=Goodput())", or
    MODULE.CLASS(...) of your own; dense: everything is sent as it is; ddp: plain DDP, without the
    library (goodput; gravac for a base that does not keep the largest elements)."""
    ddp_hook: Literal["bf16", "powersgd"] | None = None
    """With --policy ddp, PyTorch's own hook: bf16 (bf16_compress_hook) or powersgd (powerSGD_hook
    of rank 4, dense in its first 2 steps, in one bucket)."""
    base: Annotated[str | None, metavar("NAME")] = "topk"
    """Compressor: adacomp, bf16, dgc, fp16, int4, int8, natural, none, onebit, powersgd, qsgd,
    randomk, redsync, sidco, signsgd, sketch, terngrad, threshold, topk, twobit; a sparsifier's
    values travel in 4 bits, or as its name says: topk+fp32, topk+bf16, ...; or with settings as
    Python writes them: "TwoBit(threshold=0.1)", "QSGD(norm='l2', bucket=None)",
    "Ladder({4: 'int8'}, 'topk')"."""
    cf_range: Pair | None = None
    """Smallest and largest CF beside dense (10 1000)."""
    sync: Annotated[str | None, metavar("SYNC")] = None
    """How the workers keep their models together, as Python writes it: "LocalSteps(8)",
    "Delayed(2)", "Gossip('ring')" (an exchange in every step). auto: local steps if a message takes
    40 ms or more."""
    memory: str | None = None
    """What becomes of what is not sent: auto, residual, momentum, updates or none; with settings
    "Momentum(share=0.5, masking=True)", "Residual(clip_norm=1, dtype=torch.bfloat16)" (auto)."""
    exchange: str | None = None
    """How payloads become the mean: auto, all_reduce, all_gather, sharded, voted_indices; with
    settings "ParameterServer(down_cf=1)" (auto)."""
    granularity: str | None = None
    """Compress tensor by tensor (layer), or a whole bucket as one (bucket); auto: bucket where the
    base keeps the largest elements of all (auto)."""
    dense_below: Whole | None = None
    """Send tensors of fewer elements than this uncompressed (0)."""
    network: Rate | None = None
    """Emulate a slow network between the workers, e.g. 100mbit or 1gbit,5ms."""


@dataclass(frozen=True, kw_only=True)
class PolicyArguments:
    """What is asked for most."""

    cf: Number | None = None
    """The CF all along, which is --policy "Fixed(CF)"; 1 is dense (10)."""


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """What is kept, and when."""

    log_dir: Annotated[str, metavar("DIR")]
    """Where the files of this run go (logs/TASK-POLICY-TIME)."""
    eval_every: Whole = 0
    """Measure quality on held-out data every N steps (0: at the end only)."""
    checkpoint_every: Whole = 0
    """Save a checkpoint every N steps and at the end (0: only when interrupted)."""
    json: bool = False
    """Print the result as JSON on stdout, all else on stderr."""


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """With a script of your own in the task's place, behind a --: -- SCRIPT."""

    metric: Annotated[str | None, metavar("M")] = None
    """The quality, as the script reports it: what it prints, "val loss {}"; tensorboard:TAG, a
    scalar that it logs; json:KEY, of lines of JSON that it prints; FILE.jsonl:KEY, of those that it
    writes (none, which compare takes: bytes and seconds alone)."""
    better: Literal["lower", "higher"] | None = None
    """Which of two qualities is (by the metric's name: of an accuracy higher, of a loss lower)."""


@dataclass(frozen=True, kw_only=True)
class Resuming:
    """Going on with a run."""

    resume: Annotated[str | None, spec("[LOGDIR]", str, (0, 1))] = None
    """Go on from the checkpoint in LOGDIR (the newest in logs/), with its options; only --steps,
    --eval-every, --checkpoint-every, --json can be given anew, and --workers, to go on with
    another number of them; a --policy that names a class of your own has to be given again."""


@dataclass(frozen=True, kw_only=True)
class Modelling:
    """What step times are modelled by, so that a run is repeatable to the bit."""

    fixed_clock: Annotated[Positive | None, metavar("SECONDS")] = None
    """Nothing waits: step times are modelled, so much and what --network takes for the bytes."""
    model_mb: Annotated[Positive | None, metavar("MB")] = None
    """With --fixed-clock, step times as if the gradients were so large (ResNet-101 170, VGG-16 528,
    a large LSTM 252)."""
    coding: Annotated[NotNegative | None, metavar("NS")] = None
    """With --fixed-clock: nanoseconds for each gradient element that compressing and decoding take
    in a compressed step, 0 for nothing (as measured at some CFs on this machine, once)."""
    server: Annotated[str | None, metavar("RATE[/RATE]")] = None
    """With --fixed-clock, a server makes the means, and its link, e.g. 1gbit or 1gbit/500mbit (up
    and down), carries what all workers send and are sent; --exchange is sharded, or all_reduce
    (the workers themselves make them)."""
    one_worker_seconds: Annotated[Positive | None, metavar("SECONDS")] = None
    """Of a step with --workers 1 and the same batch a worker (1 / its steps/s): tells scaling
    efficiency."""
