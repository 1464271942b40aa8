"""Every argument of the constructor against every mode: it is used, or refused with its name.

A row of `USED_IN` names the modes that look at a setting. All others must refuse it, the
constructor or `attach`, where that depends on the optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    AdaptiveCompressor,
    Delayed,
    Fixed,
    Gossip,
    GraVAC,
    HookRung,
    Ladder,
    LocalSteps,
    Momentum,
    ParameterServer,
    Residual,
    Updates,
)
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
    "means as they are": ({"exchange": ParameterServer(down_cf=1)}, _momentum),
    "means' own policy": ({"exchange": ParameterServer(down_cf="auto")}, _momentum),
    "fixed": ({"policy": Fixed}, _momentum),
    "gravac": ({"policy": GraVAC}, _momentum),
    "local steps": ({"sync": LocalSteps(4)}, _momentum),
    "local steps auto": ({"sync": LocalSteps("auto"), "policy": "goodput"}, _adamw),
    "delay": ({"sync": Delayed(1)}, _momentum),
    "gossip": ({"sync": Gossip()}, _momentum),
}

VALUES: dict[str, tuple[str, Any]] = {
    "share": ("memory", Momentum(share=0.5)),
    "masking": ("memory", Momentum(masking=True)),
    "clip_norm": ("memory", Residual(clip_norm=1.0)),
    "dtype": ("memory", Residual(dtype=torch.bfloat16)),
    "dtype of updates": ("memory", Updates(dtype=torch.bfloat16)),
    "down_cf": ("exchange", ParameterServer(down_cf=50)),
    "own_memory": ("exchange", ParameterServer(own_memory=True)),
    "rungs": ("base", Ladder({4: "int8"}, "topk+int4")),
    "hooks": ("hooks", {20: HookRung(default_hooks.fp16_compress_hook, gain=0.9)}),
}

WITH_VELOCITY = {
    "momentum",
    "sharded",
    "means as they are",
    "means' own policy",
    "fixed",
    "gravac",
}
BY_GRADIENTS = {*MODES} - {"local steps", "local steps auto", "delay", "gossip"}
SPARSIFIED = {*MODES} - {"unbiased", "int8", "summed"}
GOODPUT = SPARSIFIED - {"fixed", "gravac", "gossip"}

USED_IN: dict[str, set[str]] = {
    "share": WITH_VELOCITY | {"int8", "summed"},
    "masking": WITH_VELOCITY,
    "clip_norm": BY_GRADIENTS - {"unbiased"},
    "dtype": BY_GRADIENTS - {"unbiased"},
    "dtype of updates": BY_GRADIENTS - {"unbiased", "no optimizer"},
    "down_cf": SPARSIFIED - {"delay", "gossip"} | {"int8", "unbiased", "summed"},
    "own_memory": SPARSIFIED - {"delay", "gossip"} | {"int8", "unbiased", "summed"},
    "rungs": GOODPUT - {"no memory"},
    "hooks": BY_GRADIENTS - {"fixed", "int8", "summed", "unbiased", "means' own policy"},
}
CASES = [(mode, name) for mode in MODES for name in VALUES if VALUES[name][0] not in MODES[mode][0]]

MODE_ITSELF = {"base", "policy", "exchange", "memory", "sync"}
ALWAYS = {"cf_range", "granularity", "dense_below", "timeline", "network", "debug"}


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
    assert arguments == MODE_ITSELF | ALWAYS | {argument for argument, _ in VALUES.values()}
    assert USED_IN.keys() == VALUES.keys()
    assert all(modes <= MODES.keys() for modes in USED_IN.values())


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains(mode: str) -> None:
    _train(*MODES[mode])


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_a_setting_is_used_or_refused(mode: str, name: str) -> None:
    options, optimizer = MODES[mode]
    argument, value = VALUES[name]
    options = {**options, argument: deepcopy(value)}
    if mode in USED_IN[name]:
        _train(options, optimizer)
        return
    with pytest.raises(ValueError, match=rf"(^|\W)({argument}|{name})\b") as caught:
        _train(options, optimizer)
    assert "got" in str(caught.value)


@pytest.mark.parametrize("name", sorted(VALUES.keys() - {"rungs", "hooks", "masking"}))
def test_base_none_takes_what_it_does_not_use(name: str) -> None:
    argument, value = VALUES[name]
    by_optimizer = {"share": _momentum, "dtype of updates": _adamw}
    _train({"base": "none", argument: value}, by_optimizer.get(name, _sgd))


@pytest.mark.parametrize("scaler", ["x", 65536.0, True, (), torch.amp.GradScaler], ids=repr)
def test_a_scaler_of_another_type_is_refused(scaler: Any) -> None:
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler or None"):
        AdaptiveCompressor().attach(DDP(Given([(3,)])), scaler=scaler)


def test_lbfgs_is_warned_of_as_what_may_diverge(caplog: pytest.LogCaptureFixture) -> None:
    """Two ranks at CF 10: a loss of 1e17 after 25 steps, where plain DDP had 7e-5."""
    model = DDP(Given([(3,)]))
    compressor = AdaptiveCompressor(policy=Fixed(10))
    compressor.attach(model, optimizer=torch.optim.LBFGS(model.parameters()))
    assert "LBFGS takes the differences of gradients" in caplog.text
    assert "second moment" not in caplog.text
