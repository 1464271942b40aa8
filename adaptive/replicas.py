"""The contract of a replica: a model whose gradients arrive in buckets and are to become a mean.

`DistributedDataParallel` is one as it is. `ShardedReplica` (adaptive/integrations/fsdp.py) makes
one of a model that FSDP2 shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future


class Replica(Protocol):
    """What a session knows of the model.

    parameters_to_ignore: names of parameters whose gradients do not arrive. static_graph: buckets
    are cut anew once more. find_unused_parameters: a step may leave a parameter without a gradient
    on all ranks. broadcast_buffers: buffers are sent in every forward."""

    module: nn.Module
    static_graph: bool
    find_unused_parameters: bool
    broadcast_buffers: bool

    @property
    def parameters_to_ignore(self) -> Collection[str]: ...

    def register_forward_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """As of `nn.Module`."""
        ...


class Exchanging(Protocol):
    """What a replica calls: a session."""

    def reduce_now(self, bucket: dist.GradBucket) -> Tensor:
        """The mean gradient of a bucket."""
        ...

    def end_backward(self) -> None:
        """After the last bucket of a backward."""
        ...

    def gradients_arrive(self) -> None:
        """A backward begins to write gradients."""
        ...


class Attached(Protocol):
    """The compressor of a replica."""

    @property
    def detached(self) -> bool:
        """True unless it is attached to a model."""
        ...

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """A communication hook's work for one bucket."""
        ...

    def running(self) -> Exchanging:
        """Its session. RuntimeError before it is attached."""
        ...
