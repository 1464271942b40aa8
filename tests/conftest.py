"""Property-based tests search at random on a developer's machine, and repeatably in CI; how long an
example takes is no matter in either, since the machine may be busy."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("local", _ANY_SPEED)
settings.register_profile("ci", _ANY_SPEED, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
