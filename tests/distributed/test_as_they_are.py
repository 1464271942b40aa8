"""Gradients that DDP exchanges as it would without a hook: sparse ones, and complex ones. Whatever
is beside them in the model is compressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, LocalSteps
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted

STEPS = 5


class _Net(nn.Module):
    """An embedding with sparse gradients, complex parameters, and others."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.rows = nn.Embedding(40, 6, sparse=sparse)
        self.bag = nn.EmbeddingBag(40, 6, mode="sum", sparse=sparse)
        self.first = nn.Linear(6, 300)
        self.second = nn.Linear(300, 6)
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, rows: Tensor) -> Tensor:
        x = self.second(self.first(self.rows(rows).mean(1) + self.bag(rows)).tanh())
        return (x * self.turn).abs().square().mean()


def _broadcast_complex(rank: int) -> str:
    try:
        dist.broadcast(torch.zeros(2, dtype=torch.complex64), 0)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def _complex_over_gloo() -> None:
    if error := run_ranks(1, _broadcast_complex)[0]:
        pytest.skip(f"DDP's own broadcast of complex parameters fails with this gloo: {error}")


complex_over_gloo = pytest.mark.usefixtures("_complex_over_gloo")

UNTOUCHED = ("rows.weight", "bag.weight", "turn")


def _model() -> DDP:
    torch.manual_seed(0)
    return DDP(_Net(), bucket_cap_mb=0.004)


def _rows(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(40, (3 + rank, 4), generator=generator)


def _gradients(rank: int, how: str | None) -> list[dict[str, Tensor]]:
    """Of every step, at the parameters of the beginning."""
    model, scaler = _model(), torch.amp.GradScaler("cpu", init_scale=16.0, enabled=how == "scaled")
    if how is not None:
        compressor = AdaptiveCompressor(
            policy=Scripted([10.0, 1.0, 20.0]),
            exchange="sharded" if how == "sharded" else "all_gather",
            network="100mbit" if how == "link" else None,
        )
        compressor.attach(model, scaler=scaler)
    found = []
    for step in range(STEPS):
        model.zero_grad()
        scaler.scale(model(_rows(step, rank))).backward()
        named = model.module.named_parameters()
        gradients = {name: p.grad / scaler.get_scale() for name, p in named}
        found.append(gradients)
    return found


def _all_gradients(rank: int, how: str) -> list[list[dict[str, Tensor]]]:
    return [_gradients(rank, None), _gradients(rank, how)]


@complex_over_gloo
@pytest.mark.parametrize("how", ["all_gather", "sharded", "scaled", "link"])
def test_sparse_and_complex_gradients_are_ddps_and_the_others_are_compressed(how: str) -> None:
    for dense, ours in run_ranks(2, _all_gradients, how):
        for step, (theirs, own) in enumerate(zip(dense, ours, strict=True)):
            for name in UNTOUCHED:
                assert own[name].is_sparse == theirs[name].is_sparse == (name != "turn")
                assert torch.equal(own[name].to_dense(), theirs[name].to_dense())
            compressed = (own["first.weight"] == 0).float().mean()
            assert (compressed > 0.5) == (step % 3 != 1)


def _train(rank: int, kind: str, momentum: float) -> dict[str, Any]:
    """At CF 1, with what a compressor takes over of the optimizer, or without a compressor."""
    model = _model()
    named = dict(model.module.named_parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=momentum)
    others: list[torch.optim.Optimizer] = []
    if kind.startswith("adamw"):
        embedded = [named.pop("rows.weight"), named.pop("bag.weight")]
        optimizer = torch.optim.AdamW(named.values(), 1e-2)
        others = [torch.optim.SparseAdam(embedded, 1e-2)]
    compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Fixed(cf=1.0))
    if kind.endswith("ours"):
        compressor.attach(model, optimizer=optimizer)
    for step in range(STEPS):
        for each in (optimizer, *others):
            each.zero_grad()
        model(_rows(step, rank)).backward()
        for each in (optimizer, *others):
            each.step()
    groups = [len(group["params"]) for group in optimizer.param_groups]
    return {
        "parameters": {n: p.detach().clone() for n, p in model.module.named_parameters()},
        "groups": groups,
    }


def _train_both(rank: int, kind: str, momentum: float) -> list[dict[str, Any]]:
    return [_train(rank, kind, momentum), _train(rank, f"{kind} ours", momentum)]


@complex_over_gloo
@pytest.mark.parametrize(("kind", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adamw", 0.0)])
def test_the_optimizer_does_all_its_work_for_what_is_not_compressed(
    kind: str, momentum: float
) -> None:
    results = run_ranks(2, _train_both, kind, momentum)
    for plain, ours in results:
        assert plain["groups"] == ours["groups"]
        for name, p in plain["parameters"].items():
            torch.testing.assert_close(ours["parameters"][name], p)
    for name, p in results[0][1]["parameters"].items():
        assert torch.equal(p, results[1][1]["parameters"][name])


def _counted(rank: int) -> dict[str, Any]:
    model = _model()
    policy = Scripted([10.0, 1.0])
    compressor = AdaptiveCompressor(policy=policy).attach(model)
    for step in range(STEPS):
        model(_rows(step, rank)).backward()
        model.zero_grad()
    summary = compressor.summary()
    state = compressor.state_dict()
    compressor.load_state_dict(state)
    reports = [(r.wire_bytes - r.statistics_bytes, r.dense_wire_bytes) for r in policy.reports]
    return {"reports": reports, "summary": summary, "names": list(state["parameters"])}


@complex_over_gloo
def test_what_is_not_compressed_is_not_counted() -> None:
    results = run_ranks(2, _counted)
    assert results[0]["reports"] == results[1]["reports"]
    numel = 6 * 300 + 300 + 300 * 6 + 6
    for result in results:
        assert result["names"] == ["first.weight", "first.bias", "second.weight", "second.bias"]
        dense = [report for report in result["reports"] if report[0] == report[1]]
        assert dense, "no dense step"
        assert dense[0][1] == 4 * numel
        assert result["summary"].dense_bytes == STEPS * 4 * numel


class _OnlySparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(40, 6, sparse=True)

    def forward(self, rows: Tensor) -> Tensor:
        return self.rows(rows).square().mean()


def _only_sparse(rank: int, apart: bool) -> str:
    torch.manual_seed(0)
    model = DDP(_OnlySparse())
    try:
        compressor = AdaptiveCompressor(sync=LocalSteps(4) if apart else None).attach(model)
    except ValueError as error:
        return str(error)
    for step in range(STEPS):
        model(_rows(step, rank)).backward()
    return str(compressor.summary().steps)


def test_a_model_of_nothing_else_runs_and_local_steps_refuse_it() -> None:
    assert run_ranks(2, _only_sparse, False) == [str(STEPS)] * 2
    for said in run_ranks(2, _only_sparse, True):
        assert said.startswith("sync=LocalSteps(steps=4, ")
        assert "does not go with sparse gradients" in said
        assert "rows.weight" in said


class _Beside(nn.Module):
    """An embedding with sparse gradients and dense layers, of which neither moves the other."""

    def __init__(self, embedding_first: bool) -> None:
        super().__init__()
        if embedding_first:  # whose bucket is then the last of a backward
            self.rows = nn.Embedding(40, 6, sparse=True)
        self.first, self.second = nn.Linear(6, 60), nn.Linear(60, 6)
        if not embedding_first:
            self.rows = nn.Embedding(40, 6, sparse=True)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        x = self.rows(rows).mean(1)
        y = self.second(self.first(x.detach()).tanh())
        return (x - 1).square().mean(), (y - 1).square().mean()


def _beside(rank: int, embedding_first: bool, compressed: bool) -> dict[str, Any]:
    """The dense layers' gradients are not finite on rank 1 in one step, which is left out."""
    torch.manual_seed(0)
    model = DDP(_Beside(embedding_first), bucket_cap_mb=0.001)
    embedding, dense = model.module.rows, [model.module.first, model.module.second]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SparseAdam(embedding.parameters(), 1e-2),
        torch.optim.AdamW([p for layer in dense for p in layer.parameters()], 1e-2),
    ]
    if compressed:
        compressor = AdaptiveCompressor(policy=Fixed(cf=10.0), memory="updates")
        compressor.attach(model, optimizer=optimizers)
    after, losses, left_out = [], [], []
    for step in range(16):
        for each in optimizers:
            each.zero_grad()
        of_embedding, of_dense = model(_rows(step, rank))
        losses.append(float(of_dense.detach()))
        (of_embedding + of_dense * (torch.nan if rank == 1 and step == 6 else 1.0)).backward()
        gradients = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            for each in optimizers:
                each.step()
        else:
            left_out.append(step)
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return {
        "after": torch.stack(after),
        "embedding": embedding.weight.detach(),
        "losses": losses,
        "left_out": left_out,
        "cf": compressor.cf if compressed else 1.0,
    }


def _beside_both(rank: int, embedding_first: bool) -> list[dict[str, Any]]:
    return [_beside(rank, embedding_first, compressed) for compressed in (False, True)]


@pytest.mark.parametrize("embedding_first", [True, False])
def test_an_embedding_with_sparse_gradients_beside_layers_in_parameter_space(
    embedding_first: bool,
) -> None:
    (plain, ours), (_, others) = run_ranks(2, _beside_both, embedding_first)
    assert ours["cf"] == others["cf"] == 10
    assert ours["after"].isfinite().all()
    assert torch.equal(ours["after"], others["after"])
    assert torch.equal(ours["embedding"], plain["embedding"])
    assert ours["left_out"] == others["left_out"] == plain["left_out"] == [6]
    for each in (plain, ours):
        assert sum(each["losses"][-3:]) < 0.5 * sum(each["losses"][:3])


def _ignoring(rank: int, compressed: bool) -> dict[str, Tensor]:
    """A model part of which DDP leaves alone, with an optimizer that has momentum and decay."""
    torch.manual_seed(0)
    net = _Net(sparse=False)
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["rows.weight", "second.bias"])
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
    if compressed:
        compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Fixed(cf=1.0))
        compressor.attach(model, optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(_rows(step, rank)).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def _ignoring_both(rank: int) -> list[dict[str, Tensor]]:
    return [_ignoring(rank, compressed) for compressed in (False, True)]


@complex_over_gloo
def test_momentum_and_decay_of_parameters_that_ddp_ignores_are_the_optimizers() -> None:
    for plain, ours in run_ranks(2, _ignoring_both):
        for name, p in plain.items():
            torch.testing.assert_close(ours[name], p)
