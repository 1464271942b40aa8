"""How long steps take by a modelled clock whose exchanges may be under way for several steps."""

from __future__ import annotations

import pytest

from adaptive import LinkSpec
from runs.modelled_clock import ModelledClock

COMPUTE = 0.1


def _simulated(delay: int, sending: float, latency: float, steps: int = 4000) -> float:
    """Seconds of a step in the long run, event by event: what step k has done is sent when the
    backward of step k + 1 ends, one after the other, and step k + delay waits for it."""
    now, free, arrives = 0.0, 0.0, {}
    for step in range(steps):
        now += COMPUTE  # forward and backward
        if step:
            free = max(now, free) + sending
            arrives[step - 1] = free + latency
        now = max(now, arrives.get(step - delay, 0.0))
    return now / steps


@pytest.mark.parametrize("delay", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("sending", "latency"),
    [(0.01, 0.0), (0.09, 0.0), (0.25, 0.0), (0.01, 0.15), (0.02, 1.0), (0.3, 0.5)],
)
def test_steps_take_as_long_as_when_every_exchange_is_simulated(
    delay: int, sending: float, latency: float
) -> None:
    nbytes = 1e4
    clock = ModelledClock(COMPUTE, LinkSpec(8 * nbytes / sending, latency), delay=delay)
    expected = _simulated(delay, sending, latency)
    assert clock.step(nbytes) == pytest.approx(expected, rel=0.01)
    assert clock.exposed(nbytes) == pytest.approx(clock.step(nbytes) - COMPUTE)
    if delay == 1:
        assert clock.step(nbytes) == pytest.approx(
            ModelledClock(COMPUTE, clock.link, overlap=0).step(nbytes)
        )
