"""Are the ranks alike? Asked before training starts, and with `debug=` while it runs.

A difference would make ranks issue different collectives, which is a hang, or train different
models. Every rank learns of every problem, so all of them raise. Later differences are mistakes: of
a policy that reads a clock or a random number of its own, of a script that changes one rank's
model, or of ours.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
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
"""For ranks that come later than others."""

SAY = 20.0
"""Seconds of waiting after which a rank says for what."""


def wait_for_all(group: dist.ProcessGroup, wanted: str) -> None:
    """RuntimeError, with what is wanted, unless all ranks have come here in time. With gloo only: a
    rank that goes on training instead would take part in another collective, which gloo answers by
    an abort, or by a wait for as long as the group may."""
    if dist.get_backend(group) != "gloo":
        return
    since = time.monotonic()
    waits = f"{wanted}: rank {dist.get_rank()} has waited {SAY:g} s for others that have not yet"
    saying = Timer(SAY, log.warning, (waits,))
    saying.daemon = True
    saying.start()
    try:
        dist.monitored_barrier(group, PATIENCE, wait_all_ranks=True)
    except RuntimeError as error:
        waited = time.monotonic() - since  # less than it may, if another rank ends meanwhile
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
    """Run `prepare` on every rank and compare what it returns: what must be alike on all ranks, in
    readable lines. A collective.

    An error of `prepare` is raised on the rank that has it, and a RuntimeError that quotes it on
    the others; a RuntimeError on all of them if the descriptions differ."""
    error: Exception | None = None
    description = problem = ""
    try:
        description = prepare()
    except Exception as caught:  # the other ranks must hear of it, whatever it is
        error, problem = caught, f"{type(caught).__name__}: {caught}"
    everyone = gather_objects((problem, description), group)
    if error is not None:
        raise error
    for rank, (theirs, _) in enumerate(everyone):
        if theirs:
            raise RuntimeError(f"rank {rank} failed to set up: {theirs}")
    first = everyone[0][1].splitlines()
    for rank, (_, theirs) in enumerate(everyone):
        for ours, other in zip(first, theirs.splitlines(), strict=False):
            if ours != other:
                raise RuntimeError(
                    f"AdaptiveCompressor was set up differently on rank {rank} than on rank 0, and "
                    f"must be alike on all ranks:\n  rank 0: {ours}\n  rank {rank}: {other}"
                )


@contextmanager
def all_or_none(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """What is done in this context is done on every rank, or raises on every rank. A collective at
    its end, so nothing in it may be one.

    An error is raised as it is on the rank that has it, and on the others as a ValueError that says
    `what`, which rank, and quotes it."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # the other ranks must hear of it, whatever it is
        error = caught
    told = "" if error is None else f"{type(error).__name__}: {error}"
    everyone = gather_objects(told, group)
    if error is not None:
        raise error
    for rank, theirs in enumerate(everyone):
        if theirs:
            raise ValueError(f"{what} rank {rank}: {theirs}")


def compare_replicas(
    step: int, plan: Plan, parameters: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup
) -> None:
    """Compare the plan of a step, and these parameters by name, over the ranks. A collective that
    waits for the ranks and for the device. RuntimeError on all of them, naming what differs and the
    ranks."""
    named = list(parameters)
    host = (tensor.detach().cpu().contiguous().flatten() for _, tensor in named)
    own = f"step {step}: {plan}", [crc32(each.view(torch.uint8).numpy().data) for each in host]
    everyone = gather_objects(own, group)
    first_plan, first = everyone[0]
    for rank, (said, _) in enumerate(everyone):
        if said != first_plan:
            raise RuntimeError(
                f"debug: rank {rank} plans otherwise than rank 0, and must plan alike:\n"
                f"  rank 0: {first_plan}\n  rank {rank}: {said}"
            )
    for i, (name, _) in enumerate(named):
        for rank, (_, theirs) in enumerate(everyone):
            if theirs[i] != first[i]:
                raise RuntimeError(
                    f"debug: parameter {name!r} of rank {rank} is not that of rank 0 "
                    f"before step {step}; the ranks are replicas no longer"
                )
