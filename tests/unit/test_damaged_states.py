"""A damaged state is refused with a ValueError and changes nothing, or it loads as a whole."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    Accordion,
    AdaptiveCompressor,
    Fixed,
    Goodput,
    GraVAC,
    LocalSteps,
    Network,
    Policy,
    Warmup,
)
from policies import Context, Plan, StepReport, checks
from policies.base import DeclaredPolicy, setting
from policies.state import saved
from tests.distributed.setting import Clock, loss_of, same, small_net


@dataclass(eq=False)
class Stepping(DeclaredPolicy):
    """So many local steps in its first exchanges, and so many later."""

    name = "stepping"
    chooses_local_steps = True

    first: int = setting(1, checks.whole, least=1)
    later: int = setting(2, checks.whole, least=1)
    _step: int = saved(0)

    def start(self, context: Context) -> None:
        self._begin()

    def plan(self) -> Plan:
        return Plan(8.0, local_steps=self.first if self._step < 6 else self.later)

    def observe(self, report: StepReport) -> None:
        self._step += 1


POLICIES: dict[str, Callable[[], Policy]] = {
    "accordion per layer": lambda: Accordion(interval=4, per_layer=True),
    "goodput": lambda: Goodput(opening=3, cooldown=2),
    "gravac": lambda: GraVAC(window=4, dense_window=3, epsilon=0.05),
    "parting": lambda: Stepping(first=1, later=2),
    "meeting": lambda: Stepping(first=2, later=1),
    "warmup": lambda: Warmup(Goodput(), steps=2, stages=2),
}
RUNS = [
    *((policy, "topk") for policy in POLICIES if not policy.endswith("ing")),
    ("parting", "topk", "AdamW", "auto"),
    ("meeting", "topk", "AdamW", "auto"),
    ("gravac", "powersgd"),
    ("gravac", "sketch"),
    ("gravac", "topk", "AdamW"),
    ("goodput", "topk", "RMSprop"),
    ("gravac", "topk", "AdamW", 2),
]


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    """A world of one, in this process."""
    logging.getLogger("adaptive").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/one", rank=0, world_size=1)
        yield
        dist.destroy_process_group()
    logging.getLogger("adaptive").setLevel(logging.NOTSET)


class _Run:
    """good: a state of it that nothing is wrong with."""

    good: dict[str, Any]

    def __init__(
        self,
        policy: str,
        base: str,
        optimizer: str = "SGD",
        local_steps: int | str = 1,
        overlap: int = 0,
    ) -> None:
        self.model = DDP(small_net(torch.float32), bucket_cap_mb=0.002)
        settings = {"momentum": 0.9} if optimizer == "SGD" else {}
        make = getattr(torch.optim, optimizer)
        self.optimizer = make(self.model.parameters(), lr=0.02, **settings)
        self.clock = Clock()
        momentum = 0.0 if local_steps == "auto" else 0.5
        self.compressor = AdaptiveCompressor(
            base,
            (2, 100),
            policy=POLICIES[policy](),
            network=Network(clock=self.clock),
            sync=None if local_steps == 1 else LocalSteps(local_steps, 1.0, momentum, overlap),
        ).attach(self.model, optimizer=self.optimizer)
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.clock.now += 0.01 + 0.05 / self.compressor.cf
            self.optimizer.zero_grad()
            loss_of(self.model, self.step, 0).backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return self.compressor.state_dict()


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: " with ".join(map(str, run)))
def run(request: pytest.FixtureRequest) -> _Run:
    """A run that has trained."""
    trained = _Run(*request.param)
    trained.train(30)
    trained.good = deepcopy(trained.state())
    return trained


def _places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is something in a state, at any depth."""
    if path:
        yield path
    keys = state if isinstance(state, dict) else range(len(state)) if _is_list(state) else ()
    for key in keys:
        yield from _places(state[key], (*path, key))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


OTHERS = ("x", None, [], {}, 2.5, True, torch.zeros(2), [1.0, "y"])


def _damaged(value: Any, how: str, pick: int) -> Any:
    """What becomes of a value; itself if it cannot be damaged so."""
    if how == "type":
        other = OTHERS[pick % len(OTHERS)]
        return value if type(other) is type(value) else other
    if how == "not finite" and isinstance(value, Tensor) and value.is_floating_point():
        broken = value.clone()
        broken.view(-1)[pick % value.numel()] = (nan, inf)[pick % 2]
        return broken
    if how == "not finite" and isinstance(value, float | int) and not isinstance(value, bool):
        return (nan, inf, -inf)[pick % 3]
    if how == "shape" and isinstance(value, Tensor):
        return (value[:-1], value[None], torch.cat((value, value)))[pick % 3]
    if how == "truncated" and (_is_list(value) or isinstance(value, str)):
        return value[: pick % (len(value) + 1)]
    return value


def _with(state: Any, path: tuple[Any, ...], how: str, pick: int) -> Any:
    """A copy of the state, damaged at one place."""
    key, *rest = path
    copied = list(state) if _is_list(state) else dict(state)
    if rest:
        copied[key] = _with(copied[key], tuple(rest), how, pick)
    elif how == "missing":
        del copied[key]
    else:
        copied[key] = _damaged(copied[key], how, pick)
    return copied


def _without_time(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "controller": {**state["controller"], "saved_at": 0.0}}


def _check(run: _Run, damaged: dict[str, Any]) -> None:
    before, refused = run.state(), ""
    try:
        run.compressor.load_state_dict(damaged)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert refused.startswith("state")
        assert same(run.state(), before)
    else:
        assert same(_without_time(run.state()), _without_time(damaged))
        run.train(3)
        run.compressor.load_state_dict(run.good)
        assert same(_without_time(run.state()), _without_time(run.good))


@settings(max_examples=4)
@given(data=st.data())
def test_a_damaged_state_changes_nothing_or_loads_whole(run: _Run, data: st.DataObject) -> None:
    _damage_and_check(run, data)


@pytest.mark.long
@settings(max_examples=25)
@given(data=st.data())
def test_more_damaged_states(run: _Run, data: st.DataObject) -> None:
    _damage_and_check(run, data)


def _damage_and_check(run: _Run, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(_places(run.good))))
    how = data.draw(st.sampled_from(("missing", "type", "not finite", "shape", "truncated")))
    _check(run, _with(run.good, path, how, data.draw(st.integers(0, 50))))


def test_states_of_ranks_apart_and_together_go_into_either() -> None:
    runs = [_Run(policy, "topk", "AdamW", "auto") for policy in ("parting", "meeting")]
    for run in runs:
        run.train(30)
    states = [deepcopy(run.state()) for run in runs]
    assert [bool(state["sync"]["anchors"]) for state in states] == [True, False]
    for run, own, other in zip(runs, states, reversed(states), strict=True):
        controller = {**other["controller"], "policy": own["controller"]["policy"]}
        state = deepcopy({**other, "controller": controller})
        run.compressor.load_state_dict(state)
        assert same(_without_time(run.state()), _without_time(state))
        run.train(20)
        assert run.state()["sync"]["anchors"].keys() == own["sync"]["anchors"].keys()


def test_a_state_of_another_model_names_the_parameters() -> None:
    run = _Run("gravac", "topk")
    run.train(3)
    state = run.state()
    here = state["parameters"]
    there = {name: shape for name, shape in here.items() if name != "0.bias"}
    there |= {"0.weight": [41, 12], "stranger": [7]}
    with pytest.raises(ValueError, match="state: of another model") as caught:
        run.compressor.load_state_dict({**state, "parameters": there})
    assert "that the model has not: stranger" in str(caught.value)
    assert "lacks the parameters: 0.bias" in str(caught.value)
    assert "0.weight (41, 12), here (40, 12)" in str(caught.value)


class _Careless(Fixed):
    """A policy of a user's own, which raises what it likes, half-way."""

    loaded = 3

    def state_dict(self) -> dict[str, Any]:
        return {"mine": self.loaded}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state["mine"]
        int(state.get("other", 0))


def test_whatever_a_policy_raises_all_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "careless", lambda: _Careless(cf=8))
    run = _Run("careless", "powersgd")
    run.train(4)
    state = run.state()
    damaged = {**state, "compressor": {"q": {}}}
    damaged["controller"] = {**state["controller"], "policy": {"mine": 4, "other": None}}
    with pytest.raises(ValueError, match="state: it cannot be loaded, TypeError: int"):
        run.compressor.load_state_dict(damaged)
    assert same(run.state(), state)


def test_a_refused_state_leaves_the_statistics_that_are_under_way() -> None:
    straight, disturbed = _Run("goodput", "topk"), _Run("goodput", "topk")
    disturbed.train(3)
    damaged = {**deepcopy(disturbed.state()), "sum": {"stranger": torch.zeros(3)}}
    disturbed.train(5)
    with pytest.raises(ValueError, match="state: sum has unknown keys: stranger"):
        disturbed.compressor.load_state_dict(damaged)
    for run, steps in ((straight, (3, 9)), (disturbed, (4,))):
        for each in steps:
            run.train(each)
            run.state()
    assert same(straight.state(), disturbed.state())


def _updates() -> tuple[_Run, dict[str, Any]]:
    run = _Run("gravac", "topk", "AdamW")
    run.train(12)
    return run, deepcopy(run.state())


@pytest.mark.parametrize(
    ("path", "damaged", "told"),
    [
        (("moments",), None, "'moments' must be Mapping"),
        (("moments", "share"), nan, "'share' must be"),
        (("moments", "share"), 1.5, "'share' must be in [0, 1]"),
        (("moments", "ranks_differ"), 1.0, "'ranks_differ' must be bool"),
        (("memory", "0.weight", "residual"), torch.zeros(3), "memory: 0.weight: residual"),
        (
            ("memory", "0.weight", "momentum_share"),
            "x",
            "'memory: 0.weight: momentum_share' must be float",
        ),
        (("memory", "stranger"), {}, "memory has unknown keys: stranger"),
        (("memory_kind",), "residual", "memory_kind is 'residual', expected 'updates'"),
    ],
    ids=str,
)
def test_a_damaged_state_of_updates_is_refused(path: Any, damaged: Any, told: str) -> None:
    run, state = _updates()
    before = deepcopy(state)
    place = state
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = damaged
    with pytest.raises(ValueError, match="state: ") as caught:
        run.compressor.load_state_dict(state)
    assert told in str(caught.value)
    assert same(run.state(), before)
    run.compressor.load_state_dict(before)
    run.train(3)


def test_moments_of_a_run_without_updates_must_be_empty() -> None:
    run = _Run("gravac", "topk")
    run.train(3)
    state = deepcopy(run.state()) | {"moments": "none"}
    with pytest.raises(ValueError, match=r"state: .moments. must be Mapping"):
        run.compressor.load_state_dict(state)


def test_a_state_without_the_moments_of_updates_is_refused() -> None:
    run, state = _updates()
    del state["moments"]
    with pytest.raises(ValueError, match="state: moments missing"):
        run.compressor.load_state_dict(state)


@pytest.mark.parametrize(
    ("path", "damaged", "told"),
    [
        (("sync",), {}, "sync has lost anchors"),
        (("sync", "backwards"), 1.0, "'sync: backwards' must be a whole number in [0, 3]"),
        (("sync", "anchors", "0.weight"), torch.zeros(3), "sync: anchors: 0.weight must be"),
        (("sync", "anchors", "stranger"), torch.zeros(3), "unknown keys: stranger"),
        (
            ("sync", "moving"),
            {"0.weight": torch.zeros(480)},
            "'sync: moving' (the outer momentum) must have 6 parameters",
        ),
        (
            ("sync", "moving"),
            {},
            "'sync: moving' (the outer momentum) must have 6 parameters, got 0",
        ),
        (("synchronisation",), "x", "synchronisation is 'x', expected 'LocalSteps"),
        (("sync", "flights", "0", "due"), 1.0, "'sync: flights: due' must be int"),
        (("sync", "flights", "0"), {"due": 2}, "sync: flights has lost compressed, mean"),
        (("sync", "flights", "0", "sent"), {}, "'sync: flights' has lost parameters"),
        (("sync", "flights", "0", "mean", "stranger"), torch.zeros(3), "unknown keys: stranger"),
    ],
    ids=str,
)
def test_a_damaged_state_of_local_steps_is_refused(path: Any, damaged: Any, told: str) -> None:
    run = _Run("gravac", "topk", "AdamW", 3, overlap=2)
    run.train(13)
    state = deepcopy(run.state())
    before, place = deepcopy(state), state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = damaged
    with pytest.raises(ValueError, match="state: ") as caught:
        run.compressor.load_state_dict(state)
    assert told in str(caught.value)
    assert same(run.state(), before)


def test_a_gathered_state_that_has_lost_a_parameter_is_refused() -> None:
    run = _Run("gravac", "topk", "AdamW", 3)
    run.train(12)
    state = deepcopy(run.compressor.state_dict("gathered"))
    before = deepcopy(run.state())
    del state["agreed"][0]["parameters"]["0.weight"]
    with pytest.raises(ValueError, match=r"state: parameters has lost 0\.weight"):
        run.compressor.load_state_dict(state)
    assert same(run.state(), before)
