"""GraVAC's two judgements, and the words for a switch."""

from __future__ import annotations

import pytest

from policies.base import change
from policies.exploration import nothing_lost
from policies.gravac import choose, saturation


@pytest.mark.parametrize(
    ("t_comp", "omega", "kept", "why"),
    [
        ({10: 1.0, 20: 2.0, 40: 3.0}, 0.1, 40, "largest at 40"),
        ({40: 1.0, 20: 2.0, 10: 3.0}, 0.1, 10, "largest at 10"),
        ({10: 1.0, 20: 3.0, 40: 2.0}, 0.1, 20, "largest at 20"),
        ({10: 1.0, 20: 2.0, 40: 2.1}, 0.1, 20, "saturates at 20, |2.1 - 2| / 2 = 0.050 <= omega"),
        ({10: 1.0, 20: 2.0, 40: 1.9}, 0.1, 20, "saturates at 20, |1.9 - 2| / 2 = 0.050 <= omega"),
        ({10: 1.0, 20: 2.0, 40: 2.1}, 0.01, 40, "largest at 40"),
        ({10: 1.0, 20: 1.05, 40: 9.0}, 0.1, 40, "largest at 40"),  # a plateau is not the end
        ({10: 1.0, 20: 1.08, 40: 1.16}, 0.1, 40, "largest at 40"),  # small steps add up
        ({10: 1.0, 20: 1.05, 40: 0.1}, 0.1, 10, "saturates at 10"),
        ({10: 1.0, 20: 1.5}, 0.5, 10, "saturates at 10"),
        ({64: 1.0}, 0.1, 64, "largest at 64"),
    ],
)
def test_saturation(t_comp, omega, kept, why):
    chosen, reason = saturation(t_comp, omega)
    assert chosen == kept
    assert why in reason
    for cf, value in t_comp.items():
        assert f"{value:.4g} at {cf}" in reason


def test_choice_against_dense():
    t_comp = {10.0: 0.98, 20.0: 1.05}
    assert choose(t_comp, None, 0.1)[0] == 10.0
    assert choose({10.0: 1.0, 20.0: 2.0}, 1.0, 1.0)[0] == 20.0  # as good as dense is not better
    # 10 is within omega of 20, but it does not beat dense
    assert choose(t_comp, 1.0, 0.1)[0] == 20.0
    assert choose(t_comp, 1.05, 0.1) == (1.0, "best T_comp 1.05 (CF 20) <= 1.05 of dense")


@pytest.mark.parametrize(
    ("floor_gain", "gain", "omega", "may", "why"),
    [
        (0.912, 0.906, 0.01, True, "|0.912 - 0.906| / 0.912 = 0.007 <= omega 0.01"),
        (0.9, 0.6, 0.1, False, "|0.9 - 0.6| / 0.9 = 0.333 > omega 0.1"),
        (1.0, 0.5, 0.5, True, "= 0.500 <= omega 0.5"),
        (0.3, 0.3, 0.1, True, "= 0.000 <= omega 0.1"),
        (0.6, 0.9, 0.1, False, "|0.6 - 0.9| / 0.6 = 0.500 > omega 0.1"),
        (0.31, 0.29, 0.1, False, "= 0.065 <= omega 0.1 but gain < epsilon 0.3"),
        (0.0, 0.5, 0.1, False, "> omega"),
        (None, 0.5, 0.1, False, "gains not known"),
        (0.5, None, 0.1, False, "gains not known"),
    ],
)
def test_when_the_floor_may_move(floor_gain, gain, omega, may, why):
    verdict, reason = nothing_lost(floor_gain, gain, omega, epsilon=0.3)
    assert verdict is may
    assert why in reason


def test_reasons():
    assert change(10, 20, "because") == "scale up 10 -> 20: because"
    assert change(160, 10, "because") == "scale down 160 -> 10: because"
    assert change(10, 1, "because") == "dense: 10 -> 1, because"
    assert change(1, 1.5, "because") == "scale up 1 -> 1.5: because"
    assert change(10, 10, "because") == "because"
