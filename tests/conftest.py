"""Property-based tests search at random on a developer's machine, and repeatably in CI; how long an
example takes is no matter in either, since the machine may be busy. Triton's kernels are
interpreted, but for those of tests/gpu. `make test` leaves a part of the tests to `make
long-test`. LONG_PART=0/2 leaves out the long tests of every second file: CI takes turns."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

# What coding takes on this machine is measured once for all tests, and the user's file left alone.
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir(), f"adaptive-tests-{os.getuid()}"))

_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("local", _ANY_SPEED)
settings.register_profile("ci", _ANY_SPEED, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    """A process interprets Triton's kernels or compiles them. Also on a machine with a GPU they are
    compiled where tests/gpu is asked for alone. This comes before any test is imported, which may
    import what imports Triton."""
    asked = [Path(each.split("::")[0]).resolve() for each in config.args]
    gpu = Path(__file__).parent / "gpu"
    if not all(path == gpu or gpu in path.parents for path in asked):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with real processes and several sets of parameters, `make test` takes every third
    and at least one, `make long-test` the others. Its name tells where it begins, so that there are
    tests with two ranks and tests with four."""
    processes = Path(__file__).parent / "distributed"
    quick = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and item.path.is_relative_to(processes)
        and item.get_closest_marker("long") is None
    ]
    several = Counter((item.path, item.originalname) for item in quick)
    seen: Counter[tuple[Path, str]] = Counter()
    for item in quick:
        test = item.path, item.originalname
        every = min(several[test], 3)
        if seen[test] % every != crc32(item.originalname.encode()) % every:
            item.add_marker(pytest.mark.long)
        seen[test] += 1
    part, parts = map(int, os.environ.get("LONG_PART", "0/1").split("/"))
    long = [item for item in items if item.get_closest_marker("long")]
    files = sorted({item.path for item in long})[part::parts]
    others = {item for item in long if item.path not in files}
    config.hook.pytest_deselected(items=[*others])
    items[:] = [item for item in items if item not in others]
