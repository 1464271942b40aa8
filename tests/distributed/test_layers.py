"""Layers with CFs of their own: nothing is lost, bytes are as computed, every rank the same."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import Accordion, AdaptiveCompressor, Network
from policies import Plan, Policy
from runs.tasks import make_task
from tests.distributed.balance import balance
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Clock,
    Scripted,
    flat_parameters,
    loss_of,
    same,
    small_net,
)

STEPS = 8
MIXED = [{"0.weight": 1.0, "2.weight": 7.0}, {"0.weight": 60.0, "2.bias": 1.0}, {}]


class ByLayer(Scripted):
    """Another division in every step, and the norms of layers are read."""

    layerwise = True

    def __init__(self, cf: float, divisions: list[dict[str, float]], probe: float) -> None:
        super().__init__([cf], (probe,))
        self.divisions = divisions

    def plan(self) -> Plan:
        now = self.divisions[self.step % len(self.divisions)]
        send, reads = self.cfs[0], self.step % 4 == 3
        return Plan(send, self.probe, layers=now, accumulate=True, read_sum=reads)


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


def _layer_norms(rank: int) -> tuple[list[Any], list[dict[str, float]]]:
    """What was reported of the layers, and the norm of each layer's mean gradients so far."""
    model = DDP(small_net(), bucket_cap_mb=0.004)
    policy = ByLayer(1.0, [{}], 40.0)
    AdaptiveCompressor("topk", (1, 100), policy=policy, memory="residual").attach(model)
    sums: dict[str, torch.Tensor] = {}
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        for name, parameter in model.module.named_parameters():
            assert parameter.grad is not None
            sums[name] = sums.get(name, 0.0) + parameter.grad
        norms.append({name: float(total.norm()) for name, total in sums.items()})
    return [report.layer_norms for report in policy.reports], norms


def test_layers_report_the_norms_of_their_sums_since_the_last_reading() -> None:
    reported, norms = run_ranks(2, _layer_norms)[0]
    assert [bool(layers) for layers in reported] == [False] * 3 + [True] + [False] * 3
    assert reported[3] == pytest.approx(norms[2])


class Measuring(Scripted):
    """Asks for all that can be measured, and has a statistic of its own: the squared norm of what
    is sent before error feedback, and its elements."""

    layerwise = True
    measures = 2

    def plan(self) -> Plan:
        plan = super().plan()
        return replace(plan, by_layer=True, measure=self.step % 2 == 1)

    def measure(self, gradients: Tensor) -> Tensor:
        numbers = [gradients.double().square().sum(), torch.tensor(float(len(gradients)))]
        return torch.stack([each.double() for each in numbers])


HOWS = {
    "gathered": {},
    "sharded": {"exchange": "sharded"},
    "voted": {"exchange": "voted_indices"},
    "in rounds": {"base": "powersgd"},
    "updates": {"optimizer": "adamw"},
}


def _measured(rank: int) -> dict[str, Any]:
    """The reports of a run in each way, of which one step is not finite on rank 1, and the first
    is dense."""
    found = {}
    for how, options in HOWS.items():
        options = {"base": "topk", "granularity": "layer", **options}
        model = DDP(small_net(), bucket_cap_mb=0.004)
        adam = options.pop("optimizer", "") == "adamw"
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        if adam:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        policy = Measuring([1.0, 10.0, 10.0, 30.0], (20.0,))
        compressor = AdaptiveCompressor(cf_range=(1, 100), policy=policy, **options)
        compressor.attach(model, optimizer=optimizer if adam else None)
        for step in range(STEPS):
            optimizer.zero_grad()
            bad = step == 5 and rank == 1
            (loss_of(model, step, rank) * (float("nan") if bad else 1.0)).backward()
            if step != 5:
                optimizer.step()
        found[how] = policy.reports
    return found


def test_what_is_measured_of_layers_adds_up_and_so_does_a_statistic_of_ones_own() -> None:
    everyone = run_ranks(2, _measured)
    numel = sum(p.numel() for p in small_net().parameters())
    for how, reports in everyone[0].items():
        assert same([asdict(r) for r in reports], [asdict(r) for r in everyone[1][how]])
        for report in reports:
            step = report.step
            if step == 5:
                assert (report.layer_measurements, report.measured) == ({}, [])
                continue
            assert len(report.layer_measurements) == 6
            for cf, whole in report.measurements.items():
                layers = [of[cf] for of in report.layer_measurements.values()]
                assert sum(each.total for each in layers) == pytest.approx(whole.total)
                if how != "sharded":  # whose second compression is of the whole
                    assert sum(each.kept for each in layers) == pytest.approx(whole.kept)
                    assert sum(each.error for each in layers) == pytest.approx(whole.error)
            assert bool(report.measured) == (step % 2 == 1), (how, step)
            if report.measured:
                energy, elements = report.measured
                assert elements == 2 * numel
                if how != "updates":
                    assert energy == pytest.approx(2 * report.grad_norm**2)


def _trained(rank: int, policy: Policy, steps: int, stop: int | None = None) -> dict[str, Any]:
    """A run with momentum; `stop`: saved and loaded again there."""
    task = make_task("text", batch_size=2, lr=0.3)
    model = DDP(task.build_model())
    optimizer = task.optimizer(model)
    clock = Clock()
    compressor = AdaptiveCompressor(
        "topk+fp32", (10, 1000), policy=policy, network=Network(clock=clock), granularity="layer"
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
def test_accordion_by_layer_on_a_real_task() -> None:
    policy = Accordion(10, 200, per_layer=True, interval=5, eta=0.3)
    everyone = run_ranks(2, _trained, policy, 40)
    assert same(everyone[0]["parameters"], everyone[1]["parameters"])
    mixed = [(cf, layers) for cf, layers in everyone[0]["plans"] if layers]
    assert mixed
    for cf, layers in mixed:
        assert set(layers.values()) == {10.0, 200.0}
        assert 10 < cf < 200


def test_saving_and_loading_in_the_middle_changes_nothing() -> None:
    policy = Accordion(10, 200, per_layer=True, interval=4)
    straight = run_ranks(2, _trained, policy, 20)
    stopped = run_ranks(2, _trained, policy, 20, 9)
    assert same(straight[0]["parameters"], stopped[0]["parameters"])
    assert straight[0]["plans"] == stopped[0]["plans"]


def _refused(rank: int, options: dict[str, Any]) -> str:
    model = DDP(small_net(torch.float32))
    policy = Accordion(per_layer=True)
    settings = {"base": "topk", "cf_range": (2, 100), "policy": policy, **options}
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is checked by the caller
        AdaptiveCompressor(**settings).attach(model)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"granularity": "bucket"}, "granularity must be 'layer'"),
        ({"dense_below": 10**6}, "dense_below"),
        ({"base": "fp16", "cf_range": (1, 2)}, "half"),
    ],
    ids=["bucket", "small layers", "half precision"],
)
def test_what_cannot_be_is_refused_on_every_rank(options: dict[str, Any], says: str) -> None:
    assert all(says in message for message in run_ranks(2, _refused, options))
