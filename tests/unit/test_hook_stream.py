"""The stream of the hook's work, with streams and events that only note what they are told."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch

from adaptive.exchange.pipeline import HookStream

CUDA = torch.device("cuda", 0)


class _Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class _Event:
    """Has been passed by the device once somebody says so."""

    made: ClassVar[list[_Event]] = []

    def __init__(self) -> None:
        self.passed, self.on = False, ""
        self.made.append(self)

    def record(self, stream: _Stream) -> None:
        self.on = stream.name

    def query(self) -> bool:
        return self.passed


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the streams; backward's is the current one unless another is entered."""
    lines: list[str] = []
    current = [_Stream("backward", lines)]

    @contextmanager
    def enter(stream: _Stream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    _Event.made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream("hook", lines))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", enter)
    return lines


def test_work_follows_backward_and_only_after_the_last_call_backward_follows_it(
    log: list[str],
) -> None:
    stream = HookStream(CUDA)
    for last in (False, False, True):
        with stream.hook_call(last):
            log.append(f"work on {torch.cuda.current_stream(CUDA).name}")  # type: ignore[attr-defined]
    assert log == ["hook waits for backward", "work on hook"] * 3 + ["backward waits for hook"]


def test_backward_follows_a_last_call_that_has_failed(log: list[str]) -> None:
    with pytest.raises(KeyError), HookStream(CUDA).hook_call(last=True):
        raise KeyError
    assert log[-1] == "backward waits for hook"


def test_what_callbacks_use_is_kept_until_the_device_has_passed(log: list[str]) -> None:
    stream = HookStream(CUDA)
    tensors = [torch.zeros(3), torch.zeros(3)]
    refs = [weakref.ref(tensor) for tensor in tensors]
    for tensor in tensors:
        stream.keep(tensor, None)
    del tensor
    tensors.clear()
    alive = []
    for number in range(3):
        with stream.hook_call(last=False):
            alive.append([ref() is not None for ref in refs])
        if number < 2:
            _Event.made[number].passed = True
    assert alive == [[True, True], [False, True], [False, False]]
    assert [event.on for event in _Event.made] == ["backward", "backward"]


def test_nothing_is_kept_once_backward_has_waited(log: list[str]) -> None:
    stream, tensor = HookStream(CUDA), torch.zeros(3)
    ref = weakref.ref(tensor)
    stream.keep(tensor)
    del tensor
    assert ref() is not None
    stream.backward_waited()
    assert ref() is None


def test_a_cpu_has_no_streams_and_keeps_nothing() -> None:
    stream, tensor = HookStream(torch.device("cpu")), torch.zeros(3)
    ref = weakref.ref(tensor)
    with stream.hook_call(last=True):
        stream.keep(tensor)
    del tensor
    assert ref() is None
