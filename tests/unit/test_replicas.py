"""A model under DDP as a replica: what it hands its buckets to, and what of that a copy keeps."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

from adaptive import AdaptiveCompressor, Fixed, Goodput, GraVAC
from adaptive.model.replicas import DDPReplica, adaptive_hook
from tests.unit.in_one_process import one_rank


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_rank():
        yield


def _step(model: DDP) -> None:
    model(torch.ones(2, 30)).sum().backward()


def _attached(model: DDP) -> AdaptiveCompressor:
    return AdaptiveCompressor(policy=Fixed(cf=10)).attach(model)


def test_a_copy_leaves_the_compressor_behind_and_takes_one_of_its_own() -> None:
    model = DDP(nn.Linear(30, 30))
    first = _attached(model)
    _step(model)
    other = deepcopy(model)
    second = _attached(other)
    for _ in range(2):
        _step(other)
    assert (first.summary().steps, second.summary().steps) == (1, 2)


@pytest.mark.parametrize("policy", ["goodput", Goodput(), GraVAC()])
@pytest.mark.parametrize("copied", [copy, deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_compressor_has_its_settings_and_no_model(
    copied: Callable[[AdaptiveCompressor], AdaptiveCompressor], policy: Any
) -> None:
    policy = deepcopy(policy)
    first = AdaptiveCompressor(policy=policy, cf_range=(20, 80)).attach(DDP(nn.Linear(300, 300)))
    second = copied(first)
    assert second.detached
    assert "cf_range=(20, 80)" in repr(second)
    model = DDP(nn.Linear(30, 30))
    second.attach(model)
    _step(model)
    assert (first.summary().steps, second.summary().steps) == (0, 1)


def test_a_hook_without_a_replica_says_so() -> None:
    model = DDP(nn.Linear(30, 30))
    model.register_comm_hook(DDPReplica(), adaptive_hook)
    with pytest.raises(RuntimeError, match="no compressor: attach one"):
        _step(model)
    _attached(other := DDP(nn.Linear(30, 30)))
    with pytest.raises(RuntimeError, match="compressed by another"):
        _attached(other)


def test_ddps_own_mixed_precision_is_refused_by_its_name() -> None:
    """Set afterwards: with it, DDP's constructor makes a stream, which torch built with CUDA cannot
    do on a machine without a driver."""
    model = DDP(nn.Linear(30, 30))
    model.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"mixed_precision=.*Leave it out.*autocast"):
        _attached(model)


def test_who_has_ddp_skip_buckets_is_told_what_to_leave_out() -> None:
    """Where a whole bucket goes unused: an AssertionError, or `the backward ... has not ended`."""
    skips = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    with pytest.raises(RuntimeError, match=r"skip_all_reduce_unused_params=.*Leave it out"):
        _attached(DDP(nn.Linear(30, 30), **skips))


def test_buckets_go_where_they_went_until_another_compressor_is_attached() -> None:
    model = DDP(nn.Linear(30, 30))
    first = _attached(model)
    first.detach()
    _step(model)
    second = _attached(model)
    _step(model)
    assert (first.summary().steps, second.summary().steps) == (1, 1)
