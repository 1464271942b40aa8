"""A policy or a compressor keeps what it has learnt of one model: it is not given to two."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, GraVAC, Ladder, TopK, Warmup
from policies import Policy
from tests.distributed.processes import run_ranks
from tests.distributed.setting import loss_of, small_net


def _compressor(**options: Any) -> AdaptiveCompressor:
    return AdaptiveCompressor(**{"base": "topk", "policy": "fixed", **options})


def _said(attach: Callable[[], object]) -> str:
    try:
        attach()
    except RuntimeError as error:
        return str(error)
    return ""


def _two_models(rank: int) -> dict[str, str]:
    inner, policy, base, rung = Fixed(), GraVAC(), TopK(), TopK()
    firsts = [
        _compressor(policy=policy).attach(DDP(small_net())),
        _compressor(policy=Warmup(then=inner)).attach(DDP(small_net())),
        _compressor(base=Ladder({4: rung}, base), policy="goodput").attach(DDP(small_net())),
    ]
    shared: dict[str, dict[str, Any]] = {
        "policy": {"policy": policy},
        "asked policy": {"policy": inner},
        "base": {"base": base},
        "rung": {"base": Ladder({4: rung}, TopK()), "policy": "goodput"},
        "nothing": {"base": TopK(), "policy": Fixed()},
    }
    model = DDP(small_net())
    said = {}
    for what, options in shared.items():
        second = _compressor(**options)
        said[what] = _said(lambda second=second: second.attach(model))
    loss_of(model, 0, rank).backward()  # whoever was refused has left nothing on the model
    assert all(not first.detached for first in firsts)
    return said


def test_an_object_given_to_two_compressors_is_refused_on_every_rank() -> None:
    for said in run_ranks(2, _two_models):
        assert said.pop("nothing") == ""
        for told in said.values():
            assert "works for one model, and this one for another AdaptiveCompressor" in told


def _one_after_the_other(rank: int) -> dict[str, str]:
    policy: Policy = Fixed()
    model, other = DDP(small_net()), DDP(small_net())
    first = _compressor(policy=policy).attach(model)
    first.detach()
    second = _compressor(policy=policy)
    said = {"after detach": _said(lambda: second.attach(other))}
    said["back"] = _said(lambda: first.attach(model))
    loss_of(other, 0, rank).backward()
    second.detach()
    said["again"] = _said(lambda: second.attach(other))
    return said


def test_whoever_is_detached_gives_its_objects_away_for_good() -> None:
    for said in run_ranks(2, _one_after_the_other):
        assert said["after detach"] == ""
        for back in ("back", "again"):
            assert "make a new AdaptiveCompressor" in said[back]


def _forgotten(rank: int) -> list[str]:
    policy: Policy = Fixed()
    said = []
    for _ in range(2):
        compressor = _compressor(policy=policy)
        compressor.attach(DDP(small_net()))
        del compressor
        gc.disable()  # it must not be left to chance
    failed = _compressor(policy=policy, cf_range=(10 + rank, 100))
    said.append(_said(lambda: failed.attach(DDP(small_net()))))
    said.append(_said(lambda: _compressor(policy=policy).attach(DDP(small_net()))))
    gc.enable()
    return said


def test_garbage_and_failed_attachments_hold_nothing() -> None:
    for failed, after in run_ranks(2, _forgotten):
        assert "was set up differently" in failed
        assert after == ""
