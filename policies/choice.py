"""GraVAC's two judgements (section 3.2): may the floor move up, and which CF to keep in the end."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from policies.base import DENSE


def nothing_lost(
    floor_gain: float | None, gain: float | None, omega: float, epsilon: float
) -> tuple[bool, str]:
    """Whether the floor may move up to a candidate, and why (not).

    It may if |d_floor - d_candidate| / d_floor <= omega and the candidate's gain is at least
    epsilon, without which it could not be sent as a floor.
    """
    if floor_gain is None or gain is None:
        return False, "gains not known"
    lost = abs(floor_gain - gain) / floor_gain if floor_gain > 0 else inf
    why = f"|{floor_gain:.4g} - {gain:.4g}| / {floor_gain:.4g} = {lost:.3f}"
    if lost > omega:
        return False, f"{why} > omega {omega:g}"
    why += f" <= omega {omega:g}"
    if gain < epsilon:
        return False, f"{why} but gain < epsilon {epsilon:g}"
    return True, why


def choose(t_comp: Mapping[float, float], dense: float | None, omega: float) -> tuple[float, str]:
    """The CF to keep, and why: dense (1) if no CF beats it, else where T_comp saturates.

    t_comp: compression throughput (steps/s x gain) by CF, at least one.
    dense: dense's T_comp, its gain being 1; None: dense is not a choice.
    """
    if dense is not None:
        best = max(t_comp, key=lambda cf: t_comp[cf])
        if t_comp[best] <= dense:
            return DENSE, f"best T_comp {t_comp[best]:.4g} (CF {best:g}) <= {dense:.4g} of dense"
        t_comp = {cf: value for cf, value in t_comp.items() if value > dense}
    return saturation(t_comp, omega)


def saturation(t_comp: Mapping[float, float], omega: float) -> tuple[float, str]:
    """The CF at which T_comp saturates, and why.

    Upwards from the smallest CF, of the one kept so far and the next: the smaller where their
    T_comp differ by no more than omega (relative to the one kept), else the one with the larger
    T_comp.
    """
    ascending = sorted(t_comp)
    kept = ascending[0]
    saturated = ""
    for cf in ascending[1:]:
        change = abs(t_comp[cf] - t_comp[kept]) / t_comp[kept]
        if change <= omega:
            saturated = (
                f"saturates at {kept:g}, |{t_comp[cf]:.4g} - {t_comp[kept]:.4g}| / "
                f"{t_comp[kept]:.4g} = {change:.3f} <= omega {omega:g}"
            )
        elif t_comp[cf] > t_comp[kept]:
            kept, saturated = cf, ""
    listed = ", ".join(f"{t_comp[cf]:.4g} at {cf:g}" for cf in ascending)
    return kept, f"T_comp {listed}: {saturated or f'largest at {kept:g}'}"
