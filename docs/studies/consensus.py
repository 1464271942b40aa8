"""Which consensus step gossip bears at which CF (docs/research/gossip.md).

    python -m docs.studies.consensus

Trains a perceptron of 22,000 parameters on labels of a random one, by simulated workers on a ring,
with SGD and momentum 0.9, and prints the held-out loss of the mean model at the end. Takes minutes.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from math import isfinite, nan

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Gossip
from adaptive.step.synchronisation import Synchronisation
from docs.studies.common import columns
from runs.simulate.group import SimulatedGroup
from runs.simulate.ranks import run_ranks

INPUTS, HIDDEN, CLASSES, BATCH, HELD_OUT = 64, 256, 20, 32, 4000
ALGORITHMS = "choco-sgd", "deepsqueeze"
CONSENSUS_STEPS = 1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01


def perceptron(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs, and labels drawn as a random perceptron says."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator)
    with torch.no_grad():
        likely = (8 * perceptron(1)(x)).softmax(1)
    return x, likely.multinomial(1, generator=generator)[:, 0]


def held_out_loss(
    base: str, cf: float, sync: Synchronisation | None, steps: int, workers: int
) -> float:
    """Of the mean model after so many steps; nan if it has diverged."""
    test = examples(HELD_OUT, 0)

    def train(rank: int, group: SimulatedGroup) -> float:
        model = DDP(perceptron(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        compressor = AdaptiveCompressor(base, (cf, cf), policy="fixed", sync=sync)
        compressor.attach(model, optimizer=optimizer)
        for step in range(steps):
            x, y = examples(BATCH, 1 + step * workers + rank)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        with compressor.averaged(), torch.no_grad():
            loss = float(cross_entropy(model(test[0]), test[1]))
        compressor.close()
        return loss if isfinite(loss) and loss < 10 else nan

    return float(run_ranks(workers, train)[0])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.studies.consensus")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--consensus-steps", type=float, nargs="+", default=CONSENSUS_STEPS)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    parser.add_argument("--cfs", type=float, nargs="+", default=(10.0, 100.0))
    given = parser.parse_args(words)
    logging.getLogger("adaptive").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    size = given.steps, given.workers
    for name, sync in (("all-reduce", None), ("D-PSGD", Gossip("ring"))):
        print(f"{name}: {held_out_loss('none', 1.0, sync, *size):.3f}", flush=True)
    rows = [["", *map(str, given.consensus_steps)]]
    for algorithm in given.algorithms:
        for cf in given.cfs:
            losses = [
                held_out_loss("topk", cf, Gossip("ring", algorithm, consensus_step=each), *size)
                for each in given.consensus_steps
            ]
            told = [f"{loss:.3f}" if isfinite(loss) else "diverged" for loss in losses]
            rows.append([f"{algorithm}, CF {cf:g}", *told])
            print(" ".join(rows[-1]), flush=True)
    print(columns(rows))


if __name__ == "__main__":
    main()
