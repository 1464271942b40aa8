"""A soak: very many steps of the kinds that a long run meets, on two real ranks.

    python -m tests.distributed.soak --steps 20000

Among plain steps, at random: pauses of a rank, evaluations, gradients accumulated under no_sync, a
layer that no rank or only one has used, gradients that are not finite (their step is skipped, as a
GradScaler does), and now and then the run stops into a checkpoint and goes on from it with a new
model, optimizer and compressor. At intervals: the replicas are the same to the bit; what was sent
and what waits to be sent add up to all gradients; memory and threads do not grow.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import random
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Goodput, GraVAC, Schedule
from compressors import Ladder
from tests.distributed.processes import run_ranks
from tests.distributed.setting import batch, small_net, waiting

CFS = (1.0, 8.0, 40.0, 100.0)
SETTINGS: dict[str, dict[str, Any]] = {
    # Without a policy so small a model would stay dense. What bf16 rounds is in no residual.
    "defaults": {
        "base": Ladder({4: "int8", 8: "int4"}, above="topk"),
        "momentum": 0.9,
        "cf_range": (10, 1000),
        "policy": Goodput,
    },
    "gravac, sharded, residual": {
        "momentum": 0.0,
        "cf_range": (4, 100),
        "policy": lambda: GraVAC(epsilon=0.2, window=20, dense_window=5),
        "exchange": "sharded",
        "memory": "residual",
    },
    "ever another CF": {
        "momentum": 0.9,
        "cf_range": (4, 100),
        "policy": lambda: Schedule({0: 8.0, **{7 * i: CFS[i % 4] for i in range(1, 3000)}}),
        "memory": "momentum",
        "granularity": "layer",
        "dense_below": 30,
    },
}
RESUMES = 5
CHECKS = 60
GROWTH = 8.0
"""MB of memory that a process may gain after its first fifth: allocators keep what they had."""


class _Net(nn.Module):
    """A part that every step uses, and one that some leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = small_net(seed=0), small_net(seed=1)
        self.nonfinite = False

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        y = self.always(x) + self.sometimes(x) if whole else self.always(x)
        if self.nonfinite:  # all gradients, so that no bucket sends anything
            y.register_hook(lambda gradient: gradient * math.nan)
        return y


class _Soak:
    """One rank's run; by parameter, sums of its gradients and of what was sent."""

    def __init__(self, rank: int, setting: str) -> None:
        self.rank = rank
        self.given = {**SETTINGS[setting]}
        self.momentum = self.given.pop("momentum")
        self.policy = self.given.pop("policy", lambda: None)
        self.total: dict[str, Tensor] = {}
        self.sent: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}  # since the last exchange
        self.skipped = self.resumed = 0
        self.begin()

    def begin(self) -> None:
        """A new model, optimizer and compressor."""
        self.module = _Net()
        self.model = DDP(self.module, bucket_cap_mb=0.004, find_unused_parameters=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=self.momentum)
        self.compressor = AdaptiveCompressor(policy=self.policy(), **self.given)
        self.compressor.attach(self.model, optimizer=self.optimizer)

    def stop_and_go_on(self, folder: str) -> None:
        """Through files, as a new process would."""
        path = Path(folder, f"state{self.rank}")
        state = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "compressor": self.compressor.state_dict(),
        }
        torch.save(state, path)
        self.compressor.close()
        self.begin()
        state = torch.load(path, weights_only=True)
        self.loss(0, True).backward()  # for DDP to order its buckets
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.compressor.load_state_dict(state["compressor"])
        self.optimizer.zero_grad()
        self.resumed += 1
        gc.collect()

    def loss(self, step: int, whole: bool) -> Tensor:
        x, y = batch(step, self.rank)
        return (self.model(x, whole) - y).square().mean()

    def step(self, step: int, chance: random.Random, own: random.Random) -> None:
        """chance: the same on all ranks. own: this rank's."""
        kind = chance.random()
        self.optimizer.zero_grad()
        if kind < 0.1:
            self._backward(step + 1_000_000, True, self.model.no_sync())
        # Left out: by no rank, by all, by one of them.
        whole = kind < 0.9 or (kind < 0.95 and self.rank == step % 2)
        self.module.nonfinite = 0.5 < kind < 0.52 and self.rank == step % 2
        self._backward(step, whole)
        healthy, self.module.nonfinite = not self.module.nonfinite, False
        self._count_sent(healthy)
        if all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.model.parameters()):
            self.optimizer.step()
        else:
            self.skipped += 1
        if own.random() < 0.01:
            time.sleep(0.02 * own.random())
        if chance.random() < 0.01:
            with torch.no_grad():
                self.model.eval()(batch(step, 7)[0])
                self.model.train()

    def _backward(self, step: int, whole: bool, sync: Any = None) -> None:
        """Count this rank's own gradient, and let DDP have it."""
        x, y = batch(step, self.rank)
        names, parameters = zip(*self.module.named_parameters(), strict=True)
        nonfinite, self.module.nonfinite = self.module.nonfinite, False
        local = (self.module(x, whole) - y).square().mean()
        self.module.nonfinite = nonfinite
        gradients = torch.autograd.grad(local, parameters, allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                self.gradients[name] = self.gradients.get(name, 0) + gradient.flatten()
        with sync or nullcontext():
            self.loss(step, whole).backward()

    def _count_sent(self, healthy: bool) -> None:
        """healthy: this rank's own gradients are finite. Where another's are not, nothing is sent,
        and what this rank has accumulated goes with later steps. Only what a dense step alone would
        have sent is lost: with momentum its velocity."""
        grads = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        finite = all(bool(grad.isfinite().all()) for grad in grads.values())
        lost: dict[str, Any] = {}
        if healthy and not finite and self.compressor.cf == 1:
            memory = self.compressor.state_dict()["memory"] if self.momentum else {}
            lost = {n: memory.get(n, {}).get("velocity", g) for n, g in self.gradients.items()}
        for name, gradient in self.gradients.items() if healthy else ():
            if bool(gradient.any()):
                total = self.total.setdefault(name, torch.zeros_like(gradient))
                total += gradient / (1 - self.momentum) - lost.get(name, 0)
        for name, grad in grads.items() if finite else ():
            sent = self.sent.setdefault(name, torch.zeros_like(grad.flatten()))
            sent += grad.flatten() * dist.get_world_size()
        self.gradients = {}

    def imbalance(self) -> float:
        """How far what was sent and what waits are from all gradients, as a share of these."""
        memory = self.compressor.state_dict()["memory"]
        errors = [0.0]
        for name, p in self.module.named_parameters():
            zeros = torch.zeros(p.numel(), dtype=p.dtype)
            rest = waiting(memory.get(name, {}), self.momentum) + zeros
            both = torch.stack([self.total.get(name, zeros), rest])
            dist.all_reduce(both)
            off = self.sent.get(name, zeros) + both[1] - both[0]
            errors.append(float(off.abs().max()) / max(1.0, float(both[0].abs().max())))
        return max(errors)

    def replicas_are_equal(self) -> bool:
        flat = torch.cat([p.detach().flatten() for p in self.model.parameters()]).view(torch.int64)
        first = flat.clone()
        dist.broadcast(first, 0)
        equal = torch.tensor([int(torch.equal(flat, first))])
        dist.all_reduce(equal)
        return int(equal) == dist.get_world_size()


def soak(rank: int, setting: str, steps: int, seed: int, folder: str) -> dict[str, Any]:
    """One rank; what was found wrong, and figures."""
    logging.getLogger("adaptive").setLevel(logging.ERROR)
    run = _Soak(rank, setting)
    chance, own = random.Random(seed), random.Random(1000 * seed + rank + 1)
    wrong: list[str] = []
    memory, threads, balances = [], [], []
    resumes = {steps * (i + 1) // (RESUMES + 1) for i in range(RESUMES)}
    for step in range(steps):
        if step in resumes:
            run.stop_and_go_on(folder)
        run.step(step, chance, own)
        if (step + 1) % max(1, steps // CHECKS) == 0:
            if not run.replicas_are_equal():
                wrong.append(f"step {step}: replicas differ")
                break
            balances.append(run.imbalance())
            if not balances[-1] < 1e-8:
                wrong.append(f"step {step}: what was sent and waits is off by {balances[-1]:.3g}")
                break
            memory.append(_megabytes())
            threads.append(len(os.listdir("/proc/self/task")))
    fifth = max(1, len(memory) // 5)
    grown = median(memory[-fifth:]) - median(memory[fifth : 2 * fifth]) if not wrong else math.nan
    if grown > GROWTH:
        wrong.append(f"memory grew by {grown:.1f} MB")
    if not wrong and max(threads[-fifth:]) > max(threads[: 2 * fifth]):
        wrong.append(f"threads grew from {max(threads[: 2 * fifth])} to {max(threads[-fifth:])}")
    summary = run.compressor.summary()
    return {
        "wrong": wrong,
        "switches": summary.switches,
        "skipped": run.skipped,
        "resumed": run.resumed,
        "imbalance": max(balances, default=math.nan),
        "memory": (memory[:1] or [math.nan])[0],
        "grown": grown,
        "threads": max(threads, default=0),
    }


def main() -> int:
    """0 if all went well, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.soak")
    parser.add_argument("--steps", type=int, default=20_000, help="of each setting (20000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bad = False
    for setting in SETTINGS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            limit = 120 + args.steps * 0.5
            ranks = run_ranks(2, soak, setting, args.steps, args.seed, folder, limit=limit)
        for rank, found in enumerate(ranks):
            told = "; ".join(found.pop("wrong"))
            bad = bad or bool(told)
            figures = ", ".join(f"{k} {v:.3g}" for k, v in found.items())
            print(f"{setting}, rank {rank}: {told or 'well'} ({figures})", flush=True)
        print(f"{setting}: {args.steps} steps in {time.monotonic() - began:.0f} s", flush=True)
    return int(bad)


def _megabytes() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    # Functions of a module that runs as a script cannot be found by its ranks: import it by name.
    from tests.distributed import soak as module

    sys.exit(module.main())
