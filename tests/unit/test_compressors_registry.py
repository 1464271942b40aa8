"""Compressors by name."""

from __future__ import annotations

import pytest

from compressors import (
    NoCompression,
    RandomK,
    TopK,
    compressor_names,
    make_compressor,
    register,
    registry,
)


@pytest.mark.parametrize(
    ("name", "kind"), [("none", NoCompression), ("topk", TopK), ("randomk", RandomK)]
)
def test_names(name, kind):
    made = make_compressor(name)
    assert type(made) is kind
    assert made.name == name
    assert name in compressor_names()


def test_an_object_is_passed_through():
    base = RandomK(seed=5, unbiased=True)
    assert make_compressor(base) is base


def test_unknown_name_says_what_is_accepted():
    with pytest.raises(ValueError, match=r"base must be one of .*none.*randomk.*topk.*'topkk'"):
        make_compressor("topkk")


@pytest.mark.parametrize("base", [None, 3, TopK, ["topk"]])
def test_other_types(base):
    with pytest.raises(TypeError, match="base must be"):
        make_compressor(base)


def test_register(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    register("mine", lambda: RandomK(seed=9))
    assert make_compressor("mine").seed == 9
    with pytest.raises(ValueError, match="'mine'"):
        register("mine", TopK)


def test_a_larger_cf_leaves_velocities_less_of_their_lag():
    lags = [TopK().momentum_lag(cf) for cf in (1.0, 1.5, 2.0, 10.0, 100.0, 1000.0)]
    assert lags[:2] == [1.0, 1.0]
    assert lags[1:] == sorted(lags[1:], reverse=True)
    assert lags[-1] == pytest.approx(0.12)
    for base in ("dgc", "randomk", "qsgd"):  # the paper's rule, and those that were not measured
        assert make_compressor(base).momentum_lag(100.0) == 1.0


def test_flags():
    assert NoCompression().linear
    assert RandomK().linear
    assert not TopK().linear
    assert TopK().error_feedback
    assert RandomK().error_feedback
    assert not RandomK(unbiased=True).error_feedback
