"""How momentum moves a velocity, and how much of its lag it keeps."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class MomentumRule(NamedTuple):
    """How torch's SGD moves its velocity: u = momentum * u + (1 - dampening) * gain * g, with
    gain 1."""

    momentum: float
    dampening: float = 0.0
    nesterov: bool = False
    gain: float = 1.0

    @lru_cache(maxsize=64)  # noqa: B019  # asked for every parameter in every step
    def with_lag(self, share: float) -> MomentumRule:
        """With this share of the lag m / (1 - m), the mean age in steps of what a velocity holds.
        Every gradient still adds up to the same."""
        m = self.momentum
        if share == 1 or not 0 < m < 1:
            return self
        lag = share * m / (1 - m)
        return self._replace(momentum=lag / (1 + lag), gain=1 / (1 + lag) / (1 - m))

    def change_of_lag(self, share: float, other: float) -> float:
        """What a velocity is multiplied by when it moves with the `other` share from now on: what
        it has yet to deliver, m / (1 - m) times itself (m times that with Nesterov), stays."""
        if share == other or not 0 < self.momentum < 1:
            return 1.0
        now, then = self.with_lag(share).momentum, self.with_lag(other).momentum
        return share / other * (now / then if self.nesterov else 1.0)

    def rate(self, fresh: bool) -> float:
        """What a gradient is multiplied by; SGD does not dampen the first one."""
        return self.gain * (1.0 if fresh else 1 - self.dampening)

    @property
    def sent_share(self) -> float:
        """Of the velocity; with Nesterov the direction is g + m u."""
        return self.momentum if self.nesterov else 1.0
