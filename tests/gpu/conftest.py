"""Tests that need a CUDA device (`make gpu-test`): without one each is skipped, and says so."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
