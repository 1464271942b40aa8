"""A user's memory is refused, by a sentence that says why, when it is registered or made."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptive import (
    AdaptiveCompressor,
    Delayed,
    Fixed,
    Gossip,
    LocalSteps,
    MemoryRule,
    TopK,
    register_memory,
)
from adaptive.memory.options import memory_from
from adaptive.memory.rule import RuledMemory
from adaptive.model.parameters import ModelParameter
from compressors import QSGD, Levels
from examples.own_memory import EF21, Decayed
from examples.own_sparsifier import ChunkedTopK


def test_a_name_is_registered_once_and_stands_for_a_class_that_is_whole() -> None:
    register_memory("a rule of tests", Decayed)
    assert repr(memory_from("a rule of tests")) == "Decayed(decay=0.95)"
    for name in ("a rule of tests", "auto", "residual"):
        with pytest.raises(ValueError, match=f"name must not be registered yet, got '{name}'"):
            register_memory(name, Decayed)
    with pytest.raises(TypeError, match="name must be a text, got 3"):
        register_memory(3, Decayed)  # type: ignore[arg-type]

    class Half(MemoryRule):
        pass

    class WithSettings(Decayed):
        def __init__(self, decay):
            super().__init__(decay)

    for cls, told in (
        (Half, "cls must define accumulate"),
        (EF21(), "cls must be a class that inherits from adaptive.MemoryRule"),
        (TopK, "cls must be a class that inherits from adaptive.MemoryRule"),
        (WithSettings, "cls must be made without arguments"),
    ):
        with pytest.raises(TypeError, match=told):
            register_memory("another", cls)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "keeps",
    [
        ("residual",),
        ("velocity",),
        ("m", "local"),
        ("tensor",),
        ("unsent",),
        "m",
        ("no name",),
        (3,),
    ],
)
def test_what_it_keeps_has_names_of_its_own(keeps: Any) -> None:
    with pytest.raises(TypeError, match="keeps must be a tuple of names other than those of ours"):
        type("Bad", (Decayed,), {"keeps": keeps})


def test_what_does_not_go_together_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="memory='ef22': must be one of"):
        AdaptiveCompressor(memory="ef22")
    with pytest.raises(TypeError, match="Updates or MemoryRule, got 3"):
        AdaptiveCompressor(memory=3)  # type: ignore[arg-type]
    ours = type("Residual", (Decayed,), {"name": "residual"})
    with pytest.raises(ValueError, match="its name must not be one of ours, 'residual'"):
        AdaptiveCompressor(memory=ours())
    for sync in (Delayed(2), Gossip("ring"), LocalSteps("auto")):
        with pytest.raises(ValueError, match=r"memory must be .* with sync=.*; got 'EF21'"):
            AdaptiveCompressor(memory=EF21(), sync=sync)
    base = ChunkedTopK(values=Levels("int2", 2, 64))
    sparse_loco = {"sync": LocalSteps(15, overlap=0), "memory": Decayed(0.95)}
    assert AdaptiveCompressor(base, policy=Fixed(64), **sparse_loco).memory == "Decayed"
    # Differences go with compressors whose errors are not fed back, too.
    assert AdaptiveCompressor(QSGD(), memory=EF21(), policy="fixed").memory == "EF21"


def test_the_page_shows_the_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "own_memory.md").read_text(encoding="utf-8")
    shown = "\n\n\n".join(inspect.getsource(each).rstrip() for each in (Decayed, EF21))
    assert f"```python\n{shown}\n```" in page


class OnesOwn(MemoryRule):
    """Calls the function that it was made with."""

    keeps = ("m",)

    def __init__(self, does: Callable[[Any, Tensor], Any]) -> None:
        self.does = does

    def accumulate(self, kept: Any, grad: Tensor, cf: float) -> Any:
        return self.does(kept, grad)


def _replaces(name: str) -> Callable[[Any, Tensor], Tensor]:
    def does(kept: Any, grad: Tensor) -> Tensor:
        kept[name] = 0.9 * kept[name] + grad
        return grad

    return does


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (lambda kept, grad: None, r"must return .* \(6,\) of torch.float32; got NoneType"),
        (lambda kept, grad: grad[1:], r"must return .* got \(5,\) of torch.float32"),
        (lambda kept, grad: grad.sum(), r"must return .* got \(\) of torch.float32"),
        (lambda kept, grad: grad.bfloat16(), r"must return .* got \(6,\) of torch.bfloat16"),
        (_replaces("residual"), r"kept\['residual'\].copy_\(x\), and has replaced residual"),
        (_replaces("m"), r"kept\['m'\].copy_\(x\), and has replaced m"),
        (_replaces("m2"), "KeyError"),
    ],
)
@pytest.mark.parametrize("dense", [True, False])
def test_what_a_rule_returns_or_replaces_is_no_silent_loss(
    does: Any, told: str, dense: bool
) -> None:
    memory = RuledMemory(OnesOwn(does), lambda: False)
    begin = memory.flush_into if dense else partial(memory.open, cf=10.0)
    with pytest.raises((TypeError, KeyError)) as raised:
        begin(ModelParameter("p", torch.ones(2, 3)), torch.ones(6))
    assert re.search(told, repr(raised.value))


def test_what_is_kept_may_be_changed_by_an_operator() -> None:
    def does(kept: Any, grad: Tensor) -> Tensor:
        kept["m"] *= 0.9
        kept["m"] += grad
        return kept["m"]

    memory = RuledMemory(OnesOwn(does), lambda: False)
    parameter = ModelParameter("p", torch.ones(2, 3))
    for _ in range(2):
        memory.open(parameter, torch.ones(6), 10.0)
    assert torch.equal(parameter.m, torch.full((6,), 1.9))  # type: ignore[attr-defined]
