"""The stream of the hook's work, with streams, events and futures that only note what they are
told: which stream waits for what."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import adaptive
from adaptive import AdaptiveCompressor, Fixed
from adaptive.memory import own_moments
from adaptive.model import chunks
from adaptive.model.parameters import ModelParameter
from adaptive.network import collectives
from adaptive.network.collectives import Exchange, future_of
from adaptive.network.link import done_with
from adaptive.network.pipeline import HookStream
from adaptive.sync.own_step import UNDER_WAY
from tests.unit.device_path import device_path

CUDA = torch.device("cuda", 0)


class _Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class _Future:
    """Of a collective on a device: whose callbacks have a stream of their own, as torch's have."""

    def __init__(self, value: Any, by: _Stream) -> None:
        self.result, self.by = value, by

    def value(self) -> Any:
        return self.result

    def wait(self) -> Any:
        torch.cuda.current_stream(CUDA).wait_stream(self.by)  # type: ignore[arg-type]
        return self.result

    def then(self, callback: Callable[[Any], Any]) -> _Future:
        own = _Stream("callback", self.by.log)
        own.wait_stream(self.by)
        with torch.cuda.stream(own):  # type: ignore[arg-type]
            return _Future(callback(self), own)


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
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: _Stream("hook", lines))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: _Stream("default", lines))
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


def test_the_hooks_stream_is_none_of_those_that_callbacks_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch draws these from the streams of the usual priority."""
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: asked.append(priority))
    HookStream(CUDA)
    assert asked == [-1]


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_gradients_are_handed_on_behind_the_flag_and_the_last_bucket(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parameter space a callback reads whether some rank's gradients are not finite, and DDP
    gets the last bucket's means."""
    model = DDP(nn.Linear(200, 200))
    optimizer = torch.optim.AdamW(model.parameters())
    compressor = AdaptiveCompressor("topk", policy=Fixed(10)).attach(model, optimizer=optimizer)
    session: Any = compressor._session
    exchange, end_backward = session.exchange, session._sync.end_backward

    def end(last: Future[Tensor]) -> Future[Tensor]:
        bucket = _Future(last.value(), _Stream("the bucket", log))
        flag = _Future(torch.ones(1), _Stream("the flag", log))
        monkeypatch.setattr(exchange, "any_rank", lambda *_: flag)
        return done_with(end_backward(bucket).wait())

    monkeypatch.setattr(session._sync, "end_backward", end)
    model(torch.ones(2, 200)).sum().backward()
    of_callback = {"callback waits for the flag", "callback waits for the bucket"}
    assert of_callback == set(log[:-1])
    assert log[-1] == "backward waits for callback"
    assert all(p.grad is not None and bool(p.grad.isnan().all()) for p in model.parameters())


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


CHUNKS = 24


class Peak(TorchDispatchMode):
    """The most bytes at once of tensors that are made inside, on each stream: of what is given back
    to one the allocator gives nothing to another."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self._most: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(self._most.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        stream: str = torch.cuda.current_stream(CUDA).name  # type: ignore[attr-defined]
        for x in _tensors(out):
            storage = x.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), stream
        self._made = {at: each for at, each in self._made.items() if not each[0].expired()}
        now = sum(nbytes for _, nbytes, on in self._made.values() if on == stream)
        self._most[stream] = max(self._most.get(stream, 0), now)
        return out


def _tensors(of: Any) -> list[Tensor]:
    return [x for x in tree_leaves(of) if isinstance(x, Tensor)]


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(("cf", "copies"), [(100.0, 2), (5.0, 1)])
def test_updates_are_exchanged_chunk_after_chunk_and_nothing_stays(
    cf: float, copies: int, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the path of a device, whose events nobody says that they have passed. copies: of the
    parameters, that are made before the step: where they stood, and first moments, if momentum has
    no lag."""
    monkeypatch.setattr(chunks, "DEVICE_CHUNK", 4 * 100 * 100)
    model = DDP(nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(CHUNKS))))
    optimizer = torch.optim.AdamW(model.parameters())
    with device_path():
        compressor = AdaptiveCompressor("topk", (2, 1000), policy=Fixed(cf))
        compressor.attach(model, optimizer=optimizer)
        session: Any = compressor._session
        pipeline = session._averager.pipeline
        stream = pipeline.stream = HookStream(CUDA)
        before: list[bool] = []  # where parameters stood is there, when backward waits for the hook

        def wait(backward: _Stream, other: _Stream) -> None:
            if other.name == "hook":
                before.append(bool(session._sync.handover.steps.before))

        monkeypatch.setattr(_Stream, "wait_stream", wait)
        for _ in range(4):
            model(torch.ones(2, 100)).sum().backward()
            with Peak() as peak:
                optimizer.step()
            assert not stream._kept
            assert not pipeline.decoded
    chunk, numel = 4 * 100 * 100, CHUNKS * 100 * 100
    # Of each chunk that is under way its updates and payloads, and what selecting takes of one.
    assert peak.nbytes <= copies * 4 * numel + 2 * (UNDER_WAY + 4) * chunk
    assert before == [False, True] * 4  # a backward, and a step


@pytest.mark.usefixtures("two_ranks")
def test_a_state_is_loaded_on_the_hooks_stream(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a later hook call, while backward goes on, loaded residuals move to those of a bucket. The
    allocator must not hand their memory to backward then."""
    model = DDP(nn.Linear(200, 200))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with device_path():
        compressor = AdaptiveCompressor("topk", policy=Fixed(10)).attach(model, optimizer=optimizer)
        session: Any = compressor._session
        for _ in range(3):
            model(torch.ones(2, 200)).sum().backward()
            optimizer.step()
        state = compressor.state_dict()
        session._averager.pipeline.stream = HookStream(CUDA)
        made: list[str] = []
        zeros = ModelParameter.zeros

        def noted(parameter: ModelParameter, *args: Any) -> Tensor:
            made.append(torch.cuda.current_stream(CUDA).name)  # type: ignore[attr-defined]
            return zeros(parameter, *args)

        monkeypatch.setattr(ModelParameter, "zeros", noted)
        for parameter in session._parameters.values():
            parameter.residual = None  # as in a new process
        compressor.load_state_dict(state)
    assert len(made) == 4  # a residual and a velocity of each parameter
    assert {*made} == {"hook"}
    assert log == ["hook waits for backward", "backward waits for hook"]


@pytest.mark.usefixtures("two_ranks")
def test_an_optimizers_moments_outlive_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments that a script has loaded become views of flat tensors, perhaps in a hook call."""
    kept: list[Tensor] = []
    monkeypatch.setattr(own_moments, "read_here", kept.append)
    model = DDP(nn.Linear(200, 200))
    optimizer = torch.optim.AdamW(model.parameters())
    compressor = AdaptiveCompressor("topk", policy=Fixed(10)).attach(model, optimizer=optimizer)
    model(torch.ones(2, 200)).sum().backward()
    optimizer.step()
    kept.clear()
    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    loaded = {p: dict(state) for p, state in optimizer.state.items()}
    model(torch.ones(2, 200)).sum().backward()
    optimizer.step()
    compressor.detach()
    assert len(kept) == 6
    assert all(any(each is one for one in kept) for of in loaded.values() for each in of.values())


class _Completed:
    """A future that knows a device: notes on which stream it has been completed."""

    def __init__(self) -> None:
        self.on, self.value, self.error = "", None, ""

    def set_result(self, value: Any) -> None:
        self.on = torch.cuda.current_stream(CUDA).name  # type: ignore[attr-defined]
        self.value = value

    def set_exception(self, error: Exception) -> None:
        self.error = str(error)


def _taken(future: Future[Any]) -> Any:
    work: Any = SimpleNamespace(get_future=lambda: future)
    tensor: Any = SimpleNamespace(device=CUDA)
    return future_of(work, _world(), tensor)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.mark.usefixtures("gloo", "log")
@pytest.mark.parametrize("late", [False, True])
def test_of_gloo_a_future_is_completed_on_the_stream_that_waits_for_its_copy(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "new_future", lambda device: _Completed())
    arrives: Future[list[Tensor]] = Future()
    if not late:
        arrives.set_result([torch.ones(1)])
    done = _taken(arrives)
    if late:
        assert done.value is None
        arrives.set_result([torch.ones(1)])
    assert (done.on, done.value) == ("default", [torch.ones(1)])
    fails: Future[list[Tensor]] = Future()
    fails.set_exception(OSError("connection reset"))  # type: ignore[arg-type]
    assert "connection reset" in _taken(fails).error


@pytest.mark.usefixtures("gloo", "log")
def test_a_foreign_hooks_future_is_completed_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "new_future", lambda device: _Completed())
    exchange = Exchange(_world())
    theirs: Future[Any] = Future()
    tensor: Any = SimpleNamespace(numel=lambda: 100, device=CUDA)
    done: Any = exchange.count_reduced(theirs, tensor, 2.0)
    theirs.set_result([torch.ones(1)])
    assert (done.on, done.value) == ("default", [torch.ones(1)])
    assert exchange.take_traffic().floats == 50


@pytest.mark.usefixtures("two_ranks")
def test_other_groups_futures_know_their_devices() -> None:
    future: Future[list[Tensor]] = Future()
    assert _taken(future) is future


def test_a_collectives_future_is_taken_in_one_place_and_never_joined_with_others() -> None:
    """`collect_all` and `collect_any` make futures that know no device."""
    files = Path(adaptive.__file__).parent.rglob("*.py")
    text = {file.name: file.read_text() for file in files}
    assert [name for name, of in text.items() if "get_future()" in of] == ["collectives.py"]
    assert text["collectives.py"].count("get_future()") == 1
    assert not [name for name, of in text.items() if "futures.collect_" in of]
    assert not [name for name, of in text.items() if "import collect_" in of]
