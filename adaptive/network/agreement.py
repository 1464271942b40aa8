"""Checks that all ranks have the same settings before training, and with `debug=` the same
parameters during training.

Ranks with different settings would issue different collectives, and hang, or train different
models. Every rank learns of every problem, so all ranks raise. A difference that arises during
training is a bug: of a policy that reads a clock or random numbers, of a script that changes one
rank's model, or of this library.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from threading import Timer
from typing import TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from policies import Plan

T = TypeVar("T")

log = logging.getLogger("adaptive")

PATIENCE = timedelta(minutes=5)
"""How long a rank waits for the other ranks."""

SAY = 20.0
"""Seconds after which a waiting rank logs what it waits for."""


def wait_for_all(group: dist.ProcessGroup, wanted: str) -> None:
    """RuntimeError, quoting `wanted`, unless all ranks make this call in time. Does nothing unless
    the group's backend is gloo. If a rank goes on training instead, and so issues another
    collective, gloo aborts, or waits until the group's timeout."""
    if dist.get_backend(group) != "gloo":
        return
    since = time.monotonic()
    message = f"{wanted}: rank {dist.get_rank()} has waited {SAY:g} s for others that have not yet"
    saying = Timer(SAY, log.warning, (message,))
    saying.daemon = True
    saying.start()
    try:
        dist.monitored_barrier(group, PATIENCE, wait_all_ranks=True)
    except RuntimeError as error:
        waited = time.monotonic() - since  # less than PATIENCE if another rank has exited
        raise RuntimeError(
            f"{wanted}: some have not done so within {waited:.0f} s ({error})"
        ) from error
    finally:
        saying.cancel()


def gather_objects(own: T, group: dist.ProcessGroup) -> list[T]:
    """The object of each rank of a group, in order. Waits for all of them."""
    found = [own] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def agree(prepare: Callable[[], str], group: dist.ProcessGroup) -> None:
    """Run `prepare` on every rank, and compare the results. A result is a description, in readable
    lines, of all that must be the same on all ranks. A collective.

    If `prepare` raises an error on some rank, that rank raises the error, and the other ranks raise
    a RuntimeError that quotes it. RuntimeError on all ranks if the descriptions are not equal."""
    error: Exception | None = None
    description = problem = ""
    try:
        description = prepare()
    except Exception as caught:  # the other ranks must learn of every error
        error, problem = caught, f"{type(caught).__name__}: {caught}"
    by_rank = gather_objects((problem, description), group)
    if error is not None:
        raise error
    for rank, (problem, _) in enumerate(by_rank):
        if problem:
            raise RuntimeError(f"rank {rank} failed to set up: {problem}")
    first = by_rank[0][1].splitlines()
    for rank, (_, description) in enumerate(by_rank):
        pairs = zip_longest(first, description.splitlines(), fillvalue="(nothing)")
        for expected, other in pairs:
            if expected != other:
                raise RuntimeError(
                    f"AdaptiveCompressor was set up differently on rank {rank} than on rank 0, and "
                    f"must be the same on all ranks:\n  rank 0: {expected}\n  rank {rank}: {other}"
                )


@contextmanager
def all_or_none(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """A context that raises on every rank if its body raises on one rank. The context ends with a
    collective, so its body must not issue one.

    The rank that has an error raises this error. The other ranks raise a ValueError with `what`,
    the number of that rank, and the error's text."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # the other ranks must learn of every error
        error = caught
    problem = "" if error is None else f"{type(error).__name__}: {error}"
    by_rank = gather_objects(problem, group)
    if error is not None:
        raise error
    for rank, problem in enumerate(by_rank):
        if problem:
            raise ValueError(f"{what} rank {rank}: {problem}")


def compare_replicas(
    step: int, plan: Plan, parameters: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup
) -> None:
    """Compare the plan of a step, and these parameters (by name), over the ranks. A collective that
    waits for the ranks and for the device. RuntimeError on all ranks, naming the first difference
    and the rank."""
    named = list(parameters)
    host = (tensor.detach().cpu().contiguous().flatten() for _, tensor in named)
    own = f"step {step}: {plan}", [crc32(each.view(torch.uint8).numpy().data) for each in host]
    by_rank = gather_objects(own, group)
    first_plan, first = by_rank[0]
    for rank, (its_plan, _) in enumerate(by_rank):
        if its_plan != first_plan:
            raise RuntimeError(
                f"debug: rank {rank} plans otherwise than rank 0, and plans must be equal:\n"
                f"  rank 0: {first_plan}\n  rank {rank}: {its_plan}"
            )
    for i, (name, _) in enumerate(named):
        for rank, (_, checksums) in enumerate(by_rank):
            if checksums[i] != first[i]:
                raise RuntimeError(
                    f"debug: parameter {name!r} of rank {rank} is not that of rank 0 "
                    f"before step {step}; the ranks are replicas no longer"
                )
