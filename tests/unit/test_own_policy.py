"""A policy of one's own is told by name what it must plan."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from io import BytesIO
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    AdaptiveCompressor,
    MemoryTimeline,
    ParameterServer,
    Plan,
    Policy,
    StepReport,
)
from adaptive.exchange.strategies import Piece
from adaptive.network import timing
from adaptive.step import sizes
from policies import Context
from tests.unit.in_one_process import Given, one_rank


class Planned(Policy):
    """Plans what it was given, in every step."""

    name = "planned"
    layerwise = True

    def __init__(self, planned: Any) -> None:
        self.planned = planned

    def start(self, context: Context) -> None:
        pass

    def plan(self) -> Plan:
        planned: Plan = self.planned
        return planned

    def observe(self, report: StepReport) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _step(planned: Any, kind: type[Planned] = Planned) -> float:
    gradients = [torch.randn(8, 8), torch.randn(8)]
    with one_rank():
        model = DDP(Given([gradient.shape for gradient in gradients]))
        compressor = AdaptiveCompressor("topk", (2, 20), policy=kind(planned)).attach(model)
        model(gradients).backward()
        compressor.close()
        return compressor.cf


@pytest.mark.parametrize(
    ("planned", "told"),
    [
        (None, r"plan\(\) must return a Plan, got None"),
        (10.0, r"plan\(\) must return a Plan, got 10\.0"),
        (Plan(nan), "plans a CF of nan: it must be a finite number >= 1"),
        (Plan(0.5), r"plans a CF of 0\.5"),
        (Plan("10"), "plans a CF of '10'"),  # type: ignore[arg-type]
        (Plan(10.0, probe=(nan,)), "plans a CF of nan"),
        (Plan(10.0, layers={"all.0": inf}), "plans a CF of inf"),
        (Plan(10.0, layers={"module.all.0": 5.0}), r"plans for 'module\.all\.0': layers must be"),
    ],
)
def test_what_is_no_plan_is_told_by_the_policys_name(planned: Any, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"policy 'planned'.*{told}"):
        _step(planned)


@pytest.mark.parametrize("number", [np.float64, np.float32, np.int64])
def test_a_policy_may_compute_with_numpy(number: type) -> None:
    """The state of the run is one that torch.load reads without being told to trust it."""
    gradients, kept = [torch.randn(8, 8), torch.randn(8)], MemoryTimeline()
    plan = Plan(
        number(4),
        (number(8),),
        layers={"all.1": number(2)},
        local_steps=np.int64(1),
        delay=np.int64(0),
    )
    with one_rank():
        model = DDP(Given([gradient.shape for gradient in gradients]))
        compressor = AdaptiveCompressor("topk", (2, 20), policy=Planned(plan), timeline=kept)
        compressor.attach(model)
        for _ in range(4):
            model(gradients).backward()
        file = BytesIO()
        torch.save(compressor.state_dict(), file)
        file.seek(0)
        compressor.load_state_dict(torch.load(file))
        model(gradients).backward()
        compressor.close()
    assert {record.report.cf for record in kept.steps} == {4}
    assert {record.layer_cfs["all.1"] for record in kept.steps} == {2}


class ByGains(Planned):
    """Plans for no layer, and has CFs to choose from."""

    layerwise = False

    def candidates(self) -> tuple[float, ...]:
        return 4.0, 8.0


def test_a_policy_of_means_may_compute_with_numpy() -> None:
    """The state is one that torch.load reads without being told to trust it."""
    policy = ByGains(Plan(np.float64(4), (np.float64(8),)))
    with one_rank():
        model = DDP(Given([(8, 8), (8,)]))
        exchange = ParameterServer("auto")
        compressor = AdaptiveCompressor("topk", (2, 20), policy=policy, exchange=exchange)
        compressor.attach(model)
        for _ in range(4):
            model([torch.randn(8, 8), torch.randn(8)]).backward()
        file = BytesIO()
        torch.save(compressor.state_dict(), file)
        compressor.close()
    file.seek(0)
    torch.load(file)


class Another(Planned):
    """Plans another CF in every step."""

    steps = 0

    def plan(self) -> Plan:
        self.steps += 1
        return Plan(4 + self.steps / 1024, skip_gains=True)


def test_nothing_of_the_models_size_is_kept_for_each_cf_that_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "MOST_CFS", 3)
    monkeypatch.setattr(sizes, "MOST_SIZES", 3)
    gradients, pieces = [torch.randn(8, 8) for _ in range(4)], []
    with one_rank():
        model = DDP(Given([gradient.shape for gradient in gradients]))
        compressor = AdaptiveCompressor("topk", (2, 20), policy=Another(None)).attach(model)
        for _ in range(3):
            for _ in range(8):
                model(gradients).backward()
            gc.collect()
            pieces.append(sum(type(each) is Piece for each in gc.get_objects()))
        state = compressor.state_dict()["controller"]
        compressor.close()
    assert pieces[0] == pieces[2]
    *_, (last, times) = state["times"]
    assert len(state["times"]) == 3
    assert last > 4 + 20 / 1024
    assert len(times) == 1


class Nameless(Planned):
    name = ""


def test_a_policy_without_a_name_is_told_by_its_class() -> None:
    with pytest.raises(TypeError, match=r"policy 'Nameless': plan\(\) must return a Plan"):
        _step(None, Nameless)


def test_whole_numbers_are_cfs_and_layers_may_be_left_out() -> None:
    assert _step(Plan(10, probe=(2, 20), layers={"all.1": 5})) == 10
