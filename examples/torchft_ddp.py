"""Fault-tolerant training by torchft, with compressed gradients. Each process is a replica, which
may leave and come back: torchft then heals it from the others.

    pip install torchft        # wants torch >= 2.7; tried with 0.2.0
    torchrun --standalone --nproc-per-node 2 examples/torchft_ddp.py

torchft's `Manager` forms a quorum of the replicas that are alive before every step, sums gradients
over them, and lets them agree whether the step counts. `CompressedProcessGroup` is the process
group below the manager. So it serves whatever calls `manager.allreduce`: torchft's DDP, and FSDP2
by `module.set_all_reduce_hook(...)`. The CF is fixed: a policy would have to be healed, too.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceOp, Work
from torch.futures import Future

from compressors import Compressor, Key, RoundsCompressor, check_cf, make_compressor
from compressors.base import Spec


class Place(NamedTuple):
    """Identifies an all-reduce within a step: the n-th all-reduce of this size and dtype."""

    numel: int
    dtype: torch.dtype
    number: int


class Kept(NamedTuple):
    """A residual, and the number of replicas whose mean it was left over from."""

    residual: Tensor
    participants: int


class CompressedProcessGroup:
    """One of torchft's process groups, with compressed all-reduces of gradients:

        pg = CompressedProcessGroup(ProcessGroupGloo(), "topk", cf=100)
        manager = Manager(pg=pg, ...)
        pg.watch(manager)

    An all-reduce becomes an all-gather of compressed gradients, with error feedback. Faults must
    not damage the residual:

    - A step that does not count has sent nothing: the residual stays as before the step.
    - A replica that is being healed sends zeros, and keeps its residual.
    - A payload enters the mean by 1 / N. When N replicas become M, residuals are scaled by M / N.

    pg: the process group that has the connections. All methods but `allreduce` are those of `pg`.
    base: name of a compressor, or a `Compressor`; not PowerSGD or a sketch (several rounds).
    cf: compression factor >= 1, the same on all replicas.
    dense_below: tensors of fewer elements, such as a loss, are summed without compression.
    bytes_sent, dense_bytes: sent so far by this replica; a ring all-reduce would have sent.
    """

    def __init__(
        self, pg: Any, base: str | Compressor = "topk", cf: float = 100.0, dense_below: int = 1024
    ) -> None:
        self._pg = pg
        self._compressor = make_compressor(base)
        if isinstance(self._compressor, RoundsCompressor):
            raise ValueError(f"base {self._compressor.name!r} takes several rounds")
        self._cf = check_cf(cf)
        self._dense_below = dense_below
        self._manager: Any = None
        self._kept: dict[Place, Kept] = {}
        self._pending: dict[Place, Kept] = {}  # becomes `_kept` if the step counts
        self._calls: Counter[tuple[int, torch.dtype]] = Counter()  # in this step
        self.bytes_sent = self.dense_bytes = 0.0

    def __getattr__(self, name: str) -> Any:
        if name == "_pg":  # copying looks for it before it is there
            raise AttributeError(name)
        return getattr(self._pg, name)

    def watch(self, manager: Any) -> CompressedProcessGroup:
        """Learn from `manager.should_commit` which steps count. A step that ends with the next
        `manager.start_quorum` instead does not count. Returns self. RuntimeError if it watches a
        manager already."""
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
        """Sum one large floating-point tensor over the replicas, in place, compressed; `pg` does
        everything else. Returns a `Work` that is done. RuntimeError before `watch`."""
        if self._manager is None:
            raise RuntimeError("call watch(manager) first: which steps count is not known")
        tensor = tensors[0]
        compressed = (
            len(tensors) == 1
            and getattr(opts, "reduceOp", opts) == ReduceOp.SUM
            and tensor.is_floating_point()
            and tensor.is_contiguous()
            and tensor.numel() >= self._dense_below
        )
        if not compressed:
            return self._pg.allreduce(tensors, opts)
        flat = tensor.detach().view(-1)
        self._calls[flat.numel(), flat.dtype] += 1
        place = Place(flat.numel(), flat.dtype, self._calls[flat.numel(), flat.dtype])
        wide = flat if flat.dtype == torch.float64 else flat.float()
        flat.copy_(self._sum(wide, place))
        return Done(tensors)

    def residuals(self) -> list[Tensor]:
        """What this replica has not sent yet: a flat tensor for each all-reduce of a step."""
        return [kept.residual for kept in self._kept.values()]

    def _sum(self, gradient: Tensor, place: Place) -> Tensor:
        """The sum of what the replicas send; all NaN where a replica's gradient is not finite."""
        compressor, numel, dtype = self._compressor, gradient.numel(), gradient.dtype
        takes_part = self._manager.is_participating()
        participants = self._manager.num_participants()
        kept = self._kept.get(place)
        residual = torch.zeros_like(gradient)
        if kept is not None:
            residual = kept.residual * (participants / kept.participants)
        error_fed = gradient + residual if takes_part else gradient.clone()
        finite = error_fed.isfinite().all()
        error_fed = torch.where(finite, error_fed, 0.0)

        name = f"{place.numel} elements, {place.number}"
        rank = self._manager.participating_rank() or 0
        key = Key(name, self._manager.current_step(), rank=rank)
        payload = compressor.compress(error_fed, Spec.of(error_fed, self._cf, key))
        wire = torch.empty(payload.nbytes + 1, dtype=torch.uint8, device=gradient.device)
        payload.write(wire[:-1])
        wire[-1] = finite  # one byte behind the payload
        rows = self._gather(wire, gradient)

        total, all_finite = torch.zeros_like(gradient), torch.stack(rows)[:, -1].bool().all()
        for row in rows:
            (received,) = compressor.read(row[None, :-1], Spec((numel,), self._cf, dtype, key))
            compressor.add_to(total, received)
        if takes_part and compressor.feeds_back:
            compressor.add_to(error_fed, payload, -1.0)
            left = torch.where(all_finite, error_fed, residual)
            self._pending[place] = Kept(left, participants)
        return torch.where(all_finite, total, torch.nan)

    def _gather(self, wire: Tensor, gradient: Tensor) -> list[Tensor]:
        """The bytes of all replicas; all have the same number."""
        replicas = self._pg.size()
        rows = [torch.empty_like(wire) for _ in range(replicas)]
        self._pg.allgather([rows], [wire], AllgatherOptions()).wait()
        self.bytes_sent += (replicas - 1) * wire.numel()
        self.dense_bytes += 2 * (replicas - 1) / replicas * gradient.nbytes
        return rows

    def _end_step(self, counts: bool) -> None:
        if counts:
            self._kept.update(self._pending)
        self._pending.clear()
        self._calls.clear()


class Done(Work):
    """Work that is done: the host has waited, or on a GPU the current stream has."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        device = result[0].device
        self._future: Future[list[Tensor]] = Future(
            devices=[device] if device.type == "cuda" else None
        )
        self._future.set_result(list(result))

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class Replica:
    """A training run in one process, watched over by torchft.

    rank: tells replicas apart. lighthouse: address of torchft's lighthouse, which forms quorums.
    seed: of the model's parameters; torchft heals a replica that starts with others.
    """

    def __init__(self, rank: int, lighthouse: str, seed: int, cf: float = 10.0) -> None:
        from torchft import DistributedDataParallel, Manager, ProcessGroupGloo

        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self._inputs = torch.Generator().manual_seed(rank)  # other inputs in every replica
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.group = CompressedProcessGroup(
            ProcessGroupGloo(timeout=timedelta(seconds=10)), cf=cf, dense_below=100
        )
        self.manager = Manager(
            pg=self.group,
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=2,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica{rank}",
            hostname="localhost",
            timeout=timedelta(seconds=10),
            quorum_timeout=timedelta(seconds=30),
        )
        self.group.watch(self.manager)
        self.model = DistributedDataParallel(self.manager, self.net, bucket_cap_mb=0.003)
        self.loss = float("nan")

    def _state(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self) -> int:
        """Train for a step. The number of replicas in it; 0 if the step does not count."""
        self.manager.start_quorum()
        self.optimizer.zero_grad()
        inputs = torch.randn(32, 16, generator=self._inputs)
        loss = ((self.model(inputs) - inputs[:, :4].sin()) ** 2).mean()
        loss.backward()
        if not self.manager.should_commit():
            return 0
        self.optimizer.step()
        self.loss = loss.item()
        participants: int = self.manager.num_participants()
        return participants


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lighthouse", default="http://localhost:29510")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    if rank == 0:  # elsewhere, on a cluster: torchft_lighthouse
        from torchft.coordination import LighthouseServer

        port = arguments.lighthouse.rsplit(":", 1)[1]
        lighthouse = LighthouseServer(bind=f"[::]:{port}", min_replicas=2, join_timeout_ms=2000)

    replica = Replica(rank, arguments.lighthouse, seed=0)
    while replica.manager.current_step() < arguments.steps:
        participants = replica.step()
        step = replica.manager.current_step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {replica.loss:.3f}, {participants} replicas", flush=True)
    if rank == 0:
        factor = replica.group.dense_bytes / replica.group.bytes_sent
        print(f"{factor:.1f} times fewer bytes than dense")
    replica.manager.shutdown()  # its threads must be over before the interpreter is
    if rank == 0:
        lighthouse.shutdown()


if __name__ == "__main__":
    main()
