"""Every argument of the constructor against every mode: it is used, or refused with its name.

A row of `USED_IN` names the modes that look at a setting. All others must refuse it, the
constructor or `attach`, where that depends on the optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, GraVAC, HookRung
from tests.unit.in_one_process import Given, one_rank

Optimizer = Callable[[Any], torch.optim.Optimizer]


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


MODES: dict[str, tuple[dict[str, Any], Optimizer | None]] = {
    "no optimizer": ({}, None),
    "plain": ({"memory": "residual"}, _momentum),
    "sgd": ({}, _sgd),
    "momentum": ({}, _momentum),
    "momentum without optimizer": ({"memory": "momentum", "momentum": 0.9}, None),
    "adamw": ({}, _adamw),
    "updates": ({"memory": "updates"}, _adamw),
    "no memory": ({"memory": "none"}, _sgd),
    "unbiased": ({"base": "qsgd", "cf_range": (4, 8)}, _sgd),
    "int8": ({"base": "int8", "cf_range": (4, 4), "policy": "fixed"}, _momentum),
    "summed": ({"base": "bf16", "cf_range": (2, 2), "policy": "fixed"}, _momentum),
    "sharded": ({"exchange": "sharded"}, _momentum),
    "means as they are": ({"exchange": "sharded", "down_cf": 1}, _momentum),
    "fixed": ({"policy": Fixed}, _momentum),
    "gravac": ({"policy": GraVAC}, _momentum),
    "local steps": ({"local_steps": 4}, _momentum),
    "local steps auto": ({"local_steps": "auto", "policy": "goodput"}, _adamw),
    "delay": ({"delay": 1}, _momentum),
    "gossip": ({"exchange": "gossip"}, _momentum),
}

VALUES: dict[str, Any] = {
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "overlap": 0,
    "momentum": 0.8,
    "momentum_lag": 0.5,
    "masking": True,
    "clip_norm": 1.0,
    "residual_dtype": torch.bfloat16,
    "down_cf": 50,
    "server_memory": True,
    "topology": "complete",
    "gossip": "deepsqueeze",
    "consensus_step": 0.5,
    "shadow_sample": 0.5,
    "rungs": {4: "int8"},
    "hooks": {20: HookRung(default_hooks.fp16_compress_hook, gain=0.9)},
    "checksum": True,
}

WITH_VELOCITY = {"momentum", "sharded", "means as they are", "fixed", "gravac"}
WITH_VELOCITY |= {"momentum without optimizer"}
BY_GRADIENTS = {*MODES} - {"local steps", "local steps auto", "delay", "gossip"}
UPDATES = {"adamw", "updates"}
SPARSIFIED = {*MODES} - {"unbiased", "int8", "summed"}
GOODPUT = SPARSIFIED - {"fixed", "gravac", "gossip"}

USED_IN: dict[str, set[str]] = {
    "outer_lr": {"local steps", "local steps auto"},
    "outer_momentum": {"local steps", "local steps auto"},
    "overlap": {"local steps", "local steps auto"},
    "momentum": set(),  # but with memory="momentum" and no optimizer, which is a mode
    "momentum_lag": WITH_VELOCITY | {"int8", "summed"},
    "masking": WITH_VELOCITY,
    "clip_norm": BY_GRADIENTS - UPDATES,
    "residual_dtype": {"no optimizer", "plain", "sgd", *UPDATES},
    "down_cf": {"sharded"},
    "server_memory": {"sharded"},
    "topology": {"gossip"},
    "gossip": {"gossip"},
    "consensus_step": {"gossip"},
    "shadow_sample": GOODPUT,
    "rungs": GOODPUT - {"no memory"},
    "hooks": BY_GRADIENTS - {"fixed", "int8", "summed", "unbiased"},
    "checksum": {*MODES} - {"summed"},
}
CASES = [(mode, name) for mode in MODES for name in VALUES if name not in MODES[mode][0]]

MODE_ITSELF = {"base", "policy", "exchange", "memory", "local_steps", "delay"}
ALWAYS = {"cf_range", "granularity", "dense_below", "samples_per_step", "timeline", "progress"}
ALWAYS |= {"link", "clock", "debug", "checkpoint"}
BY_TYPE = {"process_group"}


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with one_rank():
        yield


def _train(options: dict[str, Any], make: Optimizer | None, steps: int = 3) -> None:
    model = DDP(Given([(40, 10), (40,)]))
    optimizer = None if make is None else make(model.parameters())
    policy = options.get("policy")
    made = {"policy": policy()} if isinstance(policy, type) else {}
    compressor = AdaptiveCompressor(**{**options, **made})
    compressor.attach(model, optimizer=optimizer)
    try:
        for step in range(steps):
            torch.manual_seed(step)
            model([torch.randn(40, 10), torch.randn(40)]).backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
    finally:
        compressor.detach()


def test_no_argument_is_left_out() -> None:
    arguments = {*inspect.signature(AdaptiveCompressor).parameters}
    assert arguments == MODE_ITSELF | ALWAYS | BY_TYPE | VALUES.keys()
    assert USED_IN.keys() == VALUES.keys()
    assert all(modes <= MODES.keys() for modes in USED_IN.values())


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains(mode: str) -> None:
    _train(*MODES[mode])


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_a_setting_is_used_or_refused(mode: str, name: str) -> None:
    options, optimizer = MODES[mode]
    options = {**options, name: VALUES[name]}
    if name == "consensus_step" and mode == "gossip":
        options["gossip"] = "choco-sgd"
    if mode in USED_IN[name]:
        _train(options, optimizer)
        return
    with pytest.raises(ValueError, match=rf"(^|\W){name}\b") as caught:
        _train(options, optimizer)
    assert "got" in str(caught.value)


NOT_WITHOUT_MODE = {"down_cf", "server_memory", "topology", "gossip", "consensus_step"}
NOT_WITHOUT_MODE |= {"momentum", "momentum_lag", "masking", "rungs", "hooks"}


@pytest.mark.parametrize("name", sorted(VALUES.keys() - NOT_WITHOUT_MODE))
def test_base_none_takes_what_it_does_not_use(name: str) -> None:
    _train({"base": "none", name: VALUES[name]}, _sgd)


@pytest.mark.parametrize(
    ("argument", "value"), [("process_group", "x"), ("process_group", 0)], ids=str
)
def test_a_group_of_another_type_is_refused(argument: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{argument} must be a torch.distributed.ProcessGroup"):
        AdaptiveCompressor(**{argument: value})


def test_another_group_than_the_models_is_refused() -> None:
    model = DDP(Given([(3,)]))
    with pytest.raises(ValueError, match="process_group is another than that of the model"):
        AdaptiveCompressor(process_group=dist.new_group([0])).attach(model)
    AdaptiveCompressor(process_group=dist.group.WORLD).attach(model).detach()


@pytest.mark.parametrize("scaler", ["x", 65536.0, True, object()], ids=repr)
def test_a_scaler_of_another_type_is_refused(scaler: Any) -> None:
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler or None"):
        AdaptiveCompressor().attach(DDP(Given([(3,)])), scaler=scaler)


def test_what_asks_for_no_masking_may_stand_everywhere() -> None:
    _train({"memory": "residual", "masking": False}, _sgd)
