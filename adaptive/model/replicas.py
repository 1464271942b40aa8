"""A replica: a model that hands over its gradients in buckets, and gets other gradients back.

`DDPReplica` is a model under `DistributedDataParallel`. `ShardedReplica` (adaptive/fsdp.py) is a
model that FSDP2 shards. Both hand their buckets to a session. The session's synchroniser decides
which gradients the replica gets back: the ranks' mean, or this rank's own.

No `from __future__ import annotations` here: DDP compares the annotations of a hook with the
classes themselves, and rejects strings.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

ATTRIBUTE = "_adaptive_replica"
"""The attribute of a model that holds its replica, once a compressor was attached."""

JOIN = (
    "DDP's join() is not supported: a rank that has no more inputs takes part in DDP's collectives "
    "only, and compression needs others, too. Give all ranks the same number of batches "
    "(DistributedSampler, drop_last=True), and leave join() out"
)

MIXED_PRECISION = (
    "DistributedDataParallel(model, mixed_precision=...) is not supported: DDP then has a "
    "communication hook of its own, and takes one. Leave it out, and train under "
    "torch.autocast('cuda', torch.bfloat16), or with parameters in bfloat16"
)

SKIPS_UNUSED = (
    "DistributedDataParallel(model, skip_all_reduce_unused_params=True) is not supported: DDP then "
    "leaves the first or the last bucket of a backward out, and a compressor begins and ends its "
    "exchange with these. Leave it out; find_unused_parameters=True goes with compression"
)

PYTHON_REDUCER = (
    "DistributedDataParallel(model) was made under torch._dynamo.config.optimize_ddp = "
    "'python_reducer'. Then DDP hands single gradients to hooks, inside a compiled graph, and not "
    "buckets: leave optimize_ddp at True (or 'ddp_optimizer'), which goes with torch.compile and "
    "with compiled autograd, before DistributedDataParallel(model)"
)


class Exchanging(Protocol):
    """The receiver of a replica's buckets. In each backward every rank hands over the same buckets
    in the same order, and calls `end_backward` after the last bucket."""

    def reduce(self, bucket: dist.GradBucket, at_once: bool = False) -> Future[Tensor]:
        """A future of the gradients that replace a bucket's gradients. at_once: the current stream
        may use the new gradients when this call returns."""
        ...

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        """Called after the last bucket. last: a future that `reduce` has returned in this backward.
        Returns the future that takes the place of `last`: its gradients may become NaN."""
        ...


class Replica(ABC):
    """A model on this rank, to which the replica has only a weak reference.

    group: the ranks that exchange. everyone: the ranks that make the same decisions; more than
    `group` if the model is sharded. settling: number of backwards after which buckets no longer
    change. sends_buffers: DDP broadcasts buffers in every forward. exchanging: gets the buckets.
    """

    settling = 0
    sends_buffers = False
    group: dist.ProcessGroup
    everyone: dist.ProcessGroup
    exchanging: Exchanging | None = None

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else weakref.ref(model)

    @classmethod
    def _found(cls, model: nn.Module) -> Self | None:
        """The model's replica; None if it has none, or if the model is a copy of another model."""
        found: Any = getattr(model, ATTRIBUTE, None)
        return found if isinstance(found, cls) and found.model is model else None

    @property
    def model(self) -> Any:
        """The model; None once it is garbage."""
        return None if self._model is None else self._model()

    @property
    @abstractmethod
    def maybe_unused(self) -> bool:
        """Whether a step may leave a parameter without a gradient on all ranks."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module whose parameter names are used."""

    @abstractmethod
    def _ignored(self) -> set[str]:
        """Names of parameters whose gradients do not arrive."""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of the parameters whose gradients arrive."""
        ignored = self._ignored()
        for name, p in self.module.named_parameters():
            if p.requires_grad and name not in ignored:
                yield name, p

    def sent_dtype(self, p: Tensor) -> torch.dtype:
        """The dtype in which the gradient of a parameter arrives."""
        return p.dtype

    def moved(self) -> None:  # noqa: B027 - only FSDP keeps copies of parameters
        """Called after this library has moved parameters between a step and the next forward."""

    @abstractmethod
    def check_free(self) -> None:
        """RuntimeError if the model has a hook of another library."""

    def start(self, exchanging: Exchanging) -> None:
        """Hand buckets over from now on, until the next `start`. A collective."""
        self.exchanging = exchanging
        if self._found(self.model) is not self:
            object.__setattr__(self.model, ATTRIBUTE, self)  # not by nn.Module.__setattr__
            self._register()

    @abstractmethod
    def _register(self) -> None:
        """Register the hooks by which torch hands over buckets. They are never removed."""


class _Indexed:
    """A bucket of DDP's with the right `index()` and `is_last()`, where DDP returns wrong ones."""

    def __init__(self, bucket: dist.GradBucket, index: int, last: bool) -> None:
        self._bucket, self._index, self._last = bucket, index, last

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)


class DDPReplica(Replica):
    """A DDP model, and the state of this library's hook on it. A copied or pickled model gets an
    empty replica."""

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        super().__init__(model)
        # With a static graph, until its first backward has ended: the parameters of each bucket of
        # that backward so far. Later, and without a static graph: None.
        self._first: list[list[Tensor]] | None = None
        if model is not None:
            self._first = [] if model.static_graph else None
            self.group = self.everyone = model.process_group
            # DDP rebuilds its buckets after the first backward, with a static graph after the
            # second.
            self.settling = 1 + model.static_graph
            buffers = any(buffer.numel() for buffer in model.module.buffers())
            self.sends_buffers = model.broadcast_buffers and buffers

    @classmethod
    def of(cls, model: object, compiled: bool, by_framework: bool = False) -> "DDPReplica":
        """The replica of this model, made if there is none. TypeError if the model is not DDP,
        RuntimeError if DDP would not hand buckets to a hook. compiled: the model was found inside
        a module that torch.compile has made. by_framework: see `Unwrapped`."""
        if not isinstance(model, DistributedDataParallel):
            if hasattr(model, "set_requires_all_reduce"):
                raise TypeError(
                    f"{type(model).__name__} is sharded by FSDP2: attach_fsdp(model, mesh) "
                    f"compresses what its replicas exchange"
                )
            if by_framework:
                raise TypeError(
                    f"model must be a DistributedDataParallel module, got {type(model).__name__}: "
                    f"hand over what prepare() or setup() has returned. In a single process, and "
                    f"with a strategy other than DDP, they make no such module: leave attach() out"
                )
            how = "model = DistributedDataParallel(model)"
            if compiled:
                how = "model = torch.compile(DistributedDataParallel(model))"
            got = f"a compiled {type(model).__name__}" if compiled else type(model).__name__
            raise TypeError(
                f"model must be a DistributedDataParallel module, got {got}; wrap it first, and "
                f"train what that makes: {how}"
            )
        if getattr(model, "_use_python_reducer", False):
            raise RuntimeError(PYTHON_REDUCER)
        return cls._found(model) or cls(model)

    def __reduce__(self) -> "tuple[type[DDPReplica], tuple[()]]":
        return DDPReplica, ()

    @property
    def maybe_unused(self) -> bool:
        model = self.model
        return model is None or model.find_unused_parameters or model.static_graph

    @property
    def module(self) -> nn.Module:
        inside: nn.Module = self.model.module
        return inside

    def _ignored(self) -> set[str]:
        # DDP looks up parameters of the outermost module as ".name", so it never ignores "name".
        names = self.model.parameters_to_ignore
        return {name.removeprefix(".") for name in names if "." in name}

    def check_free(self) -> None:
        if getattr(self.model, "mixed_precision", None) is not None:
            raise RuntimeError(MIXED_PRECISION)
        if getattr(self.model, "skip_all_reduce_unused_params", False):
            raise RuntimeError(SKIPS_UNUSED)
        hooks = [hook for hook, _ in self.model._comm_hooks if hook is not adaptive_hook]
        if hooks:
            name = getattr(hooks[0], "__name__", "?")
            raise RuntimeError(f"model has a communication hook already ({name}); DDP takes one")

    def _register(self) -> None:
        self.model.register_comm_hook(self, adaptive_hook)

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook's work for one bucket."""
        if self.exchanging is None:
            raise RuntimeError("this copy of the model has no compressor: attach one")
        if self.model is not None and self.model._join_config.enable:
            raise RuntimeError(JOIN)
        if self._first is not None:
            bucket = self._with_index(bucket, self._first)
        done = self.exchanging.reduce(bucket)
        return self.exchanging.end_backward(done) if bucket.is_last() else done

    def _with_index(self, bucket: Any, before: list[list[Tensor]]) -> Any:
        """The bucket with the right index. In the first backward of a static graph each dtype has
        one bucket. DDP gives each of them index 0, and calls none of several the last one. before:
        the parameters of each bucket so far."""
        parameters = bucket.parameters()
        if any(each[0] is parameters[0] for each in before):  # an earlier backward has raised
            before.clear()
        before.append(parameters)
        last = sum(map(len, before)) >= sum(1 for _ in self.parameters())
        if last or bucket.is_last():
            self._first = None
        return _Indexed(bucket, len(before) - 1, last or bucket.is_last())


def adaptive_hook(state: DDPReplica, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand over one of DDP's buckets. Returns a future of the gradients that DDP gets back, shape
    (elements of the bucket,). RuntimeError if DDP hands over single gradients, not buckets."""
    if isinstance(bucket, tuple):  # (gradient, parameter)
        raise RuntimeError(PYTHON_REDUCER)
    return state.reduce(bucket)
