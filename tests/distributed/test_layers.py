"""Layers with CFs of their own: nothing is lost, bytes are as computed, every rank the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import Accordion, AdaptiveCompressor, Fixed, Layerwise
from policies import Plan, Policy
from runs.tasks import make_task
from tests.distributed.balance import balance
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Clock,
    Scripted,
    flat_parameters,
    local_gradients,
    loss_of,
    same,
    small_net,
)

STEPS = 8
MIXED = [{"0.weight": 1.0, "2.weight": 7.0}, {"0.weight": 60.0, "2.bias": 1.0}, {}]


class ByLayer(Scripted):
    """Another division in every step; what is probed has one too, and layers are read."""

    layerwise = True

    def __init__(self, cf: float, divisions: list[dict[str, float]], probe: float) -> None:
        super().__init__([cf], (probe,))
        self.divisions = divisions

    def plan(self) -> Plan:
        now = self.divisions[self.step % len(self.divisions)]
        send, reads = self.cfs[0], self.step % 4 == 3
        layers = {send: now, self.probe[0]: {"0.weight": 90.0}}
        return Plan(
            send, self.probe, layers=layers, accumulate=True, read_sum=reads, read_layers=reads
        )


def _run(
    rank: int, base: str, exchange: str, memory: str, divisions: list[dict[str, float]]
) -> dict[str, Any]:
    policy = ByLayer(20.0, divisions, 40.0)
    options = {"exchange": exchange, "memory": memory}
    return balance(rank, base, policy, STEPS, options=options, ddp_options={"bucket_cap_mb": 0.004})


@pytest.mark.parametrize(
    ("base", "exchange"),
    [
        ("topk", "all_gather"),
        ("topk", "sharded"),
        ("topk", "voted_indices"),
        ("topk", "shared_indices"),
        ("threshold", "auto"),
        ("randomk", "auto"),
        ("powersgd", "auto"),
        ("sketch", "auto"),
        ("onebit", "auto"),
        ("topk+int8", "auto"),
    ],
)
def test_nothing_is_lost_and_all_ranks_agree(base: str, exchange: str) -> None:
    everyone = run_ranks(2, _run, base, exchange, "residual", MIXED)
    assert max(each["deviation"] for each in everyone) < 1e-12
    assert same(everyone[0]["parameters"], everyone[1]["parameters"])
    assert same(everyone[0]["reports"], everyone[1]["reports"])
    assert everyone[0]["layer_cfs"] == [MIXED[step % 3] for step in range(STEPS)]
    assert everyone[1]["layer_cfs"] == []  # rank 0 writes


def test_a_division_into_equals_changes_nothing() -> None:
    names = [name for name, _ in small_net().named_parameters()]
    equal = [dict.fromkeys(names, 20.0)]
    divided, alike = (
        run_ranks(2, _run, "topk", "all_gather", "residual", each)[0] for each in (equal, [{}])
    )
    assert same(divided["parameters"], alike["parameters"])
    assert divided["reports"][2][-1] == alike["reports"][2][-1]  # wire bytes


def test_all_layers_at_cf_1_is_dense() -> None:
    names = [name for name, _ in small_net().named_parameters()]
    exact = [dict.fromkeys(names, 1.0)]
    sent = run_ranks(2, _run, "topk", "all_gather", "none", exact)[0]["parameters"]
    dense = run_ranks(2, _dense)[0]
    torch.testing.assert_close(sent, dense, rtol=0, atol=1e-13)


def _dense(rank: int) -> Any:
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return flat_parameters(model)


def _reattached(rank: int) -> list[Any]:
    """What was reported of the layers before and after a while without the compressor."""
    model = DDP(small_net(), bucket_cap_mb=0.004)
    policy = ByLayer(20.0, MIXED, 40.0)
    compressor = AdaptiveCompressor("topk", (1, 100), policy=policy, memory="residual")
    for _ in range(2):
        compressor.attach(model)
        for step in range(STEPS):
            loss_of(model, step, rank).backward()
        compressor.detach()
        model.zero_grad()
    return [report.layers for report in policy.reports if report.layers]


def test_layers_are_measured_on_after_detach_and_attach() -> None:
    reported = run_ranks(2, _reattached)[0]
    assert len(reported) == 4
    assert all(layer.energy > 0 for layers in reported for layer in layers.values())


def _layer_reports(rank: int) -> tuple[list[Any], list[dict[str, float]]]:
    """What was reported of the layers, and each step's own energies, summed over the ranks."""
    model = DDP(small_net(), bucket_cap_mb=0.004)
    policy = ByLayer(20.0, MIXED, 40.0)
    AdaptiveCompressor("topk", (1, 100), policy=policy, memory="residual").attach(model)
    energies = []
    for step in range(STEPS):
        gradients = local_gradients(model, step, rank)
        energy = torch.stack([g.square().sum() for g in gradients.values()])
        dist.all_reduce(energy)
        energies.append(dict(zip(gradients, energy.tolist(), strict=True)))
        model.zero_grad()
        loss_of(model, step, rank).backward()
    return [report.layers for report in policy.reports], energies


def test_layers_report_their_energies_since_the_last_reading() -> None:
    reported, energies = run_ranks(2, _layer_reports)[0]
    assert [bool(layers) for layers in reported] == [False] * 3 + [True] + [False] * 3
    for name, layer in reported[3].items():
        assert layer.energy == pytest.approx(sum(each[name] for each in energies[:3]))
        assert layer.sum_norm > 0


def _trained(rank: int, policy: Policy, steps: int, stop: int | None = None) -> dict[str, Any]:
    """A run with momentum; `stop`: saved and loaded again there."""
    task = make_task("text", batch_size=2, lr=0.3)
    model = DDP(task.build_model())
    optimizer = task.optimizer(model)
    clock = Clock()
    compressor = AdaptiveCompressor(
        "topk+fp32", (10, 1000), policy=policy, clock=clock, granularity="layer"
    )
    compressor.attach(model, optimizer=optimizer)
    plans = []
    for step in range(steps):
        clock.now += 0.1
        if step == stop:
            compressor.load_state_dict(compressor.state_dict())
        optimizer.zero_grad()
        task.loss(model, task.batch(step, rank, 2)).backward()
        optimizer.step()
        plans.append((compressor.cf, compressor.layer_cfs))
    summary = compressor.summary()
    return {
        "parameters": flat_parameters(model),
        "plans": plans,
        "gain": summary.mean_gain[compressor.cf],
        "bytes": summary.bytes_sent,
    }


@pytest.mark.long
def test_layerwise_keeps_more_for_the_same_bytes_on_a_real_task() -> None:
    alike = run_ranks(2, _trained, Fixed(cf=100), 120)[0]
    everyone = run_ranks(2, _trained, Layerwise(Fixed(cf=100), window=15), 120)
    divided = everyone[0]
    assert same(everyone[0]["parameters"], everyone[1]["parameters"])
    assert everyone[0]["plans"] == everyone[1]["plans"]
    assert len(set(divided["plans"][-1][1].values())) > 1
    assert divided["gain"] > alike["gain"]
    assert divided["bytes"] == pytest.approx(alike["bytes"], rel=0.05)


@pytest.mark.long
def test_accordion_by_layer_on_a_real_task() -> None:
    policy = Accordion(10, 200, per_layer=True, interval=5, eta=0.3)
    everyone = run_ranks(2, _trained, policy, 40)
    assert same(everyone[0]["parameters"], everyone[1]["parameters"])
    mixed = [(cf, layers) for cf, layers in everyone[0]["plans"] if layers]
    assert mixed
    for cf, layers in mixed:
        assert set(layers.values()) == {10.0, 200.0}
        assert 10 < cf < 200


@pytest.mark.parametrize(
    "policy",
    [
        Layerwise(Fixed(cf=50), window=6),
        pytest.param(Accordion(10, 200, per_layer=True, interval=4), marks=pytest.mark.long),
    ],
)
def test_saving_and_loading_in_the_middle_changes_nothing(policy: Policy) -> None:
    straight = run_ranks(2, _trained, policy, 20)
    stopped = run_ranks(2, _trained, policy, 20, 9)
    assert same(straight[0]["parameters"], stopped[0]["parameters"])
    assert straight[0]["plans"] == stopped[0]["plans"]


def _refused(rank: int, options: dict[str, Any]) -> str:
    model = DDP(small_net(torch.float32))
    settings = {"base": "topk", "cf_range": (2, 100), "policy": Layerwise(Fixed(cf=10)), **options}
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is checked by the caller
        AdaptiveCompressor(**settings).attach(model)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"granularity": "bucket"}, "granularity must be 'layer'"),
        ({"dense_below": 10**6}, "dense_below"),
        ({"base": "fp16", "cf_range": (1, 2), "policy": Accordion(per_layer=True)}, "half"),
        ({"base": "qsgd"}, "keeps the largest elements"),
    ],
    ids=["bucket", "small layers", "half precision", "quantizer"],
)
def test_what_cannot_be_is_refused_on_every_rank(options: dict[str, Any], says: str) -> None:
    assert all(says in message for message in run_ranks(2, _refused, options))
