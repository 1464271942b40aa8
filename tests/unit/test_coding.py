"""What coding takes is measured once a machine, and charged by modelled step times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runs import coding
from runs.build import modelled_clock
from runs.config import TrainConfig
from runs.options import make_config
from runs.result import coding_in_words


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The bases that are measured, on a machine where nothing was."""
    asked: list[str] = []

    def measure(base: str) -> coding.ByCF:
        asked.append(base)
        return ((2.0, 0.5), (10.0, 4.0), (100.0, 2.0))

    monkeypatch.setattr(coding, "_measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    coding.measured.cache_clear()
    yield asked
    coding.measured.cache_clear()


def _config(**given: Any) -> TrainConfig:
    return make_config({"fixed_clock": 0.1, **given})


def test_it_is_measured_once_a_machine(counted: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        for base in ("topk", "dgc"):
            assert coding.measured(base) == ((2.0, 0.5), (10.0, 4.0), (100.0, 2.0))
        coding.measured.cache_clear()  # as in another process
    assert counted == ["topk", "dgc"]
    path = tmp_path / "new" / "adaptive-coding.json"
    path.write_text("damaged")
    assert coding.measured("topk")
    assert counted == ["topk", "dgc", "topk"]


def test_a_cache_that_cannot_be_written_is_no_error(
    counted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert coding.measured("topk")
    assert counted == ["topk"]


def test_modelled_steps_charge_it_and_say_so(counted: list[str]) -> None:
    config = _config(model_mb=8.0)
    clock = modelled_clock(config, 1_000_000)
    assert clock is not None
    expected = {1.0: 0.0, 2.0: 1e-3, 10.0: 8e-3, 20.0: 8e-3, 1000.0: 4e-3}  # as of 2 M elements
    assert {cf: clock.coding(cf) for cf in expected} == pytest.approx(expected)
    told = coding_in_words(config)
    assert told.startswith("coding as measured on this machine (ns an element: 0.5 at CF 2, 4 at")
    again = TrainConfig.from_json(json.loads(json.dumps(config.as_json())))
    assert again == config
    assert "coding" not in config.command


def test_what_is_given_counts_instead(counted: list[str]) -> None:
    given, free = _config(coding=5.0), _config(coding=0.0)
    assert coding_in_words(given) == "5 ns of coding an element"
    assert coding_in_words(free) == coding_in_words(_config(base="none")) == "coding free"
    clock = modelled_clock(given, 1_000_000)
    assert clock is not None
    assert [clock.coding(cf) for cf in (1.0, 2.0, 500.0)] == pytest.approx([0.0, 5e-3, 5e-3])
    assert counted == []
    assert make_config({}).coding_by_cf == ()


def test_each_base_is_measured_where_it_is_and_at_the_rungs_below() -> None:
    found = dict(coding._measure("topk"))
    assert [*found] == [2.0, 4.0, 8.0, 10.0, 100.0, 1000.0]
    assert all(ns > 0 for ns in found.values())
    with pytest.raises(ValueError, match="nonsense"):
        coding.measured("nonsense")
