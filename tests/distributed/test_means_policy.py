"""The CF of means that a second instance of the policy chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    AdaptiveCompressor,
    Goodput,
    GraVAC,
    LinkSpec,
    MemoryTimeline,
    Network,
    ParameterServer,
    Warmup,
)
from adaptive.exchange.means_policy import MeansPolicy
from adaptive.timeline.records import scalars
from runs.modelled_clock import ModelledClock
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Scripted,
    flat_parameters,
    local_gradients,
    loss_of,
    same,
    small_net,
)
from tests.distributed.test_resume import Run
from tests.quick import quick

STEPS = 60

POLICIES = {
    "gravac": lambda: GraVAC(window=5, dense_window=2, epsilon=0.1),
    "goodput": lambda: Goodput(goal="time", opening=3, cooldown=3),
    "after a warm-up": lambda: Warmup(steps=2, then=GraVAC(window=4, gain="error_fed")),
}


def _trained(rank: int, policy: str, own_memory: bool) -> dict[str, Any]:
    """The CF of means in each step, records, and where all that the ranks have computed went."""
    model, timeline = DDP(small_net(), bucket_cap_mb=0.004), MemoryTimeline()
    compressor = AdaptiveCompressor(
        "topk+fp32",
        (2, 200),  # no rung in bf16, whose rounding is lost
        policy=POLICIES[policy](),
        memory="residual",
        exchange=ParameterServer("auto", own_memory),
        network=Network(clock=ModelledClock(1e-3, LinkSpec.parse("3mbit"))),
        timeline=timeline,
    ).attach(model)
    own, sent, cfs = 0.0, 0.0, []
    for step in range(STEPS):
        own += sum(float(g.sum()) for g in local_gradients(model, step, rank).values())
        model.zero_grad()
        loss_of(model, step, rank).backward()
        sent += sum(float(p.grad.sum()) for p in model.parameters() if p.grad is not None)
        means = compressor.running().controller.policy
        assert isinstance(means, MeansPolicy)
        cfs.append(means.cf)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
    state = compressor.state_dict()
    return {
        "cfs": cfs,
        "parameters": flat_parameters(model),
        "sent": sent,
        "own": own,
        "waits": sum(float(kept["residual"].sum()) for kept in state["memory"].values()),
        "server": sum(float(each.sum()) for each in state["server"].values()),
        "records": timeline.steps,
        "reasons": [event.reason for event in timeline.events],
        "says": compressor.explain(),
    }


@pytest.mark.parametrize(
    ("ranks", "policy", "own_memory"),
    quick(
        (2, "gravac", False),
        (4, "goodput", True),
        of=[(ranks, policy, own) for ranks in (2, 4) for policy in POLICIES for own in (0, 1)],
    ),
)
def test_all_ranks_send_means_at_the_cf_that_the_policy_chooses(
    ranks: int, policy: str, own_memory: bool
) -> None:
    """It is alike on all ranks, changes, is on record, and nothing is lost by it."""
    found = run_ranks(ranks, _trained, policy, bool(own_memory))
    first = found[0]
    mean = sum(each["own"] - each["waits"] for each in found) / ranks
    mean -= sum(each["server"] for each in found)
    for each in found:
        assert each["cfs"] == first["cfs"]
        assert torch.equal(each["parameters"], first["parameters"])
        assert each["sent"] == pytest.approx(mean, abs=1e-9)
    assert len({*first["cfs"]}) > 1
    assert f"means come back at CF {first['cfs'][-1]:.4g} since step" in first["says"]
    assert any("means at CF " in reason for reason in first["reasons"])
    for record in first["records"]:
        numbers = scalars(record)
        if record.report.cf > 1:
            assert numbers["cf/means"] == first["cfs"][record.report.step]
            assert 0 < numbers["gain/means"] <= 1
        else:
            assert numbers["cf/means"] != numbers["cf/means"]  # nan


def _measured(rank: int, alike: bool) -> list[dict[float, float]]:
    """The gains of means, where all ranks have the same gradients or not."""
    seen: list[Scripted] = []

    class Copied(Scripted):
        def __deepcopy__(self, memo: Any) -> Copied:
            seen.append(Copied(self.cfs, self.probe))
            return seen[-1]

    model = DDP(small_net())
    compressor = AdaptiveCompressor(
        "topk+fp32",
        (4, 100),
        policy=Copied([10.0, 10.0, 1.0], probe=(5.0, 20.0)),
        exchange=ParameterServer("auto"),
        granularity="layer",
    ).attach(model)
    for step in range(9):
        loss_of(model, step, 0 if alike else rank).backward()
    compressor.flush()
    (policy,) = (each for each in seen if each.reports)
    return [
        {cf: each.gain("error_fed") for cf, each in report.measurements.items()}
        for report in policy.reports
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_gains_are_those_of_the_means(ranks: int) -> None:
    """The mean of equal payloads is one of them, of which a smaller CF loses nothing. That of
    different payloads has more elements."""
    for alike in (True, False):
        for gains in run_ranks(ranks, _measured, alike):
            assert len(gains) == 6  # of 9 steps a third is dense
            for of_step in gains:
                assert of_step.keys() >= {5.0, 20.0}
                assert 0 < of_step[20.0] < 1
                if alike:
                    assert of_step[5.0] == pytest.approx(1)
                    assert of_step.get(10.0, 1.0) == pytest.approx(1)
                else:
                    assert of_step.get(10.0, 0.5) < 1


def _told(rank: int) -> dict[str, Any]:
    """What both policies were told of bytes and waits, where both ways change their CFs."""
    model = DDP(small_net(torch.float32))
    own = Scripted([10.0, 50.0, 50.0, 1.0])
    compressor = AdaptiveCompressor(
        "topk+fp32",
        (4, 100),
        policy=own,
        exchange=ParameterServer("auto"),
        network=Network(clock=ModelledClock(1e-3, LinkSpec.parse("3mbit"), scale=1000.0)),
    ).attach(model)
    means = compressor.running().controller.policy
    assert isinstance(means, MeansPolicy)
    policy = means.policy
    assert isinstance(policy, Scripted)
    policy.cfs = [5.0, 20.0]
    promised = []
    for step in range(24):
        loss_of(model, step, rank).backward()
        promised.append((own.context.wire_bytes(1.0), policy.context.wire_bytes(means.cf)))
    compressor.flush()
    waits: dict[str, dict[float, list[float]]] = {"up": {}, "down": {}}
    for way, reports in (("up", own.reports[2:]), ("down", policy.reports[2:])):
        for report in reports:
            if report.timed_cf == report.timed_cf:
                waits[way].setdefault(report.timed_cf, []).append(report.exchange_seconds)
    sent = [r.down_bytes - r.statistics_bytes / 2 for r in policy.reports]
    compressed = [bytes_ for step, (_, bytes_) in enumerate(promised) if step % 4 != 3]
    return {"waits": waits, "sent": sent, "promised": compressed, "dense": promised}


def test_each_policy_is_told_of_its_own_way() -> None:
    """Bytes are what was promised, and waits do not depend on the CF of the other way."""
    for found in run_ranks(2, _told):
        for sent, promised in zip(found["sent"][1:], found["promised"][1:], strict=True):
            assert sent == pytest.approx(promised, rel=0.05)
        assert found["waits"]["up"].keys() == {1.0, 10.0, 50.0}
        assert found["waits"]["down"].keys() == {5.0, 20.0}
        for way, by_cf in found["waits"].items():
            for cf, waits in by_cf.items():
                if cf > 1:  # a dense step takes the place of means at any CF
                    assert waits == pytest.approx([waits[0]] * len(waits), rel=0.05), (way, cf)


def _resumed(rank: int, path: str, policy: str) -> tuple[bool, bool]:
    def run() -> Run:
        return Run(POLICIES[policy](), "topk", ParameterServer("auto", own_memory=True))

    straight, stopped, resumed = run(), run(), run()
    straight.train(rank, 0, 40)
    stopped.train(rank, 0, 23)
    torch.save(stopped.state(), f"{path}/{rank}")
    resumed.load(rank, torch.load(f"{path}/{rank}", weights_only=True))
    resumed.train(rank, 23, 40)
    states = [each.compressor.state_dict() for each in (straight, resumed)]
    parameters = [flat_parameters(each.model) for each in (straight, resumed)]
    return same(*states), torch.equal(*parameters)


@pytest.mark.parametrize("policy", quick("gravac", of=["gravac", "goodput"]))
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path, policy: str) -> None:
    for states, parameters in run_ranks(2, _resumed, str(tmp_path), policy):
        assert states
        assert parameters
