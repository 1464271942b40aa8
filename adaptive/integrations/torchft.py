"""torchft: what fault-tolerant replicas all-reduce is compressed, replica by replica.

torchft's `Manager` forms a quorum of the replicas that are alive before every step, sums gradients
over them by a process group that it configures anew whenever one comes or goes, and has all of them
agree whether the step counts. `CompressedProcessGroup` stands in for that process group: each
all-reduce of gradients becomes an all-gather of compressed, error-fed ones. So it is below
`torchft.DistributedDataParallel`, HSDP by torchft, and whatever else calls `manager.allreduce`.

What a fault must not do to a residual:

- Of a step that does not count nothing was sent: the residual is what it was before.
- A replica that does not take part in a step (it is being healed) sends zeros, and keeps its own.
- A payload enters the mean by 1 / N. Where N has become M since, what waits is worth M / N times as
  much, so that it delivers what it would have delivered.

The CF is fixed: a policy would have to be healed with the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceOp, Work

from adaptive.config import make_base
from adaptive.exchange.collectives import gather_wire_bytes, reduce_wire_bytes
from adaptive.exchange.link import new_future
from compressors import Compressor
from compressors.base import Key, check_cf
from compressors.kernels import all_finite
from compressors.kernels.blocks import fill_if
from compressors.rounds import RoundsCompressor


class _Place(NamedTuple):
    """Which all-reduce of a step it is: the how many-th of so many elements."""

    numel: int
    dtype: torch.dtype
    number: int


class _Kept(NamedTuple):
    """A residual, and among how many replicas it was left."""

    residual: Tensor
    participants: int


class CompressedProcessGroup:
    """One of torchft's process groups, whose all-reduces of gradients are compressed:

        pg = CompressedProcessGroup(ProcessGroupGloo(), "topk", cf=100)
        manager = Manager(pg=pg, ...)
        pg.watch(manager)

    pg: the process group that has the connections; all but `allreduce` is its own.
    base: name of a compressor or a `Compressor`, as of `AdaptiveCompressor`; not PowerSGD or a
        sketch, which take several rounds.
    cf: compression factor >= 1, the same on all replicas. dense_below: tensors of fewer elements
        are summed as they are (a loss that a script averages by `manager.allreduce` is no
        gradient).
    bytes_sent, dense_bytes: on the wire so far, and what it would have been.
    """

    def __init__(
        self, pg: Any, base: str | Compressor = "topk", cf: float = 100.0, dense_below: int = 1024
    ) -> None:
        self._pg = pg
        self._compressor = make_base(base, "auto")
        if isinstance(self._compressor, RoundsCompressor):
            raise ValueError(f"base {self._compressor.shown!r} takes several rounds")
        self._cf = check_cf(cf)
        self._dense_below = dense_below
        self._manager: Any = None
        self._kept: dict[_Place, _Kept] = {}
        self._pending: dict[_Place, _Kept] = {}  # if the step counts
        self._calls: Counter[tuple[int, torch.dtype]] = Counter()  # in this step
        self.bytes_sent = self.dense_bytes = 0.0

    def __getattr__(self, name: str) -> Any:
        if name == "_pg":  # of a copy that is not finished
            raise AttributeError(name)
        return getattr(self._pg, name)

    def watch(self, manager: Any) -> CompressedProcessGroup:
        """Learn from `manager.should_commit` which steps count; one that `manager.start_quorum`
        ends, since nobody has asked, does not. Returns self. RuntimeError if it watches one
        already."""
        if self._manager is not None:
            raise RuntimeError("this process group is watching a manager already")
        self._manager, ask, begin = manager, manager.should_commit, manager.start_quorum

        @wraps(ask)
        def should_commit(*args: Any, **kwargs: Any) -> bool:
            counts: bool = ask(*args, **kwargs)
            self._end_step(counts)
            return counts

        @wraps(begin)
        def start_quorum(*args: Any, **kwargs: Any) -> Any:
            self._end_step(counts=False)
            return begin(*args, **kwargs)

        manager.should_commit, manager.start_quorum = should_commit, start_quorum
        return self

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Sum gradients over the replicas, in place, compressed; anything else (several tensors,
        another operation, few elements, integers) as `pg` does it. A `Work` that is done: the host
        has waited, or on a device the current stream does."""
        if self._manager is None:
            raise RuntimeError("call watch(manager) first: which steps count is not known")
        operation = getattr(opts, "reduceOp", opts)
        compressed = (
            len(tensors) == 1
            and operation == ReduceOp.SUM
            and tensors[0].is_floating_point()
            and tensors[0].is_contiguous()
            and tensors[0].numel() >= self._dense_below
        )
        if not compressed:
            return self._pg.allreduce(tensors, opts)
        (tensor,) = tensors
        flat = tensor.detach().view(-1)
        wide = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
        self._sum(wide, self._place(flat))
        if wide is not flat:
            flat.copy_(wide)
        return _Done(tensors)

    def residuals(self) -> list[Tensor]:
        """What waits on this replica, of each all-reduce of a step, flat."""
        return [kept.residual for kept in self._kept.values()]

    def _place(self, flat: Tensor) -> _Place:
        like = (flat.numel(), flat.dtype)
        self._calls[like] += 1
        return _Place(*like, self._calls[like])

    def _sum(self, flat: Tensor, place: _Place) -> None:
        """Replace a gradient by the sum of what the replicas send of theirs."""
        takes_part = self._manager.is_participating()
        participants = self._manager.num_participants()
        compressor, numel, dtype = self._compressor, flat.numel(), flat.dtype
        error_fed, kept = flat.clone(), self._kept.get(place)
        if takes_part and kept is not None:
            error_fed.add_(kept.residual, alpha=participants / kept.participants)
        bad = all_finite(error_fed) ^ True
        fill_if(bad, error_fed, 0.0)
        name = f"{place.numel} elements, {place.number}"
        step = self._manager.current_step()
        key = Key(name, step, rank=self._manager.participating_rank() or 0)
        own = compressor.poison(compressor.compress(error_fed, self._cf, key), bad)
        rows = self._gather(own.nbytes, own.write, flat)
        payloads = compressor.read_all(rows, numel, self._cf, dtype, key)
        poisoned = compressor.any_poisoned(payloads)
        compressor.write_mean(flat, payloads, 1.0, poisoned)
        fill_if(poisoned, flat, torch.nan)
        if takes_part and compressor.error_feedback:
            compressor.subtract_from(error_fed, compressor.void(own, bad))
            before = torch.zeros_like(error_fed) if kept is None else kept.residual
            if kept is not None and participants != kept.participants:
                before = before * (participants / kept.participants)
            flag = torch.as_tensor(poisoned, device=flat.device)
            residual = torch.where(flag, before, error_fed)
            self._pending[place] = _Kept(residual, participants)

    def _gather(self, nbytes: int, write: Any, like: Tensor) -> Tensor:
        """Everyone's payload, of so many bytes: (replicas, bytes), uint8."""
        replicas = self._pg.size()
        wire = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        write(wire)
        rows = [torch.empty_like(wire) for _ in range(replicas)]
        self._pg.allgather([rows], [wire], AllgatherOptions()).wait()
        self.bytes_sent += gather_wire_bytes(nbytes, replicas)
        self.dense_bytes += reduce_wire_bytes(like.nbytes, replicas)
        return torch.stack(rows)

    def _end_step(self, counts: bool) -> None:
        if counts:
            self._kept.update(self._pending)
        self._pending.clear()
        self._calls.clear()


class _Done(Work):
    """Of what has been done already."""

    def __init__(self, result: Sequence[Tensor]) -> None:
        super().__init__()
        self._future = new_future(result[0].device)
        self._future.set_result(list(result))  # type: ignore[arg-type]  # torch's is a list, too

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future
