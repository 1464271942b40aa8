"""What all tests of commands need: something to train on, and a way to start them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.integration.commands")

from tests.integration.commands import Start, starting, write_text_file  # noqa: E402


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text small enough that reading and evaluating it take no time."""
    return write_text_file(tmp_path_factory.mktemp("data"))


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """start(*words): a running command."""
    with starting(tmp_path_factory.mktemp) as begin:
        yield begin


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """The same, for commands that the tests of a module share."""
    with starting(tmp_path_factory.mktemp) as begin:
        yield begin
