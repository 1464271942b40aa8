"""What the help of commands says of the library and of torch: written down here, so that help and
wrong options need not wait for torch. A test holds it to what the library has."""

from __future__ import annotations

OPTIMIZERS = ("sgd", "adamw", "adam", "nadam", "radam", "rmsprop", "adagrad")
WITH_BETAS = ("adamw", "adam", "nadam", "radam")
BETAS = (0.9, 0.95)
"""As people train transformers; torch's own second one is 0.999."""

ADAMW_DECAY = 0.1
LR, ADAGRAD_LR = 1e-3, 1e-2
"""Of every optimizer but SGD, for which each task has its own."""

LR_SCHEDULES = ("constant", "cosine", "linear")

EXCHANGES = (
    "auto",
    "all_reduce",
    "all_gather",
    "sharded",
    "voted_indices",
    "shared_indices",
    "shared_indices_by_energy",
    "gossip",
)
TOPOLOGIES = ("ring", "torus", "exponential", "one_peer", "complete")
GOSSIP_ALGORITHMS = ("auto", "d-psgd", "dcd-psgd", "deepsqueeze", "choco-sgd", "naive")

DDP_HOOKS = ("bf16", "powersgd")
"""PyTorch's own, see `runs/ddp_hooks.py`."""

OUTER_LR, OUTER_MOMENTUM = 1.0, 0.0
"""Of local steps."""

COMPRESSORS = (
    *("adacomp", "bf16", "dgc", "fp16", "int8", "natural", "none", "onebit", "powersgd", "qsgd"),
    *("randomk", "redsync", "sidco", "signsgd", "sketch", "terngrad", "threshold", "topk"),
    "twobit",
)
