"""sync="auto": local steps where messages are late, and elsewhere the default, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, LinkSpec, LocalSteps, MemoryTimeline, Network
from runs.modelled_clock import ModelledClock
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, loss_of, same, small_net
from tests.unit.in_one_process import one_rank

STEPS = 60
PROMPT = ("10mbit", "100mbit", "1gbit", "1gbit,20ms")


def _trained(rank: int, link: str, optimizer: Any, **sync: Any) -> dict[str, Any]:
    """By a clock that only computes, on which a model of 4.5 kB takes as long as one of 4.5 MB."""
    model = DDP(small_net())
    made = optimizer(model.parameters())
    network = Network(clock=ModelledClock(0.05, LinkSpec.parse(link), scale=1000))
    records = MemoryTimeline()
    options = {"policy": "goodput", "network": network, "timeline": records, **sync}
    compressor = AdaptiveCompressor(**options).attach(model, optimizer=made)
    for step in range(STEPS):
        made.zero_grad()
        loss_of(model, step, rank).backward()
        made.step()
    cfs = [record.report.cf for record in records.steps]
    of = {"cfs": cfs, "sync": repr(compressor._settings.sync)}
    with compressor.averaged():
        return {**of, "parameters": flat_parameters(model)}


def _everywhere(rank: int) -> dict[str, Any]:
    adam, sgd = torch.optim.AdamW, lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9)
    found: dict[str, Any] = {}
    for link in PROMPT:
        left, auto = (_trained(rank, link, adam, **way) for way in ({}, {"sync": "auto"}))
        found[link] = left, auto
    found["late, SGD"] = tuple(
        _trained(rank, "100mbit,100ms", sgd, **way) for way in ({}, {"sync": "auto"})
    )
    found["late"] = _trained(rank, "100mbit,100ms", adam, sync="auto")
    return found


def test_it_is_the_default_but_where_messages_are_late() -> None:
    results = run_ranks(2, _everywhere, limit=150)
    late = [result.pop("late") for result in results]
    assert torch.equal(late[0]["parameters"], late[1]["parameters"])
    assert {each["sync"] for each in late} == {repr(LocalSteps("auto"))}
    for result in results:
        assert all(same(left, auto) for left, auto in result.values())
    assert len({tuple(left["cfs"]) for left, _ in results[0].values()}) > 2


def _differently(rank: int, how: str) -> str:
    options = {"sync": "auto"}, {"sync": "auto", "network": "100mbit"} if how == "network" else {}
    model = DDP(small_net())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError) as raised:
        AdaptiveCompressor(**options[rank]).attach(model, optimizer=optimizer)
    return str(raised.value)


@pytest.mark.parametrize("how", ["sync", "network"])
def test_ranks_that_would_not_all_time_messages_are_told(how: str) -> None:
    for told in run_ranks(2, _differently, how):
        assert "set up differently on rank 1 than on rank 0" in told


def test_what_does_not_go_with_it_is_refused() -> None:
    for options, told in (
        ({"sync": "always"}, "sync must be 'auto', LocalSteps"),
        ({"policy": "fixed"}, "sync=LocalSteps.*steps must be a whole number"),
        ({"memory": "residual"}, "memory must be 'auto' or 'updates'"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            AdaptiveCompressor(**{"sync": "auto", **options})


def test_a_state_of_the_other_choice_is_refused_with_what_to_give() -> None:
    """Near 40 ms a resumed run may measure another latency, and choose otherwise."""
    with one_rank():
        way: dict[str, Any] = {"policy": "goodput", "network": "100mbit,100ms"}
        state = _attached(sync="auto", **way).state_dict()
        other = _attached(sync="auto", **{**way, "network": "100mbit,1ms"})
        with pytest.raises(ValueError, match=r"synchronisation is .* sync=LocalSteps\('auto'\) or"):
            other.load_state_dict(state)
        other.detach()
        _attached(sync=LocalSteps("auto"), **way).load_state_dict(state)


def test_other_ways_than_its_choices_are_refused_without_a_word_of_it() -> None:
    with one_rank():
        state = _attached(sync=LocalSteps(10)).state_dict()
        with pytest.raises(ValueError, match=r"synchronisation is .*steps=10") as told:
            _attached(sync=LocalSteps(4)).load_state_dict(state)
        assert "sync='auto'" not in str(told.value)


def _attached(**options: Any) -> AdaptiveCompressor:
    model = DDP(small_net())
    optimizer = torch.optim.AdamW(model.parameters())
    return AdaptiveCompressor(**options).attach(model, optimizer=optimizer)
