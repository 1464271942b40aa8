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
}

WITH_VELOCITY = {"momentum", "sharded", "means as they are", "fixed", "gravac"}
BY_GRADIENTS = {*MODES} - {"local steps", "local steps auto", "delay", "gossip"}
UPDATES = {"adamw", "updates"}
SPARSIFIED = {*MODES} - {"unbiased", "int8", "summed"}
GOODPUT = SPARSIFIED - {"fixed", "gravac", "gossip"}

USED_IN: dict[str, set[str]] = {
    "outer_lr": {"local steps", "local steps auto"},
    "outer_momentum": {"local steps", "local steps auto"},
    "overlap": {"local steps", "local steps auto"},
    "momentum_lag": WITH_VELOCITY | UPDATES | {"int8", "summed", "local steps auto"},
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
}
CASES = [(mode, name) for mode in MODES for name in VALUES if name not in MODES[mode][0]]

MODE_ITSELF = {"base", "policy", "exchange", "memory", "local_steps", "delay"}
ALWAYS = {"cf_range", "granularity", "dense_below", "samples_per_step", "timeline"}
ALWAYS |= {"link", "clock", "debug", "checkpoint"}


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
    assert arguments == MODE_ITSELF | ALWAYS | VALUES.keys()
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
NOT_WITHOUT_MODE |= {"momentum_lag", "masking", "rungs", "hooks"}


@pytest.mark.parametrize("name", sorted(VALUES.keys() - NOT_WITHOUT_MODE))
def test_base_none_takes_what_it_does_not_use(name: str) -> None:
    _train({"base": "none", name: VALUES[name]}, _sgd)


@pytest.mark.parametrize("scaler", ["x", 65536.0, True, ()], ids=repr)
def test_a_scaler_of_another_type_is_refused(scaler: Any) -> None:
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler or None"):
        AdaptiveCompressor().attach(DDP(Given([(3,)])), scaler=scaler)


def test_what_asks_for_no_masking_may_stand_everywhere() -> None:
    _train({"memory": "residual", "masking": False}, _sgd)
