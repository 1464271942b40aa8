"""Optimizers as people install them, from their packages, held to what `test_optimizer_kinds.py`
holds kinds to: CF 1 is plain DDP, the ranks are alike wherever a script may read the model, and a
sentence says what is not served."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from adaptive import Fixed, Policy, Schedule
from tests.distributed.frameworks import needs
from tests.distributed.processes import run_ranks
from tests.distributed.setting import listen, same
from tests.distributed.test_updates import Training, differs

pytestmark = pytest.mark.long

SWITCH = {0: 20, 7: 1, 9: 20, 14: 1, 16: 20}

Make = Callable[[nn.Module], Optimizer]


def _net() -> nn.Module:
    """With two matrices of one size, which a distributed Muon wants."""
    torch.manual_seed(0)
    layers = [nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(24, 3))


def _of(package: str, name: str, **options: Any) -> Make:
    def make(model: nn.Module) -> Optimizer:
        optimizer: Optimizer = getattr(import_module(package), name)(model.parameters(), **options)
        return optimizer

    return make


def _muon(name: str) -> Make:
    """Of the two equal matrices; an Adam inside has the rest."""

    def make(model: nn.Module) -> Optimizer:
        ps = list(model.parameters())
        square = [p for p in ps if p.shape == (24, 24)]
        rest = [p for p in ps if p.shape != (24, 24)]
        groups = [
            {"params": square, "use_muon": True, "lr": 0.02},
            {"params": rest, "use_muon": False, "lr": 0.003},
        ]
        optimizer: Optimizer = getattr(import_module("muon"), name)(groups)
        return optimizer

    return make


CHANGED = "numbers that its steps change"
MAKE: dict[str, list[tuple[Make, str]]] = {
    "prodigyopt": [(_of("prodigyopt", "Prodigy"), CHANGED)],
    "schedulefree": [
        (_of("schedulefree", "AdamWScheduleFree", lr=0.01), CHANGED),
        (_of("schedulefree", "RAdamScheduleFree", lr=0.01), CHANGED),
        (_of("schedulefree", "SGDScheduleFree", lr=0.1), CHANGED),
    ],
    "dadaptation": [
        (_of("dadaptation", "DAdaptAdam"), CHANGED),
        (_of("dadaptation", "DAdaptSGD"), CHANGED),
    ],
    "muon": [
        (_muon("MuonWithAuxAdam"), "state of other parameters on each rank"),
        (_muon("SingleDeviceMuonWithAuxAdam"), ""),
    ],
    "lion_pytorch": [(_of("lion_pytorch", "Lion", lr=1e-3), "")],
    "torchao": [
        (_of("torchao.optim", "AdamW8bit", lr=0.01, block_size=16), ""),
        (_of("torchao.optim", "AdamW4bit", lr=0.01, block_size=16), ""),
    ],
}
"""Of each package: optimizers, and what is said that each keeps; "" where it is served."""


def _train(rank: int, make: Make, policy: Policy | None) -> tuple[Training, float]:
    """A run, and how far the ranks were apart at most after any step, and after `eval()`."""
    run = Training(make, policy, _net())
    if hasattr(run.optimizer, "train"):
        run.optimizer.train()
    apart = 0.0
    for step in range(18):
        run.train(rank, step, step + 1)
        apart = max(apart, differs([run.flat]))
    if hasattr(run.optimizer, "eval"):
        run.optimizer.eval()
    return run, max(apart, differs([run.flat]))


def _wrong(rank: int, make: Make, said: str | None, told: list[str]) -> list[str]:
    """said: what is to be said of it; None: anything."""
    wrong = []
    plain, apart = _train(rank, make, None)
    if apart != 0:
        return []  # without us, too, or it is not finite
    name = type(plain.optimizer).__name__
    try:
        dense, _ = _train(rank, make, Fixed(1))
    except RuntimeError as error:
        if "steps within a step of" in str(error):
            return []  # an optimizer around another one is refused in a sentence
        raise
    if not same(plain.flat, dense.flat):
        wrong.append(f"{name}: CF 1 is not DDP")
    told.clear()
    _, apart = _train(rank, make, Schedule(SWITCH))
    if apart:
        wrong.append(f"{name}: ranks differ by {apart}")
    found = [each for each in told if "cannot agree" in each]
    if said is not None and rank == 0 and (len(found) != bool(said) or said not in "".join(found)):
        wrong.append(f"{name}: told {found}")
    return wrong


def _packages(rank: int, package: str) -> list[str]:
    logging.getLogger("adaptive").propagate = False
    told = listen()
    return [each for make, said in MAKE[package] for each in _wrong(rank, make, said, told)]


@pytest.mark.parametrize("package", [pytest.param(each, marks=needs(each)) for each in MAKE])
def test_optimizers_of_packages_are_served_or_a_sentence_says_they_are_not(package: str) -> None:
    assert run_ranks(2, _packages, package, limit=170) == [[], []]


def _collection(rank: int, part: int) -> tuple[list[str], int]:
    """What is wrong of an eighth of the optimizers of pytorch_optimizer, and how many those are. It
    leaves out those that want arguments, closures or second derivatives."""
    logging.getLogger("adaptive").propagate = False
    package, told = import_module("pytorch_optimizer"), listen()
    wrong, count = [], 0
    for name in package.get_supported_optimizers()[part::8]:

        def make(model: nn.Module, name: str = name) -> Optimizer:
            torch.manual_seed(1)
            np.random.seed(1)  # Kron draws from NumPy whether a step balances its factors
            random.seed(1)
            optimizer: Optimizer = package.create_optimizer(model, name, lr=1e-3)
            return optimizer

        try:
            _train(rank, make, None)
        except Exception:
            continue
        wrong += _wrong(rank, make, None, told)
        count += 1
    return wrong, count


@needs("pytorch_optimizer")
@pytest.mark.parametrize("part", range(8))
def test_a_hundred_optimizers_of_one_collection_leave_ranks_alike(part: int) -> None:
    for wrong, count in run_ranks(2, _collection, part, limit=170):
        assert wrong == []
        assert count > 8
