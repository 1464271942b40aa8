"""Tests that need a CUDA device (`make gpu-test`): without one each is skipped, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.compiling import share_compiling

HERE = Path(__file__).parent

if torch.cuda.is_available():
    share_compiling()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:  # of all folders that are collected, not of this one alone
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
