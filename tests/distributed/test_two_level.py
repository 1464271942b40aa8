"""Two levels: a node of several ranks is one rank to all that compresses.

Four ranks are two nodes of two. What they do is compared with two ranks, each of which has the
batches of a whole node, and cuts what is gathered where nodes do.
"""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from adaptive import (
    AdaptiveCompressor,
    Delayed,
    Gossip,
    LocalSteps,
    MemoryTimeline,
    ParameterServer,
    TwoLevel,
)
from adaptive.exchange.bucket import Granularity
from adaptive.exchange.two_level import VARIABLE, NodeExchange, _problem
from compressors import make_compressor
from compressors.base import Payload, Spec
from policies import Fixed
from tests.distributed.balance import balance
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Scripted,
    batch,
    flat_parameters,
    loss_of,
    same,
    small_net,
)

STEPS = 12

WAYS: dict[str, dict[str, Any]] = {
    "gathered": {"base": "topk+int4"},
    "layers": {"base": "topk+fp32", "granularity": "layer"},
    "server": {"base": "topk+fp32", "between": ParameterServer(down_cf=5, own_memory=True)},
    "votes": {"base": "topk+fp32", "between": "voted_indices"},
    "summed": {"base": "bf16", "cf": 2},
    "rounds": {"base": "powersgd", "cf": 4},
    "quantized": {"base": "int8", "cf": 4},
    "random": {"base": "randomk"},
    "dense": {"base": "topk", "cf": 1},
    "local steps": {"base": "topk", "sync": LocalSteps(3)},
}
IN_PARTS = ("gathered", "layers", "quantized", "local steps")
"""Of these each rank of a node compresses a part."""

OPTIMIZERS = {
    "none": lambda parameters: SGD(parameters, lr=0.05),
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def _node_loss(model: nn.Module, step: int, ranks: list[int]) -> Tensor:
    losses = []
    for rank in ranks:
        x, y = batch(step, rank)
        losses.append(((model(x) - y) ** 2).mean())
    return torch.stack(losses).mean()


def _cut_as_nodes(size: int) -> AbstractContextManager[Any]:
    """Units end where the parts of the ranks of a node do, of so many."""
    cut = Granularity.cut

    def cut_in_parts(
        self: Any, bucket: Any, cfs: Any, shards: int = 1, sharded: bool = False
    ) -> Any:
        return cut(self, bucket, cfs, shards if shards > 1 else size, sharded)

    return patch.object(Granularity, "cut", cut_in_parts)


def _train(
    rank: int, way: str, optimizer: str, levels: bool, size: int = 2, link: str | None = None
) -> dict[str, Any]:
    """With levels rank i has the batches i, without those of a node of so many ranks."""
    settings = dict(WAYS[way])
    cf, between = settings.pop("cf", 10), settings.pop("between", "auto")
    model = DDP(small_net(), bucket_cap_mb=0.002)
    opt = OPTIMIZERS[optimizer](list(model.parameters()))
    exchange = TwoLevel(node=size, between=between) if levels else between
    timeline = MemoryTimeline()
    compressor = AdaptiveCompressor(
        policy=Fixed(cf),
        cf_range=(2, 100),
        exchange=exchange,
        network=link,
        timeline=timeline,
        **settings,
    )
    compressor.attach(model, optimizer=None if optimizer == "none" else opt)
    ranks = [rank] if levels else [size * rank + i for i in range(size)]
    alike = _cut_as_nodes(size) if way in IN_PARTS and not levels else nullcontext()
    with alike:
        for step in range(STEPS):
            opt.zero_grad()
            _node_loss(model, step, ranks).backward()
            opt.step()
    compressor.flush()
    last = [record.report for record in timeline.steps[-1:]]  # none but on rank 0
    return {
        "parameters": flat_parameters(model),
        "summary": compressor.summary(),
        "cf": compressor.cf,
        "wire": [each.wire_bytes - each.statistics_bytes for each in last],
        "down": [each.down_bytes - each.statistics_bytes / 2 for each in last],
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_node_is_one_rank(way: str, optimizer: str) -> None:
    nodes = run_ranks(4, _train, way, optimizer, True)
    ranks = run_ranks(2, _train, way, optimizer, False)
    for rank, of_node in enumerate(nodes):
        alone = ranks[rank // 2]
        assert torch.equal(of_node["parameters"], nodes[rank // 2 * 2]["parameters"])
        if way != "local steps":  # in the middle of a round
            assert torch.equal(of_node["parameters"], nodes[0]["parameters"])
        assert torch.allclose(of_node["parameters"], alone["parameters"], rtol=1e-6, atol=1e-9)
        assert of_node["cf"] == alone["cf"]
        told, expected = of_node["summary"], alone["summary"]
        assert told.payload_bytes == expected.payload_bytes
        assert told.floats_sent == expected.floats_sent
        assert told.inside_bytes > 0
        assert "inside it each rank sent" in told.table()
        assert not expected.inside_bytes
        # Statistics are summed over all ranks, and not over nodes.
        assert 0 <= told.bytes_sent - expected.bytes_sent <= 8 * 200 * STEPS
    for what in ("wire", "down"):  # shards of a node are padded
        assert nodes[0][what] == pytest.approx(ranks[0][what], abs=20)


@pytest.mark.parametrize("way", ["gathered", "server", "rounds", "dense"])
def test_parts_of_a_payload_may_be_unequal(way: str) -> None:
    """Three ranks a node, over an emulated link."""
    nodes = run_ranks(6, _train, way, "adamw", True, 3, "100mbit")
    alone = run_ranks(2, _train, way, "adamw", False, 3)[0]["parameters"]
    for each in nodes:
        assert torch.equal(each["parameters"], nodes[0]["parameters"])
        assert torch.allclose(each["parameters"], alone, rtol=1e-6, atol=1e-9)


class _Raw(Scripted):
    gain = "raw"


def _measured(rank: int, levels: bool) -> list[Any]:
    """Energies and norms that the policy is told of each CF."""
    model, policy = DDP(small_net(), bucket_cap_mb=0.002), _Raw([10.0, 10.0, 5.0], (5.0, 20.0))
    exchange = TwoLevel(node=2) if levels else "all_gather"
    AdaptiveCompressor("topk", (2, 100), policy=policy, exchange=exchange).attach(model)
    with nullcontext() if levels else _cut_as_nodes(2):
        for step in range(6):
            _node_loss(model, step, [rank] if levels else [2 * rank, 2 * rank + 1]).backward()
    return [
        [getattr(measured, field.name) for field in fields(measured)]
        for report in policy.reports
        for measured in report.measurements.values()
    ]


def test_statistics_are_of_nodes() -> None:
    of_nodes, of_ranks = run_ranks(4, _measured, True)[0], run_ranks(2, _measured, False)[0]
    assert len(of_nodes) > 8
    for nodes, ranks in zip(of_nodes, of_ranks, strict=True):
        assert nodes == pytest.approx(ranks, rel=1e-6, nan_ok=True)


def _compressed(rank: int) -> tuple[int, int]:
    """Elements that a rank compresses in a step, beside those of the model."""
    model, seen = DDP(small_net(), bucket_cap_mb=0.002), [0]
    base = make_compressor("topk+int4")
    compress = base.compress

    def counted(x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        seen[0] += x.numel()
        return compress(x, spec, add)

    base.compress = counted  # type: ignore[method-assign]
    AdaptiveCompressor(base, policy="fixed", exchange=TwoLevel(node=2)).attach(model)
    for step in range(3):
        seen[0] = 0
        loss_of(model, step, rank).backward()
    return seen[0], sum(p.numel() for p in model.parameters())


def test_each_rank_compresses_its_part_only() -> None:
    found = run_ranks(4, _compressed)
    assert [each for each, _ in found[:2]] == [each for each, _ in found[2:]]
    whole = found[0][1]
    assert found[0][0] + found[1][0] == whole
    assert abs(found[0][0] - found[1][0]) < whole / 10


def _balance(rank: int, base: str, between: str, ddp_options: dict[str, Any], bad: bool) -> Any:
    policy = Scripted([10.0, 100.0, 1.0, 1000.0, 1.5, 10.0, 1.0, 30.0], (10.0, 20.0))
    options = {"exchange": TwoLevel(node=2, between=between)}
    bad_at = 5 if bad else None
    found = balance(rank, base, policy, 9, options=options, ddp_options=ddp_options, bad_at=bad_at)
    return {name: found[name] for name in ("deviation", "parameters", "nonfinite", "reports")}


@pytest.mark.parametrize(
    ("base", "between", "ddp_options"),
    [
        ("topk", "all_gather", {"bucket_cap_mb": 0.002, "gradient_as_bucket_view": True}),
        ("topk", "sharded", {"bucket_cap_mb": 0.002, "static_graph": True}),
        ("randomk", "auto", {"find_unused_parameters": True}),
    ],
)
def test_nothing_is_lost(base: str, between: str, ddp_options: dict[str, Any]) -> None:
    found = run_ranks(4, _balance, base, between, ddp_options, False)
    assert max(each["deviation"] for each in found) < 1e-12
    for each in found:
        assert torch.equal(each["parameters"], found[0]["parameters"])
        assert same(each["reports"], found[0]["reports"])


def test_a_gradient_that_is_not_finite_is_so_on_all_ranks() -> None:
    found = run_ranks(4, _balance, "topk", "auto", {"bucket_cap_mb": 0.002}, True)
    for each in found:
        assert all(each["nonfinite"])
        assert torch.equal(each["parameters"], found[0]["parameters"])
        assert bool(each["parameters"].isfinite().all())


def _attached(exchange: Any, env: str | None = None, **options: Any) -> AdaptiveCompressor:
    os.environ.pop(VARIABLE, None)
    if env is not None:
        os.environ[VARIABLE] = env
    model = DDP(small_net())
    return AdaptiveCompressor(policy="fixed", exchange=exchange, **options).attach(model)


def _nodes(compressor: AdaptiveCompressor) -> int:
    """0: one level."""
    exchange = compressor.running().exchange
    return exchange.world_size if isinstance(exchange, NodeExchange) else 0


def _error(exchange: Any, env: str | None = None, **options: Any) -> str:
    try:
        _attached(exchange, env, **options)
    except ValueError as error:
        return str(error)
    return ""


def _set_up(rank: int) -> dict[str, Any]:
    dist.new_group([0, 2])  # so that ranks are in different numbers of groups
    dist.new_group([0])
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    return {
        "nodes": [
            _nodes(_attached("auto", "2")),
            _nodes(_attached(TwoLevel(), "2")),
            _nodes(_attached(TwoLevel(node=2))),
            _nodes(_attached(TwoLevel(node=groups[rank // 2]))),
        ],
        "flat": [
            _nodes(_attached("auto")),
            _nodes(_attached("auto", "4")),
            _nodes(_attached("auto", "1")),
            _nodes(_attached("auto", "3")),
            _nodes(_attached("all_gather", "2")),
            _nodes(_attached("auto", "2", sync=Delayed(2))),
            _nodes(_attached(TwoLevel(node=4))),
            _nodes(_attached(TwoLevel(node=1))),
        ],
        "errors": [
            _error(TwoLevel()),
            _error(TwoLevel(), "many"),
            _error(TwoLevel(), "2" if rank else "many"),
            _error(TwoLevel(node=3)),
            _error(TwoLevel(node=crossed[rank in (1, 2)])),
            _error(TwoLevel(node=dist.group.WORLD if rank < 2 else groups[1])),
            _error(TwoLevel(node=2), sync=Delayed(2)),
            _error(TwoLevel(node=2), sync=Gossip("ring")),
        ],
    }


def test_nodes_are_found_or_said_to_be_none() -> None:
    for found in run_ranks(4, _set_up):
        assert found["nodes"] == [2] * 4
        assert found["flat"] == [0] * 8
        parts = [VARIABLE, "many", "rank 0", "3, 1", "order", "group", "Delayed", "Gossip"]
        for error, part in zip(found["errors"], parts, strict=True):
            assert "exchange" in error or "TwoLevel" in error
            assert part in error


def test_torchruns_nodes_of_two_sizes_are_not_taken_for_more_of_one() -> None:
    labels = [(2, 0), (2, 0), (4, 0), (4, 0), (4, 1), (4, 1)]
    told = _problem(TwoLevel(), labels, [[0, 1], [2, 3], [4, 5]], range(6))
    assert "got nodes of 2, 4" in told


@pytest.mark.parametrize("node", [0, 1.5, "2", True])
def test_a_node_is_a_number_or_a_group(node: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="node"):
        TwoLevel(node=node)


def _lose_a_rank(rank: int, how: int) -> dict[str, Any]:
    """Rank 3 is taken away in the middle of its backward."""
    model = DDP(small_net(torch.float32), bucket_cap_mb=0.002)
    compressor = AdaptiveCompressor(policy="fixed", exchange=TwoLevel(node=2)).attach(model)
    for step in range(5):
        if rank == 3 and step == 3:
            first = next(model.module.parameters())
            first.register_hook(lambda _: os.kill(os.getpid(), how))
        try:
            loss_of(model, step, rank).backward()
        except RuntimeError as error:
            try:
                compressor.state_dict()
            except RuntimeError as refused:
                return {"step": step, "error": str(error), "state": str(refused)}
    return {"step": None}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_all_ranks_learn_of_one_that_is_gone(how: int) -> None:
    *survivors, _ = run_ranks(4, _lose_a_rank, how, lost=[3], timeout=5, limit=60)
    for survivor in survivors:
        assert survivor["step"] == 3, survivors
        assert "step 3 failed" in survivor["state"]


def _resume(rank: int, form: str, optimizer: str, stop: int | None) -> Any:
    """Train, stopping into a state and going on in another model if `stop` is given."""

    def start() -> tuple[DDP, Any, AdaptiveCompressor]:
        model = DDP(small_net(), bucket_cap_mb=0.002)
        opt = OPTIMIZERS[optimizer](list(model.parameters()))
        compressor = AdaptiveCompressor(
            policy=Scripted([10.0, 20.0, 1.0, 5.0]),
            cf_range=(2, 100),
            exchange=TwoLevel(node=2, between=ParameterServer(own_memory=True)),
        )
        return model, opt, compressor.attach(model, optimizer=opt)

    model, opt, compressor = start()
    for step in range(STEPS):
        if step == stop:
            whole = {
                "compressor": compressor.state_dict(checkpoint=form),
                "model": model.state_dict(),
                "opt": opt.state_dict(),
            }
            told = [whole]
            if form == "gathered":  # as frameworks save it
                dist.broadcast_object_list(told)
            model, opt, compressor = start()
            loss_of(model, 0, rank).backward()  # DDP cuts its buckets
            opt.zero_grad()
            model.load_state_dict(told[0]["model"])
            opt.load_state_dict(told[0]["opt"])
            compressor.load_state_dict(told[0]["compressor"])
        opt.zero_grad()
        loss_of(model, step, rank).backward()
        opt.step()
    return flat_parameters(model)


@pytest.mark.parametrize(
    ("form", "optimizer"),
    [
        ("rank", "adamw"),
        pytest.param("rank", "sgd", marks=pytest.mark.long),
        pytest.param("gathered", "none", marks=pytest.mark.long),
    ],
)
def test_a_run_that_was_stopped_goes_on(form: str, optimizer: str) -> None:
    whole = run_ranks(4, _resume, form, optimizer, None)
    stopped = run_ranks(4, _resume, form, optimizer, 6)
    for before, after in zip(whole, stopped, strict=True):
        assert torch.equal(before, after)
        assert torch.equal(after, stopped[0])


class _Words(nn.Module):
    """Has sparse gradients, which travel as they are, beside dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 12, sparse=True).double()
        self.net = small_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.words((x[:, :4].abs() * 5).long() % 20).mean(1))


def _others(rank: int, what: str) -> Tensor:
    """What DDP or a foreign hook exchanges, and a compressor that is taken off."""
    torch.manual_seed(0)
    model = DDP(_Words() if what == "sparse" else small_net(), bucket_cap_mb=0.002)
    opt = SGD(model.parameters(), lr=0.05)
    hooks: dict[float, Any] = {4.0: default_hooks.bf16_compress_hook} if what == "hook" else {}
    compressor = AdaptiveCompressor(
        policy=Fixed(4 if hooks else 1),
        cf_range=(2, 100),
        hooks=hooks,
        exchange=TwoLevel(node=2),
    ).attach(model)
    for step in range(6):
        if step == 3 and what == "detached":
            compressor.detach()
        opt.zero_grad()
        loss_of(model, step, rank).backward()
        opt.step()
    return flat_parameters(model)


def _plain(rank: int, what: str) -> Tensor:
    torch.manual_seed(0)
    model = DDP(_Words() if what == "sparse" else small_net())
    opt = SGD(model.parameters(), lr=0.05)
    for step in range(6):
        opt.zero_grad()
        loss_of(model, step, rank).backward()
        opt.step()
    return flat_parameters(model)


@pytest.mark.parametrize("what", ["dense", "sparse", "hook", "detached"])
def test_what_is_not_compressed_is_as_with_ddp(what: str) -> None:
    close = {"rtol": 1e-2, "atol": 1e-3} if what == "hook" else {"rtol": 1e-9, "atol": 1e-12}
    plain = run_ranks(4, _plain, what)
    for found in run_ranks(4, _others, what):
        torch.testing.assert_close(found, plain[0], **close)
