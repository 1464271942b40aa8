"""Tests that need a CUDA device (`make gpu-test`): without one each is skipped, and says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.gpu.compiling import share_compiling

HERE = Path(__file__).parent

if torch.cuda.is_available():
    share_compiling()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = "" if torch.cuda.is_available() else "torch sees no CUDA device"
    if not why and os.environ.get("TRITON_INTERPRET") == "1":
        why = "kernels are interpreted in this run: python -m pytest tests/gpu"
    for item in items if why else ():  # of all folders that are collected, not of this one alone
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=why))
