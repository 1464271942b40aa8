"""Small tensors: more threads only get in each other's way."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from tests.unit.device_path import device_path


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Studies and commands, which a test may run in this process, make the library's log quiet."""
    log = logging.getLogger("adaptive")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["host", "device"])
def either_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs twice: on the path of the host, and on that of a device."""
    if request.param == "host":
        yield "host"
        return
    with device_path():
        yield "device"
