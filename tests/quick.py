"""Which of a test's parameters `make test` takes; `make long-test` takes the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(*chosen: Any, of: Iterable[Any]) -> list[Any]:
    """All values of `of`, those marked "long" that are not among the chosen."""
    long = pytest.mark.long
    whole = ((value, value if isinstance(value, tuple) else (value,)) for value in of)
    return [v if v in chosen else pytest.param(*parts, marks=long) for v, parts in whole]
