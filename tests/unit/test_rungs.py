"""Other compressors below cf_range: which there are, and when goodput goes there."""

from __future__ import annotations

import pytest

from adaptive import AdaptiveCompressor, Goodput, GraVAC
from compressors import Int8, Ladder, make_compressor
from compressors.base import Spec
from compressors.ladder import GAIN
from policies import DENSE, Context
from tests.unit.test_policies_goodput import nbytes as sparse_nbytes
from tests.unit.test_policies_goodput import run

QUANTIZED = {2.0: GAIN, 4.0: GAIN, 8.0: GAIN}


def names(**options) -> dict[float, str]:
    base = AdaptiveCompressor(**options)._settings.base
    return {cf: base.at(cf).name for cf in base.known_gains}


def test_by_default_bf16_int8_and_int4_are_below_the_range() -> None:
    assert names() == {2.0: "bf16", 4.0: "int8", 8.0: "int4"}
    assert names(policy=Goodput(goal="time", power=1.0), base="dgc") == names()
    assert names(cf_range=(5, 100)) == {2.0: "bf16", 4.0: "int8"}
    assert names(cf_range=(3, 100)) == {2.0: "bf16"}


def test_a_compressor_names_the_candidates_below_its_range() -> None:
    told = "cf_range=(10, 1000) and below it bf16 (CF 2), int8 (CF 4), int4 (CF 8), policy="
    assert told in repr(AdaptiveCompressor(base="topk", cf_range=(10, 1000)))
    assert "below it" not in repr(AdaptiveCompressor(policy="gravac"))


@pytest.mark.parametrize(
    "options",
    [
        {"base": Ladder({}, "topk+int4")},
        {"cf_range": (2, 100)},
        {"policy": "gravac"},
        {"policy": "accordion"},
        {"policy": "accordion-paper"},
        {"base": "int8"},
        {"base": "powersgd"},
        {"memory": "none"},
    ],
    ids=str,
)
def test_elsewhere_there_are_none(options) -> None:
    assert names(**options) == {}


def test_they_can_be_chosen() -> None:
    base = Ladder({4: Int8(bucket=64), 2: "fp16"}, "topk+int4")
    assert names(base=base, policy=GraVAC()) == {4.0: "int8", 2.0: "fp16"}


@pytest.mark.parametrize(
    ("rungs", "above", "options", "told"),
    [
        ({4: "topk"}, "int8", {}, "a ladder needs a sparsifier above"),
        ({20: "topk"}, "topk", {}, "must be below the smallest of cf_range, 10; got CF 20"),
        ({4: "int8"}, "topk", {"memory": "none"}, "got policy 'goodput', memory 'none'"),
        ({4: "int8"}, "topk", {"policy": "accordion-paper"}, "policy 'accordion'"),
    ],
    ids=str,
)
def test_a_ladder_that_does_not_go_with_the_rest_is_refused(
    rungs: dict[float, str], above: str, options: dict[str, str], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        AdaptiveCompressor(Ladder(rungs, above), **{"policy": "goodput", **options})


def nbytes(cf: float) -> float:
    """On the wire: without indices where everything is sent."""
    return sparse_nbytes(DENSE) / cf if cf in QUANTIZED else sparse_nbytes(cf)


def with_rungs() -> Goodput:
    policy = Goodput(goal="time")
    policy.start(Context((10, 1000), 2, wire_bytes=nbytes, assumed=QUANTIZED))
    return policy


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(1e9, {DENSE, 2.0}), (7e7, {4.0, 8.0}), (1e4, {160.0, 320.0, 640.0, 1000.0})],
)
def test_goodput_goes_there_when_the_network_is_a_little_too_slow(rate, expected) -> None:
    """A quantized step takes as long to compress as another."""
    policy = with_rungs()
    assert policy.candidates()[:3] == (2.0, 4.0, 8.0)
    sent = run(policy, [rate] * 60)
    assert sent[0] == 10.0
    assert set(sent[40:]) <= expected


def test_it_comes_back_up_when_the_network_gets_slow() -> None:
    sent = run(with_rungs(), [3e7] * 60 + [1e4] * 60)
    assert sent[59] == 8.0
    assert sent[119] == 640.0  # the largest that 120 steps allow


def test_gravac_tries_what_has_an_assumed_gain_only_inside_its_range() -> None:
    policy = GraVAC()
    assumed = {**QUANTIZED, 50.0: 0.9, 2000.0: 0.1}
    policy.start(Context((10, 1000), 2, wire_bytes=nbytes, assumed=assumed))
    assert policy.candidates() == (10.0, 20.0, 40.0, 50.0, 160.0, 1000.0)


@pytest.mark.parametrize(("cf", "name"), [(2.0, "bf16"), (4.0, "int8"), (8.0, "int4")])
def test_the_defaults_can_do_their_cfs(cf, name) -> None:
    compressor = make_compressor(name)
    assert compressor.nearest(Spec((1000,), cf)) == cf
    assert compressor.feeds_back
    assert compressor.keeps_zeros
