"""Golden runs: what whole runs do to the last bit, written down, so that later work is held to it.

    python -m tests.integration.golden            makes golden.json anew
    python -m tests.integration.golden --print    prints what it would hold

Every run is trained for 60 steps on simulated ranks, threads of one process, under a modelled
clock: nothing is measured, so a run goes the same way on a busy machine as on an idle one. How a
processor rounds is pinned by environment variables (`PINNED`), which must be set before torch and
NumPy are imported: the command therefore starts itself again with them. What remains of a
machine's own arithmetic is in the `fingerprint`, made of plain torch and NumPy operations: where it
differs, other numbers say nothing of our code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

from adaptive import (
    Accordion,
    AdaptiveCompressor,
    Delayed,
    Fixed,
    Goodput,
    Gossip,
    GraVAC,
    LinkSpec,
    LocalSteps,
    MemoryTimeline,
    Momentum,
    Network,
    ParameterServer,
    Policy,
    Schedule,
    Warmup,
)
from adaptive.memory.options import Memory
from runs.modelled_clock import ModelledClock
from runs.simulate.ranks import WorkerError, run_ranks
from tests.integration.commands import ROOT

FILE = Path(__file__).with_name("golden.json")
STEPS = 60
LOOKS = (1, 20, 40, 60)
"""The steps after which parameters are looked at: which one differs first says where to look."""

PINNED = {
    "ATEN_CPU_CAPABILITY": "default",  # torch's own kernels without AVX2, AVX-512
    "DNNL_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",  # MKL: the same bits on Intel and AMD
    "MKL_NUM_THREADS": "1",
    # By the names of NumPy 2.4 and of those before; it says at its import which it does not know.
    "NPY_DISABLE_CPU_FEATURES": (
        "X86_V3 X86_V4 AVX512_ICL AVX512_SPR AVX2 FMA3 AVX512F AVX512CD AVX512_SKX"
    ),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "Prescott",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}


@dataclass(frozen=True)
class Run:
    """One golden run: what `AdaptiveCompressor` is given, and on how many ranks.

    momentum: of the SGD optimizer, which is handed over; with "updates" it is AdamW. unused: every
    fifth step leaves a layer out (find_unused_parameters). apart: the ranks' parameters differ.
    saved: everything is made anew after step 30, and takes up what was saved.
    """

    policy: Callable[[], Policy]
    base: str
    memory: str | Memory
    exchange: str | ParameterServer
    granularity: str
    ranks: int = 2
    cf_range: tuple[float, float] = (4, 64)
    momentum: float = 0.9
    unused: bool = False
    apart: bool = False
    saved: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def _gravac(**settings: Any) -> Policy:
    return GraVAC(**{"window": 4, "dense_window": 3, "cooldown": 4, "omega": 0.3, **settings})


def _goodput() -> Policy:
    return Goodput(goal="time", opening=3, cooldown=3)


def _fixed() -> Policy:
    return Fixed()


RUNS: dict[str, Run] = {
    # The policies, mostly over the compressor that is the default
    "defaults": Run(_goodput, "topk", "auto", "auto", "auto"),
    "goodput": Run(_goodput, "redsync", "residual", "sharded", "bucket"),
    "gravac": Run(_gravac, "topk+bf16", "residual", "sharded", "bucket", ranks=3),
    "gravac, error-fed gain": Run(
        lambda: _gravac(gain="error_fed", epsilon=0.2), "dgc", "momentum", "all_gather", "bucket"
    ),
    "accordion": Run(
        lambda: Accordion(interval=6, eta=0.2), "topk+fp32", "momentum", "voted_indices", "bucket"
    ),
    "accordion, by layer": Run(
        lambda: Accordion(interval=6, eta=0.2, per_layer=True), "topk", "none", "sharded", "layer"
    ),
    "warmup": Run(
        lambda: Warmup(_gravac(), steps=20), "topk+int8", "residual", "all_gather", "bucket"
    ),
    "schedule": Run(
        lambda: Schedule({0: 1.0, 7: 8.0, 23: 40.0, 41: 1.0, 44: 16.0}),
        "topk+fp32",
        "residual",
        "voted_indices",
        "bucket",
        ranks=3,
        unused=True,
    ),
    "a layer left out": Run(_goodput, "topk", "momentum", "all_gather", "bucket", unused=True),
    "adamw": Run(_goodput, "topk", "updates", "all_gather", "bucket", ranks=3),
    "votes": Run(_goodput, "topk", "updates", "voted_indices", "bucket", ranks=4),
    "gravac of the paper": Run(
        lambda: GraVAC.paper(window=6, epsilon=0.3), "dgc+fp32", "residual", "all_gather", "layer"
    ),
    "accordion of the paper": Run(
        lambda: Accordion.paper(4, 64, interval=10, epoch=4, eta=0.2),
        "topk+fp32",
        "residual",
        "all_gather",
        "layer",
    ),
    # The other compressors
    "adacomp": Run(_gravac, "adacomp", "residual", "all_gather", "bucket"),
    "bf16": Run(_fixed, "bf16", "none", "all_reduce", "bucket", cf_range=(2, 2)),
    "fp16": Run(_fixed, "fp16", "auto", "all_reduce", "layer", ranks=3, cf_range=(2, 2)),
    "int8": Run(_fixed, "int8", "residual", "sharded", "bucket", ranks=3, cf_range=(4, 4)),
    "int4": Run(_fixed, "int4", "residual", "sharded", "layer", ranks=3, cf_range=(8, 8)),
    "natural": Run(_gravac, "natural", "none", "all_gather", "layer"),
    "none": Run(_fixed, "none", "none", "all_reduce", "bucket", ranks=4),
    "onebit": Run(_gravac, "onebit", "residual", "all_gather", "layer"),
    "powersgd": Run(_gravac, "powersgd", "momentum", "all_reduce", "layer", ranks=4),
    "qsgd": Run(_gravac, "qsgd", "auto", "all_gather", "bucket"),
    "randomk": Run(
        lambda: _gravac(epsilon=0.05), "randomk", "residual", "all_reduce", "bucket", ranks=4
    ),
    "randomk, sharded": Run(_gravac, "randomk", "momentum", "sharded", "layer", ranks=3),
    "sidco": Run(_goodput, "sidco", "momentum", "all_gather", "bucket", ranks=3),
    "signsgd": Run(_gravac, "signsgd", "residual", "all_gather", "layer", unused=True),
    "sketch": Run(
        _gravac, "sketch", "residual", "all_reduce", "layer", options={"dense_below": 50}
    ),
    "terngrad": Run(_fixed, "terngrad", "none", "all_gather", "layer", cf_range=(16, 16)),
    "threshold": Run(_gravac, "threshold", "residual", "all_gather", "bucket"),
    "twobit": Run(_gravac, "twobit", "residual", "sharded", "layer"),
    # Ranks that step by themselves
    "local steps": Run(
        _goodput, "topk", "auto", "auto", "auto", 3, apart=True, options={"sync": LocalSteps(4)}
    ),
    "local steps, no overlap": Run(
        _goodput,
        "topk+bf16",
        "auto",
        "sharded",
        "auto",
        3,
        apart=True,
        options={"sync": LocalSteps(3, 0.7, 0.5, overlap=0)},
    ),
    "local steps, auto": Run(
        _goodput,
        "topk",
        "updates",
        "auto",
        "auto",
        cf_range=(4, 8),  # where no larger CF is left, local steps are next
        apart=True,
        options={"sync": LocalSteps("auto")},
    ),
    "delay": Run(
        _goodput, "topk", "auto", "auto", "auto", 3, apart=True, options={"sync": Delayed(2)}
    ),
    "gossip, d-psgd": Run(
        _fixed, "none", "auto", "auto", "auto", 4, apart=True, options={"sync": Gossip("ring")}
    ),
    "gossip, choco-sgd": Run(
        _fixed,
        "topk",
        "auto",
        "auto",
        "auto",
        4,
        apart=True,
        options={"sync": Gossip(algorithm="choco-sgd")},
    ),
    "gossip, dcd-psgd every 3 steps": Run(
        _fixed,
        "qsgd",
        "auto",
        "auto",
        "auto",
        4,
        apart=True,
        options={"sync": Gossip("exponential", every=3)},
    ),
    # What else there is
    "server with its own memory": Run(
        _fixed,
        "onebit",
        "residual",
        ParameterServer(own_memory=True),
        "layer",
        3,
        cf_range=(30, 30),
    ),
    "means come back dense": Run(
        _goodput, "topk", "residual", ParameterServer(down_cf=1), "bucket", 3
    ),
    "a hook as a rung": Run(
        lambda: Schedule({0: 1.0, 9: 16.0, 30: 4.0, 45: 16.0}),
        "topk",
        "momentum",
        "all_gather",
        "layer",
        options={"hooks": {4.0: default_hooks.bf16_compress_hook}},
    ),
    "clipped": Run(_goodput, "dgc", Momentum(clip_norm=0.1), "all_gather", "bucket", 3),
    "adamw, a layer left out": Run(_goodput, "topk", "updates", "auto", "auto", unused=True),
    "saved, residual": Run(_goodput, "topk", "residual", "auto", "auto", 3, saved=True),
    "saved, momentum": Run(_goodput, "topk", "momentum", "sharded", "auto", 3, saved=True),
    "saved, updates": Run(_goodput, "topk", "updates", "auto", "auto", 3, saved=True),
}


class _Net(nn.Module):
    """2,243 parameters in five tensors; several buckets, and a layer that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 40), nn.Linear(40, 3)
        self.sometimes = nn.Linear(40, 40, bias=False)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(self.sometimes(hidden).relu() if whole else hidden)


class _Training:
    """Model, optimizer and compressor of one rank."""

    def __init__(self, run: Run, timeline: MemoryTimeline) -> None:
        torch.manual_seed(17)
        self.model = DDP(_Net(), bucket_cap_mb=0.004, find_unused_parameters=run.unused)
        self.optimizer: Optimizer = AdamW(self.model.parameters())
        if run.memory != "updates":
            self.optimizer = SGD(
                self.model.parameters(), lr=0.02, momentum=run.momentum, weight_decay=0.001
            )
        self.compressor = AdaptiveCompressor(
            run.base,
            run.cf_range,
            policy=run.policy(),
            memory=run.memory,
            exchange=run.exchange,
            granularity=run.granularity,
            network=Network(clock=ModelledClock(0.01, LinkSpec(2e6, 0.001))),
            timeline=timeline,
            **run.options,
        ).attach(self.model, optimizer=self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        state = {"compressor": self.compressor.state_dict()}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.compressor.load_state_dict(state["compressor"])


def train(run: Run, rank: int) -> dict[str, Any]:
    """One rank of a run; what is to be written down of it."""
    timeline = MemoryTimeline()
    training = _Training(run, timeline)
    looks = []
    for step in range(STEPS):
        if run.saved and step == STEPS // 2:
            state = training.state_dict()
            training.compressor.detach()
            training = _Training(run, timeline)
            training.load_state_dict(state)
        for group in training.optimizer.param_groups:
            group["lr"] = 0.02 if step < 40 else 0.004
        x, y = batch(step, rank)
        training.optimizer.zero_grad()
        whole = not run.unused or step % 5 != 3
        (training.model(x, whole) - y).square().mean().backward()
        training.optimizer.step()
        if step + 1 in LOOKS:
            looks.append(digest(training.model.parameters()))
    training.compressor.close()
    return written_down(looks, timeline)


def written_down(looks: list[str], timeline: MemoryTimeline) -> dict[str, Any]:
    """What is compared of a rank's run. looks: digests of its parameters."""
    records = timeline.steps
    return {
        "parameters": looks,
        "cfs": stretches(record.report.cf for record in records),
        "layer_cfs": stretches(dict(record.layer_cfs) for record in records),
        "bytes": stretches(record.report.wire_bytes for record in records),
    }


def train_all() -> dict[str, Any]:
    """Every run, and what it is to be compared by; two at a time. RuntimeError if ranks differ."""
    # Nothing has run in this process yet, so there are no threads that a fork would lose.
    with get_context("fork").Pool(2) as pool:
        return dict(zip(RUNS, pool.map(_train, RUNS, chunksize=1), strict=True))


def _train(name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    logging.getLogger("adaptive").setLevel(logging.ERROR)  # what policies conclude
    run = RUNS[name]
    try:
        ranks = run_ranks(run.ranks, lambda rank, _: train(run, rank))
    except WorkerError as error:  # which would not find its way back from a process of the pool
        raise RuntimeError(f"{name}: {error}") from None
    looks = [each["parameters"] for each in ranks]
    if any(each != looks[0] for each in looks) != run.apart:
        raise RuntimeError(f"{name}: the ranks' parameters are {'' if run.apart else 'not '}alike")
    if run.apart:  # all of them
        return {**ranks[0], "parameters": list(map(list, zip(*looks, strict=True)))}
    return ranks[0]  # which keeps the record


def fingerprint() -> str:
    """Of this machine's arithmetic, by operations that are not ours."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(67, 93, generator=generator)
    flat, array = x.flatten(), x.numpy()
    results = [
        x @ x.T,
        torch.nn.functional.linear(x[:8, :12], x[:40, :12], x[0, :40]),
        torch.dot(flat, flat),
        flat.sum(),
        flat.double().sum(),
        flat.norm(),
        flat.exp(),
        torch.linalg.qr(x[:, :4])[0],
        torch.add(flat, flat.flip(0), alpha=-0.02),
        torch.randn(7, generator=generator),
    ]
    results += [torch.as_tensor(each) for each in (array @ array.T, np.exp(array), array.sum())]
    results += [torch.as_tensor(np.dot(array.ravel(), array.ravel())), torch.as_tensor(np.log2(7))]
    return digest(results)


def pinned() -> bool:
    """This process began with arithmetic pinned."""
    return all(os.environ.get(name) == value for name, value in PINNED.items())


def exact_sqrt(x: Tensor) -> Tensor:
    """The square root by NumPy, which is exact. torch's is MKL's, also where it is written as a
    power: on some processors it errs in the last bit of one element in five."""
    if type(x) is Tensor and x.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.asarray(np.sqrt(x.detach().numpy())))
    return x.double().pow(0.5).to(x.dtype)  # a DTensor, or half precision: exact once rounded


if pinned():
    torch.Tensor.sqrt = exact_sqrt  # type: ignore[method-assign, assignment]
    torch.Tensor.sqrt_ = lambda x: x.copy_(exact_sqrt(x))  # type: ignore[method-assign, assignment]


def as_text(golden: Mapping[str, Any]) -> str:
    """The file: a line for each entry of a run, so that a change can be read in a diff."""
    lines = []
    for name, run in golden["runs"].items():
        entries = ",\n".join(f"      {json.dumps(k)}: {json.dumps(v)}" for k, v in run.items())
        lines.append(f"    {json.dumps(name)}: {{\n{entries}\n    }}")
    runs = ",\n".join(lines)
    machine = json.dumps(golden["fingerprint"])
    return f'{{\n  "fingerprint": {machine},\n  "runs": {{\n{runs}\n  }}\n}}\n'


def command(module: str, file: Path, train: Callable[[], dict[str, Any]]) -> None:
    """The command line of a module whose runs `train` makes."""
    help_ = sys.modules["__main__"].__doc__
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=help_)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--print", action="store_true", help="to stdout, and leave the file alone")
    args = parser.parse_args()
    if not pinned():
        words = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, **PINNED})
    runs = train()
    text = as_text({"fingerprint": fingerprint(), "runs": runs})
    if args.print:
        print(text, end="")
    else:
        file.write_text(text, encoding="utf-8")
        print(f"{len(runs)} runs written to {file}")


def runs_now(module: str, file: Path) -> dict[str, Any]:
    """What a module's runs do now, in a process whose arithmetic is pinned. Skips the test where
    `file` was made on a machine that rounds differently."""
    words = [sys.executable, "-m", module, "--print"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    golden = json.loads(done.stdout)
    if golden["fingerprint"] != json.loads(file.read_text(encoding="utf-8"))["fingerprint"]:
        pytest.skip(
            f"plain torch and NumPy operations round differently here than where {file.name} was "
            f"made (another version or kind of processor): python -m {module}, on a commit that is "
            f"known to be right, makes one for this machine"
        )
    runs: dict[str, Any] = golden["runs"]
    return runs


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Made of whole numbers: sines and normal numbers are rounded by every library in its way."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randint(-8, 9, (8, 12), generator=generator).float() / 8
    return x, (x[:, :3] * x[:, 3:6] * (1 + rank)).contiguous()


def digest(tensors: Iterable[Tensor]) -> str:
    """Of their bytes, in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def stretches(values: Iterable[Any]) -> list[list[Any]]:
    """[how many in a row, what], in order."""
    return [[len(list(group)), value] for value, group in groupby(values)]


if __name__ == "__main__":
    command("tests.integration.golden", FILE, train_all)
