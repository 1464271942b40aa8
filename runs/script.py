"""A user's own script as one of several worker processes, with the environment of torchrun's."""

from __future__ import annotations

import atexit
import gc
import io
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from runs.interrupt import ASKING, INTERRUPTED, take_signals
from runs.needs import check_beside
from runs.netlab.lab import Lab, address
from runs.netlab.place import the_place, told
from runs.parser import UsageError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Script:
    """A script and its arguments. master: address and port where the workers meet."""

    path: str
    arguments: tuple[str, ...]
    master: tuple[str, int]

    @classmethod
    def of(cls, words: list[str]) -> Script:
        """From `script.py args...`. UsageError if there is no such file."""
        path, *arguments = words
        if not Path(path).is_file():
            raise UsageError(f"{path}: there is no such script")
        check_beside(path)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            number = free.getsockname()[1]
        host = "127.0.0.1" if Lab.of_environment() is None else address(0)
        return cls(path, tuple(arguments), (host, number))


def run_in_place(script: Script, rank: int, world_size: int, init_method: str) -> int:
    """Work for `launch`: the script, and what the interface of its place in a lab has sent."""
    code = run_script(script, rank, world_size)
    place = the_place()
    if place is not None and rank == 0 and place.steps:
        counted = place.counted(place.reported())
        print(f"netlab: {place.lab}; rank 0 has sent {told(counted)}", file=sys.stderr, flush=True)
    return code


def run_script(script: Script, rank: int, world_size: int) -> int:
    """Run it as that rank of those that `launch` has started; its exit code."""
    host, port = script.master
    told_all = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": host}
    told_all |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told_all.items()})
    if (lab := Lab.of_environment()) is not None:
        os.environ.update(lab.as_torchrun(rank))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # This process was spawned, and so would be what it starts: a DataLoader's workers would run a
    # script without a `__main__` guard anew, and take no lambda.
    multiprocessing.set_start_method(None, force=True)
    asked = False

    def interrupted(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:  # SIGTERM to all processes comes twice; the script is cleaning up by then
            asked = True
            raise KeyboardInterrupt

    # The launcher gets signals of the terminal itself, and sends SIGTERM.
    take_signals(interrupted, signal.SIG_IGN)
    # What it forks is no rank: SIGTERM ends it without a word, as elsewhere.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    code = INTERRUPTED
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
        code = run_words(script)
    except BaseException:
        if not asked:  # else a peer that has ended before is no failure of this one
            raise
    else:
        atexit._run_exitfuncs()
    finally:
        _flush_files()
    # A script may catch it, save, and end as if it were whole.
    return INTERRUPTED if asked else code


def _flush_files() -> None:
    """Write what the script has not closed: workers end by `os._exit`, which does not."""
    for each in gc.get_objects():
        # By its type: `isinstance` asks proxies, which may raise.
        if issubclass(type(each), (io.TextIOWrapper, io.BufferedWriter)):
            with suppress(OSError, ValueError):  # a full disk; it is closed, or detached
                each.flush()


def before_training(do: Callable[[DistributedDataParallel], object]) -> None:
    """From now on, `do` this before each forward, in training, of each DDP model of this process.
    If the first forward is in an optimizer's closure, it is done before that optimizer's step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.optim import Optimizer

    from adaptive.memory.handover import closure_of
    from adaptive.memory.step_watch import before_any_step
    from adaptive.model.parameters import parameters_of
    from adaptive.model.replicas import ATTRIBUTE

    build, make = DDP.__init__, Optimizer.__init__
    models: WeakSet[DDP] = WeakSet()  # those that have not been trained yet
    hooks: list[Any] = []  # of optimizers, for the first step only

    def before_forward(model: DDP, *_: Any) -> None:
        while hooks and not models:  # all models train
            hooks.pop().remove()
        # Lightning leaves the wrapper in eval mode after a validation, and not what it wraps.
        if torch.is_grad_enabled() and (model.training or model.module.training):
            models.discard(model)
            do(model)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Of a step whose closure makes the first forward: what is attached within a step has
        missed its beginning."""
        if not models or closure_of(args, kwargs) is None:
            return None
        own = {*parameters_of(optimizer)}
        steps = [model for model in models if not own.isdisjoint(model.parameters())]
        new = [model for model in steps if getattr(model, ATTRIBUTE, None) is None]
        for model in new:
            before_forward(model)
        # torch has called the hooks of all optimizers by now, before a compressor was attached.
        return before_any_step(optimizer, args, kwargs) if new else None

    def built(model: DDP, *args: Any, **kwargs: Any) -> None:
        build(model, *args, **kwargs)
        model.register_forward_pre_hook(before_forward)
        models.add(model)

    def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        hooks.append(optimizer.register_step_pre_hook(before_step))

    DDP.__init__ = built  # type: ignore[assignment, method-assign]
    Optimizer.__init__ = made  # type: ignore[assignment, method-assign]


def run_words(script: Script) -> int:
    """Run it in this process, whose environment is set; its exit code."""
    sys.argv = [script.path, *script.arguments]
    sys.path[0] = str(Path(script.path).resolve().parent)
    try:
        # As `python script.py` has it, whose `__file__` is absolute, also after os.chdir.
        runpy.run_path(os.path.abspath(script.path), run_name="__main__")
    except SystemExit as ended:
        return _code(ended.code)
    return 0


def _code(given: Any) -> int:
    """As Python makes an exit code of what `sys.exit` is given."""
    if given is None or isinstance(given, int):
        return given or 0
    print(given, file=sys.stderr)
    return 1
