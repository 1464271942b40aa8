"""Bad arguments: the error names the argument, the value and what is accepted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import adaptive
import compressors
from adaptive import (
    Accordion,
    AdaptiveCompressor,
    Compressor,
    Delayed,
    Goodput,
    GraVAC,
    LocalSteps,
    Momentum,
    Network,
    ParameterServer,
    Policy,
    RandomK,
    TopK,
    Warmup,
)
from adaptive.exchange.choice import EXCHANGES
from adaptive.memory.options import NAMED
from adaptive.step.config import make_base
from compressors import compressor_names
from runs import settings
from runs.__main__ import COMMANDS
from runs.build import MUON, OPTIMIZERS
from runs.expression import OBJECTS
from runs.option_types import at_least
from runs.tasks import tasks

NAN = float("nan")


def _made(options: dict[str, Any]) -> dict[str, Any]:
    """Typed options check themselves, so they are made here."""
    names = ("memory", "sync", "exchange", "network")
    return {n: v() if n in names and callable(v) else v for n, v in options.items()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cf_range": (1000, 10)}, ["cf_range", "(1000, 10)", "smallest", "largest"]),
        ({"cf_range": (0, 10)}, ["cf_range", "0", ">= 1"]),
        ({"cf_range": (10,)}, ["cf_range", "(10,)", "a pair"]),
        ({"cf_range": (NAN, 10)}, ["cf_range", "nan", "finite"]),
        ({"cf_range": (10, float("inf"))}, ["cf_range", "inf", "finite"]),
        ({"cf_range": "10"}, ["cf_range", "'10'"]),
        ({"base": "topp"}, ["base", "'topp'", "topk", "randomk", "none"]),
        ({"policy": "gravacc"}, ["policy", "'gravacc'", "gravac", "accordion", "fixed"]),
        ({"memory": "all"}, ["memory", "'all'", "residual", "momentum"]),
        ({"memory": lambda: Momentum(share=0)}, ["share", "0", "(0, 1]"]),
        ({"memory": lambda: Momentum(share=1.01)}, ["share", "1.01", "(0, 1]"]),
        ({"memory": lambda: Momentum(masking=0.5)}, ["masking", "0.5", ">= 1"]),
        ({"sync": lambda: LocalSteps(1)}, ["steps", "1", ">= 2"]),
        ({"sync": lambda: LocalSteps(4, outer_momentum=1.0)}, ["outer_momentum", "1.0", "[0, 1)"]),
        ({"sync": lambda: LocalSteps(4, overlap=4)}, ["overlap", "4", "less than"]),
        ({"sync": lambda: Delayed(0)}, ["steps", "0", ">= 1"]),
        ({"exchange": lambda: ParameterServer(down_cf=0.5)}, ["down_cf", "0.5", ">= 1"]),
        (
            {"exchange": ParameterServer("auto"), "sync": LocalSteps("auto")},
            ["exchange", "down_cf='auto'", "local steps that is fixed", "got sync=LocalSteps"],
        ),
        (
            {"exchange": ParameterServer("auto"), "policy": "accordion"},
            ["exchange", "down_cf='auto'", "'goodput'", "down_cf=None", "got policy 'accordion'"],
        ),
        ({"base": "qsgd", "policy": "goodput"}, ["policy", "'goodput'", "topk", "base='qsgd'"]),
        ({"base": "qsgd", "policy": Warmup(Goodput())}, ["'warmup'", "topk", "base='qsgd'"]),
        (
            {"policy": "accordion-paper", "base": "fp16"},
            ["policy", "'accordion'", "base='fp16'"],
        ),
        (
            {"policy": "accordion-paper", "granularity": "bucket"},
            ["granularity", "'layer'", "'accordion'", "got 'bucket'"],
        ),
        (
            {"policy": "accordion-paper", "hooks": {2: lambda state, bucket: bucket}},
            ["hooks", "must be empty", "'accordion'", "CF 2"],
        ),
        ({"memory": lambda: Momentum(clip_norm=-1)}, ["clip_norm", "-1", "> 0"]),
        ({"dense_below": -1}, ["dense_below", "-1", ">= 0"]),
        ({"base": "fp16", "dense_below": 10}, ["dense_below", "10", "0", "'fp16'"]),
        ({"granularity": "tensor"}, ["granularity", "'tensor'", "'bucket'", "'layer'"]),
        ({"network": "fast"}, ["network", "'fast'", "100mbit"]),
        ({"network": "100mbit,slow"}, ["network", "100mbit,slow", "latency"]),
        (
            {"base": RandomK(unbiased=True), "memory": "residual"},
            ["memory", "unbiased", "'residual'"],
        ),
    ],
)
def test_value_errors(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0]) as caught:
        AdaptiveCompressor(**_made(options))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base": 3}, ["base", "3"]),
        ({"cf_range": (True, 10)}, ["cf_range", "True"]),
        ({"memory": lambda: Momentum(share=True)}, ["share", "True"]),
        ({"memory": lambda: Momentum(masking="yes")}, ["masking", "'yes'"]),
        ({"network": 100}, ["network", "'100mbit'", "100"]),
        ({"network": lambda: Network(clock=3.0)}, ["clock", "seconds", "3.0"]),
        ({"memory": 3}, ["memory", "'residual'", "3"]),
        ({"sync": 4}, ["sync", "LocalSteps", "4"]),
        ({"exchange": 4}, ["exchange", "ParameterServer", "4"]),
        ({"debug": "yes"}, ["debug", "'yes'"]),
        ({"policy": GraVAC}, ["policy", "GraVAC"]),
        ({"policy": "schedule"}, ["policy='schedule'", "'pieces'", "pieces, gain"]),
        ({"timeline": "logs"}, ["timeline", "MemoryTimeline"]),
    ],
)
def test_type_errors(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TypeError, match=words[0]) as caught:
        AdaptiveCompressor(**_made(options))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["epsilon", "omega"])
@pytest.mark.parametrize("value", [0, -0.1, 1.1, NAN])
def test_thresholds_are_in_0_1(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        GraVAC(**{name: value})


def test_only_a_ddp_model_can_be_attached() -> None:
    with pytest.raises(TypeError, match="model must be a DistributedDataParallel"):
        AdaptiveCompressor().attach(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_advice_for_a_compiled_model_is_what_has_to_be_done() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"got a compiled Linear; .*torch\.compile\(Distributed"):
        AdaptiveCompressor().attach(torch.compile(net))  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["summary", "flush", "detach", "state_dict"])
def test_before_attach_there_is_nothing_to_tell(call: str) -> None:
    with pytest.raises(RuntimeError, match="attach"):
        getattr(AdaptiveCompressor(), call)()


@pytest.mark.parametrize(
    ("base", "memory", "name"),
    [
        ("topk", "auto", "topk+int4"),
        ("dgc", "momentum", "dgc+int4"),
        ("topk+fp32", "auto", "topk"),
        ("topk+bf16", "auto", "topk+bf16"),
        (TopK(), "auto", "topk"),
        ("topk", "none", "topk"),  # what rounding loses would be lost for good
        ("randomk", "auto", "randomk"),
    ],
)
def test_values_are_coded_where_nobody_says_and_errors_are_fed_back(
    base: str | Compressor, memory: str, name: str
) -> None:
    made = make_base(base, memory)
    assert made.name == name


@pytest.mark.parametrize("factor", [0.0, NAN])
def test_a_compressors_own_momentum_factor_is_checked(factor: float) -> None:
    class Late(TopK):
        momentum_factor = factor

    with pytest.raises(ValueError, match=r"compressor's momentum_factor=.*must be > 0"):
        AdaptiveCompressor(Late(), (10, 100))


def test_what_help_says_is_what_the_library_has() -> None:
    assert compressor_names() == settings.COMPRESSORS
    assert (*OPTIMIZERS, MUON) == get_args(settings.OptimizerName)
    helped = Path(settings.__file__).read_text(encoding="utf-8")
    exchanges = [name for name in EXCHANGES if name not in helped]
    memories = [name for name in NAMED if name not in helped]
    models = [
        name
        for name in tasks()["cifar10"].models
        if not name.startswith("resnet") and name not in helped
    ]
    assert exchanges == memories == models == []
    for option, names in OBJECTS.items():
        package = compressors if option == "base" else adaptive
        assert [name for name in names if not hasattr(package, name)] == []


def test_help_imports_neither_torch_nor_optuna() -> None:
    code = """
import sys
from runs.__main__ import COMMANDS, main
for command in COMMANDS:
    try: main([command, "--help"])
    except SystemExit as end: assert not end.code, command
print({"torch", "optuna", "matplotlib"} & {*sys.modules})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: python -m runs ") == len(COMMANDS)
    assert done.stdout.endswith("set()\n")


GRAVAC = "topk", (10, 1000), "layer", "residual"
ACCORDION = "topk", (1 / 0.99, 10), "layer", "residual"
POWERSGD = "powersgd", (10, 1000), "layer", "residual"


@pytest.mark.parametrize(
    ("policy", "given", "expected"),
    [
        ("gravac-paper", {}, GRAVAC),
        (GraVAC.paper(window=20), {}, GRAVAC),
        (Warmup(GraVAC.paper(), steps=3), {}, GRAVAC),
        ("accordion-paper", {}, ACCORDION),
        (Accordion.paper(4, 20), {}, ("topk", (4, 20), "layer", "residual")),
        (Accordion.paper(4, 1, as_ranks=True), {}, POWERSGD),
        ("dgc-paper", {}, ("dgc", (4, 1000), "layer", "momentum")),
        ("gravac-paper", {"base": "dgc"}, ("dgc+int4", (10, 1000), "layer", "residual")),
        ("gravac-paper", {"memory": "auto"}, ("topk", (10, 1000), "layer", "auto")),
        ("gravac", {}, ("topk+int4", (10, 1000), "auto", "auto")),
    ],
)
def test_a_papers_policy_brings_its_compression_along(
    policy: str | Policy, given: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """For arguments that are left out; the same by name, as an object, and inside a warm-up."""
    settings = AdaptiveCompressor(**given, policy=policy)._settings
    found = settings.base.name, settings.cf_range, settings.granularity
    assert (*found, settings.memory.options.kind) == expected


def test_a_whole_number_beyond_all_floats_is_refused() -> None:
    with pytest.raises(ValueError, match="must be an integer >= 1, got '1000"):
        at_least(1)(str(10**400))
