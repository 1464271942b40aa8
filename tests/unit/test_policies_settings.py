"""GraVAC's settings: what is accepted, what is refused and how."""

from __future__ import annotations

from math import nan

import pytest

from policies.base import Context, Plan
from policies.baselines import Fixed
from policies.gravac import GraVAC

RANGE = (10.0, 1000.0)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"epsilon": 0}, ValueError, r"epsilon=0: must be in \(0, 1\]"),
        ({"epsilon": 1.01}, ValueError, "epsilon=1.01"),
        ({"epsilon": nan}, ValueError, "epsilon=nan"),
        ({"epsilon": "0.5"}, TypeError, "epsilon='0.5'"),
        ({"epsilon": True}, TypeError, "epsilon=True"),
        ({"omega": -0.1}, ValueError, "omega=-0.1"),
        ({"omega": nan}, ValueError, "omega=nan"),
        ({"omega": None}, TypeError, "omega=None"),
        ({"window": 0}, ValueError, "window=0: must be an int >= 1"),
        ({"window": 2.5}, TypeError, "window=2.5"),
        ({"scaling": "linear"}, ValueError, "scaling='linear'.*'exponential', 'geometric'"),
        ({"scaling": 2}, TypeError, "scaling=2"),
        ({"step_size": 1}, ValueError, "step_size=1: must be a finite number > 1"),
        ({"step_size": nan}, ValueError, "step_size=nan"),
        ({"step_size": float("inf")}, ValueError, "step_size=inf"),
        ({"step_size": "2"}, TypeError, "step_size='2'"),
        ({"gain": "best"}, ValueError, "gain='best'.*'error_fed', 'gradient', 'raw'"),
        ({"gain": 1}, TypeError, "gain=1"),
        ({"allow_dense": 1}, TypeError, "allow_dense=1"),
        ({"dense_window": -1}, ValueError, "dense_window=-1"),
        ({"hysteresis": -0.1}, ValueError, "hysteresis=-0.1: must be a finite number >= 0"),
        ({"cooldown": 0}, ValueError, "cooldown=0"),
    ],
)
def test_settings_are_checked(settings, error, message):
    with pytest.raises(error, match=message):
        GraVAC(**settings)


def test_settings_are_by_keyword():
    with pytest.raises(TypeError):
        GraVAC(0.5)


@pytest.mark.parametrize(
    "cf_range", [(1000.0, 10.0), (0.5, 10.0), (10.0,), (nan, 10.0), (10.0, float("inf")), 10.0]
)
def test_a_range_that_is_none(cf_range):
    with pytest.raises(ValueError, match="cf_range"):
        GraVAC().start(Context(cf_range, 2))


def test_a_step_size_that_does_not_fit_the_range():
    with pytest.raises(ValueError, match="step_size"):
        GraVAC(step_size=1.0001).start(Context(RANGE, 2))


def test_before_start():
    for use in (GraVAC().plan, lambda: GraVAC().load_state_dict({})):
        with pytest.raises(RuntimeError, match="start"):
            use()


def test_the_ends_of_what_is_accepted():
    policy = GraVAC(epsilon=1, omega=1, window=1, step_size=1.5, cooldown=1, dense_window=0)
    policy.start(Context(RANGE, 1))
    assert policy.plan().send == 10.0
    assert policy.status()["epsilon"] == 1


def test_fixed_probes_other_cfs_than_the_one_it_sends():
    policy = Fixed(10.0, probe=(1000.0, 10.0, 20.0, 20.0))
    policy.start(Context((10.0, 10.0), 2))
    assert policy.plan() == Plan(10.0, probe=(20.0, 1000.0))
    with pytest.raises(ValueError, match="probe"):
        Fixed(10.0, probe=(1.0,))
