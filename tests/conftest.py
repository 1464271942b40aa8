"""Property-based tests search at random on a developer's machine, and repeatably in CI; how long an
example takes is no matter in either, since the machine may be busy. Without a GPU, Triton's kernels
are interpreted."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Here, since tests of any folder may import what imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"

_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("local", _ANY_SPEED)
settings.register_profile("ci", _ANY_SPEED, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
