"""`AdaptiveCompressor(progress=True)` and what a compressor says of itself."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Event, LinkSpec, ModelledClock, StepRecord, Warmup
from adaptive.timeline.progress import ProgressTimeline
from runs.simulate.ranks import run_ranks
from tests.unit.ranks import simulates
from tests.unit.test_records import HEADER
from tests.unit.test_records import _record as _without_gain


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _record(step: int, cf: float = 10.0) -> StepRecord:
    return replace(_without_gain(step, cf), gain=0.5)


def _play(stream: io.StringIO) -> str:
    timeline = ProgressTimeline(stream, seconds=1.0)
    timeline.start(HEADER)
    for step in range(25):
        timeline.step(_record(step))  # a tenth of a second each
    timeline.event(Event(25, 10.0, 20.0, "scale up 10 -> 20: why"))
    timeline.event(Event(25, 20.0, 20.0, "judged, and stayed"))
    timeline.step(_record(25, 20.0))
    timeline.close()
    return stream.getvalue()


def test_plain_lines_come_now_and_then_with_each_switch_and_the_end() -> None:
    lines = _play(io.StringIO()).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        *("step 1", "step 11", "step 21", "step 25: scale up 10 -> 20: why", "step 26"),
    ]
    assert "CF 10  gain 0.500  wire factor 10.0" in lines[0]
    assert "CF 20" in lines[-1]


def test_a_terminal_gets_a_bar() -> None:
    pytest.importorskip("tqdm")
    shown = _play(Terminal())
    assert "26 steps" in shown
    assert "CF=20" in shown
    assert "scale up 10 -> 20: why\n" in shown
    assert "judged" not in shown


@simulates
def test_one_rank_shows_progress_and_a_compressor_says_what_it_is(capsys: Any) -> None:
    said: list[str] = []

    def train(rank: int, _: object) -> None:
        model = DDP(nn.Linear(20, 20))
        compressor = AdaptiveCompressor(
            "topk",
            (10, 100),
            policy=Warmup(steps=2),
            progress=True,
            clock=ModelledClock(0.01, LinkSpec(2e5, 0.001)),
        )
        said.append(repr(compressor))
        compressor.attach(model)
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(3, 20)).sum().backward()
        said.append(repr(compressor))
        compressor.close()
        compressor.detach()
        said.append(repr(compressor))

    run_ranks(2, train)
    error = capsys.readouterr().err
    assert error.count("step 1  CF 10") == 1
    assert error.count("step 2: scale up 10 -> 16") == 1
    assert len(set(said)) == 3
    fresh, attached, detached = dict.fromkeys(said)
    assert "(base='topk', cf_range=(10, 100), policy=Warmup(" in fresh
    assert fresh.endswith("; not attached)")
    assert attached.endswith("memory='residual'; CF 16 after 4 steps on 2 ranks)")
    assert "; detached, " in detached


def test_progress_is_a_flag() -> None:
    with pytest.raises(TypeError, match="progress='yes': must be True or False"):
        AdaptiveCompressor(progress="yes")  # type: ignore[arg-type]
