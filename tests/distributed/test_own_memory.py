"""Memories of users' own: those of examples/own_memory.py do what their papers say, on the host and
on the device path, nothing they keep parts the ranks, and a run that was saved goes on."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, LocalSteps, register_memory, reshard_states
from compressors.kernels import blocks
from examples.own_memory import EF21, Decayed
from tests.distributed.balance import balance
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Scripted,
    flat_parameters,
    local_gradients,
    loss_of,
    small_net,
)
from tests.distributed.test_device_path import ByStep

CFS = [10.0, 1.0, 3.0, 50.0]
STEPS = 8
LR = 0.05


def _largest(x: Tensor, cf: float) -> Tensor:
    """Top-k by the paper."""
    kept = torch.zeros_like(x)
    indices = x.abs().topk(max(1, int(x.numel() / cf))).indices
    kept[indices] = x[indices]
    return kept


def _by_the_paper(ef21: bool, decay: float) -> Tensor:
    """The parameters after a run of two ranks, in plain arithmetic: EF21, or decayed feedback."""
    model = small_net()
    parameters = dict(model.named_parameters())
    own: list[dict[str, Any]] = [dict.fromkeys(parameters, 0.0) for _ in range(2)]  # h, or r
    for step in range(STEPS):
        cf = CFS[step % len(CFS)]
        means: dict[str, Any] = dict.fromkeys(parameters, 0.0)
        for rank in range(2):
            loss = loss_of(model, step, rank)
            grads = torch.autograd.grad(loss, [*parameters.values()])
            for name, grad in zip(parameters, grads, strict=True):
                g = grad.flatten()
                if ef21:
                    own[rank][name] = own[rank][name] + _largest(g - own[rank][name], cf)
                    means[name] = means[name] + own[rank][name] / 2
                else:
                    a = g + decay * own[rank][name]
                    c = _largest(a, cf)
                    own[rank][name] = a - c
                    means[name] = means[name] + c / 2
        with torch.no_grad():
            for name, p in parameters.items():
                p.sub_(means[name].view_as(p), alpha=LR)
    return flat_parameters(model)


def _sparse_loco(every: int, steps: int, decay: float) -> list[Tensor]:
    """The parameters of two ranks that take `every` steps by themselves between two exchanges, with
    decayed feedback of what they have moved: all go on from the anchor."""
    ranks = [small_net(), small_net()]
    anchor = [p.detach().flatten().clone() for p in ranks[0].parameters()]
    waiting = [[torch.zeros_like(a) for a in anchor] for _ in ranks]
    for step in range(steps):
        grads = [
            torch.autograd.grad(loss_of(model, step, rank), [*model.parameters()])
            for rank, model in enumerate(ranks)
        ]
        if step and step % every == 0:
            cf = CFS[(step // every - 1) % len(CFS)]
            for i, a in enumerate(anchor):
                mean = torch.zeros_like(a)
                for rank, model in enumerate(ranks):
                    moved = a - [*model.parameters()][i].detach().flatten()
                    of_rank = moved + decay * waiting[rank][i]
                    mean += _largest(of_rank, cf) / 2
                    waiting[rank][i] = of_rank - _largest(of_rank, cf)
                anchor[i] = a - mean
        with torch.no_grad():
            for model, own in zip(ranks, grads, strict=True):
                for p, a, g in zip(model.parameters(), anchor, own, strict=True):
                    if step and step % every == 0:
                        p.copy_(a.view_as(p))
                    p.sub_(g, alpha=LR)
    return [flat_parameters(model) for model in ranks]


def _policy() -> Scripted:
    """The CFs by step; on the device path reports come late."""
    return ByStep(CFS) if blocks.force_device_path else Scripted(CFS)


def _train(
    rank: int, steps: int = STEPS, bad_at: int | None = None, **options: Any
) -> tuple[DDP, AdaptiveCompressor]:
    cap = 0.004 if options.get("granularity") == "bucket" else 25
    model = DDP(small_net(), bucket_cap_mb=cap)
    made = {"granularity": "layer", **options}
    compressor = AdaptiveCompressor("topk+fp32", (1, 1000), policy=_policy(), **made)
    _go_on(rank, model, compressor.attach(model), 0, steps, bad_at)
    return model, compressor


def _go_on(
    rank: int,
    model: DDP,
    compressor: AdaptiveCompressor,
    first: int,
    last: int,
    bad_at: int | None = None,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(first, last):
        optimizer.zero_grad()
        bad = step == bad_at
        (loss_of(model, step, rank) * (float("nan") if bad and rank == 1 else 1.0)).backward()
        if not bad:
            optimizer.step()


def _estimates(compressor: AdaptiveCompressor) -> float:
    """By how much the mean of the ranks' estimates, h = last - what waits, is off what each rank
    takes it for."""
    off = 0.0
    for kept in compressor.state_dict()["memory"].values():
        h = kept["last"] - kept.get("residual", torch.zeros_like(kept["last"]))
        dist.all_reduce(h)
        off = max(off, float((h / dist.get_world_size() - kept["mean"]).abs().max()))
    return off


def _resumed(rank: int) -> tuple[Tensor, Tensor, list[str]]:
    whole, _ = _train(rank, memory="ef21")
    model, before = _train(rank, 5, memory="ef21")
    state, at = before.state_dict(), deepcopy(model.module.state_dict())
    again = DDP(small_net())
    compressor = AdaptiveCompressor(
        "topk+fp32", (1, 1000), policy=Scripted(CFS), memory="ef21", granularity="layer"
    ).attach(again)
    loss_of(again, 0, rank).backward()  # after which DDP's buckets stay as they are
    errors = []
    for damaged in (_without(state, "mean"), _with(state, "mean", 3.0), _with(state, "more", 3.0)):
        try:
            compressor.load_state_dict(damaged)
        except ValueError as error:
            errors.append(str(error))
    try:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, state)
        reshard_states(gathered, 1)
    except ValueError as error:
        errors.append(str(error))
    again.module.load_state_dict(at)
    compressor.load_state_dict(state)
    _go_on(rank, again, compressor, 5, STEPS)
    return flat_parameters(whole), flat_parameters(again), errors


def _without(state: dict[str, Any], key: str) -> dict[str, Any]:
    changed = deepcopy(state)
    for kept in changed["memory"].values():
        del kept[key]
    return changed


def _with(state: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    changed = deepcopy(state)
    for kept in changed["memory"].values():
        kept[key] = value
    return changed


def _detached(rank: int) -> float:
    """How far the first step after EF21 is off DDP's own mean."""
    model, compressor = _train(rank, 3, memory="ef21")
    compressor.detach()
    own = local_gradients(model, 3, rank)
    model.zero_grad()
    loss_of(model, 3, rank).backward()
    off = 0.0
    for name, p in model.module.named_parameters():
        mean = own[name].clone()
        dist.all_reduce(mean)
        off = max(off, float((p.grad.flatten() - mean / dist.get_world_size()).abs().max()))
    return off


def _ranks(rank: int) -> dict[str, Any]:
    register_memory("decayed", Decayed)
    register_memory("ef21", EF21)
    found: dict[str, Any] = {"deviation": {}, "parameters": {}, "estimates": {}}
    for path in ("host", "device"):
        blocks.force_device_path = path == "device"
        for granularity in ("layer", "bucket"):
            where = f"{path}, {granularity}"
            balanced = balance(
                rank,
                "topk",
                _policy(),
                STEPS,
                options={"memory": Decayed(1.0), "granularity": granularity},
                ddp_options={"bucket_cap_mb": 0.004},
                bad_at=4,
            )
            found["deviation"][where] = balanced["deviation"]
            found["parameters"][where] = balanced["parameters"]
            options = {"memory": EF21(), "granularity": granularity}
            model, compressor = _train(rank, bad_at=5, **options)
            found["estimates"][where] = _estimates(compressor)
            found["parameters"][f"ef21, {where}"] = flat_parameters(model)
        for memory in ("decayed", "ef21"):
            model, _ = _train(rank, memory=memory)
            found["parameters"][f"{memory}, {path}"] = flat_parameters(model)
    blocks.force_device_path = False
    found["resumed"], found["detached"] = _resumed(rank), _detached(rank)
    model, _ = _train(rank, 9, memory=Decayed(), sync=LocalSteps(2, overlap=0))
    found["local steps"] = flat_parameters(model)
    return found


def test_memories_of_ones_own() -> None:
    results = run_ranks(2, _ranks, limit=150)
    papers = {"decayed": _by_the_paper(False, 0.95), "ef21": _by_the_paper(True, 0.0)}
    for result, own in zip(results, _sparse_loco(2, 9, 0.95), strict=True):
        assert torch.allclose(result["local steps"], own, rtol=0, atol=1e-12)
        assert max(result["deviation"].values()) < 1e-12
        assert max(result["estimates"].values()) < 1e-12
        assert result["detached"] < 1e-12
        for name, parameters in result["parameters"].items():
            assert torch.equal(parameters, results[0]["parameters"][name]), name
            paper = papers.get(name.removesuffix(", host").removesuffix(", device"))
            if paper is not None:
                assert torch.allclose(parameters, paper, rtol=0, atol=1e-12), name
        whole, again, errors = result["resumed"]
        assert torch.equal(whole, again)
        lost, kind, unknown, shared_out = errors
        assert "has lost mean" in lost
        assert "must be finite torch.float64" in kind
        assert "unknown keys: more" in unknown
        assert (
            "cannot be resharded for 1, memory 'EF21' keeps last, mean of each rank" in shared_out
        )
