"""docs/studies/predictors.py: what it measures of a run, and its rank correlations."""

from __future__ import annotations

from math import isfinite

import pytest

from docs.studies.predictors import ranked, run
from policies import DENSE
from runs.bench import quality
from tests.unit.test_bench_quality import TINY, text

__all__ = ["text"]


def test_a_run_at_one_cf_is_the_benchs_and_tells_what_a_policy_could_know(text):
    data = {"text": text}
    small, large = (run(TINY, data, cf, 0) for cf in (20.0, 100.0))
    assert small.keys() == large.keys()
    assert all(map(isfinite, [*small.values(), *large.values()]))
    for name in ("the CF itself", "1 - error-fed gain", "CF / steps at about this rate"):
        assert small[name] < large[name] or small[name] == 1.0
    fixed = quality.train(TINY, data, "Fixed(20)", 2, "", 0).quality
    assert small["quality"] == pytest.approx(fixed, rel=1e-6)
    assert (
        run(TINY, data, DENSE, 0)["quality"]
        == quality.train(TINY, data, "Fixed(1)", 2, "", 0).quality
    )


def test_equal_values_share_a_rank():
    assert ranked([3.0, 1.0, 3.0, 5.0]) == [2.0, 0.5, 2.0, 3.5]
