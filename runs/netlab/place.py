"""A worker's place in a lab: its namespace, what its interface sends, and rates that change."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runs.netlab.lab import DEVICE, Lab, die_with_parent
from runs.parser import UsageError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer


HEADERS = 66
"""Bytes before the data in a frame: 14 of Ethernet, 20 of IP, 32 of TCP with its timestamps."""


def enter_lab(rank: int, workers: int) -> None:
    """Before anything connects to another worker: take this one's place in the lab that the
    launcher is in, if it is in one. UsageError if there are too few places."""
    global _place
    lab = Lab.of_environment()
    if lab is None:
        return
    if workers > lab.workers:
        raise UsageError(
            f"--workers {workers}: the netlab has places for {lab.workers}; accepted: as many as "
            f"netlab's --workers"
        )
    die_with_parent()
    if lab.rate_at and rank == 0:
        lab.shape()  # an earlier run in this lab has left the rates of its end
    lab.enter(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    os.environ.update(lab.as_torchrun(rank))
    _place = Place(lab, rank)
    _place.watch()


def the_place() -> Place | None:
    """This worker's; None outside of a lab."""
    return _place


class ModelSteps:
    """Tells the steps of a model from those of its optimizers. Several that step one after the
    other, as Muon and the AdamW beside it, make one step of the model."""

    def __init__(self) -> None:
        self._stepped: set[Optimizer] = set()  # since the model's step began

    def begins(self, optimizer: Optimizer) -> bool:
        """Whether the step that an optimizer of the model has done is the first of a step of the
        model: each of them steps once in it."""
        begins = not self._stepped or optimizer in self._stepped
        self._stepped = {optimizer} if begins else {*self._stepped, optimizer}
        return begins


def holds(optimizer: Optimizer, model: DistributedDataParallel) -> bool:
    """Whether it is an optimizer of the model: not of another, nor somebody's own copy of one."""
    mine = {id(p) for p in model.parameters()}
    groups = getattr(optimizer, "param_groups", ())  # one that is being made has none
    return any(id(p) in mine for group in groups for p in group["params"])


class Place:
    """A worker's place in a lab. It counts the steps of the DDP model that was built last, by
    which rates change, and the bytes that the worker's interface sends in them.

    DDP begins with a broadcast of the parameters, and a compressor with questions, which are none
    of them: the count begins with `begin`, or else after the first step.
    """

    def __init__(self, lab: Lab, rank: int) -> None:
        self.lab, self.rank = lab, rank
        self.first: int | None = None  # the step from which on bytes are counted
        self.steps, self._began, self._sent = 0, (0, 0), (0, 0)
        self._of_optimizers = ModelSteps()
        self.model: DistributedDataParallel | None = None
        self._reported = 0.0

    def watch(self) -> None:
        """See every model that DDP is built around, and every step of an optimizer of its."""
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.optim.optimizer import register_optimizer_step_post_hook

        build = DDP.__init__

        def built(model: DDP, *args: Any, **kwargs: Any) -> None:
            build(model, *args, **kwargs)
            self.model, self.first, self.steps = model, None, 0
            self._of_optimizers = ModelSteps()

        DDP.__init__ = built  # type: ignore[assignment, method-assign]
        register_optimizer_step_post_hook(self._stepped)

    def begin(self, step: int = 0) -> None:
        """Count anew from here, so many steps having been done. A collective."""
        import torch.distributed as dist

        assert self.model is not None
        self.first = self.steps = step
        if self.lab.rate_at and self.rank == 0:
            self.lab.shape(step)
        dist.barrier(self.model.process_group)  # what was sent before has arrived
        self._began = self._sent = sent_so_far()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.model is None or not holds(optimizer, self.model):
            return
        if not self._of_optimizers.begins(optimizer):
            self._sent = sent_so_far()
            return
        self.steps += 1
        if self.first is None:
            self.first, self._began = self.steps, sent_so_far()
            self._reported = self._bytes_of_compressor() or 0.0
        self._sent = sent_so_far()
        if self.rank == 0 and self.lab.changes_at(self.steps):
            # On a thread, since it takes a while, and its thread goes round the namespaces.
            threading.Thread(target=self.lab.shape, args=(self.steps,), daemon=True).start()

    def reported(self) -> float | None:
        """Bytes that the model's AdaptiveCompressor says it has sent since the first step; None if
        it has none."""
        total = self._bytes_of_compressor()
        return None if total is None else total - self._reported

    def _bytes_of_compressor(self) -> float | None:
        from adaptive.model.replicas import ATTRIBUTE
        from adaptive.session.session import Session

        exchanging = getattr(getattr(self.model, ATTRIBUTE, None), "exchanging", None)
        session = getattr(exchanging, "session", exchanging)
        return float(session.summary().bytes_sent) if isinstance(session, Session) else None

    def counted(self, reported: float | None) -> dict[str, Any]:
        """What goes into result.json. reported: bytes that the steps are said to have sent."""
        nbytes, frames = (now - then for now, then in zip(self._sent, self._began, strict=True))
        return {
            "links": str(self.lab),
            "steps": self.steps - (self.first or 0),
            "interface_bytes": nbytes,
            "data_bytes": nbytes - HEADERS * frames,
            "reported_bytes": reported,
        }


_place: Place | None = None


def sent_so_far() -> tuple[int, int]:
    """Bytes that this worker's interface has sent, and in how many pieces: frames, or where rates
    are high segments of up to 16 KB, whose headers the kernel then counts once."""
    # Of the calling thread's namespace, wherever the process's other threads are.
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            nbytes, frames = numbers.split()[8:10]
            return int(nbytes), int(frames)
    return 0, 0


def told(counted: dict[str, Any]) -> str:
    """The same, to be read."""
    sent, data, reported = (counted[f"{name}_bytes"] for name in ("interface", "data", "reported"))
    text = f"{sent / 1e6:.4g} MB in {counted['steps']} steps, {data / 1e6:.4g} without headers"
    if reported:
        ratio = f"{sent / reported:.3f} and {data / reported:.3f}"
        text += f": {ratio} of the {reported / 1e6:.4g} MB reported"
    return text
