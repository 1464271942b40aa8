"""Gossip: each rank steps by itself, and exchanges parameters with its neighbours only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from adaptive import AdaptiveCompressor, Gossip
from adaptive.contrib.topology import named
from compressors.kernels import blocks
from runs.simulate.ranks import run_ranks as simulate
from tests.distributed.processes import run_ranks
from tests.distributed.setting import batch, flat_parameters, same, small_net

STEPS = 12

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
}


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return ((model(x) - y) ** 2).mean()


def _step(model: nn.Module, optimizer: Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    _loss(model, step, rank).backward()
    optimizer.step()


def _kept(state: Any, model: DDP, *names: str) -> Tensor | None:
    """What a state keeps of each parameter under one of these names; None: nothing."""
    for name in names:
        keys = [f"{parameter}: {name}" for parameter, _ in model.module.named_parameters()]
        if keys[0] in state:
            return torch.cat([state[key] for key in keys])
    return None


def _train(
    rank: int, optimizer: str, base: str, options: dict[str, Any], on_device: bool = False
) -> dict[str, Any]:
    """Some steps of gossip, of which rank 1 leaves one out if it is told to."""
    blocks.force_device_path = on_device
    leaves_out = options.get("leaves_out") if rank == 1 else None
    options = {name: value for name, value in options.items() if name != "leaves_out"}
    model = DDP(small_net())
    steps = OPTIMIZERS[optimizer](model)
    start = flat_parameters(model)
    compressor = AdaptiveCompressor(base, (8, 8), debug=5, **options).attach(model, optimizer=steps)
    sent, moved, before, plain = 0, torch.zeros_like(start), start, dist.ProcessGroup.send

    def counting(group: Any, tensors: list[Tensor], *args: Any) -> Any:
        nonlocal sent
        sent += sum(tensor.nbytes for tensor in tensors)
        return plain(group, tensors, *args)

    def about_to_step(*_: Any) -> None:  # after the library's own hook
        nonlocal before
        before = flat_parameters(model)

    def stepped(*_: Any) -> None:  # before it
        nonlocal moved
        moved = moved + flat_parameters(model) - before

    dist.ProcessGroup.send = counting  # of isend
    steps.register_step_pre_hook(about_to_step)
    steps.register_step_post_hook(stepped)
    try:
        for step in range(STEPS):
            steps.zero_grad()
            _loss(model, step, rank).backward()
            if step != leaves_out:
                steps.step()
        own = flat_parameters(model)
        with compressor.averaged():
            mean = flat_parameters(model)
        assert torch.equal(own, flat_parameters(model))
    finally:
        dist.ProcessGroup.send = plain
    summary, explained = compressor.summary(), compressor.explain()
    sync = compressor.state_dict()["sync"]
    compressor.detach()
    return {
        "start": start,
        "moved": moved,
        "own": own,
        "mean": mean,
        "united": flat_parameters(model),
        "offset": _kept(sync["kept"], model, "offset"),
        "kept": _kept(sync["kept"], model, "error", "replica"),
        "sent": sent,
        "summary": summary,
        "explained": explained,
    }


def _reference(ranks: int, optimizer: str, gossip: str, topology: str, every: int) -> list[Tensor]:
    """Each rank's parameters, without compression: replicas in one process, mixed as the papers
    write it, once in `every` steps."""
    models = [small_net() for _ in range(ranks)]
    steps = [OPTIMIZERS[optimizer](model) for model in models]
    rounds = named(topology, ranks).rounds

    def mix(exchange: int) -> None:
        x = rounds[exchange % len(rounds)] @ torch.stack([flat_parameters(m) for m in models])
        for model, there in zip(models, x, strict=True):
            nn.utils.vector_to_parameters(there, model.parameters())

    for step in range(STEPS):
        for rank, model in enumerate(models):
            steps[rank].zero_grad()
            _loss(model, step, rank).backward()
        if gossip in ("d-psgd", "dcd-psgd") and step and step % every == 0:
            mix(step // every - 1)  # of the gradients of where they stood
        for each in steps:
            each.step()
        if gossip in ("deepsqueeze", "choco-sgd") and (step + 1) % every == 0:
            mix(step // every)
    return [flat_parameters(model) for model in models]


@pytest.mark.parametrize(
    ("gossip", "topology", "optimizer", "ranks", "every"),
    [
        ("d-psgd", "ring", "sgd", 4, 1),
        ("d-psgd", "ring", "adamw", 4, 5),
        pytest.param("d-psgd", "one_peer", "adamw", 2, 1, marks=pytest.mark.long),
        pytest.param("dcd-psgd", "exponential", "adamw", 4, 1, marks=pytest.mark.long),
        pytest.param("dcd-psgd", "ring", "sgd", 2, 1, marks=pytest.mark.long),
        ("dcd-psgd", "ring", "sgd", 2, 4),
        ("deepsqueeze", "one_peer", "adamw", 4, 1),
        ("deepsqueeze", "one_peer", "adamw", 4, 2),
        pytest.param("choco-sgd", "torus", "sgd", 4, 1, marks=pytest.mark.long),
        pytest.param("choco-sgd", "torus", "sgd", 4, 3, marks=pytest.mark.long),
    ],
)
def test_uncompressed_it_is_what_replicas_do_that_mix(
    gossip: str, topology: str, optimizer: str, ranks: int, every: int
) -> None:
    options = {"sync": Gossip(topology, gossip, every=every), "network": "10gbit"}
    found = run_ranks(ranks, _train, optimizer, "none", options)
    own = _reference(ranks, optimizer, gossip, topology, every)
    mean = torch.stack(own).mean(0)
    for rank, mine in enumerate(found):
        torch.testing.assert_close(mine["own"], own[rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(mine["mean"], mean, rtol=0, atol=1e-12)
        assert torch.equal(mine["united"], mine["mean"])
        assert f"spectral gap {named(topology, ranks).spectral_gap:.4g}" in mine["explained"]
        summary = mine["summary"]
        assert summary.sync in str(summary)
        assert (summary.steps, summary.local_steps) == (STEPS // every, STEPS // every * every)
        for told in (str(mine["summary"]), mine["explained"]):
            assert told.startswith("gossip: ")
            assert "than a dense all-reduce" in told


BASES = {"dcd-psgd": "qsgd", "deepsqueeze": "topk", "choco-sgd": "topk", "naive": "qsgd"}


def _check_invariants(
    gossip: str, topology: str, found: list[dict[str, Any]], compressed: bool = True
) -> None:
    """What holds of all ranks together, whatever is lost in compression."""
    own, kept, offset = (
        torch.stack([each[what] if each[what] is not None else each["own"] for each in found])
        for what in ("own", "kept", "offset")
    )
    w = named(topology, len(found)).rounds[0]
    if gossip in ("d-psgd", "dcd-psgd"):  # neighbours follow what the rank really has
        torch.testing.assert_close(offset, w @ own - own, rtol=0, atol=1e-12)
    if gossip == "choco-sgd":
        torch.testing.assert_close(offset, w @ kept - kept, rtol=0, atol=1e-12)
        assert not compressed or not torch.allclose(kept, own)
    if gossip in ("d-psgd", "deepsqueeze", "choco-sgd"):
        moved = torch.stack([each["start"] + each["moved"] for each in found]).mean(0)
        torch.testing.assert_close(own.mean(0), moved, rtol=0, atol=1e-12)
    assert (found[0]["offset"] is None) == (gossip == "deepsqueeze")  # used up in each step
    if gossip in ("d-psgd", "dcd-psgd", "choco-sgd"):
        assert offset.sum(0).abs().max() < 1e-12
    for each in found:
        torch.testing.assert_close(each["mean"], own.mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(each["united"], own.mean(0), rtol=0, atol=1e-12)
        # Statistics are all else: all-reduced, where neighbours get a copy each.
        summary, ranks = each["summary"], len(found)
        statistics = summary.payload_bytes - each["sent"]
        on_wire = summary.bytes_sent - each["sent"]
        assert statistics > 0
        assert on_wire == pytest.approx(statistics * 2 * (ranks - 1) / ranks)


@pytest.mark.parametrize(
    ("gossip", "topology", "ranks", "on_device", "every"),
    [
        ("dcd-psgd", "ring", 4, False, 1),
        ("dcd-psgd", "ring", 2, True, 3),
        pytest.param("deepsqueeze", "exponential", 4, False, 1, marks=pytest.mark.long),
        ("choco-sgd", "ring", 2, True, 1),
        ("choco-sgd", "ring", 4, False, 3),
        pytest.param("deepsqueeze", "ring", 2, True, 1, marks=pytest.mark.long),
        pytest.param("deepsqueeze", "ring", 4, False, 4, marks=pytest.mark.long),
        pytest.param("dcd-psgd", "torus", 4, True, 1, marks=pytest.mark.long),
        pytest.param("choco-sgd", "exponential", 4, False, 1, marks=pytest.mark.long),
        pytest.param("naive", "ring", 4, False, 1, marks=pytest.mark.long),
        pytest.param("naive", "ring", 2, False, 2, marks=pytest.mark.long),
    ],
)
def test_compressed_the_mean_moves_by_the_mean_step_and_bytes_are_those_of_isend(
    gossip: str, topology: str, ranks: int, on_device: bool, every: int
) -> None:
    step = 0.4 if gossip in ("deepsqueeze", "choco-sgd") else None
    options = {"sync": Gossip(topology, gossip, step, every)}
    found = run_ranks(ranks, _train, "adamw", BASES[gossip], options, on_device)
    _check_invariants(gossip, topology, found)


@pytest.mark.parametrize(("gossip", "ranks"), [("choco-sgd", 2), ("dcd-psgd", 4)])
def test_with_more_steps_between_exchanges_bytes_fall_and_ranks_drift_further(
    gossip: str, ranks: int
) -> None:
    sent, drifts = [], []
    for every in (1, 4):
        sync = Gossip(algorithm=gossip, every=every)
        found = run_ranks(ranks, _train, "adamw", BASES[gossip], {"sync": sync})
        sent.append(found[0]["sent"])
        assert found[0]["summary"].dense_bytes > 0
        own = torch.stack([each["own"] for each in found])
        drifts.append((own - own.mean(0)).norm())
        # No further than ranks that never exchange anything, which their own steps take apart.
        alone = torch.stack([each["start"] + each["moved"] for each in found])
        assert drifts[-1] < (alone - alone.mean(0)).norm()
    assert sent[0] == 4 * sent[1]
    assert drifts[0] < drifts[1]


@pytest.mark.parametrize(
    ("gossip", "base", "ranks", "every"),
    [
        ("dcd-psgd", "qsgd", 4, 1),
        ("dcd-psgd", "qsgd", 2, 4),
        ("d-psgd", "none", 2, 6),
        pytest.param("d-psgd", "none", 2, 1, marks=pytest.mark.long),
        pytest.param("choco-sgd", "topk", 2, 1, marks=pytest.mark.long),
        pytest.param("choco-sgd", "topk", 2, 2, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_leaves_a_step_out_does_not_keep_others_waiting(
    gossip: str, base: str, ranks: int, every: int
) -> None:
    # With 4 it is the middle of a round, with 6 the first step after an exchange.
    options = {"sync": Gossip(algorithm=gossip, every=every), "leaves_out": STEPS // 2}
    found = run_ranks(ranks, _train, "sgd", base, options)
    _check_invariants(gossip, "ring", found)


def _left_out_before(rank: int, gossip: str, base: str, every: int) -> list[Tensor]:
    """Rank 1 leaves out the step before all states are gathered, and the one before the end."""
    model = DDP(small_net())
    optimizer, found = OPTIMIZERS["sgd"](model), []
    sync = Gossip(algorithm=gossip, every=every)
    compressor = AdaptiveCompressor(base, (8, 8), sync=sync).attach(model, optimizer=optimizer)
    for end in (compressor.state_dict, lambda _: compressor.detach()):
        for step in range(3):
            optimizer.zero_grad()
            _loss(model, step, rank).backward()
            if rank == 0 or step < 2:
                optimizer.step()
        end("gathered")
        found.append(flat_parameters(model))
    return found


@pytest.mark.parametrize(
    ("gossip", "base", "every"),
    [("dcd-psgd", "qsgd", 1), ("choco-sgd", "topk", 3), ("d-psgd", "none", 3)],
)
def test_ranks_unite_though_one_has_left_its_step_out(gossip: str, base: str, every: int) -> None:
    for first, second in zip(*run_ranks(2, _left_out_before, gossip, base, every), strict=True):
        assert torch.equal(first, second)


def _plain(rank: int) -> Tensor:
    model = DDP(small_net())
    optimizer = OPTIMIZERS["sgd"](model)
    for step in range(STEPS):
        _step(model, optimizer, step, rank)
    return flat_parameters(model)


def test_with_all_as_neighbours_deepsqueeze_at_cf_1_is_all_reduce() -> None:
    options = {"sync": Gossip("complete", "deepsqueeze")}
    dense = run_ranks(4, _plain)
    for mine, theirs in zip(run_ranks(4, _train, "sgd", "none", options), dense, strict=True):
        torch.testing.assert_close(mine["own"], theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("gossip", "base"),
    [("deepsqueeze", "topk"), pytest.param("dcd-psgd", "qsgd", marks=pytest.mark.long)],
)
def test_simulated_ranks_do_what_processes_do(gossip: str, base: str) -> None:
    options = {"sync": Gossip("exponential", gossip)}
    real = run_ranks(4, _train, "adamw", base, options)
    simulated = simulate(4, lambda rank, _: _train_simulated(rank, base, options))
    for mine, theirs in zip(simulated, real, strict=True):
        assert torch.equal(mine, theirs["own"])


def _train_simulated(rank: int, base: str, options: dict[str, Any]) -> Tensor:
    model = DDP(small_net())
    optimizer = OPTIMIZERS["adamw"](model)
    AdaptiveCompressor(base, (8, 8), **options).attach(model, optimizer=optimizer)
    for step in range(STEPS):
        _step(model, optimizer, step, rank)
    return flat_parameters(model)


def _resumed(rank: int, gossip: str, base: str, form: str, every: int) -> dict[str, Any]:
    """Parameters after a run that goes on, and after one that goes on from what was saved on the
    way: with "gathered", from what rank 0 has alone."""

    def new() -> tuple[DDP, Optimizer, AdaptiveCompressor]:
        model = DDP(small_net())
        optimizer = OPTIMIZERS["adamw"](model)
        sync = Gossip(algorithm=gossip, every=every)
        compressor = AdaptiveCompressor(base, (8, 8), sync=sync)
        return model, optimizer, compressor.attach(model, optimizer=optimizer)

    model, optimizer, compressor = new()
    for step in range(STEPS):
        if step == STEPS // 2:
            saved: list[Any] = [
                compressor.state_dict(form),  # first: with "gathered" it moves parameters
                model.module.state_dict(),
                optimizer.state_dict(),
            ]
            if form == "gathered":
                dist.broadcast_object_list(saved, src=0)
            saved = torch.utils._pytree.tree_map(
                lambda v: v.clone() if isinstance(v, Tensor) else v, saved
            )
        _step(model, optimizer, step, rank)
    straight, end = flat_parameters(model), compressor.state_dict("rank")["sync"]
    compressor.close()
    model, optimizer, compressor = new()
    for step in range(2):  # is thrown away, and something is under way
        _step(model, optimizer, step, rank)
    model.module.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    compressor.load_state_dict(saved[0])
    for step in range(STEPS // 2, STEPS):
        _step(model, optimizer, step, rank)
    found = compressor.state_dict("rank")["sync"]
    problem = ""
    try:
        AdaptiveCompressor(base, (8, 8), sync=Gossip(algorithm=gossip)).attach(
            DDP(small_net()), optimizer=OPTIMIZERS["sgd"](small_net())
        )
    except (ValueError, RuntimeError) as error:
        problem = str(error)
    return {
        "alike": torch.equal(flat_parameters(model), straight) and same(found, end),
        "own": straight,
        "problem": problem,
    }


@pytest.mark.parametrize(
    ("gossip", "base", "form", "every"),
    [
        ("dcd-psgd", "qsgd", "gathered", 1),
        # Saved two steps after an exchange, and right after one.
        ("dcd-psgd", "qsgd", "rank", 4),
        ("d-psgd", "none", "rank", 4),
        ("d-psgd", "none", "rank", 3),
        pytest.param("choco-sgd", "topk", "rank", 1, marks=pytest.mark.long),
        pytest.param("choco-sgd", "topk", "rank", 4, marks=pytest.mark.long),
        pytest.param("choco-sgd", "topk", "gathered", 4, marks=pytest.mark.long),
        pytest.param("deepsqueeze", "topk", "gathered", 1, marks=pytest.mark.long),
        pytest.param("deepsqueeze", "topk", "rank", 4, marks=pytest.mark.long),
        pytest.param("naive", "qsgd", "rank", 4, marks=pytest.mark.long),
        pytest.param("d-psgd", "none", "rank", 1, marks=pytest.mark.long),
    ],
)
def test_resumed_it_goes_on_to_the_bit_and_needs_the_optimizer(
    gossip: str, base: str, form: str, every: int
) -> None:
    found = run_ranks(2, _resumed, gossip, base, form, every)
    assert all(each["alike"] for each in found)
    assert not torch.equal(found[0]["own"], found[1]["own"])
    for each in found:
        assert "optimizer must be one of the model's parameters" in each["problem"]
